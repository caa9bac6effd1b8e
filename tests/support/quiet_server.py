# SPDX-License-Identifier: Apache-2.0
"""A thread per connection, for clients that may go away at any time."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """A server that says nothing about connections that their clients cut.

    The standard library's writes their tracebacks to `sys.stderr`. A thread that outlives its test may find that closed by
    pytest, and then ends with an exception, which pytest reports for the test that happens to run.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
