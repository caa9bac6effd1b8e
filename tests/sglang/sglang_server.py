# SPDX-License-Identifier: Apache-2.0
"""SGLang's own HTTP server over a tiny Llama with random weights, on the CPU.

With windows, three of four layers keep their KV in SGLang's pool for sliding windows, so that its scheduler, allocators
and cache are those of a hybrid model. The torch backend does not follow that pool's own places, so the pool is as large
as the other one. The answers of such a model mean nothing, but the reuse of its cache is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

from tests.sglang.sglang_forks import ForkedSglang
from tests.support.ports import free_port
from tests.support.router_process import PRELOAD_VARIABLE
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

MODEL = "m"
PAGE_TOKENS = 16
WINDOW_TOKENS = 40
# Enough for a few prompts of some hundred tokens.
MAX_TOTAL_TOKENS = 2_048
HOST_RATIO = 2.0
# The switch of `stubs/hicache_on_cpu.py`.
HICACHE_SWITCH = "KVROUTER_TEST_HICACHE"
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 60.0
# Its /health generates a token, which takes some seconds on a machine under load.
HEALTH_TIMEOUT_S = 20.0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_TOTAL_TOKENS,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 1, 1, 0],
    "sliding_window": WINDOW_TOKENS,
    "sliding_window_size": WINDOW_TOKENS,
}


# Layers of short convolutions and of full attention alternate; SGLang calls the convolutions' states Mamba. The kernels
# are Triton's, which interprets them if there is no GPU.
STATES = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
# Fewer states than the prompts that come back would need.
STATES_KEPT = 40
INTERPRETER = "TRITON_INTERPRET"
# The switch of `stubs/states_on_cpu.py`.
STATES_SWITCH = "KVROUTER_TEST_STATES"


class SglangServer:
    """A server that starts on entry and stops on exit.

    Args:
        folder: Where the model and the log are written.
        windows: Whether the model has sliding windows.
        states: Whether the model has states (short convolutions).
        patched: Whether the engine patch is on.
        has_host: Whether the server has a host tier, of HOST_RATIO times the device's tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        windows: bool = False,
        states: bool = False,
        patched: bool = True,
        has_host: bool = False,
    ) -> None:
        self._folder = folder
        self._windows = windows
        self._states = states
        self._patched = patched
        self._has_host = has_host
        self._process: Any = None
        self._port = free_port()
        self._events_port, self._replay_port = free_port(), free_port()
        self._log = folder / "sglang.log"
        self.url = f"http://127.0.0.1:{self._port}"
        self.endpoint = f"tcp://127.0.0.1:{self._events_port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self._replay_port}"

    def __enter__(self) -> Self:
        model = self._folder / "model"
        write_tokenizer(model)
        (model / "config.json").write_text(
            json.dumps(CONFIG | (WINDOWS if self._windows else STATES if self._states else {}))
        )
        events = {"publisher": "zmq", "endpoint": f"tcp://*:{self._events_port}", "topic": "kv-events"}
        events["replay_endpoint"] = f"tcp://*:{self._replay_port}"
        command = ["--model-path", str(model)]
        command += ["--served-model-name", MODEL, "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
        command += ["--attention-backend", "torch_native"]
        # A state may be kept at any token unless each request has a second buffer for it, so a page is one token.
        command += ["--page-size", str(1 if self._states else PAGE_TOKENS)]
        command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"]
        command += ["--max-total-tokens", str(MAX_TOTAL_TOKENS), "--max-running-requests", "8"]
        command += ["--chunked-prefill-size", "256", "--disable-overlap-schedule", "--swa-full-tokens-ratio", "1.0"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--enable-cache-report", "--enable-metrics"]
        # Without this flag, the idle scheduler keeps a core busy, which the other tests need.
        command += ["--kv-events-config", json.dumps(events), "--sleep-on-idle"]
        environment = {**os.environ, "KVROUTER_PATCH": str(int(self._patched)), "KVROUTER_PATCH_HEARTBEAT_S": "0.05"}
        if self._states:
            command += ["--max-mamba-cache-size", str(STATES_KEPT)]
            environment |= {INTERPRETER: "1", STATES_SWITCH: "1"}
        if self._has_host:
            command += ["--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)]
            command += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
            command += ["--hicache-write-policy", "write_through"]
            environment[HICACHE_SWITCH] = "1"
        # Triton decides on import whether it interprets, so the server with states is started by its command. It shows
        # that SGLang loads the patch in new processes, too.
        if os.environ.get(PRELOAD_VARIABLE) == "1" and not self._states:
            self._process = ForkedSglang(command, environment, self._folder, self._log)
        else:
            command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *command]
            with self._log.open("w") as log:
                # In its own session, the server can be ended together with the processes that it starts.
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, cwd=self._folder, start_new_session=True
                )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"SGLang did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        # At SIGTERM, the server would take the end of its scheduler for a crash, and kill itself 5 seconds later.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S).status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def generate(self, token_ids: list[int], count: int) -> int:
        """Generate `count` tokens, and return how many of the prompt's tokens the server did not compute."""
        body = {"input_ids": token_ids, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}
        return int(post(f"{self.url}/generate", body)[0]["meta_info"]["cached_tokens"])


def post(url: str, body: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """Post a JSON body, and return the answer (None if the request is refused) and its headers."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return json.loads(answer.read()), {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.BAD_REQUEST:
            raise
        return None, {}
