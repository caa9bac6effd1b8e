# SPDX-License-Identifier: Apache-2.0
"""LFM2's short convolutions in torch, because Triton's interpreter does not take the masks of SGLang's kernels.

This is an entry point of `sglang.srt.plugins`, so that the scheduler's process loads it too. It does nothing unless
KVROUTER_TEST_STATES is set. The code that keeps, copies and evicts the states is SGLang's own, with Triton's
interpreter where it uses Triton.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

SWITCH = "KVROUTER_TEST_STATES"


def causal_conv1d_fn(
    x: Any,
    weight: Any,
    bias: Any = None,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    activation: str | None = None,
    **_: object,
) -> Any:
    """Return the convolutions of all requests' tokens, and leave each request's last inputs in `conv_states`.

    `x` is (channels, tokens of all requests), and `conv_states` is (slots, channels, kernel - 1).
    """
    torch = importlib.import_module("torch")
    assert activation is None
    out = torch.empty_like(x)
    ends = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        first, end = ends[i], ends[i + 1]
        state = conv_states[slot]
        before = state.to(x.dtype) if bool(has_initial_state[i]) else torch.zeros_like(state, dtype=x.dtype)
        row = torch.cat([before, x[:, first:end]], 1)
        out[:, first:end] = torch.nn.functional.conv1d(row[None], weight[:, None], bias, groups=row.shape[0])[0]
        state.copy_(row[:, row.shape[1] - state.shape[1] :])
    return out


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    conv_state_indices: Any = None,
    **_: object,
) -> Any:
    """Return the convolutions of one token of each request; `x` is (requests, channels)."""
    torch = importlib.import_module("torch")
    assert activation is None
    rows = []
    for token, slot in zip(x, conv_state_indices.tolist(), strict=True):
        state = conv_state[slot]
        row = torch.cat([state.to(x.dtype), token[:, None]], 1)
        rows.append((row * weight).sum(1) + (0 if bias is None else bias))
        state.copy_(row[:, 1:])
    return torch.stack(rows)


def register() -> None:
    if os.environ.get(SWITCH):
        model: Any = importlib.import_module("sglang.srt.models.lfm2")
        model.causal_conv1d_fn, model.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
