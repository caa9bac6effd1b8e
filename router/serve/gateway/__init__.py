# SPDX-License-Identifier: Apache-2.0
"""Endpoints picked for a gateway, over Envoy's external processing protocol."""
