# SPDX-License-Identifier: Apache-2.0
"""SGLang: reports the blocks that its radix cache holds, by component, on the same stream of reports."""
