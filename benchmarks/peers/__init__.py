# SPDX-License-Identifier: Apache-2.0
"""The router beside its peers, which do the same, on the same events and requests: `make bench-peers`."""
