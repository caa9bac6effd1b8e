# SPDX-License-Identifier: Apache-2.0
"""Settings: sources and their order, messages for wrong ones, worker SPECs, and secrets that are never shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.contract.registrations import CatalogBody
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.redaction import redacted_text
from kvrouter.router.base.telemetry.log_format import Formatter
from kvrouter.router.model.config.cautions import open_to_pages
from kvrouter.router.model.config.loading import listed_settings, load_config
from kvrouter.router.model.config.settings import FIELDS, Config, describe, flag_of, without_password
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.model.workers.listed_worker import ListedWorker, listed_worker
from kvrouter.router.model.workers.registration import CatalogSpec, Registration
from kvrouter.router.model.workers.registration_from_body import catalog_of
from kvrouter.router.model.workers.role import HandoverWay, Role


def wrong(file: Path | None = None, environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None) -> str:
    """Return the one-line error with which these settings end the start."""
    with pytest.raises(SettingError) as caught:
        load_config(file, environ or {}, flags or {})
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_settings_are_few_and_each_says_what_it_takes() -> None:
    # An operator must understand each setting; a constant is enough where nobody would change the value.
    # 63: only the operator knows that a gateway translates requests (gateway_translated_paths).
    # 64: only the operator knows which servers return tokens and run no model (renderers); nothing announces them.
    # 67: salts made by the router need a secret, who names tenants, and what becomes of clients' own salts, and only the
    # operator knows each (cache_salt_secret_file, tenant_header, client_salts).
    # 68: pulls between workers may harm a network, and only the operator can tell (peer_pulls).
    # 69: whether clients may point engines at other engines is the operator's decision (trust_client_kv_sources).
    assert len(FIELDS) <= 69
    assert all(describe(name) for name in FIELDS)


def test_no_settings_give_the_defaults() -> None:
    config = load_config(None, {"PATH": "/bin"}, {"port": None, "workers": []})
    assert config == Config()
    assert (config.host, config.port, config.redis, config.data_dir) == ("127.0.0.1", 30_000, None, "./kvrouter-data")
    assert (config.flush_interval_s, config.max_body_bytes, config.none_hash_seed) == (0.002, 32 * 1024**2, None)


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("port: 1\nhost: file\nlog_level: error\nworkers:\n  - a=http://h:1\n")
    environ = {"KVROUTER_PORT": "2", "KVROUTER_HOST": "environ", "KVROUTER_WORKERS": "b=http://h:1\n c=http://h:2 "}
    config = load_config(file, environ, {"port": "3"})
    assert (config.port, config.host, config.log_level) == (3, "environ", "error")
    assert config.workers == ("b=http://h:1", "c=http://h:2")


def test_every_setting_can_come_from_every_source(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "host": "h",
        "port": 1,
        "redis": "rediss+cluster://h:1",
        "data_dir": "d",
        "workers": ["a=http://h:1"],
        "workers_file": "w.yaml",
        "kubernetes_selector": "app=vllm",
        "kubernetes_namespace": "serving",
        "kubernetes_api": "http://h:1",
        "kubernetes_token_file": "t",
        "kubernetes_ca_file": "c",
        "allow_hosts": ["h"],
        "allowed_hosts": ["router", "*.svc"],
        "cors_origins": ["https://app.example"],
        "processes": 1,
        "api_key": "k",
        "worker_api_key": "e",
        "worker_api_keys_file": "/etc/kvr/engines.yaml",
        "predicted_hit_header": "off",
        "trust_client_kv_sources": "on",
        "log_level": "debug",
        "log_format": "json",
        "access_log": "on",
        "documentation_url": "https://docs.example/kvrouter/",
        "grafana_url": "https://grafana.example/d/kvrouter?var-model=m",
        "trace_url": "https://traces.example/trace/{trace_id}",
        "flush_interval_s": 0.01,
        "mirror_budget_bytes": 2**30,
        "segment_memory_bytes": 0,
        "max_workers": 7,
        "max_body_bytes": 1024,
        "lease_ttl_s": 1.5,
        "suspect_credit_s": 0.5,
        "decisions_kept": 7,
        "health_interval_s": 0.5,
        "approximate_ttl_s": 0.5,
        "policy": "least_load",
        "temperature": 0.5,
        "saturation_tokens": 7,
        "remote_prefill_min_tokens": 100,
        "handover_token_cost": 0.5,
        "queue_size": 0,
        "queue_deadline_s": 1.5,
        "answer_timeout_s": 1.5,
        "drain_s": 3,
        "shutdown_delay_s": 1.5,
        "replay_timeout_s": 1.5,
        "none_hash_seed": "0",
        "tokenizers": ["m=folder"],
        "renderers": ["m=http://h:1", "m=http://h:2,key=render"],
        "tokenize_timeout_s": 1.5,
        "model_aliases": ["a=m", "b=m"],
        "otlp_endpoint": "http://otel:4318",
        "gateway_port": 9102,
        "gateway_fallbacks": 2,
        "gateway_translated_paths": ["/v1/messages"],
        "gateway_certificate": "/etc/kvr/tls.crt",
        "gateway_key": "/etc/kvr/tls.key",
        "gateway_client_ca": "/etc/kvr/gateways.pem",
        "tls_certificate": "/etc/kvr/tls.crt",
        "tls_key": "/etc/kvr/tls.key",
        "tls_client_ca": "/etc/kvr/clients.pem",
        "api_keys_file": "/etc/kvr/keys.yaml",
        "cache_salt_secret_file": "/etc/kvr/salt.secret",
        "client_salts": "combine",
        "tenant_header": "x-tenant",
        "registrations_per_s": 7.5,
        "curve_client_key": "/etc/kvr/curve.key",
        "peer_pulls": "off",
    }
    assert set(values) == set(FIELDS)
    file = tmp_path / "k.yaml"
    file.write_bytes(msgspec.yaml.encode(values))
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    expected = Config(**arguments)
    assert load_config(file, {}, {}) == expected
    texts = {name: " ".join(value) if isinstance(value, list) else str(value) for name, value in values.items()}
    assert load_config(None, {f"KVROUTER_{name.upper()}": text for name, text in texts.items()}, {}) == expected
    one_place = {name: value for name, value in values.items() if name != "data_dir"}
    flags = {name: value if isinstance(value, list) else str(value) for name, value in one_place.items()}
    assert load_config(None, {"KVROUTER_DATA_DIR": "d"}, flags) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("port", "-1"),
        ("port", "x"),
        ("port", True),
        ("host", ""),
        ("redis", "http://h:1"),
        ("redis", "redis://"),
        ("data_dir", ""),
        ("processes", "0"),
        ("api_key", "two words"),
        ("api_key", "schlüssel"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("flush_interval_s", "0.011"),
        ("flush_interval_s", "-0.1"),
        ("flush_interval_s", "nan"),
        ("mirror_budget_bytes", "1"),
        ("segment_memory_bytes", "-1"),
        ("max_workers", "0"),
        ("max_body_bytes", "0"),
        ("lease_ttl_s", "0"),
        ("replay_timeout_s", "inf"),
        ("worker_api_key", "two words"),
        ("answer_timeout_s", "0"),
        ("drain_s", "0.5"),
        ("shutdown_delay_s", "-1"),
        ("workers", "a=http://h:1"),
        ("tokenize_timeout_s", "0"),
        ("host", ["a"]),
        ("allow_hosts", "h"),
        ("allowed_hosts", "h"),
        ("grafana_url", "javascript:alert(1)"),
        ("documentation_url", "docs.example"),
        ("trace_url", "https://traces.example/trace"),
    ],
)
def test_a_wrong_value_names_the_flag_and_says_what_to_write(name: str, value: Any) -> None:
    message = wrong(flags={name: value})
    assert message.startswith(f"{flag_of(name)} ")
    assert describe(name) in message


def test_the_message_names_the_source_that_was_wrong(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("port: many")
    assert wrong(file).startswith(f"port in {file} is 'many': write ")
    assert wrong(environ={"KVROUTER_PORT": "many"}).startswith("KVROUTER_PORT is 'many': write ")


def test_an_unknown_key_suggests_the_right_one(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("log-levl: info")
    assert "did you mean log_level?" in wrong(file)
    assert "did you mean KVROUTER_PORT?" in wrong(environ={"KVROUTER_PROT": "1"})
    assert "KVROUTER_REDIS" in wrong(environ={"KVROUTER_ZZZZZZ": "1"})


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "port: [1", "\x00"])
def test_a_file_without_settings_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "k.yaml"
    file.write_text(content)
    assert str(file) in wrong(file)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in wrong(tmp_path / "nope.yaml")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in wrong(binary)


def test_an_empty_file_and_null_values_give_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("# nothing\n")
    assert load_config(file, {}, {}) == Config()
    file.write_text("redis:\n")
    assert load_config(file, {}, {}) == Config()


def test_a_yaml_number_is_read_as_text_where_text_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("none_hash_seed: 0\n")
    assert load_config(file, {}, {}).none_hash_seed == "0"


def test_variables_of_kubernetes_and_of_other_parts_are_ignored() -> None:
    environ = {
        "KVROUTER_PORT": "tcp://10.0.0.7:30000",
        "KVROUTER_SERVICE_HOST": "10.0.0.7",
        "KVROUTER_SERVICE_PORT_HTTP": "30000",
        "KVROUTER_PORT_30000_TCP": "tcp://10.0.0.7:30000",
        "KVROUTER_PORT_30000_TCP_ADDR": "10.0.0.7",
        "KVROUTER_URL": "http://h",
        "KVROUTER_CONFIG": "f",
        "KVROUTER_ENGINE_X": "1",
    }
    assert load_config(None, environ, {}) == Config()


def test_redis_and_data_dir_exclude_each_other() -> None:
    assert "--redis and --data-dir" in wrong(flags={"redis": "redis://h", "data_dir": "d"})
    environ = {"KVROUTER_REDIS": "redis://h:1", "KVROUTER_DATA_DIR": "/image/default"}
    assert load_config(None, environ, {}).redis == "redis://h:1"
    assert load_config(None, environ, {"data_dir": "d"}).redis is None


def test_no_secret_is_shown() -> None:
    assert "hunter2" not in wrong(flags={"api_key": "hunter2 x"})
    assert "hunter2" not in wrong(flags={"worker_api_key": "hunter2 x"})
    assert "hunter2" not in wrong(flags={"redis": "http://u:hunter2@h"})
    shown = Config(api_key="hunter2", worker_api_key="hunter2", redis="redis://u:hunter2@h:1/0").shown()
    assert "hunter2" not in str(shown)
    assert shown["redis"] == "redis://***@h:1/0"
    assert without_password("redis://h:1/0") == "redis://h:1/0"


def test_a_worker_spec_with_every_field_is_read() -> None:
    spec = (
        "w0=https://h:8000/base,events=tcp://h:5557,replay=ipc:///r,model=org/name,dp_rank=3,block_size=16,lora_name=a,"
        "hash_block_size=16,hash_algo=xxhash,none_hash_seed=0,offload_connector=OffloadingConnector"
    )
    catalog = CatalogSpec(
        hash_block_size=16, hash_algo="xxhash", none_hash_seed="0", offload_connector="OffloadingConnector"
    )
    registration = Registration(
        WorkerKey("org/name", "w0", 3), "tcp://h:5557", "ipc:///r", "https://h:8000/base", 16, "a", catalog
    )
    assert listed_worker(spec) == ListedWorker(registration, any_rank=False)


def test_a_worker_spec_has_a_role() -> None:
    registration = listed_worker("w0=http://h:8000,role=decode,handover=header").registration
    assert (registration.role, registration.handover) == (Role.DECODE, HandoverWay.HEADER)
    assert listed_worker("w0=http://h:8000").registration.role is Role.BOTH


def test_a_worker_spec_states_hashes_as_a_registration_does() -> None:
    root = "0x" + "AB" * 16
    spec = f"w0=http://h:8000,hash_algo=xxhash,none_hash={root},hash_lookahead_tokens=0"
    stated = CatalogBody(hash_algo="xxhash", none_hash=root, hash_lookahead_tokens=0)
    expected = CatalogSpec(hash_algo="xxhash", none_hash="ab" * 16, hash_lookahead_tokens=0)
    assert listed_worker(spec).registration.catalog == catalog_of(stated) == expected
    [scheme] = VLLM.schemes(expected, None)
    assert scheme.none_hash == b"\xab" * 16


@pytest.mark.parametrize(
    ("spec", "worker_id", "url"),
    [
        ("w0=http://h:8000", "w0", "http://h:8000"),
        ("http://h:8000", "h:8000", "http://h:8000"),
        ("https://h/base/v1/", "h", "https://h/base"),
        ("HTTP://[::1]:8000/v1", "[::1]:8000", "HTTP://[::1]:8000"),
        ("http://h:8000/a=b", "h:8000", "http://h:8000/a=b"),
        ("w0=http://h:8000/v1", "w0", "http://h:8000"),
    ],
)
def test_the_shortest_worker_spec_is_an_address_whose_host_and_port_are_its_id(
    spec: str, worker_id: str, url: str
) -> None:
    expected = Registration(WorkerKey("", worker_id, 0), url=url)
    assert listed_worker(spec) == ListedWorker(expected, any_rank=True, had_base_path="/v1" in spec)


@pytest.mark.parametrize(
    "entries", [["http://h:1/a", "http://h:1/b"], ["http://h:1", {"worker_id": "h:1", "url": "http://h:2"}]]
)
def test_two_addresses_with_one_host_and_port_need_ids(entries: list[Any]) -> None:
    assert "name one worker; give each its own ID" in wrong(flags={"workers": entries})


@pytest.mark.parametrize("entry", ["http://u:hunter2@h:1", {"worker_id": "w", "url": "http://u:hunter2@h:1"}])
def test_a_password_in_a_workers_address_is_not_shown(entry: Any) -> None:
    message = wrong(flags={"workers": [entry]})
    assert "must be an HTTP address" in message and "hunter2" not in message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "workers:\n- {url: 'http://u:HUSH@h:1', none_hash_seed: HUSH}\n- 5\n",
            "entry 2 is neither text nor a mapping",
        ),
        ("workers:\n- {5: HUSH}\n", "entry 1 is neither"),
        ("workers: {url: 'http://u:HUSH@h:1', none_hash_seed: HUSH}\n", "is no list"),
        ("workers: a=http://h:1,none_hash_seed=HUSH\n", "is no list"),
        ("workers: ['a=http://h:1,none_hash_seed=HUSH,more=1']\n", "none_hash_seed=***,more=1"),
        ("redis: {url: 'redis://u:HUSH@h:1'}\n", "redis in f.yaml is {'url': 'redis://***@h:1'}"),
        ("queue_size: [{none_hash_seed: HUSH}]\n", "queue_size in f.yaml is"),
    ],
)
def test_a_wrong_setting_shows_neither_passwords_nor_seeds(text: str, place: str) -> None:
    file = Path("f.yaml")
    with pytest.raises(SettingError) as caught:
        load_config(file, {}, {}, listed_settings(file, text))
    assert place in caught.value.message and "HUSH" not in caught.value.message


@pytest.mark.parametrize(
    "field",
    [
        "none_hash_seed=HUSH",
        "'none_hash_seed': 'HUSH, HUSH'",
        "'none_hash_seed': \"HUSH it's HUSH\"",
        '"none_hash_seed":"HUSH \\" HUSH"',
        '"none_hash": "HUSH"',
        "'none_hash_seed': HUSH",
        '\\"none_hash_seed\\": \\"HUSH HUSH\\"',
    ],
)
def test_a_seed_in_a_text_is_hidden(field: str) -> None:
    for text in (field, f"workers is [{{'worker_id': 'a', {field}, 'url': 'http://h'}}]"):
        hidden = redacted_text(text)
        assert "HUSH" not in hidden and "***" in hidden
        assert ("'url': 'http://h'}]" in hidden) == ("url" in text), "the rest stays"
    assert redacted_text("none_hash_seed: write text") == "none_hash_seed: write text"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("", "ID=]HTTP_URL"),
        ("w0", "ID=]HTTP_URL"),
        ("w0=", "ID=]HTTP_URL"),
        ("=http://h:1", "ID "),
        ("w0=h:8000", "http://"),
        ("h:8000", "write [ID=]HTTP_URL"),
        ("http://", "HTTP_URL must be an HTTP address"),
        ("http://[::1", "HTTP_URL must be an HTTP address"),
        ("w0=http://h:1,replay=tcp://h:1", "replay needs events"),
        ("w0@12=http://h:1", "ID must not end in '@12', which stands for a rank: write dp_rank=12"),
        ("w0=http://h:1,events", "KEY=VALUE"),
        ("w0=http://h:1,event=tcp://h:1", "events"),
        ("w0=http://h:1,events=h:1", "tcp://"),
        ("w0=http://h:1,events=tcp://*:1", "binds"),
        ("w0=http://h:1,model=a,model=b", "twice"),
        ("w0=http://h:1,dp_rank=x", "dp_rank"),
        ("w0=http://h:1,dp_rank=-1", "dp_rank"),
        ("w0=http://h:1,block_size=0", "block_size"),
        ("w0=http://h:1,hash_algo=md5", "sha256"),
        ("w0=http://h:1,none_hash=zz", "none_hash"),
        ("w0=http://h:1,none_hash=0x" + "ab" * 16, "none_hash must be 64 hex digits, as hash_algo is sha256"),
        ("w0=http://h:1,hash_algo=xxhash,none_hash=" + "ab" * 32, "none_hash must be 32 hex digits"),
        ("w0=http://h:1,hash_lookahead_tokens=-1", "hash_lookahead_tokens must be a whole number, 0 to"),
        ("w0=http://h:1,hash_block_size=0", "hash_block_size must be a whole number, 1 to"),
        ("w0=http://h:1,lora_name=" + "l" * 513, "lora_name has a text of 513 characters; at most 512 are possible"),
        ("w0=http://h:1,none_hash_seed=" + "s" * 513, "none_hash_seed has a text of 513 characters"),
        ("w0=http://h:1,offload_connector=a b", "offload_connector must be the class name"),
        ("w0=http://h:1,role=prefiller", "role must be one of both, prefill, decode"),
        ("w0=http://h:1,handover=nixl", "handover must be one of kv_transfer_params, header"),
    ],
)
def test_a_wrong_worker_spec_says_what_to_write(spec: str, named: str) -> None:
    message = wrong(flags={"workers": [spec]})
    assert message.startswith(f"--worker {redacted_text(spec)!r}: ")
    assert named in message


def test_one_worker_twice_is_refused_but_its_ranks_are_not() -> None:
    assert "name one worker" in wrong(flags={"workers": ["a=http://h:1", "a=http://h:2"]})
    assert len(load_config(None, {}, {"workers": ["a=http://h:1", "a=http://h:1,dp_rank=1"]}).workers) == 2


def record(message: str, **fields: Any) -> logging.LogRecord:
    log_record = logging.LogRecord("kvrouter.x", logging.WARNING, "f", 1, message, None, None)
    log_record.__dict__.update(fields)
    return log_record


def test_logs_as_text_keep_to_one_line_whatever_the_names() -> None:
    line = Formatter(as_json=False).format(record("resync", worker=WorkerKey("m", "w\n0", 2), missed=3))
    assert line.endswith("WARNING resync worker='m/w\\n0@2' missed=3")
    assert "\n" not in line


def test_logs_as_json_are_one_object_a_line() -> None:
    line = Formatter(as_json=True).format(record("resync", worker=WorkerKey("m", "w0", 0), path=Path("/d")))
    assert "\n" not in line
    entry = msgspec.json.decode(line)
    assert (entry["level"], entry["message"], entry["worker"], entry["path"]) == ("warning", "resync", "m/w0", "/d")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tokenizers", ["folder"], "write MODEL=FOLDER"),
        ("tokenizers", ["m=a", "m=b"], "given twice"),
        ("renderers", ["http://h:1"], "write MODEL=URL"),
        ("renderers", ["m=h:1"], "must be an HTTP address"),
        ("renderers", ["m=http://user:pw@h:1"], "must be an HTTP address"),
        ("renderers", ["m=http://h:1,token=a"], "write MODEL=URL"),
        ("renderers", ["m=http://h:1,key=a b"], "must be the name of a key"),
        ("renderers", ["m=http://h:1", "m=http://h:1"], "given twice"),
        ("renderers", ["m=http://h:1", "n=http://h:1,key=a"], "two keys"),
        ("model_aliases", ["=m"], "write NAME=MODEL"),
        ("model_aliases", ["a=b", "b=m"], "name the model itself"),
    ],
)
def test_a_wrong_pair_says_what_is_wrong(name: str, value: list[str], said: str) -> None:
    assert said in wrong(flags={name: value})


def test_all_origins_without_a_key_are_a_caution() -> None:
    assert "any web page" in (open_to_pages(Config(cors_origins=("*",))) or "")
    for settings in ({"cors_origins": ("https://app.example",)}, {"cors_origins": ("*",), "api_key": "k"}, {}):
        assert open_to_pages(Config(**settings)) is None  # type: ignore[arg-type]
