# SPDX-License-Identifier: Apache-2.0
"""The HTTP server below the API."""
