# SPDX-License-Identifier: Apache-2.0
"""Token ids made in this process, with the model's own tokenizer."""
