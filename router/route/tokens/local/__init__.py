# SPDX-License-Identifier: Apache-2.0
"""Token ids made here, with the model's own tokenizer."""
