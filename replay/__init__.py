# SPDX-License-Identifier: Apache-2.0
"""Traffic through a virtual fleet, faster than real time: replicas as `simulator` has them, and whoever routes to
them."""
