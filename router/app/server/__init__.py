# SPDX-License-Identifier: Apache-2.0
"""The wiring of a router process, its start, its signals, and several processes behind one port."""
