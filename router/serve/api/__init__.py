# SPDX-License-Identifier: Apache-2.0
"""The HTTP API, one module a resource."""
