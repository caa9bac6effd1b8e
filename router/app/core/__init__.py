# SPDX-License-Identifier: Apache-2.0
"""The router without its HTTP: questions answered, and how everything is."""
