# SPDX-License-Identifier: Apache-2.0
"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`), before its scheduler is made.

It adds a reporter to the scheduler's publisher of KV events. KVROUTER_PATCH=0 leaves SGLang untouched. Only a scheduler
that publishes KV events over ZMQ starts a reporter.
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

# A child of SGLang's own logger, so that messages get SGLang's handler and format.
LOGGER = "sglang.kvrouter"
PUBLISHER = "sglang.srt.managers.scheduler_components.kv_events_publisher"
EVENTS = "sglang.srt.disaggregation.kv_events"
# The attribute of SGLang's ZmqEventPublisher that holds its `TreeTap`.
TAP = "_kvrouter_tap"
# The attribute of a replacement that holds the method of SGLang that it replaces.
ORIGINAL = "_kvrouter_original"

# (publisher, features, configured endpoint) -> the reporter, or None if there is no address to listen on.
StartReporter = Callable[[Any, Features, str], Reports | None]


def register() -> None:
    """Apply the patch as SGLang's entry point. It never raises, and may be called again."""
    log = logging.getLogger(LOGGER)
    try:
        patch(os.environ, log)
    except Exception:
        log.warning("kvrouter: the engine patch could not be applied; the engine runs without it", exc_info=True)


def patch(environment: Mapping[str, str], log: logging.Logger, start: StartReporter | None = None) -> bool:
    """Replace two methods of the scheduler's publisher.

    Args:
        environment: The engine's environment variables.
        log: Receives the warnings.
        start: Starts a publisher's reporter. None: `start_reporter` does, with the settings of the environment.

    Returns:
        Whether the patch is in place.
    """
    settings, problems = from_environment(environment)
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
        for problem in problems:
            log.warning("kvrouter: %s", problem)
        attach(publisher, Features(log, FEATURES), start)

    owner.init_kv_events = after(owner.init_kv_events, begin, log)
    owner.publish_kv_events = after(owner.publish_kv_events, step, log)
    return True


def after(original: Callable[..., Any], then: Callable[[Any], None], log: logging.Logger) -> Callable[..., Any]:
    """Return a method that runs `original` and then `then`, whose errors are logged and not raised."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            then(self)
        except Exception:
            log.warning("kvrouter: reports could not be started; the engine goes on", exc_info=True)
        return result

    setattr(method, ORIGINAL, original)
    return method


def attach(publisher: Any, features: Features, start: StartReporter) -> None:
    """Start the reporter of one scheduler, if that scheduler publishes KV events itself."""
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

        def end(*args: Any, **kwargs: Any) -> Any:
            try:
                return shutdown(*args, **kwargs)
            finally:
                tap.close()

        stock.shutdown = end


def step(publisher: Any) -> None:
    """Report the changes of a step after SGLang published its own events."""
    tap = getattr(publisher.kv_event_publisher, TAP, None)
    if tap is not None:
        tap.step()


def served_model() -> str | None:
    """Return the name that requests use, or None if SGLang does not give one."""
    try:
        arguments = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except Exception:
        return None
    name = getattr(arguments, "served_model_name", None) or getattr(arguments, "model_path", None)
    return None if name is None else str(name)
