# SPDX-License-Identifier: Apache-2.0
"""The followed fleet: the workers, the router that follows each of them, and the events about them."""
