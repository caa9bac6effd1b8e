# SPDX-License-Identifier: Apache-2.0
"""`kvrouter demo`."""
