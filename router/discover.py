# SPDX-License-Identifier: Apache-2.0
"""The model of a worker that was given without one: its engine is asked. For `--worker ID=URL` without `model=`."""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import msgspec

from kvrouter.router.registration import Registration
from kvrouter.router.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

# An engine takes minutes to load its weights; a shorter interval would only fill its log.
RETRY_S = 2.0
# A list of models is answered at once; the process cannot end before the thread that waits for it.
TIMEOUT_S = 2.0
# Some tens of LoRA adapters and their paths; an answer beyond this is no engine's.
MAX_ANSWER_BYTES = 1024**2


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An engine's list of models is where it is; a redirect would take us to hosts that nobody registered."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


class _Model(msgspec.Struct):
    id: str
    # vLLM names the base model as the parent of a LoRA adapter.
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def ask_engine(url: str, *, key: str | None = None) -> str:
    """The base model that the engine at `url` serves; blocks. key: its own. Raises OSError or ValueError with what is wrong."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)
    with _opener.open(asked, timeout=TIMEOUT_S) as answer:
        raw = answer.read(MAX_ANSWER_BYTES)
    try:
        models = msgspec.json.decode(raw, type=_Models).data
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"its /v1/models is no list of models: {error}") from None
    for model in models:
        if model.parent is None:
            return model.id
    raise ValueError("its /v1/models names no model")


async def register_when_known(
    spec: WorkerSpec,
    register: Callable[[Registration], Awaitable[None]],
    ask: Callable[[str], str] = ask_engine,
    retry_s: float = RETRY_S,
) -> None:
    """Asks until the engine answers, then registers. Each new problem is logged once."""
    told = ""
    while True:
        try:
            model = await asyncio.to_thread(ask, spec.url)
            await register(spec.registration(model))
        except Exception as error:
            problem = str(error)
            if problem != told:
                told = problem
                log.warning(
                    "worker waits: its model is unknown; start the engine, or add model=NAME",
                    extra={"worker": spec.worker_id, "url": spec.url, "error": problem},
                )
            await asyncio.sleep(retry_s)
        else:
            return
