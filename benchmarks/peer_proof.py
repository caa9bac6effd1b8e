# SPDX-License-Identifier: Apache-2.0
"""Claim: engines that fetch chunks from each other give the answers of an engine without any cache.

Three real engines (the CPU build of the engine tests, tiny hybrid models) with CPU tiers that are far too small fetch
from each other over TCP, one or several prompts at a time. Each answer is compared, and the reuse of prompts that run
alone in their engine with the router's prediction, which is exact for the engine's own tiers. Each chunk that did not
come must have a counted reason, and chunks that a source held at first and that did not come are at most 2 % of those
that were to come. The exit status is 1 if a claim is broken.

    make peer-proof ARGS="--prompts 600 --json FILE"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.engine_venv import enter

# A chunk that the source held when it was queried, and that did not come. The rest is computed, so more costs time only.
MAX_SHORTFALL_SHARE = 0.02
# The tiers' part of a step may keep the other requests waiting for so long: it has no wait. Time in which a busy machine
# had no core for the call is not counted; what other threads of the engine wait for is.
MAX_CALL_S = 0.5
# No telemetry, one thread for each engine, and the transport that works between machines.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=600, help="of each shape")
    parser.add_argument("--shape", action="append", help="windows, states; default: both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the summaries here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    os.environ.update(ENVIRONMENT)
    enter(nixl=True)
    from tests.engine import offload_engine
    from tests.engine.offload_workload import SHAPES
    from tests.engine.peer_proof import Proof, Summary

    summaries: list[Summary] = []
    for shape in arguments.shape or SHAPES:
        with tempfile.TemporaryDirectory(prefix="kvr-peers-") as name:
            folder = Path(name)
            model = getattr(offload_engine, SHAPES[shape].model)(folder / "model")
            proof = Proof(
                shape,
                model,
                folder,
                arguments.seed,
                arguments.prompts,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
            summaries.append(proof.run())
    rows = [
        msgspec.to_builtins(summary)
        | {"broken_claims": broken(summary.faults, summary.shortfall_share, summary.slowest_call_s)}
        for summary in summaries
    ]
    text = json.dumps(rows, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(f"{text}\n")
    return int(any(row["broken_claims"] for row in rows))


def broken(faults: int, shortfall_share: float, slowest_call_s: list[float]) -> list[str]:
    """Return the claims that do not hold."""
    claims = {
        "answers, counts, pages and announcements are right": faults == 0,
        f"shortfall below {MAX_SHORTFALL_SHARE:.0%}": shortfall_share < MAX_SHORTFALL_SHARE,
        f"no call of a scheduler above {MAX_CALL_S} s": max(slowest_call_s) < MAX_CALL_S,
    }
    return [claim for claim, holds in claims.items() if not holds]


if __name__ == "__main__":
    sys.exit(main())
