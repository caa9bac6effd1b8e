# SPDX-License-Identifier: Apache-2.0
"""Values and helpers that know nothing of routing."""
