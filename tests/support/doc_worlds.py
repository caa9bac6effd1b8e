# SPDX-License-Identifier: Apache-2.0
"""The surroundings that the shell blocks of each documentation page need: engines, a router, files, host names.

Each page runs in its own network, with the addresses and ports that the page names. A page that is not listed here has
only blocks that say why they are not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.doc_blocks import blocks_of


@dataclass(frozen=True)
class World:
    # Flags of `kvrouter sim`, one simulated engine each.
    engines: tuple[str, ...] = ()
    # Flags of a `kvrouter serve` that runs before the first block.
    router: str | None = None
    # Commands that run before the first block, so that its output is not empty.
    sent: tuple[str, ...] = ()
    # A Valkey on its usual port, 6379.
    store: bool = False
    # Host names beside localhost that resolve to this machine.
    hosts: tuple[str, ...] = ()
    # Texts of the files in the folder where the blocks run, by name.
    files: Mapping[str, str] = field(default_factory=dict)
    # A function that prepares that folder further.
    prepare: Callable[[Path], None] | None = None
    # Values for the page's placeholders.
    fill: Mapping[str, str] = field(default_factory=dict)
    # Whether to wait after a block that sends a prompt to an engine until the router has received its events, in place
    # of the pause that a human reader makes.
    settles: bool = False
    # Regular expressions for the output that the page promises for its commands.
    shown: tuple[str, ...] = ()


def engine(host: str = "10.0.0.1", port: int = 8000, flags: str = "--model gemma") -> str:
    """Return the flags of a simulated engine at the ports that pages use: HTTP 8000, events 5557, replay 5558."""
    return f"--host {host} --port {port} --events tcp://{host}:5557 --replay tcp://{host}:5558 {flags}"


def simulators(count: int, shape: str = "gemma3") -> tuple[str, ...]:
    return tuple(f"--shape {shape} --port {8001 + number}" for number in range(count))


def written(page: str, language: str) -> str:
    """Return the page's first block of this language, which shows the text of a file."""
    return next(block.text for block in blocks_of(page) if block.language == language)


def tokenizer(folder: Path) -> None:
    """Write the folder of a model with a tokenizer."""
    from tests.support.tiny_tokenizer import write_tokenizer

    write_tokenizer(folder / "gemma-3-27b-it")


def trace(requests: int) -> str:
    """Return a trace of completions in OpenAI's form, one a second, with the usage that the engine reported."""
    rows = []
    for number in range(requests):
        body = {"model": "gemma", "prompt": list(range(1, 200 + 16 * number)), "max_tokens": 4}
        usage = {"prompt_tokens": 199 + 16 * number, "completion_tokens": 4}
        rows.append({"timestamp": 1_795_493_999 + number, "worker": "10.0.0.1:8000", "body": body, "usage": usage})
    return "".join(json.dumps(row) + "\n" for row in rows)


TWO = (engine("10.0.0.1"), engine("10.0.0.2"))
TWO_WORKERS = "--worker w0=http://10.0.0.1:8000 --worker w1=http://10.0.0.2:8000"
# A prompt for each engine, so that the router knows their groups.
_PROMPT = json.dumps({"model": "gemma", "prompt": list(range(1, 200)), "max_tokens": 1})
_AS_JSON = "-H 'content-type: application/json'"
WARM = (*(f"curl -s http://10.0.0.{n}:8000/v1/completions {_AS_JSON} -d '{_PROMPT}'" for n in (1, 2)), "sleep 1")

WORLDS: dict[str, World] = {
    "README.md": World(
        engines=TWO,
        files={"prompt.json": json.dumps(list(range(1, 200)))},
        shown=(r"x-kvrouter-worker: w[01]", r'"worker_id": ?"w1"', r"(?m)^ *w1 "),
    ),
    "docs/tutorials/first-steps.md": World(
        settles=True,
        # The output of each step, and that of step 6 once more after its answer.
        shown=(
            r"x-kvrouter-predicted-hit: 0\b",
            r'"longest_matched": ?688',
            r"x-kvrouter-predicted-hit: 688\b",
            r'"cached_tokens": ?688',
        ),
    ),
    "docs/how-to/containers.md": World(
        settles=True,
        engines=simulators(3),
        router="--port 30001 "
        + " ".join(f"--worker replica-{number}=http://127.0.0.1:{8001 + number}" for number in range(3)),
        shown=(r'"longest_matched": ?\d{3}',),
    ),
    "docs/how-to/disaggregation.md": World(engines=TWO),
    "docs/how-to/discovery.md": World(
        engines=(*TWO, engine("10.0.0.3")),
        files={
            "workers.yaml": written("docs/how-to/discovery.md", "yaml"),
            "kvrouter.yaml": "workers: [w0=http://10.0.0.1:8000]\n",
        },
    ),
    "docs/how-to/doctor.md": World(
        engines=TWO,
        router=TWO_WORKERS,
        fill={"HOST:PORT": "127.0.0.1:30000", "--api-key KEY": "--api-key secret"},
    ),
    "docs/how-to/gateway.md": World(engines=TWO),
    "docs/how-to/load-test.md": World(
        engines=TWO,
        router=TWO_WORKERS,
        sent=(f"curl -s localhost:30000/v1/completions {_AS_JSON} -d '{_PROMPT}'",),
        shown=(r"(?m)^kvrouter_delivered_cached_tokens_total",),
    ),
    "docs/how-to/migration.md": World(engines=TWO, shown=(r'"worker_id": ?"w[01]"',)),
    "docs/how-to/monitoring.md": World(
        engines=TWO,
        router=f"--redis redis://127.0.0.1:6379/0 {TWO_WORKERS}",
        sent=WARM,
        store=True,
        hosts=("otel-collector",),
        shown=(r'"status": ?"ok"',),
    ),
    "docs/how-to/page.md": World(shown=(r"The fleet in a browser: http://127\.0\.0\.1:\d+/",)),
    "docs/how-to/proxy.md": World(
        engines=TWO,
        router=f"--allowed-host router {TWO_WORKERS}",
        hosts=("router",),
        shown=(r'"model": ?"gemma"', r"draining"),
    ),
    "docs/how-to/replay.md": World(
        files={"requests.jsonl": trace(30)}, shown=(r"(?m)^kv\* ", r"would save this fleet")
    ),
    "docs/how-to/sglang.md": World(
        engines=(engine(flags="--model m"),), router="", fill={"ROUTER": "127.0.0.1", "HOST": "10.0.0.1"}
    ),
    "docs/how-to/shadow.md": World(engines=TWO, files={"requests.jsonl": trace(3)}),
    "docs/how-to/sizing.md": World(engines=(engine(),), shown=(r"(?m)^kvrouter_mirror_entries ",)),
    "docs/how-to/tokenizers.md": World(engines=(engine(),), prepare=tokenizer),
    "docs/how-to/troubleshooting.md": World(engines=TWO, router=TWO_WORKERS),
    "docs/how-to/vllm.md": World(engines=TWO, shown=(r"(?m)^ *w0 +live",)),
    "docs/reference/simulator.md": World(),
}


def filled(command: str, fill: Mapping[str, str]) -> str:
    """Return the command with its placeholders replaced by the values of `fill`."""
    for name, value in fill.items():
        command = re.sub(rf"(?<![\w-]){re.escape(name)}(?!\w)", value, command)
    return command
