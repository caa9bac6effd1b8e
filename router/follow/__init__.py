# SPDX-License-Identifier: Apache-2.0
"""The followed fleet: which workers there are, which router follows each, and what happened to them."""
