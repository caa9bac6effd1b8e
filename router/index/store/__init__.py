# SPDX-License-Identifier: Apache-2.0
"""The workers' state in Redis: how it is written, read and followed."""
