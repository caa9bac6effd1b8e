# SPDX-License-Identifier: Apache-2.0
"""The router without its HTTP: it answers questions and reports the state of its parts."""
