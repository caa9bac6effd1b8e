# SPDX-License-Identifier: Apache-2.0
"""The engine patch under one version of vLLM of each generation that it supports, and under one that it refuses.

Each version runs in its own process (`version_probe`): vLLM's scheduler, its offloading connector and its publisher,
the patch, and a reader on its sockets. The tests assert that the patch's reports equal what those objects hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.versions import INSTALLED, NEWEST, REFUSED, SUPPORTED, run_under

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
# Importing vLLM and running all layouts takes a quarter of a minute, and several times that on a busy machine.
TIMEOUT_S = 600.0
AT_ONCE = 2

VERSIONS = (INSTALLED, *SUPPORTED)
# In these versions, nothing shows the patch the position of an offloaded chunk.
WITHOUT_OFFLOAD_POSITIONS = ("0.23.0", "0.22.1", "0.20.2")
# The own topic of these versions does not name the group of offloaded blocks.
WITHOUT_OFFLOAD_GROUPS = ("0.23.0", "0.22.1", "0.20.2")
# The connector of this version cannot be reset.
WITHOUT_OFFLOAD_RESET = ("0.20.2",)
CHANGED = [
    "vllm.distributed.kv_events.EventPublisherFactory._registry",
    "vllm.v1.core.sched.scheduler.Scheduler.__init__",
]

Report = dict[str, Any]
Reports = Callable[[str], Report]


@pytest.fixture(scope="module")
def reports(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """Return `reports(version)`, which returns the report of a version's probe; two probes run at a time."""
    folder = tmp_path_factory.mktemp("versions")

    def probe(version: str) -> Report:
        out = folder / f"{version}.json"
        run_under(version, HERE / "version_probe.py", str(model), str(out), timeout_s=TIMEOUT_S)
        return json.loads(out.read_text())

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running: dict[str, Future[Report]] = {version: pool.submit(probe, version) for version in VERSIONS}
        try:
            yield lambda version: running[version].result()
        finally:
            pool.shutdown(cancel_futures=True)


def names(report: Report) -> list[str]:
    return list(report["layouts"])


def each(report: Report) -> Iterator[tuple[str, Report]]:
    yield from report["layouts"].items()


def offloading(report: Report) -> Iterator[tuple[str, Report]]:
    yield from ((name, layout) for name, layout in each(report) if name.startswith("cpu "))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_is_the_one_that_ran(version: str, reports: Reports) -> None:
    report = reports(version)
    assert report["version"] == version
    hybrid_offload = [name for name, _ in offloading(report) if name != "cpu full"]
    assert bool(hybrid_offload) == (version != "0.20.2"), "0.20's connector takes a single group"
    assert len(names(report)) >= 9


@pytest.mark.parametrize("version", VERSIONS)
def test_loading_the_patch_exchanges_two_places_and_no_more(version: str, reports: Reports) -> None:
    assert reports(version)["changed"] == CHANGED


@pytest.mark.parametrize("version", VERSIONS)
def test_every_feature_finds_its_place(version: str, reports: Reports) -> None:
    for name, layout in each(reports(version)):
        off = {feature for feature, state in layout["features"].items() if state != "on"}
        unplaced = name.startswith("cpu ") and version in WITHOUT_OFFLOAD_POSITIONS
        assert off == ({"offload_positions"} if unplaced else set()), name
        warned = [line for line in layout["log"] if " is off" in line]
        assert len(warned) == len(off), name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_declared_catalog_is_the_coordinators(version: str, reports: Reports) -> None:
    for name, layout in each(reports(version)):
        assert layout["catalog"] == layout["expected_catalog"], name


