# SPDX-License-Identifier: Apache-2.0
"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`), before its scheduler is made: the
scheduler's publisher of KV events gets a reporter beside it.

KVROUTER_PATCH=0 leaves SGLang untouched. Only a scheduler that publishes KV events over ZMQ starts a reporter.
Source: SGLang 0.5.23 srt/plugins/__init__.py, srt/managers/scheduler_components/kv_events_publisher.py.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvrouter.engine_patch.reporter.reporter_start import Reports, start_reporter
from kvrouter.engine_patch.setup.features import Features, misfit
from kvrouter.engine_patch.setup.settings import from_environment
from kvrouter.engine_patch.sglang.tree_tap import FEATURES, TreeTap

# Below SGLang's own logger, which has its handler and its format.
LOGGER = "sglang.kvrouter"
PUBLISHER = "sglang.srt.managers.scheduler_components.kv_events_publisher"
EVENTS = "sglang.srt.disaggregation.kv_events"
# On SGLang's ZmqEventPublisher.
TAP = "_kvrouter_tap"
# On what replaces a method of SGLang: what it stands for.
ORIGINAL = "_kvrouter_original"

# (publisher, features, configured endpoint) -> the reporter, None where there is no place to listen.
StartReporter = Callable[[Any, Features, str], Reports | None]


def register() -> None:
    """Never raises, and may be called again."""
    log = logging.getLogger(LOGGER)
    try:
        patch(os.environ, log)
    except Exception:
        log.warning("kvrouter: the engine patch could not be applied; the engine runs without it", exc_info=True)


def patch(environment: Mapping[str, str], log: logging.Logger, start: StartReporter | None = None) -> bool:
    """Replaces two methods of the scheduler's publisher. Returns whether the patch is in place."""
    settings, wrong = from_environment(environment)
    if not settings.enabled:
        return False
    owner = importlib.import_module(PUBLISHER).SchedulerKvEventsPublisher
    if hasattr(owner.init_kv_events, ORIGINAL):
        return True
    why = misfit(owner, "init_kv_events", ("self", "kv_events_config")) or misfit(owner, "publish_kv_events", ("self",))
    if why is not None:
        log.warning("kvrouter: this SGLang is not known (%s); the engine runs without the patch", why)
        return False
    start = start or functools.partial(start_reporter, settings)

    def begin(publisher: Any) -> None:
        for text in wrong:
            log.warning("kvrouter: %s", text)
        attach(publisher, Features(log, FEATURES), start)

    owner.init_kv_events = after(owner.init_kv_events, begin, log)
    owner.publish_kv_events = after(owner.publish_kv_events, step, log)
    return True


def after(original: Callable[..., Any], then: Callable[[Any], None], log: logging.Logger) -> Callable[..., Any]:
    """The method, and then ours, which costs the engine nothing where it fails."""

    @functools.wraps(original)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        result = original(self, *given, **named)
        try:
            then(self)
        except Exception:
            log.warning("kvrouter: reports could not be started; the engine goes on", exc_info=True)
        return result

    setattr(method, ORIGINAL, original)
    return method


def attach(publisher: Any, features: Features, start: StartReporter) -> None:
    """Starts the reporter of one scheduler, where that publishes KV events itself."""
    stock = publisher.kv_event_publisher
    if not isinstance(stock, importlib.import_module(EVENTS).ZmqEventPublisher):
        return
    reporter = start(stock, features, str(stock._endpoint))
    if reporter is None:
        return
    tap = TreeTap(publisher.tree_cache, reporter, features)
    version = str(getattr(importlib.import_module("sglang"), "__version__", "unknown"))
    if tap.attach(int(stock._dp_rank), version, served_model()):
        setattr(stock, TAP, tap)
        shutdown = stock.shutdown

        def end(*given: Any, **named: Any) -> Any:
            try:
                return shutdown(*given, **named)
            finally:
                tap.close()

        stock.shutdown = end


def step(publisher: Any) -> None:
    tap = getattr(publisher.kv_event_publisher, TAP, None)
    if tap is not None:
        tap.step()


def served_model() -> str | None:
    """The name that requests use."""
    try:
        arguments = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except Exception:
        return None
    name = getattr(arguments, "served_model_name", None) or getattr(arguments, "model_path", None)
    return None if name is None else str(name)
