# SPDX-License-Identifier: Apache-2.0
"""The choice of a worker for a request: one module for each family of routers."""
