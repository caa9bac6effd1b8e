# SPDX-License-Identifier: Apache-2.0
"""The features of the patch, one for each patched place in vLLM.

A feature is on until its place looks different or the patch's code fails there.

Invariant: the patch's code never raises into the engine. A feature that cannot work logs one warning and stays off.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

# Older versions turn the hybrid KV cache manager off whenever KV events are on (config/vllm.py), so they have no groups
# to report.
OLDEST_VERSION = (0, 20)
# The newest version whose source the patched places were compared with. Newer versions are tried, because every feature
# checks its own place.
NEWEST_KNOWN_VERSION = (0, 33)

ON = "on"
FAILED = "failed, see the engine's log"

# The effect of each feature's absence, by the feature's name, for the warning.
FEATURES = {
    "queue": "a full event queue blocks the engine, as without the patch",
    "reports": "nothing is published for routers beyond vLLM's own events",
    "catalog": "routers must learn the KV cache groups from events or from their registration",
    "lora": "LoRA paths are not declared, so prompts with an adapter cannot be matched",
    "positions": "reports of stored blocks do not say which positions they have",
    "reuse": "nothing at all is reported, as blocks announced again by kv_cache_report_mode=full would be counted twice",
    "resets": "a reset of the prefix cache is reported with the next engine step, and nothing of a host pool that it empties",
    "offload": "offloaded blocks are reported as in vLLM's own events, or no longer at all if it worked before",
    "offload_positions": "reports of offloaded blocks do not say which positions they have",
    "wake": "an idle engine announces chunks that another engine handed over only at its next step",
    "offload_resets": "nothing is reported of offloaded blocks, as a reset of their tier would not be",
}


class Feature:
    """One patched place, which is on until it is turned off for good."""

    def __init__(self, name: str, effect: str, log: logging.Logger) -> None:
        """Turn the feature on.

        Args:
            name: The name under which `Features` has it.
            effect: What is missing while the feature is off, for the warning.
            log: Receives the warning.
        """
        self.name = name
        self._effect = effect
        self.on = True
        self.state = ON
        self._has_failed = False
        # Callbacks for when the feature turns off, each with whether only a failure of the patch's code calls it.
        self._then: list[tuple[Callable[[str], None], bool]] = []
        self._log = log

    @property
    def problem(self) -> str:
        """Return why the feature is off, as it is shown to readers."""
        return f"{self.name}: {self.state}"

    def when_off(self, then: Callable[[str], None], *, if_failed: bool = False) -> None:
        """Call `then` with `problem` when the feature turns off, or now if it is off.

        Args:
            then: Receives the problem.
            if_failed: Whether to call it only if code of this patch failed.
        """
        if self.on:
            self._then.append((then, if_failed))
        elif self._has_failed or not if_failed:
            self._call(then)

    def off(self, reason: str) -> None:
        """Turn the feature off for good; only the first reason is logged and kept."""
        if self.on:
            self.on, self.state = False, reason
            self._log.warning("kvrouter: %s is off: %s. Effect: %s.", self.name, reason, self._effect)
            self._tell()

    def failed(self) -> None:
        """Turn the feature off because the patch's code failed at its place; call this in an `except` block."""
        if self.on:
            self.on, self.state = False, FAILED
            self._has_failed = True
            self._log.warning(
                "kvrouter: %s failed and is off from now on; the engine goes on. Effect: %s.",
                self.name,
                self._effect,
                exc_info=True,
            )
            self._tell()

    def _tell(self) -> None:
        for then, if_failed in self._then:
            if self._has_failed or not if_failed:
                self._call(then)

    def _call(self, then: Callable[[str], None]) -> None:
        try:
            then(self.problem)
        except Exception:
            self._log.warning("kvrouter: what follows from %s being off failed", self.name, exc_info=True)

    def install(self, check: Callable[[], str | None], apply: Callable[[], None]) -> None:
        """Patch the engine's code for this feature, or turn the feature off if that is not possible.

        Args:
            check: Returns how the engine's code differs from the known versions, or None if it does not.
            apply: Patches the engine's code.
        """
        if not self.on:
            return
        try:
            reason = check()
            if reason is None:
                apply()
            else:
                self.off(reason)
        except Exception:
            self.failed()


class Features:
    """All features of one engine core, by name."""

    def __init__(self, log: logging.Logger, effects: Mapping[str, str] = FEATURES) -> None:
        """Turn all features on.

        Args:
            log: Receives a warning for each feature that turns off.
            effects: What is missing while a feature is off, by the feature's name.
        """
        self.log = log
        self._features = {name: Feature(name, effect, log) for name, effect in effects.items()}

    def __getitem__(self, name: str) -> Feature:
        return self._features[name]

    def states(self) -> dict[str, str]:
        """Return "on", or why it is off, for each feature by its name."""
        return {name: feature.state for name, feature in self._features.items()}


def misfit(owner: Any, name: str, parameters: tuple[str, ...]) -> str | None:
    """Return how `owner.name` differs from what the patch expects, or None if it fits.

    It fits if it is a callable whose parameters begin with the names in `parameters`.
    """
    function = getattr(owner, name, None)
    where = f"{owner.__name__ if inspect.isclass(owner) else type(owner).__name__}.{name}"
    if not callable(function):
        return f"{where} is not there"
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"{where} has no readable signature"
    if names[: len(parameters)] != parameters:
        return f"{where}{names} has other parameters than {parameters}"
    return None


def parse_version(version: str) -> tuple[int, int] | None:
    """Return (major, minor), or None for a version without them, as in source builds without tags ("0.1.dev...")."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.1.dev"):
        return None
    return int(match[1]), int(match[2])


def admit(version: str, log: logging.Logger) -> bool:
    """Return whether to patch this version of vLLM at all, and log why not, or what is uncertain."""
    parsed = parse_version(version)
    if parsed is None:
        log.warning(
            "kvrouter: vLLM version %r cannot be compared; patching the places that match known versions", version
        )
    elif parsed < OLDEST_VERSION:
        log.error(
            "kvrouter: vLLM %s is too old for the engine patch (0.20 is the oldest): it turns the hybrid KV cache manager off "
            "whenever KV events are on, so there are no KV cache groups to report. The engine runs unpatched; update vLLM, "
            "or set KVROUTER_PATCH=0 to silence this.",
            version,
        )
        return False
    elif parsed > NEWEST_KNOWN_VERSION:
        log.warning(
            "kvrouter: vLLM %s is newer than %d.%d, which this patch knows; features whose place changed turn themselves off",
            version,
            *NEWEST_KNOWN_VERSION,
        )
    return True
