# SPDX-License-Identifier: Apache-2.0
"""A router whose table of tiers has a fourth entry, `remote`. It runs in a process of its own, by `BOOT`.

The judge has no rule for the tier, so its hits are entered at the judge's border: each worker reuses a block more with
the tier than without it.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from kvrouter.contract.tiers import TIERS
from kvrouter.router.app.cli.commands import run
from kvrouter.router.app.cli.tables import candidates_text
from kvrouter.router.app.core.resident_blocks import ResidentBlocks
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching import matcher
from kvrouter.router.index.matching.judge import Judge
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.load.worker_speed import SAMPLES_MIN
from kvrouter.router.route.placement.cost import ChoiceContext, weigh
from tests.contract.api_support import TinyCore, build, call

# The entry, and the program that adds it to the table before any module reads it, then calls `main` of this module.
ENTRY = 'Tier("remote", "REMOTE", "tokens reused with the remote tier too", "from remote", "+REMOTE", 0.9),'
BOOT = f"""
import importlib.util, sys
spec = importlib.util.find_spec("kvrouter.contract.tiers")
tiers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
table, end, rest = open(spec.origin).read().partition("\\n)\\nMEDIA = ")
assert end
exec(table + {ENTRY!r} + end + rest, vars(tiers))
from tests.support.four_tiers import main
main(sys.argv[1])
"""
BLOCK, HELD_BLOCKS, NUM_TOKENS = 16, 4, 200


class RemoteJudge:
    """A judge of which each hit with the last tier is a block longer."""

    def __init__(self, *arguments: Any) -> None:
        self._judge = Judge(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._judge, name)

    def judge(self, mirror: Any, hashes: Any, num_tokens: int) -> Any:
        found = self._judge.judge(mirror, hashes, num_tokens)
        last = len(TIERS) - 1
        assert (found[:, last] == found[:, last - 1]).all(), "a tier without a rule adds something"
        found[:, last] = np.minimum(found[:, last] + BLOCK, num_tokens - 1)
        return found


class MirrorCore(TinyCore):
    """A core of one worker, whose hits come from a mirror and the judge."""

    def __init__(self) -> None:
        super().__init__()
        mirror, worker = Mirror(1 << 20), WorkerKey("m", "w0")
        mirror.begin_epoch(worker, "e")
        self.hashes = np.arange(1, 1 + NUM_TOKENS // BLOCK, dtype=np.uint64)
        mirror.add(worker, Place(0, GPU), self.hashes[:HELD_BLOCKS])
        catalog = build_catalog((Group(0, "full_attention", BLOCK),), "learned", CatalogSpec())
        view = matcher.WorkerView(worker, None, StreamState.LIVE, True, "", "e", catalog, HashScheme.default(), {})
        self._plans = matcher.HashPlans.build(mirror, [view])
        self._matcher = matcher.Matcher(mirror, SegmentMemory(0))

    def ask(self, question: Question) -> list[Hit]:
        self.hits_known = self._matcher.match(question, self._plans)
        return self.hits_known

    def hit_table(self, question: Question) -> Any:
        return self._matcher.table(question, self._plans)


def main(trace: str) -> None:
    """Print what each part of the router makes of the fourth tier, as JSON; `trace` is a trace to replay."""
    vars(matcher)["Judge"] = RemoteJudge
    core = MirrorCore()
    app, _ = build(core)
    asked = {"model": "m", "block_hashes": core.hashes.tolist(), "num_tokens": NUM_TOKENS}
    selected = call(app, "POST", "/select", asked | {"explain": True}).json()
    output = io.StringIO()
    print(candidates_text(selected, NUM_TOKENS, 200).plain, file=output)
    (hit,) = core.hits_known
    load = LoadModel(LoadTable(), 10_000)
    costs = [weigh([hit], ChoiceContext(NUM_TOKENS, load), hit.tokens).terms[0][0]]
    for computed_tokens, loaded_tokens, seconds in ((1_000, 0, 1.0), (0, 10_000, 9.5)):
        for _ in range(SAMPLES_MIN):
            load.rates_of(hit.worker).first_token(computed_tokens, loaded_tokens, 0, seconds)
    load.tick([hit.worker], 0.0)
    costs.append(weigh([hit], ChoiceContext(NUM_TOKENS, load), hit.tokens).terms[0][0])
    resident = ResidentBlocks(MetricRegistry())
    resident.counts = lambda: [(hit.worker, {"g0:REMOTE": 3, "g0:TAPE": 5})]
    with redirect_stdout(report := io.StringIO()):
        assert run(["replay", "--trace", trace, "--workers", "1", "--policy", "kv", "--json"]) == 0
    json.dump(
        {
            "by_tier": hit.by_tier,
            "template": call(app, "POST", "/query_by_hash", asked).body.decode(),
            "encoded": call(app, "POST", "/query_by_hash", asked | {"workers": ["w0"]}).body.decode(),
            "select": selected,
            "document": call(app, "GET", "/openapi.json").json()["components"]["schemas"],
            "table": output.getvalue(),
            "costs": costs,
            "metric": resident.text(),
            "replay": json.loads(report.getvalue())["rows"][0],
        },
        sys.stdout,
    )
