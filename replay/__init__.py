# SPDX-License-Identifier: Apache-2.0
"""Traffic through a virtual fleet, faster than real time: the replicas of `simulator` behind different routers."""
