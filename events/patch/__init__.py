# SPDX-License-Identifier: Apache-2.0
"""The reports of the engine patch."""
