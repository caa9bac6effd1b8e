# SPDX-License-Identifier: Apache-2.0
"""Workers: their registrations, the sources of these, and the addresses that the router may connect to."""
