# SPDX-License-Identifier: Apache-2.0
"""The bodies of a hand-over against vLLM's own request classes and its NixlConnector's scheduler.

The scheduler takes the first body for a prompt to be kept, and the second one for a prompt to be fetched. No blocks are
moved, because that needs NIXL and two engines.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.request import RequestStatus

from kvrouter.router.serve.proxy.kv_transfer_params import decode_body, given_params, prefill_body

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own
]

PROMPT = list(range(100, 180))
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "completion": (CompletionRequest, {"prompt": PROMPT, "max_tokens": 9, "min_tokens": 4, "logprobs": 2}),
    "chat": (
        ChatCompletionRequest,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 9,
            "min_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


def scheduler() -> Any:
    """Return the connector's scheduler with the attributes that it needs to decide about requests."""
    connector = object.__new__(NixlPullConnectorScheduler)
    connector.engine_id, connector.side_channel_host, connector.side_channel_port = "e0", "10.0.0.1", 5600
    connector.transfer_tp_size = 1
    connector.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
    )
    connector.use_host_buffer = connector.is_bidirectional_kv_xfer_enabled = False
    connector.kv_recompute_threshold, connector._kv_lease_duration, connector.decoder_kv_blocks_ttl = 0, 30, 480
    connector._reqs_need_send, connector._reqs_need_recv, connector._reqs_need_save = {}, {}, {}
    connector._reqs_in_batch, connector._reqs_not_processed = set(), set()
    connector._stop_heartbeat = lambda request_id: None
    connector.get_exchange_clipped_blocks = lambda block_ids: block_ids
    connector._get_remote_prefill_token_count = lambda tokens: tokens
    return connector


def params_of(request: Any) -> dict[str, Any]:
    extra = request.to_sampling_params(max_tokens=9, default_sampling_params={}).extra_args
    params: dict[str, Any] = extra["kv_transfer_params"]
    return params


def engine_request(params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id="r0",
        kv_transfer_params=params,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        num_computed_tokens=len(PROMPT),
        num_prompt_tokens=len(PROMPT),
        prompt_token_ids=PROMPT,
    )


@pytest.mark.parametrize("name", BODIES)
def test_vllm_keeps_what_the_first_request_asks_for_and_fetches_what_the_second_one_says(name: str) -> None:
    kind, sent = BODIES[name]
    raw = json.dumps({"model": "m", **sent}).encode()
    first = kind.model_validate_json(prefill_body(raw))
    assert not first.stream and first.stream_options is None and first.min_tokens == 0
    assert (getattr(first, "max_completion_tokens", None) or first.max_tokens) == 1
    keeps, answer = scheduler().request_finished(engine_request(params_of(first)), ([1, 2, 3],))
    assert keeps and answer["do_remote_prefill"] and not answer["do_remote_decode"]
    # The HTTP server's answer carries these parameters in the same form.
    transfer_params = given_params(json.dumps({"id": "x", "choices": [], "kv_transfer_params": answer}).encode())
    second = kind.model_validate_json(decode_body(raw, transfer_params))
    assert second.min_tokens == 4 and second.stream is sent.get("stream", False)
    params = params_of(second)
    assert params == json.loads(json.dumps(answer))
    # The decode engine fetches all of the prompt but the 16 tokens that it has, beside its steps.
    assert scheduler().get_num_new_matched_tokens(engine_request(params), 16) == (len(PROMPT) - 16, True)


def test_the_clients_own_request_fetches_nothing() -> None:
    kind, sent = BODIES["completion"]
    request = kind.model_validate({"model": "m", **sent})
    assert request.kv_transfer_params is None
    assert scheduler().get_num_new_matched_tokens(SimpleNamespace(kv_transfer_params=None), 0) == (0, False)
