# SPDX-License-Identifier: Apache-2.0
"""The messages with which a router has one engine hand its cache over to others."""
