# SPDX-License-Identifier: Apache-2.0
"""Who gets a request: one module for each family of routers."""
