# SPDX-License-Identifier: Apache-2.0
"""Which worker gets a request, why, and the reservation."""
