# SPDX-License-Identifier: Apache-2.0
"""Access to the router's port: its certificate, its API keys, and the rate of registrations."""
