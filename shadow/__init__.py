# SPDX-License-Identifier: Apache-2.0
"""The cached tokens that another router's choices leave unused, measured with this router's index."""
