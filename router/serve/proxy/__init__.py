# SPDX-License-Identifier: Apache-2.0
"""An OpenAI request to an engine, and its answer back."""
