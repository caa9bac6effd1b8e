# SPDX-License-Identifier: Apache-2.0
"""The HTTP API, with one module for each resource."""
