# SPDX-License-Identifier: Apache-2.0
"""Loading of the settings from a file, the environment and flags, of which a later source overrides an earlier one.

An error names the wrong value and its fix in one line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.host_list import allowed_hosts
from kvrouter.router.base.common.redaction import HIDDEN, redacted, redacted_text
from kvrouter.router.base.common.yaml_text import read_yaml
from kvrouter.router.model.config.settings import (
    ENV_PREFIX,
    FIELDS,
    LISTS,
    SECRETS,
    Config,
    describe,
    flag_of,
    variable_of,
    without_password,
)
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.model_names import parse_aliases, parse_tokenizers
from kvrouter.router.model.workers.renderer_spec import parse_renderers

# Variables that the client commands and `serve` itself read, which are not settings.
CLIENT_VARIABLES = frozenset(
    {
        "KVROUTER_URL",
        "KVROUTER_CONFIG",
        "KVROUTER_CA_FILE",
        "KVROUTER_CLIENT_CERTIFICATE",
        "KVROUTER_CLIENT_KEY",
    }
)

# Prefixes of the variables of this project's other parts, which may run in the same environment.
FOREIGN_PREFIXES = ("KVROUTER_ENGINE_", "KVROUTER_PATCH", "KVROUTER_TEST_", "KVROUTER_SIM_")

# Kubernetes sets these variables for every Service of the namespace. For a Service named `kvrouter`, it sets
# KVROUTER_PORT to `tcp://10.0.0.7:30000`.
KUBERNETES_NAME = re.compile(r"KVROUTER_(.*_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")

KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")

FORM = "write lines like `port: 30000`"

REDIS_URL = re.compile(r"unix://.|(rediss?|valkeys?)(\+(cluster|sentinel))?://.")

# Settings that are text even if they look like numbers: YAML reads `none_hash_seed: 0` as a number.
TEXT_SETTINGS = ("host", "redis", "data_dir", "api_key", "worker_api_key", "none_hash_seed")

# The settings that are lists of pairs or of hosts, and the function that reads each.
LIST_READERS: dict[str, Callable[[tuple[str, ...]], object]] = {
    "tokenizers": parse_tokenizers,
    "renderers": parse_renderers,
    "model_aliases": parse_aliases,
    "allow_hosts": AllowList,
    "allowed_hosts": allowed_hosts,
}


class Origin(msgspec.Struct, frozen=True):
    """The sources of a router's settings besides the environment, kept to read the settings again."""

    # The path of the settings file, or None without one.
    file: str | None = None
    # The values of the given flags, by setting.
    flags: dict[str, str | list[str]] = {}
    # The settings as `load_config` read them at the start of the router.
    loaded: Config = Config()


def given_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were given; a value of None or an empty list means that a flag was not given."""
    return {name: value for name, value in flags.items() if value is not None and value != []}


def load_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any], listed: Mapping[str, Any] | None = None
) -> Config:
    """Load the settings from their three sources. Raises SettingError.

    Args:
        file: The settings file, or None without one.
        environ: The environment variables.
        flags: The values of all flags, by setting, see `given_flags`.
        listed: The result of `listed_settings` for the file, or None to read it.
    """
    flag_values = given_flags(flags)
    if "redis" in flag_values and "data_dir" in flag_values:
        raise SettingError("--redis and --data-dir contradict each other: the data is either there or here; give one")
    values: dict[str, Any] = {}
    if listed is None:
        listed = {} if file is None else listed_settings(file)
    for name, value in listed.items():
        if value is not None:
            values[name] = _converted(name, value, f"{name} in {file}")
    for name, value in _from_environ(environ).items():
        values[name] = _converted(name, value, variable_of(name))
    for name, value in flag_values.items():
        values[name] = _converted(name, value, flag_of(name))
    if "data_dir" in flag_values:
        # The flag --data-dir overrides a Redis that the file or the environment names.
        values["redis"] = None
    config = Config(**values)
    _check_allowed(config)
    return config


def listed_settings(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return the settings that a file lists, as they are written there. Raises SettingError.

    Args:
        file: The settings file.
        text: Its text if it was read already, otherwise None.
    """
    try:
        text = file.read_text(encoding="utf-8") if text is None else text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"cannot read the settings file {file}: {reason}; name a readable YAML file") from None
    content: Any = read_yaml(text, str(file), FORM)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError(f"{file} is not a list of settings: {FORM}")
    for name in content:
        if name not in FIELDS:
            raise SettingError(f"{file}: there is no setting {name!r}; {_nearest(str(name), str)}")
    return content


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in CLIENT_VARIABLES or variable.startswith(FOREIGN_PREFIXES):
            continue
        if KUBERNETES_NAME.match(variable) or (variable == "KVROUTER_PORT" and KUBERNETES_PORT.match(text)):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in FIELDS:
            raise SettingError(f"the environment variable {variable} is no setting; {_nearest(name, variable_of)}")
        if text:
            values[name] = text.split() if name in LISTS else text
    return values


