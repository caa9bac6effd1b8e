# SPDX-License-Identifier: Apache-2.0
"""One request for each operation, for the OpenAPI document.

`tests/system/test_openapi_examples.py` sends them in this order to a router with the worker w0 of the model gemma;
every one succeeds.
"""

from __future__ import annotations

from typing import Any

MODEL, WORKER, SECOND_WORKER = "gemma", "w0", "w1"
SELECTION, OWN_SELECTION = "chat-42", "chat-43"
PROMPT = [2, 105, 2364, 107, 10979, 106, 107, 105, 4368, 107]
RERANK = {
    "model": MODEL,
    "query": "prefix cache",
    "documents": ["Blocks that are reused", "A kind of pasta"],
    "top_n": 1,
}
SCORE = {"model": MODEL, "text_1": "prefix cache", "text_2": ["Blocks that are reused", "A kind of pasta"]}

# The body of each operation, by method and path; None if it has no body.
EXAMPLES: dict[tuple[str, str], Any] = {
    ("GET", "/health"): None,
    ("GET", "/ready"): None,
    ("GET", "/version"): None,
    ("GET", "/metrics"): None,
    ("POST", "/register"): {
        "worker_id": SECOND_WORKER,
        "model": MODEL,
        "url": "http://10.0.0.2:8000",
        "endpoint": "tcp://10.0.0.2:5557",
        "replay_endpoint": "tcp://10.0.0.2:5558",
    },
    ("POST", "/workers"): {
        "worker_id": SECOND_WORKER,
        "model": MODEL,
        "url": "http://10.0.0.2:8000",
        "endpoint": "tcp://10.0.0.2:5557",
        "replay_endpoint": "tcp://10.0.0.2:5558",
        "role": "both",
    },
    ("GET", "/workers"): None,
    ("GET", "/workers/{worker_id}"): None,
    ("PATCH", "/workers/{worker_id}"): {"state": "active"},
    # Needs engines that lend.
    ("POST", "/workers/{worker_id}/hand_over"): {"max_bytes": 20_000_000_000, "within_s": 30},
    ("GET", "/hand_overs/{number}"): None,
    ("DELETE", "/hand_overs/{number}"): None,
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{model}"): None,
    ("POST", "/query"): {"model": MODEL, "token_ids": PROMPT, "explain": True, "held": True},
    ("POST", "/query_by_hash"): {"model": MODEL, "block_hashes": ["9ae16a3b2f90404f"], "num_tokens": 17},
    ("POST", "/select"): {"model": MODEL, "token_ids": PROMPT, "session_id": "alice-7", "explain": True},
    ("POST", "/select_and_reserve"): {"model": MODEL, "token_ids": PROMPT, "selection_id": SELECTION},
    ("POST", "/reservations"): {
        "model": MODEL,
        "worker_id": WORKER,
        "dp_rank": 0,
        "selection_id": OWN_SELECTION,
        "isl_tokens": 2048,
        "effective_prefill_tokens": 512,
    },
    ("GET", "/decisions"): None,
    ("GET", "/decisions/{name}"): None,
    ("GET", "/diagnosis"): None,
    ("GET", "/diagnosis/{code}"): None,
    ("GET", "/settings"): None,
    ("GET", "/store"): None,
    ("GET", "/history"): None,
    ("GET", "/savings"): None,
    ("GET", "/loads"): None,
    ("POST", "/reservations/{selection_id}/prefill_complete"): None,
    ("POST", "/reservations/{selection_id}/output_block"): None,
    ("DELETE", "/reservations/{selection_id}"): None,
    ("POST", "/v1/chat/completions"): {
        "model": MODEL,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is a prefix cache?"}],
    },
    ("POST", "/v1/completions"): {"model": MODEL, "prompt": PROMPT, "max_tokens": 16},
    ("POST", "/v1/responses"): {"model": MODEL, "input": "What is a prefix cache?", "max_output_tokens": 16},
    ("GET", "/v1/responses/{response_id}"): None,
    ("GET", "/v1/responses/{response_id}/input_items"): None,
    ("POST", "/v1/responses/{response_id}/cancel"): None,
    ("DELETE", "/v1/responses/{response_id}"): None,
    ("POST", "/v1/embeddings"): {"model": MODEL, "input": "What is a prefix cache?"},
    ("POST", "/v1/messages"): {
        "model": MODEL,
        "max_tokens": 16,
        "system": "You are brief.",
        "messages": [{"role": "user", "content": "What is a prefix cache?"}],
    },
    ("POST", "/v1/messages/count_tokens"): {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is a prefix cache?"}],
    },
    ("POST", "/inference/v1/generate"): {"model": MODEL, "token_ids": PROMPT, "sampling_params": {"max_tokens": 16}},
    ("POST", "/generate"): {"model": MODEL, "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 16}},
    ("POST", "/pooling"): {"model": MODEL, "input": "What is a prefix cache?"},
    ("POST", "/classify"): {"model": MODEL, "input": "What is a prefix cache?"},
    ("POST", "/v1/audio/speech"): {"model": MODEL, "input": "What is a prefix cache?", "voice": "alloy"},
    # A form with a recording has no example in JSON.
    ("POST", "/v1/audio/transcriptions"): None,
    ("POST", "/v1/audio/translations"): None,
    **{("POST", path): RERANK for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    **{("POST", path): SCORE for path in ("/v1/score", "/score")},
    ("POST", "/tokenize"): {"model": MODEL, "prompt": "What is a prefix cache?"},
    ("POST", "/detokenize"): {"model": MODEL, "tokens": PROMPT},
    ("POST", "/unregister"): {"worker_id": SECOND_WORKER},
    ("DELETE", "/workers/{worker_id}"): None,
}
# The parameters in paths: the meaning of each, and an example.
PATH_PARTS = {
    "worker_id": ("the worker's id", WORKER),
    "number": ("the hand-over, by the number in the answer that began it", "4242424242"),
    "selection_id": ("the reservation, by the id of its choice", SELECTION),
    "response_id": ("the response, by the `id` of its creation", "resp_0123456789abcdef0123456789abcdef"),
    "model": ("a name that a request's model may have", MODEL),
    "code": ("the code of a finding, in upper or lower case", "KV201"),
    "name": ("the id of a choice, or the x-request-id of a proxied request", SELECTION),
}
