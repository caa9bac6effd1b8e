# SPDX-License-Identifier: Apache-2.0
"""Values and helpers that do not depend on routing."""
