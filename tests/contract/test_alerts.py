# SPDX-License-Identifier: Apache-2.0
"""The alert rules of deploy/prometheus and the queries of deploy/grafana, checked with Prometheus' own tool.

Each alert fires in its own case and no alert fires where all is well; each names its row of the doctor's page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrouter.engine_patch.offload.metrics import COUNTERS
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from tests.support.monitoring_files import ROOT, RULES, alert_rules, dashboard_queries, panels

DOCTOR = ROOT / "docs" / "how-to" / "doctor.md"

ONE = 'instance="a",model="m",worker="w0"'
TWO = 'instance="a",model="m",worker="w1"'
# The columns of Grafana's dashboards.
GRID_COLUMNS = 24
# The duration of a case, which is longer than the `for` of every rule.
MINUTES = 90
# How often the rules are evaluated: more often, the 40 cases would take a minute and end in the same state.
EVERY = "3m"

# Series of a healthy router, in Prometheus' notation for the values at each minute.
WELL = {
    'kvrouter_build_info{instance="a",version="1",compiled="yes"}': "1x90",
    f'kvrouter_stream_state{{{ONE},state="live"}}': "1x90",
    f'kvrouter_stream_state{{{TWO},state="live"}}': "1x90",
    f'kvrouter_stream_state{{{ONE},state="down"}}': "0x90",
    f'kvrouter_stream_state{{{TWO},state="down"}}': "0x90",
    f'kvrouter_stream_state{{{ONE},state="connecting"}}': "1x2 0x88",
    f'kvrouter_proxy_breaker_state{{{ONE},state="open"}}': "0x90",
    f"kvrouter_worker_unserved_models{{{ONE}}}": "0x90",
    f"kvrouter_patch_withheld{{{ONE}}}": "0x90",
    f"kvrouter_worker_refusing_engines{{{ONE}}}": "0x90",
    f"kvrouter_worker_disk_corrupt_records{{{ONE}}}": "3x90",
    f"kvrouter_worker_engines_twice{{{ONE}}}": "0x90",
    f"kvrouter_worker_draining{{{ONE}}}": "0x90",
    # Both workers refuse an eighth of their requests, as a client sends wrong ones.
    **{
        f'kvrouter_proxy_answers_total{{{worker},outcome="{outcome}"}}': values
        for worker in (ONE, TWO)
        for outcome, values in (("ok", "0+70x90"), ("client_error", "0+10x90"))
    },
    # A single worker has no peers.
    'kvrouter_proxy_answers_total{instance="a",model="single",worker="w0",outcome="client_error"}': "0+10x90",
    'kvrouter_discovery_up{instance="a",source="file"}': "1x90",
    'kvrouter_discovery_waiting{instance="a",source="file"}': "0x90",
    f"kvrouter_mirror_refused_blocks_total{{{ONE}}}": "7x90",
    f"kvrouter_predicted_cached_tokens_total{{{ONE}}}": "0+1000x90",
    f"kvrouter_over_credit_tokens_total{{{ONE}}}": "0+10x90",
    'kvrouter_predictions_unjudged_total{instance="a",reason="no_cached_tokens"}': "3x90",
    f"kvrouter_token_count_mismatches_total{{{ONE}}}": "1x90",
    'kvrouter_prompts_total{instance="a",source="given"}': "0+1000x90",
    'kvrouter_prompts_total{instance="a",source="render"}': "0+60x90",
    'kvrouter_prompts_total{instance="a",source="none"}': "0+60x90",
    # A reason that lies in the client's request is not a fault of the router.
    'kvrouter_prompts_unknown_total{instance="a",reason="refused"}': "0+60x90",
    'kvrouter_prompts_unknown_total{instance="a",reason="timeout"}': "0+5x90",
    # A third of the pulls fails.
    f'kvrouter_peer_pulls_total{{{ONE},outcome="whole"}}': "0+20x90",
    f'kvrouter_peer_pulls_total{{{ONE},outcome="partial"}}': "0+4x90",
    f'kvrouter_peer_pulls_total{{{ONE},outcome="none"}}': "0+6x90",
    f'kvrouter_peer_pulls_total{{{ONE},outcome="unknown"}}': "0+60x90",
    # A worker with few pulls.
    f'kvrouter_peer_pulls_total{{{TWO},outcome="whole"}}': "0x90",
    f'kvrouter_peer_pulls_total{{{TWO},outcome="partial"}}': "0x90",
    f'kvrouter_peer_pulls_total{{{TWO},outcome="none"}}': "0x80 1+1x10",
    'kvrouter_achievable_hit_tokens_total{instance="a",model="m"}': "0+1000x90",
    'kvrouter_lost_hit_tokens_total{instance="a",model="m",reason="load"}': "0+50x90",
    f'kvrouter_ttft_seconds_bucket{{{ONE},le="1"}}': "0+60x90",
    f'kvrouter_ttft_seconds_bucket{{{ONE},le="+Inf"}}': "0+60x90",
    **{
        f'kvrouter_itl_seconds_bucket{{instance="a",model="m",worker="{worker}",le="{bound}"}}': "0+60x90"
        for worker in ("w0", "w1", "w2")
        for bound in ("0.01", "+Inf")
    },
    'kvrouter_queue_refused_total{instance="a",model="m",reason="full"}': "5x90",
    'kvrouter_store_up{instance="a"}': "1x90",
    'kvrouter_registrations_lost{instance="a"}': "0x90",
    'kvrouter_history_entries_lost_total{instance="a",reason="unwritten"}': "7x90",
    'kvrouter_unreadable_values_total{instance="a",where="worker"}': "1x90",
    'kvrouter_load_known{instance="a"}': "1x90",
    'kvrouter_task_failures_total{instance="a",task="mirror"}': "3x90",
    'kvrouter_internal_errors_total{instance="a",where="/query"}': "1x90",
    # A certificate that is valid for ten hours, of which eight and a half are left at the end.
    'kvrouter_tls_certificate_start_timestamp_seconds{instance="a"}': "1x90",
    'kvrouter_tls_certificate_expiry_timestamp_seconds{instance="a"}': "36000x90",
    # A router without TLS.
    'kvrouter_tls_certificate_start_timestamp_seconds{instance="b"}': "0x90",
    'kvrouter_tls_certificate_expiry_timestamp_seconds{instance="b"}': "0x90",
    'kvrouter_access_file_stale{instance="a",file="certificate"}': "0x90",
    'kvrouter_trace_spans_total{instance="a",outcome="exported"}': "0+9x90",
    'kvrouter_trace_spans_total{instance="a",outcome="dropped"}': "2x90",
}
# The series that differ from WELL in the case of each alert; None removes the series.
FAULTS: dict[str, dict[str, str | None]] = {
    "KvrouterAbsent": {'kvrouter_build_info{instance="a",version="1",compiled="yes"}': None},
    "KvrouterModelDown": {f'kvrouter_stream_state{{{worker},state="down"}}': "1x90" for worker in (ONE, TWO)},
    "KvrouterWorkerDown": {f'kvrouter_stream_state{{{TWO},state="down"}}': "1x90"},
    "KvrouterBreakerOpen": {f'kvrouter_proxy_breaker_state{{{ONE},state="open"}}': "1x90"},
    "KvrouterModelNotServed": {f"kvrouter_worker_unserved_models{{{ONE}}}": "1x90"},
    "KvrouterPatchFailed": {f"kvrouter_patch_withheld{{{ONE}}}": "1x90"},
    "KvrouterEngineWantsKey": {f"kvrouter_worker_refusing_engines{{{ONE}}}": "1x90"},
    "KvrouterTextsWithoutTokens": {'kvrouter_prompts_unknown_total{instance="a",reason="unauthorized"}': "0+70x90"},
    "KvrouterWorkerRefusesMore": {
        f'kvrouter_proxy_answers_total{{{ONE},outcome="client_error"}}': "0+1x90",
        f'kvrouter_proxy_answers_total{{{TWO},outcome="client_error"}}': "0+20x90",
    },
    "KvrouterEngineRegisteredTwice": {f"kvrouter_worker_engines_twice{{{ONE}}}": "1x90"},
    "KvrouterWorkerDrains": {f"kvrouter_worker_draining{{{ONE}}}": "1x90"},
    "KvrouterDiskDamaged": {f"kvrouter_worker_disk_corrupt_records{{{ONE}}}": "3x70 4x20"},
    "KvrouterSourceFails": {'kvrouter_discovery_up{instance="a",source="file"}': "0x90"},
    "KvrouterWorkersWait": {'kvrouter_discovery_waiting{instance="a",source="file"}': "2x90"},
    "KvrouterEventsNotFollowed": {f'kvrouter_stream_state{{{ONE},state="connecting"}}': "1x90"},
    "KvrouterHashesUnknown": {f'kvrouter_stream_state{{{ONE},state="unhashable"}}': "1x90"},
    "KvrouterEventsOfAnother": {f'kvrouter_stream_state{{{ONE},state="mismatched"}}': "1x90"},
    "KvrouterBlocksRefused": {f"kvrouter_mirror_refused_blocks_total{{{ONE}}}": "0+1x90"},
    "KvrouterPredictionsWrong": {f"kvrouter_over_credit_tokens_total{{{ONE}}}": "0+60x90"},
    "KvrouterReuseNotReported": {
        'kvrouter_predictions_unjudged_total{instance="a",reason="no_cached_tokens"}': "0+3x90"
    },
    "KvrouterPullsFail": {f'kvrouter_peer_pulls_total{{{ONE},outcome="none"}}': "0+40x90"},
    "KvrouterTokenCountsDiffer": {f"kvrouter_token_count_mismatches_total{{{ONE}}}": "0+1x90"},
    "KvrouterReuseLost": {'kvrouter_lost_hit_tokens_total{instance="a",model="m",reason="load"}': "0+110x90"},
    "KvrouterClientsWait": {
        f'kvrouter_ttft_seconds_bucket{{{ONE},le="1"}}': "0+50x90",
        f'kvrouter_ttft_seconds_bucket{{{ONE},le="5"}}': "0+60x90",
    },
    "KvrouterEngineSlow": {
        'kvrouter_itl_seconds_bucket{instance="a",model="m",worker="w2",le="0.01"}': "0x90",
        'kvrouter_itl_seconds_bucket{instance="a",model="m",worker="w2",le="0.1"}': "0+60x90",
    },
    "KvrouterRequestsRefused": {'kvrouter_queue_refused_total{instance="a",model="m",reason="full"}': "0+1x90"},
    "KvrouterStoreAway": {'kvrouter_store_up{instance="a"}': "0x90"},
    "KvrouterHistoryIncomplete": {'kvrouter_history_entries_lost_total{instance="a",reason="unwritten"}': "0+1x90"},
    "KvrouterRegistrationsLost": {'kvrouter_registrations_lost{instance="a"}': "1x90"},
    "KvrouterUnreadableValues": {'kvrouter_unreadable_values_total{instance="a",where="worker"}': "0+1x90"},
    "KvrouterLoadUnknown": {'kvrouter_load_known{instance="a"}': "0x90"},
    "KvrouterTaskFails": {'kvrouter_task_failures_total{instance="a",task="mirror"}': "0+1x90"},
    "KvrouterInternalErrors": {'kvrouter_internal_errors_total{instance="a",where="/query"}': "0+1x90"},
    "KvrouterCertificateEnds": {'kvrouter_tls_certificate_expiry_timestamp_seconds{instance="a"}': "6000x90"},
    "KvrouterAccessFileRefused": {'kvrouter_access_file_stale{instance="a",file="certificate"}': "1x90"},
    "KvrouterNotCompiled": {'kvrouter_build_info{instance="a",version="1",compiled="no"}': "1x90"},
    "KvrouterVersionsDiffer": {'kvrouter_build_info{instance="b",version="2",compiled="yes"}': "1x90"},
    "KvrouterTracesLost": {'kvrouter_trace_spans_total{instance="a",outcome="dropped"}': "0+2x90"},
}
# Alerts that fire together with another alert: a model is down when all its workers are.
COMPANY = {"KvrouterModelDown": {"KvrouterWorkerDown"}}


@pytest.fixture(scope="session")
def promtool() -> str:
    """Return the path of promtool, from Debian's package prometheus.

    Without it CI fails, and any other machine skips the tests that need it.
    """
    path = shutil.which("promtool")
    if path is None:
        reason = "no promtool on PATH, so the alert rules were not tested: apt-get install prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def case(name: str, series: Mapping[str, str | None], firing: set[str]) -> dict[str, Any]:
    """Return a test for promtool: after MINUTES, exactly these alerts fire."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": sample, "values": values} for sample, values in series.items() if values is not None
        ],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }


