# SPDX-License-Identifier: Apache-2.0
"""SGLang's servers forked from a process that has imported SGLang.

By its command, each server imports SGLang three times: in the server, its scheduler and its detokenizer.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engine.engine_forks import Forked, serve

SGLANG = "tests.sglang.sglang_forks"


class ForkedSglang(Forked):
    """A forked process that runs SGLang's HTTP server with these arguments, in a session of its own."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
            request = {"arguments": arguments, "folder": str(folder)}
            super().__init__(request, environment, [nothing.fileno(), output.fileno(), output.fileno()], SGLANG)


def _serve_http(request: dict[str, Any]) -> None:
    """Run `sglang.launch_server`, which forks its scheduler and its detokenizer where it would start new processes."""
    from sglang.launch_server import kill_process_tree, load_plugins, prepare_server_args, run_server

    os.setsid()
    sys.argv = ["sglang", *request["arguments"]]
    multiprocessing.set_start_method("fork", force=True)
    # SGLang sets the method to `spawn` during its start.
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _import_sglang() -> None:
    # SGLang warns of parts that are missing without a GPU, and of parts that its dependencies deprecate.
    warnings.simplefilter("ignore")
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    # Imported before SGLang has named the folder of its metrics, it would keep the metrics of each process apart.
    assert "prometheus_client" not in sys.modules


if __name__ == "__main__":
    _import_sglang()
    serve(socket.socket(fileno=int(sys.argv[1])), _serve_http)
