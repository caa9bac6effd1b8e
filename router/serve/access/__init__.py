# SPDX-License-Identifier: Apache-2.0
"""Who may connect to the router's port and do what: certificate, API keys, rate of registrations."""
