# SPDX-License-Identifier: Apache-2.0
"""The description of SGLang and the readers of its answers."""