def run(promtool: str, *arguments: object) -> None:
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", RULES)


def test_promtool_takes_the_queries_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    queries = [*dashboard_queries(), *dashboard_queries(of_engines=True)]
    recorded = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    run(promtool, "check", "rules", file)


def test_the_dashboard_has_every_reason_why_a_chunk_does_not_come() -> None:
    names = set(re.findall(r"vllm:(\w+)", " ".join(dashboard_queries(of_engines=True))))
    counted = {name.removeprefix("vllm:") for name in COUNTERS if "peer_miss_" in name}
    assert names == {f"{name}_total" for name in counted} and len(counted) == len(PeerMiss)


def test_the_panels_of_the_dashboard_do_not_overlap_and_say_what_they_show() -> None:
    cells = [
        (panel["gridPos"]["y"] + row, panel["gridPos"]["x"] + column)
        for panel in panels()
        for row in range(panel["gridPos"]["h"])
        for column in range(panel["gridPos"]["w"])
    ]
    assert len(cells) == len(set(cells)) and max(column for _, column in cells) < GRID_COLUMNS
    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels())


def test_every_alert_fires_in_its_case_alone_and_none_where_all_is_well(promtool: str, tmp_path: Path) -> None:
    assert {rule["alert"] for rule in alert_rules()} == set(FAULTS)
    cases = [case("all is well", WELL, set())]
    cases += [case(name, WELL | series, {name} | COMPANY.get(name, set())) for name, series in FAULTS.items()]
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": EVERY, "tests": cases}))
    run(promtool, "test", "rules", file)


