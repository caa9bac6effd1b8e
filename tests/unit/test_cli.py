# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter`: its output, its one-line errors and its exit codes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from jsonschema import Draft202012Validator

from kvrouter.router.app.cli.api_client import router_url
from kvrouter.router.app.cli.commands import app, run
from kvrouter.router.app.cli.tables import candidates_text, outcome_line, prompts_text
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.model.config.loading import listed_settings, load_config
from kvrouter.router.model.config.settings import FIELDS, Config, flag_of, metavar_of
from kvrouter.router.model.workers.listed_worker import listed_worker
from tests.support.stub_router import SELECTED, StubRouter, unset_client_variables


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_client_variables(monkeypatch)


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and its one line on stderr, and require an empty stdout."""
    code = run(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrouter: ") and err.count("\n") == 1
    return code, err


def test_url_and_key_come_from_the_environment_too(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.answers["/workers"] = (200, b'{"workers": []}')
    monkeypatch.setenv("KVROUTER_URL", stub.url + "/")
    monkeypatch.setenv("KVROUTER_API_KEY", "k")
    assert run(["workers"]) == 0
    assert stub.received == [("GET", "/workers", b"", "Bearer k")]


@pytest.mark.parametrize(
    ("given", "port", "url"),
    [
        (None, None, "http://127.0.0.1:30000"),
        (None, "18000", "http://127.0.0.1:18000"),
        # Kubernetes sets this value for a Service that is named `kvrouter`.
        (None, "tcp://10.0.0.7:80", "http://127.0.0.1:30000"),
        ("localhost:18000", "1", "http://localhost:18000"),
        ("10.0.0.7", None, "http://10.0.0.7"),
        ("[::1]:30000", None, "http://[::1]:30000"),
        ("https://gate/kv/", None, "https://gate/kv"),
    ],
)
def test_the_routers_address_is_found(given: str | None, port: str | None, url: str) -> None:
    assert router_url(given, {} if port is None else {"KVROUTER_PORT": port}) == url


@pytest.mark.parametrize("given", ["ftp://h", "http://", "h:x", "h:70000", "h:0", "://h", "http://[::1"])
def test_a_wrong_address_says_what_to_write(given: str) -> None:
    with pytest.raises(SettingError, match="localhost:30000"):
        router_url(given, {})


@pytest.mark.parametrize("port", ["x", "0", "70000", "-1", "1.5", "\u0661"])
def test_a_wrong_port_in_the_environment_says_what_to_write(port: str) -> None:
    with pytest.raises(SettingError, match=r"KVROUTER_PORT is .* pass --url"):
        router_url(None, {"KVROUTER_PORT": port})


def test_the_client_takes_the_port_of_the_environment(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.answers["/workers"] = (200, b'{"workers": []}')
    monkeypatch.setenv("KVROUTER_PORT", stub.url.rpartition(":")[2])
    assert run(["workers"]) == 0
    assert run(["workers", "--url", stub.url.removeprefix("http://")]) == 0
    assert len(stub.received) == 2


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvrouter {VERSION}\n"


def test_explain_shows_every_candidate_and_the_reason(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.answers["/select"] = (200, json.dumps(SELECTED).encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2,\n3]"))
    assert run(["explain", "--url", stub.url, "--model", "m", "--tokens", "-", "--lora-name", "a"]) == 0
    assert json.loads(stub.received[0][2]) == {
        "model": "m",
        "explain": True,
        "dry_run": True,
        "token_ids": [1, 2, 3],
        "lora_name": "a",
    }
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r">\s+w0\s+1\s+2\s+2\s+1\s+0\s+1\s+live", lines[1])
    assert lines[2].startswith("    group 1 (mamba): no state")
    assert re.fullmatch(r"\s+w1\s+1\s+2\s+0\s+3\s+0\s+3\s+live", lines[3])
    assert not any(line.endswith(" ") for line in lines)
    assert lines[-1] == "w0 (http://e:8000): reuses 2 of 3 tokens"


def test_explain_folds_reasons_at_the_terminals_width_and_only_there() -> None:
    why = "its unbroken run of blocks on the GPU ends at 688 tokens, and after that the blocks of another prompt begin"
    limited = {"group_idx": 5, "kind": "full_attention", "why": why}
    answer = SELECTED | {"candidates": [candidate | {"limited_by": limited} for candidate in SELECTED["candidates"]]}
    whole = f"    group 5 (full_attention): {why}"
    assert candidates_text(answer, 3, 4_000).plain.splitlines()[2::2] == [whole, whole]
    folded = candidates_text(answer, 3, 80).plain.splitlines()
    assert max(map(len, folded)) <= 80 and not any(line.endswith(" ") for line in folded)
    assert " ".join(line.strip() for line in folded[2:4]) == whole.strip()


def test_explain_shows_the_terms_of_a_cost_that_the_columns_do_not_show() -> None:
    first, second = SELECTED["candidates"]
    parts = first["parts"] | {"prefill": 13, "queued": 4, "room": 10, "session": 3}
    rows = candidates_text(SELECTED | {"candidates": [first | {"parts": parts}, second]}, 3, 80).plain.splitlines()
    assert [row.strip() for row in rows if "cost" in row] == ["cost: prefill 13, queued 4, room 10, session -3"]


def test_explain_has_no_line_for_a_hit_that_nothing_limits() -> None:
    answer = SELECTED | {"candidates": [candidate | {"limited_by": None} for candidate in SELECTED["candidates"]]}
    assert len(candidates_text(answer, 3, 80).plain.splitlines()) == 3


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, ""),
        ({"num_prompts": 1, "answers": 1}, ""),
        ({"num_prompts": 3, "answers": 1}, " of 3 prompts"),
        ({"num_prompts": 1, "answers": 8}, ", 8 answers"),
        ({"num_prompts": 3, "answers": 8}, " of 3 prompts, 8 answers to each"),
    ],
)
def test_explain_says_how_many_prompts_and_answers_there_were(counts: dict[str, int], text: str) -> None:
    assert prompts_text(counts) == text


def test_explain_shows_the_sources_of_candidates_and_what_the_chosen_one_fetches(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = SELECTED["candidates"]
    peer = {"worker_id": "w1", "dp_rank": 2, "tokens": 3}
    pull = {"worker_id": "w1", "dp_rank": 2, "tokens": 3, "fetched_tokens": 1, "timeout_s": 0.25}
    answer = SELECTED | {"candidates": [first | {"peer": peer}, second], "pull": pull}
    stub.answers["/select"] = (200, json.dumps(answer).encode())
    assert run(["explain", "--url", stub.url, "-m", "m", "--prompt", "hi"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["WORKER", "GPU", "+CPU", "+DISK", "+PEER", "UNCACHED", "LOAD", "COST", "STATE"]
    assert re.fullmatch(r">\s+w0\s+1\s+2\s+2\s+3 \(w1@2\)\s+1\s+0\s+1\s+live", lines[1])
    assert re.fullmatch(r"\s+w1\s+1\s+2\s+0\s+-\s+3\s+0\s+3\s+live", lines[3])
    assert lines[-1] == "fetches 1 tokens from w1@2, waits 0.25 s at most"


def test_the_outcome_of_a_decision_says_how_many_tokens_were_fetched() -> None:
    outcome = {"outcome": "ok", "predicted_tokens": 2, "delivered_tokens": 2, "completion_tokens": None, "ttft_s": None}
    line = outcome_line({"outcome": outcome | {"e2e_s": 1.5, "fetched_tokens": 0}})
    assert line == "outcome: ok; predicted 2 tokens, reused 2 tokens, fetched 0 tokens, over after 1.5 s"


def test_explain_as_json_and_from_a_file(stub: StubRouter, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stub.answers["/select"] = (200, json.dumps(SELECTED).encode())
    (tmp_path / "t").write_text("7 8")
    assert run(["explain", "--url", stub.url, "-m", "m", "--tokens", str(tmp_path / "t"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SELECTED
    assert json.loads(stub.received[0][2])["token_ids"] == [7, 8]


@pytest.mark.parametrize("whole", [False, True], ids=["messages", "a body"])
def test_explain_takes_a_chat_and_names_the_source_of_its_tokens(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], tmp_path: Path, whole: bool
) -> None:
    tokens = {"source": "render", "num_tokens": 3, "known_tokens": 3, "problem": ""}
    stub.answers["/select"] = (200, json.dumps(SELECTED | {"tokens": tokens}).encode())
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": []}
    (tmp_path / "c").write_text(json.dumps(chat | {"model": "theirs"} if whole else chat["messages"]))
    assert run(["explain", "--url", stub.url, "-m", "m", "--messages", str(tmp_path / "c")]) == 0
    body = json.loads(stub.received[0][2])
    assert body == (chat if whole else {"messages": chat["messages"]}) | {
        "model": "m",
        "explain": True,
        "dry_run": True,
    }
    assert capsys.readouterr().out.startswith("3 tokens (source: render)\n")


def test_explain_says_how_many_tokens_are_unknown(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {"source": "none", "num_tokens": 9, "known_tokens": 0, "problem": "no engine [x] to ask"}
    stub.answers["/select"] = (200, json.dumps(SELECTED | {"tokens": tokens}).encode())
    assert run(["explain", "--url", stub.url, "-m", "m", "--prompt", "hi"]) == 0
    assert "about 9 tokens, 0 of them known (source: none): no engine [x] to ask" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "content", "wanted"),
    [
        *[("--messages", content, '"role": "user"') for content in ("", "{", "3", "{}", '{"messages": "x"}')],
        *[("--tokens", content, "ids like [1, 2, 3]") for content in ("", "[]", "1 x", "1.5", "-1", "[[1]]")],
    ],
)
def test_a_file_without_a_prompt_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, content: str, wanted: str
) -> None:
    (tmp_path / "f").write_text(content)
    code, line = failing(capsys, "explain", "-m", "m", flag, str(tmp_path / "f"))
    assert code == 2 and wanted in line


def test_the_routers_error_message_is_shown(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": "send\n token_ids", "type": "t", "code": "tokens_required"}}
    stub.answers["/select"] = (400, json.dumps(error).encode())
    assert failing(capsys, "explain", "--url", stub.url, "-m", "m", "--prompt", "hi") == (
        1,
        "kvrouter: send token_ids\n",
    )
    assert json.loads(stub.received[0][2])["prompt"] == "hi"


def test_a_wrong_key_says_how_to_give_one(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": "no key", "type": "t", "code": "invalid_api_key"}}
    stub.answers["/workers"] = (401, json.dumps(error).encode())
    code, line = failing(capsys, "workers", "--url", stub.url)
    assert code == 1 and "--api-key" in line


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b'{"x": 1}', b"\xff"])
def test_a_server_that_is_not_a_router_is_detected(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    stub.answers["/workers"] = (200, content)
    code, line = failing(capsys, "workers", "--url", stub.url)
    assert code == 1 and "check --url" in line
    stub.answers["/workers"] = (500, content)
    code, line = failing(capsys, "workers", "--url", stub.url)
    assert code == 1 and "500" in line


def test_an_unreachable_router_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 9 is discard; nothing listens there in any test environment.
    code, line = failing(capsys, "workers", "--url", "http://127.0.0.1:9")
    assert code == 1 and "kvrouter serve" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["workers", "--url", "ftp://127.0.0.1"], "--url"),
        (["workers", "3"], "--watch 3"),
        (["workers", "--watch", "0"], "0.05 to 86400"),
        (["workers", "--watch", "nan"], "0.05 to 86400"),
        (["drain"], "ID"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "x"], "--port is 'x'"),
        (["serve", "--worker", "w0"], "--worker 'w0'"),
        (["serve", "--redis", "redis://h", "--data-dir", "d"], "--redis and --data-dir"),
        (["serve", "--config", "/nope.yaml"], "/nope.yaml"),
        (["explain", "--model", "m"], "--tokens FILE, --prompt TEXT, --messages FILE"),
        (["explain", "--model", "m", "--tokens", "f", "--prompt", "x"], "give exactly one of --tokens FILE"),
        (["explain", "--model", "m", "--messages", "/nope"], "/nope"),
        (["explain", "--prompt", "x"], "--model"),
        (["explain", "--model", "m", "--tokens", "/nope"], "/nope"),
        (["nonsense"], "nonsense"),
        (["explainn"], "Did you mean 'explain'? See --help\n"),
        (["add", "w0=h:1"], "'w0=h:1': HTTP_URL must be an HTTP address"),
    ],
)
def test_wrong_usage_prints_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    code, line = failing(capsys, *arguments)
    assert named in line
    assert code == 2


def test_a_port_that_is_taken_is_one_line(stub: StubRouter, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port = stub.url.rpartition(":")[2]
    code, line = failing(capsys, "serve", "--port", port, "--data-dir", str(tmp_path / "d"))
    assert code == 2 and f"port {port}" in line
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "command",
    [*sorted(typer.main.get_command(app).commands), "config example"],  # type: ignore[attr-defined]
)
def test_help_is_as_wide_as_the_terminal_and_names_values_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"<[a-z]+( range)?>|\b(INTEGER|FLOAT|RANGE)\b", text)
    longest = max(map(len, text.splitlines()))
    assert longest <= 120 and (longest > 80 or text.count("\n") < 20)


def test_the_example_of_a_settings_file_is_valid_line_by_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["config", "example"]) == 0
    example = capsys.readouterr().out
    file = tmp_path / "k.yaml"
    config = load_config(file, {}, {}, listed_settings(file, example))
    assert [listed_worker(entry).registration.worker.worker_id for entry in config.workers] == [
        "10.0.0.1:8000",
        "w1",
        "w2",
    ]
    values = {name: getattr(config, name) for name in FIELDS if name != "workers"}
    assert values == {name: getattr(Config(), name) for name in values}, "the other values are the defaults"
    remarks = [line for line in example.splitlines() if re.match(r"# [a-z_]+: ", line)]
    assert len(remarks) > 8
    for line in remarks:
        setting = line.removeprefix("# ")
        assert getattr(load_config(file, {}, {}, listed_settings(file, setting)), setting.partition(":")[0])


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    help_text = capsys.readouterr().out
    for name in FIELDS:
        assert f"{flag_of(name)} {metavar_of(name)}" in help_text
    assert run([]) == 0
    assert "explain" in capsys.readouterr().out


def test_the_schema_of_the_settings_is_valid_and_refuses_what_a_start_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for settings, valid in (
        ({"port": 30_000, "api_key": "k", "workers": ["w0=http://h:1"]}, True),
        ({"prot": 30_000}, False),
        ({"port": 70_000}, False),
        ({"api_key": "k\n"}, False),
        ({"policy": "best"}, False),
    ):
        assert validator.is_valid(settings) == valid, settings
        file = tmp_path / "settings.yaml"
        file.write_text(yaml.safe_dump(settings))
        if valid:
            load_config(file, {}, {})
        else:
            with pytest.raises(SettingError):
                load_config(file, {}, {})


def test_the_page_of_settings_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "markdown"]) == 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md").read_text()
    assert page.endswith(capsys.readouterr().out), "kvrouter config markdown prints what its table should be"
