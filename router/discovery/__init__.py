# SPDX-License-Identifier: Apache-2.0
"""Where workers come from that nobody registers."""
