# SPDX-License-Identifier: Apache-2.0
"""The engines' own event stream, in vLLM's form, which SGLang uses too."""
