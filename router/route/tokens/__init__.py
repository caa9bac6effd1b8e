# SPDX-License-Identifier: Apache-2.0
"""From a client's text to the engine's token ids."""
