# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in its own process: a tiny Gemma-3 with random weights on the CPU, driven line by line.

Run as a script, this file is the child: it reads one JSON request per line and writes one JSON answer per line.
`EngineProcess` is the parent's side. The engine's output goes to a log file, and its warnings stay in the child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import zmq

START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
REPLAY_TIMEOUT_MS = 10_000
VOCAB_SIZE = 512
MAX_MODEL_LEN = 2048
# Enough for a few prompts of some hundred tokens: five windows and one full attention, with blocks of 32 tokens.
NUM_BLOCKS = 110

_END_OF_REPLAY = b"\xff" * 8


# Six layers: five with a sliding window of 128 tokens and one with full attention.
HYBRID_LAYERS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}

# vLLM's CPU build would start a worker process and bind it to the first core, which all engines of a run would share.
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def gemma3_config() -> dict[str, Any]:
    """Return the config of a text model with `HYBRID_LAYERS`."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **HYBRID_LAYERS,
        "query_pre_attn_scalar": 64,
        "vocab_size": VOCAB_SIZE,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


class EngineProcess:
    """A child process with one engine, which starts on entry and stops on exit."""

    def __init__(
        self, folder: Path, events_port: int, replay_port: int, environment: dict[str, str] | None = None
    ) -> None:
        """Prepare the child, whose variables are this process's own and those in `environment`."""
        self.folder = folder
        self.environment = {**os.environ, **(environment or {})}
        self.log = folder / "engine.log"
        self._process: Any = None
        self._events_port, self._replay_port = events_port, replay_port
        self.endpoint = f"tcp://127.0.0.1:{events_port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay_port}"

    def __enter__(self) -> Self:
        options = {"model": str(self.model()), "events_port": self._events_port, "replay_port": self._replay_port}
        self._process = self.start(options | self.options())
        try:
            assert self._read(START_TIMEOUT_S) == {"ready": True}
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, options: dict[str, Any]) -> Any:
        """Start the child, and return a `subprocess.Popen` or an object with the methods of one that are used here."""
        with self.log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, __file__, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=self.environment,
            )

    def model(self) -> Path:
        """Return the folder that vLLM loads its model from."""
        folder = self.folder / "gemma3"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(gemma3_config()))
        return folder

    def options(self) -> dict[str, Any]:
        """Return the options that the child needs beside its model and its ports."""
        return {}

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()  # the child's loop ends with its input
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _read(self, timeout_s: float) -> Any:
        assert self._process is not None and self._process.stdout is not None
        poller = zmq.Poller()
        poller.register(self._process.stdout.fileno(), zmq.POLLIN)
        if not poller.poll(int(timeout_s * 1000)):
            raise AssertionError(f"no answer from the engine in {timeout_s} s\n{self.log_tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the engine has ended\n{self.log_tail()}")
        return json.loads(line)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def generate(self, token_ids: tuple[int, ...], max_tokens: int, cache_salt: str | None) -> dict[str, Any]:
        """Run one prompt alone, and return its reused tokens (`cached`), its answer (`token_ids`) and `seconds`."""
        return dict(self._ask({"token_ids": token_ids, "max_tokens": max_tokens, "cache_salt": cache_salt}))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of vLLM's `LLM`, and return its result, or the result's text if JSON has no form for it."""
        return self._ask({"call": method, "arguments": arguments})

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read(ANSWER_TIMEOUT_S)

    def last_published(self, context: zmq.Context[zmq.Socket[bytes]], known: int) -> int:
        """Return the seq of the last batch that the engine will publish before its next step, or -1 for none."""
        return last_published(context, self.replay_endpoint, known)


def last_published(context: zmq.Context[zmq.Socket[bytes]], replay_endpoint: str, known: int) -> int:
    """Return the seq of the last batch that an idle engine will publish before its next step, or -1 for none.

    The publisher's thread alternates: it serves one replay request, then takes at most one batch from its queue. When
    two consecutive replays end at the same batch, the queue was empty between them, and no batch is left to come.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(replay_endpoint)
        last = None
        while True:
            newest = _replay(socket, known)
            if newest == last:
                return newest
            last = known = newest
    finally:
        socket.close(linger=0)


def _replay(socket: zmq.Socket[bytes], known: int) -> int:
    """Return the last seq of a replay that starts at `known`, or `known` if the replay has no batch."""
    socket.send_multipart([b"", max(known, 0).to_bytes(8, "big")])
    newest = known
    while socket.poll(REPLAY_TIMEOUT_MS):
        _, _, seq, _ = socket.recv_multipart()
        if seq == _END_OF_REPLAY:
            return newest
        newest = int.from_bytes(seq, "big")
    raise AssertionError("the engine's replay endpoint does not answer")


def _serve(options: dict[str, Any]) -> None:
    """Run the child: one engine, one prompt at a time."""
    # Only answers go to stdout; the output of the engine and its processes goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=options["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="float32",
        distributed_executor_backend=EXECUTOR,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=True,
        disable_log_stats=True,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{options['events_port']}",
            replay_endpoint=f"tcp://*:{options['replay_port']}",
        ),
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "call" in request:
            result = getattr(engine, request["call"])(*request["arguments"])
            print(json.dumps(result, default=str), file=answers, flush=True)
            continue
        prompt = TokensPrompt(prompt_token_ids=request["token_ids"])
        if request["cache_salt"]:
            prompt["cache_salt"] = request["cache_salt"]
        params = SamplingParams(max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
        started = time.monotonic()
        output = engine.generate(prompt, params, use_tqdm=False)[0]
        answer = {
            "cached": output.num_cached_tokens,
            "token_ids": list(output.outputs[0].token_ids),
            "seconds": time.monotonic() - started,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
