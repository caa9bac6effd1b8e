# SPDX-License-Identifier: Apache-2.0
"""Script: print what the vLLM of this process reads from a source that the router names, as JSON.

Arguments: the source. The output's last line has the source as the p2p tier parses it, and the `kv_transfer_params` that
each kind of request passes on to the engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.v1.kv_offload.tiering.p2p.manager import _parse_source

MESSAGES = [{"role": "user", "content": "a"}]


def passed_on(request: Any) -> Any:
    """Return the parameters that a request passes on."""
    return (request.to_sampling_params(4, {}).extra_args or {}).get("kv_transfer_params")


def passed_on_by_path(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that the requests of each path pass on; none if this vLLM's server cannot be imported here."""
    try:
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    except ModuleNotFoundError:
        return {}
    message = AnthropicMessagesRequest(model="m", max_tokens=4, messages=MESSAGES, kv_transfer_params=params)
    return {
        "/v1/chat/completions": passed_on(
            ChatCompletionRequest(model="m", messages=MESSAGES, kv_transfer_params=params)
        ),
        "/v1/completions": passed_on(CompletionRequest(model="m", prompt="a", kv_transfer_params=params)),
        "/v1/responses": passed_on(ResponsesRequest(model="m", input="a", kv_transfer_params=params)),
        "/v1/messages": passed_on(AnthropicServingMessages._build_base_request(message, MESSAGES)),
    }


def main() -> None:
    params = {"mine": 1, "remote_kv_source": json.loads(sys.argv[1])}
    parsed = _parse_source(params)
    source = parsed and [parsed.kv_request_id, parsed.peer_id, parsed.do_probe]
    print()
    print(json.dumps({"parsed": source} | passed_on_by_path(params)))


if __name__ == "__main__":
    main()
