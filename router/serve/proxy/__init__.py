# SPDX-License-Identifier: Apache-2.0
"""The proxy: it forwards an OpenAI request to an engine and passes the answer back."""
