# SPDX-License-Identifier: Apache-2.0
"""The doors of the router: HTTP API, proxy, gateway and page, and who may use them."""
