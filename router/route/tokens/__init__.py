# SPDX-License-Identifier: Apache-2.0
"""The way from a client's text to the engine's token ids."""
