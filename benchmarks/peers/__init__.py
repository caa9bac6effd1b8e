# SPDX-License-Identifier: Apache-2.0
"""`make bench-peers`: the router beside those who do the same, on the same events and requests. It runs as `python -m
peers` with this package's parent folder on the path."""
