# SPDX-License-Identifier: Apache-2.0
"""The registered workers, their assignment to routers, and the mirror of all of them."""