@pytest.mark.parametrize("version", VERSIONS)
def test_hashes_that_cover_following_tokens_are_declared(version: str, reports: Reports) -> None:
    for name, layout in each(reports(version)):
        covers = version == NEWEST and name.startswith("eagle")
        assert layout["catalog"]["hash_lookahead_tokens"] == int(covers), name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_block_has_its_group_on_both_tiers(version: str, reports: Reports) -> None:
    for name, layout in each(reports(version)):
        media = ("GPU", "CPU") if name.startswith("cpu ") else ("GPU",)
        places = {f"{medium} {i}" for medium in media for i in range(len(layout["catalog"]["groups"]))}
        assert layout["stored"].keys() == places, name
        assert layout["removed"].keys() <= places, name
        assert {f"GPU {i}" for i in range(len(layout["catalog"]["groups"]))} <= layout["removed"].keys(), name


@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_have_the_hashes_positions_and_parents_of_their_prompts(version: str, reports: Reports) -> None:
    """Compare also the blocks of sparse groups, and offloaded blocks under the same hash as on the GPU."""
    for name, layout in each(reports(version)):
        assert layout["wrong"] == [], name
        placed = {
            place: count
            for place, count in layout["stored"].items()
            if place.startswith("GPU") or version not in WITHOUT_OFFLOAD_POSITIONS
        }
        assert layout["placed"] == placed, name


@pytest.mark.parametrize("version", VERSIONS)
def test_events_heartbeats_and_snapshots_say_what_is_resident(version: str, reports: Reports) -> None:
    """Compare after each stage: a load, a reset of the idle device's cache, a load, the connector's reset, a load."""
    for name, layout in each(reports(version)):
        loaded, cleared, _, reset, _ = (stage["resident"] for stage in layout["stages"])
        assert any(place.startswith("GPU") for place in loaded), name
        assert not any(place.startswith("GPU") for place in (*cleared, *reset)), name
        if name.startswith("cpu "):
            assert any(place.startswith("CPU") for place in cleared), name
            assert bool(reset) == (version in WITHOUT_OFFLOAD_RESET), name
        for number, stage in enumerate(layout["stages"]):
            assert stage["heartbeat"] == stage["resident"], (name, number)
            assert stage["heartbeat_agrees"], (name, number)
            assert stage["snapshot_agrees"], (name, number)
            assert stage["snapshot_at"] == 0, (name, number)
            assert stage["events_agree"], (name, number)
            assert stage["dropped"] == 0, (name, number)


@pytest.mark.parametrize("version", VERSIONS)
def test_clears_name_the_medium_that_was_cleared(version: str, reports: Reports) -> None:
    for name, layout in each(reports(version)):
        connector = name.startswith("cpu ") and version not in WITHOUT_OFFLOAD_RESET
        assert [medium for medium, _ in layout["cleared"]] == ["GPU", "GPU", *["CPU"] * connector], name


@pytest.mark.parametrize("version", VERSIONS)
def test_vllms_own_topic_keeps_its_bytes(version: str, reports: Reports) -> None:
    for name, layout in each(reports(version)):
        assert layout["stock"]["batches"] > 50, name
        assert layout["stock"]["broken"] == 0, name
        assert layout["same_run"], name
        assert layout["same_bytes"], name


@pytest.mark.parametrize("version", VERSIONS)
def test_what_vllms_own_topic_leaves_out(version: str, reports: Reports) -> None:
    """Without the patch, offloaded blocks have no group before 0.24; the patch closes this gap."""
    for name, layout in offloading(reports(version)):
        offloaded = {place for place in layout["stock"]["stored"] if place.startswith("CPU")}
        assert ("CPU None" in offloaded) == (version in WITHOUT_OFFLOAD_GROUPS), name


def test_an_older_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "refused.json"
    run_under(REFUSED, HERE / "version_footprint.py", str(out), timeout_s=TIMEOUT_S)
    report = json.loads(out.read_text())
    assert report["version"] == REFUSED
    assert report["changed"] == []
    [[level, text]] = report["log"]
    assert level == "ERROR"
    assert "0.20 is the oldest" in text
    assert "hybrid KV cache manager off whenever KV events are on" in text
    assert "KVROUTER_PATCH=0" in text
