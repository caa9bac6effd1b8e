# SPDX-License-Identifier: Apache-2.0
"""What was predicted beside what engines delivered."""
