# SPDX-License-Identifier: Apache-2.0
"""What a worker is, who described it, and what may be connected to."""
