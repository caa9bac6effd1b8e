# SPDX-License-Identifier: Apache-2.0
"""The routing decision: from the tokens of a prompt to the worker that gets it."""
