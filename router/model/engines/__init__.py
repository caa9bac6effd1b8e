# SPDX-License-Identifier: Apache-2.0
"""What differs from engine to engine: a folder each, all else reads its description."""
