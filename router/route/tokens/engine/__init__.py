# SPDX-License-Identifier: Apache-2.0
"""Token ids as an engine makes them."""
