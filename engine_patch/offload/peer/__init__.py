# SPDX-License-Identifier: Apache-2.0
"""The peer tier: chunks that another engine's CPU tier holds are fetched from it instead of being computed."""
