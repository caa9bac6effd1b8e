# SPDX-License-Identifier: Apache-2.0
"""Logs as text or JSON lines on stderr: state changes, never secrets, and single requests only where the access log is
on.

Fields are given as `extra={...}`; they follow the message as `key=value`, or stand beside it in JSON.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from kvrouter.router.base.common.escaping import printable, printable_json
from kvrouter.router.base.common.ids import WorkerKey

# What a record has without our fields.
STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class Formatter(logging.Formatter):
    """One line a record in JSON; in text too, but for the traceback of a bug, whose lines are indented."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: _shown(value) for key, value in record.__dict__.items() if key not in STANDARD}
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {
                "time": time,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": message,
                **fields,
            }
            if trace:
                line["traceback"] = trace
            return printable_json(msgspec.json.encode(line, enc_hook=str).decode())
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        text = f"{time} {record.levelname:<7} {printable(message)}{pairs}"
        # Indented, so that no text of an exception passes for a line of the log.
        return "\n    ".join([text, *trace.splitlines()]) if trace else text


def _shown(value: Any) -> Any:
    if isinstance(value, WorkerKey):
        rank = f"@{value.dp_rank}" if value.dp_rank else ""
        return f"{value.model}/{value.worker_id}{rank}"
    return value


def _quoted(value: Any) -> str:
    text = str(value)
    # repr also keeps a line break in a name from forging a line.
    return repr(text) if not text or any(c.isspace() or not c.isprintable() for c in text) else text


def set_up_logs(level: str, form: str, stream: TextIO) -> None:
    """Sends the logs of `kvrouter`, of uvicorn and of asyncio to `stream`, replacing what was set up before."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(as_json=form == "json"))
    for name in ("kvrouter", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
    # It repeats itself while a collector is away, which router/observe/quality/tracing.py says once.
    logging.getLogger("opentelemetry").setLevel("CRITICAL")
    # Its start and stop lines repeat ours, and its warnings are single requests that are no HTTP: those are counted.
    logging.getLogger("uvicorn").setLevel("ERROR")
