# SPDX-License-Identifier: Apache-2.0
"""The doors of the router (HTTP API, proxy, gateway and page), and the access rules for them."""