def _nearest(name: str, form: Callable[[str], str]) -> str:
    matches = difflib.get_close_matches(name.replace("-", "_"), FIELDS, n=1)
    if matches:
        return f"did you mean {form(matches[0])}?"
    return "there are " + ", ".join(form(setting) for setting in FIELDS)


def _converted(name: str, value: Any, where: str) -> Any:
    if name == "workers":
        _check_entries(value, where)
    field = FIELDS[name]
    if name in TEXT_SETTINGS and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    shown = HIDDEN if name in SECRETS else repr(without_password(value) if isinstance(value, str) else redacted(value))
    try:
        converted = msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError:
        raise SettingError(f"{where} is {shown}: write {describe(name)}") from None
    if name == "redis" and not REDIS_URL.match(converted):
        raise SettingError(f"{where} is {shown}: write {describe(name)}")
    if name == "workers":
        _check_workers(converted, where)
    if name in LIST_READERS:
        try:
            LIST_READERS[name](converted)
        except SettingError as error:
            raise SettingError(f"{where}: {error.message}") from None
    return converted


def _check_allowed(config: Config) -> None:
    allowed = AllowList(config.allow_hosts)
    for entry in config.workers:
        registration = listed_worker(entry).registration
        if problem := allowed.registration_problem(registration):
            raise SettingError(f"--worker {registration.worker.worker_id!r}: {problem}")
    for renderer in parse_renderers(config.renderers):
        if problem := allowed.problem(renderer.url):
            raise SettingError(f"--renderer {renderer.model}: {problem}")


def _check_entries(value: Any, where: str) -> None:
    """Check that the value is a list of texts and mappings. Raises SettingError, which shows no value: it may have keys."""
    if not isinstance(value, list | tuple):
        raise SettingError(f"{where} is no list: write {describe('workers')}")
    for number, entry in enumerate(value, 1):
        try:
            msgspec.convert(entry, str | dict[str, Any])
        except msgspec.ValidationError:
            raise SettingError(
                f"{where}: entry {number} is neither text nor a mapping: write {describe('workers')}"
            ) from None


def _check_workers(entries: tuple[str | dict[str, Any], ...], where: str) -> None:
    shown_by_worker: dict[tuple[str, int], str] = {}
    for number, entry in enumerate(entries, 1):
        shown = repr(redacted_text(without_password(entry))) if isinstance(entry, str) else f"entry {number}"
        try:
            worker = listed_worker(entry).registration.worker
        except SettingError as error:
            raise SettingError(f"{where} {shown}: {error.message}") from None
        name = worker.worker_id, worker.dp_rank
        if name in shown_by_worker:
            raise SettingError(
                f"{where}: {shown} and {shown_by_worker[name]} name one worker; give each its own ID or dp_rank"
            )
        shown_by_worker[name] = shown
