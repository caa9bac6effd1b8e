# SPDX-License-Identifier: Apache-2.0
"""The differences between engines: one folder per engine, whose description the other code reads."""
