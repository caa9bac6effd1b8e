# SPDX-License-Identifier: Apache-2.0
"""The load in flight at each worker, and the speed of each worker."""
