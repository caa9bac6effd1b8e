# SPDX-License-Identifier: Apache-2.0
"""Runs inside vLLM and reports what each cache group and tier holds."""
