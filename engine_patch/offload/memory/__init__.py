# SPDX-License-Identifier: Apache-2.0
"""Copies between the GPU's blocks and the CPU tier's memory."""
