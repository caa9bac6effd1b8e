# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker for gateways, over Envoy's external processing protocol."""
