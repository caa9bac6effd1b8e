# SPDX-License-Identifier: Apache-2.0
"""The choice of the worker for each request, its reason, and the reservation of the load."""
