# SPDX-License-Identifier: Apache-2.0
"""What operators watch: the fleet's events as one stream, and why each request went where it went."""
