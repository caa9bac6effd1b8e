# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes.

It replaces two constructors, and each scheduler then connects itself. Only a scheduler with an enabled ZMQ publisher
starts a reporter. KVROUTER_PATCH=0 leaves vLLM untouched.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvrouter.engine_patch.hooks.event_tap import EventTap
from kvrouter.engine_patch.hooks.publisher import ATTRIBUTE, ORIGINAL, constructor, watch
from kvrouter.engine_patch.reporter.reporter_start import Reports, start_reporter
from kvrouter.engine_patch.setup.features import Features, admit, misfit
from kvrouter.engine_patch.setup.settings import from_environment

# A child of vLLM's own logger, so that messages get vLLM's handler and format.
LOGGER = "vllm.kvrouter"
KV_EVENTS = "vllm.distributed.kv_events"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ENGINE_CORE = "vllm.v1.engine.core"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"

# (publisher, features, configured endpoint) -> the reporter, or None if there is no address to listen on.
StartReporter = Callable[[Any, Features, str], Reports | None]


def register() -> None:
    """Apply the patch as vLLM's `vllm.general_plugins` entry point.

    It never raises, and may be called again.
    """
    log = logging.getLogger(LOGGER)
    try:
        patch(os.environ, log)
    except Exception:
        log.warning("kvrouter: the engine patch could not be applied; the engine runs without it", exc_info=True)


def patch(environment: Mapping[str, str], log: logging.Logger, start: StartReporter | None = None) -> bool:
    """Replace the constructors of publisher and scheduler.

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
    version = vllm_version()
    factory = importlib.import_module(KV_EVENTS).EventPublisherFactory
    if hasattr(factory._registry["zmq"], ORIGINAL):
        return True
    if not admit(version, log):
        return False
    scheduler_class = importlib.import_module(SCHEDULER).Scheduler
    start = start or functools.partial(start_reporter, settings)

    def tap(publisher: Any, features: Features, configured: str) -> EventTap | None:
        # Logged here and not in `patch`, because `patch` runs in every process of vLLM.
        for problem in problems:
            log.warning("kvrouter: %s", problem)
        reporter = start(publisher, features, configured)
        if reporter is None:
            return None
        try:
            event_tap = EventTap(reporter, features, version, publisher._dp_rank)
        except BaseException:
            # An open reporter would show routers a cache that stays empty.
            reporter.close()
            raise
        watch(publisher, event_tap.published, event_tap.close, features["reports"])
        if not features["reports"].on:
            reporter.close()
            return None
        return event_tap

    factory._registry["zmq"] = constructor(factory._registry["zmq"], lambda: Features(log), tap)
    scheduler_class.__init__ = attaching(scheduler_class.__init__, log)
    return True


def vllm_version() -> str:
    """Return the version of the installed vLLM, or "unknown" if vLLM does not give one."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def attaching(original: Callable[..., None], log: logging.Logger) -> Callable[..., None]:
    """Return a `Scheduler.__init__` that runs `original` and then connects the publisher's tap to the scheduler."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tap = None
        try:
            tap = getattr(getattr(self, "kv_event_publisher", None), ATTRIBUTE, None)
            if tap is not None and not hasattr(self, ATTRIBUTE):
                setattr(self, ATTRIBUTE, tap)
                tap.attach(self)
                watch_engine_core(tap)
        except Exception as error:
            if tap is None:
                log.warning("kvrouter: this scheduler is not known, so nothing is reported about it", exc_info=True)
            else:
                # The failure leaves unknown which places of this scheduler are watched, so nothing may be reported.
                tap.features["reports"].off(f"unknown scheduler layout: {error!r}")

    setattr(__init__, ORIGINAL, original)
    return __init__


def watch_engine_core(tap: EventTap) -> None:
    """Watch the engine core for adapters that are loaded before a request uses them, and for the draw of NONE_HASH."""
    core = sys.modules.get(ENGINE_CORE)
    if core is None:
        return  # This scheduler runs without an engine.
    tap.features["wake"].install(
        lambda: misfit(core.EngineCoreProc, "_process_input_queue", ("self",)),
        lambda: watch_input_queue(core.EngineCoreProc, core.EngineCoreRequestType.WAKEUP),
    )
    feature = tap.features["lora"]
    feature.install(
        lambda: misfit(core.EngineCore, "add_lora", ("self", "lora_request")), lambda: watch_add_lora(core.EngineCore)
    )
    if not hasattr(importlib.import_module(KV_CACHE_UTILS), "NONE_HASH"):
        tap.features["catalog"].install(lambda: misfit(core, "init_none_hash", ()), lambda: watch_none_hash(core, tap))


def watch_input_queue(engine_core: Any, wakeup: Any) -> None:
    """Wrap `EngineCoreProc._process_input_queue`, where an idle engine waits, so that its scheduler's tap can wake it."""
    original = engine_core._process_input_queue
    if hasattr(original, ORIGINAL):
        return

    @functools.wraps(original)
    def _process_input_queue(self: Any, *args: Any, **kwargs: Any) -> Any:
        tap = getattr(self.scheduler, ATTRIBUTE, None)
        if tap is not None and not tap.wakes:
            try:
                tap.wake_with(functools.partial(self.input_queue.put_nowait, (wakeup, None)))
            except Exception:
                tap.features["wake"].failed()
        return original(self, *args, **kwargs)

    setattr(_process_input_queue, ORIGINAL, original)
    engine_core._process_input_queue = _process_input_queue


def watch_add_lora(engine_core: Any) -> None:
    """Wrap `EngineCore.add_lora`, so that its scheduler's tap learns each adapter when it is loaded."""
    original = engine_core.add_lora
    if hasattr(original, ORIGINAL):
        return

    @functools.wraps(original)
    def add_lora(self: Any, lora_request: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(self, lora_request, *rest, **kwargs)
        tap = getattr(getattr(self, "scheduler", None), ATTRIBUTE, None)
        if tap is not None and tap.features["lora"].on:
            try:
                tap.learn_lora(lora_request)
            except Exception:
                tap.features["lora"].failed()
        return result

    setattr(add_lora, ORIGINAL, original)
    engine_core.add_lora = add_lora


def watch_none_hash(core: Any, tap: EventTap) -> None:
    """Declare the catalog once more when the engine core under construction draws its NONE_HASH."""
    original = core.init_none_hash

    def init_none_hash(*args: Any, **kwargs: Any) -> Any:
        core.init_none_hash = original
        result = original(*args, **kwargs)
        tap.declare()
        return result

    core.init_none_hash = init_none_hash
