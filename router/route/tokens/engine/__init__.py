# SPDX-License-Identifier: Apache-2.0
"""Token ids that engines make."""
