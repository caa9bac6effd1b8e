# SPDX-License-Identifier: Apache-2.0
"""The bodies and answers of the router's HTTP API, each declared once for the router and for its clients."""
