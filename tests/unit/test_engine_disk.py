# SPDX-License-Identifier: Apache-2.0
"""Reports of a disk that returns bad data, from the engine's /metrics; each report is shown for a while."""

from __future__ import annotations

from kvrouter.engine_patch.offload.metrics import COUNTERS, GAUGES, PREFIX
from kvrouter.router.follow.streams.offload_watch import NAMED_S, OffloadSigns, OffloadWatch, parse_offload

PAGE = b"""# TYPE vllm:kvrouter_offload_disk_corrupt_total counter
vllm:kvrouter_offload_disk_corrupt_total{engine="0",model_name="m"} 3.0
vllm:kvrouter_offload_disk_corrupt_total{engine="1",model_name="m"} 0.0
vllm:kvrouter_offload_disk_off{engine="0",model_name="m"} 0.0
vllm:kvrouter_offload_disk_off{engine="1",model_name="m"} 1.0
vllm:kvrouter_offload_disk_corrupt_created{engine="0",model_name="m"} 1.7e+09
"""


def test_the_state_of_the_disk_is_read_from_a_page_of_metrics() -> None:
    # The engine's side uses the same names.
    assert f"{PREFIX}disk_corrupt" in COUNTERS and f"{PREFIX}disk_off" in GAUGES
    assert parse_offload(PAGE, 0) == OffloadSigns(3, False)
    assert parse_offload(PAGE, 1) == OffloadSigns(0, True)
    assert parse_offload(PAGE, 2) is None
    assert parse_offload(b"vllm:kvrouter_offload_disk_corrupt_total 7\n", 5) == OffloadSigns(7)
    assert parse_offload(b"", 0) is None
    assert parse_offload(b"vllm:kvrouter_offload_disk_corrupt_total 1e999\n", 0) == OffloadSigns(10**12)
    assert parse_offload(b"vllm:kvrouter_offload_disk_corrupt_total +-.\n", 0) is None


def test_damaged_records_are_reported_for_a_while_and_again_when_more_come() -> None:
    watch = OffloadWatch()
    watch.observe(OffloadSigns(0), 0.0)
    assert watch.disk_problem(0.0) == ""
    watch.observe(OffloadSigns(2), 1.0)
    assert "returned bad data: 2 records" in watch.disk_problem(1.0)
    watch.observe(OffloadSigns(2), 1.0 + NAMED_S)
    assert watch.disk_problem(1.0 + NAMED_S) == ""
    # Another life of the engine has begun, and its disk is no better.
    watch.observe(OffloadSigns(1), 1000.0)
    assert "1 records" in watch.disk_problem(1000.0)
    watch.observe(OffloadSigns(0, off=True), 1000.0 + NAMED_S)
    assert watch.disk_problem(1000.0 + NAMED_S).startswith("its offload disk is left alone")