def test_an_alert_names_its_subject(promtool: str, tmp_path: Path) -> None:
    (rule,) = (rule for rule in alert_rules() if rule["alert"] == "KvrouterWorkerDown")
    annotations = rule["annotations"] | {"summary": "Worker w1 of m is down"}
    alert = {"exp_labels": {"severity": "warning", "model": "m", "worker": "w1"}, "exp_annotations": annotations}
    series = WELL | FAULTS["KvrouterWorkerDown"]
    test = {
        "interval": "1m",
        "input_series": [{"series": sample, "values": values} for sample, values in series.items()],
        "alert_rule_test": [{"eval_time": "10m", "alertname": "KvrouterWorkerDown", "exp_alerts": [alert]}],
    }
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    run(promtool, "test", "rules", file)


def test_every_alert_names_its_row_of_the_doctors_page() -> None:
    rows = re.findall(r'<a id="(\w+)"></a>', DOCTOR.read_text())
    for rule in alert_rules():
        notes = rule["annotations"]
        code = notes.get("doctor")
        assert notes["runbook_url"] == "how-to/doctor.md" + (f"#{code.lower()}" if code else "")
        assert code is None or code.lower() in rows, rule["alert"]
        assert (
            notes["summary"] and notes["description"] and rule["labels"]["severity"] in ("info", "warning", "critical")
        )
