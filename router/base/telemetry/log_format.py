# SPDX-License-Identifier: Apache-2.0
"""Logs as text or JSON lines on stderr: state changes, never secrets; single requests only if the access log is on.

Fields are passed as `extra={...}`. They follow the message as `key=value`, or become JSON fields beside it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from kvrouter.router.base.common.escaping import printable, printable_json
from kvrouter.router.base.common.ids import WorkerKey

# The attributes of every log record; all others are our fields.
STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class Formatter(logging.Formatter):
    """A formatter that writes one line for each record; as text, the traceback of a bug follows in indented lines."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON line or as text."""
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
        # Indented, so that an exception's text cannot pass for a line of the log.
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
    """Send the logs of `kvrouter`, of uvicorn and of asyncio to `stream`, replacing their previous handlers."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(as_json=form == "json"))
    for name in ("kvrouter", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
    # OpenTelemetry repeats its error while a collector is unreachable; router/observe/quality/tracing.py logs it once.
    logging.getLogger("opentelemetry").setLevel("CRITICAL")
    # uvicorn's start and stop lines repeat ours, and its warnings are about requests that are not HTTP, which are
    # counted.
    logging.getLogger("uvicorn").setLevel("ERROR")
