# SPDX-License-Identifier: Apache-2.0
"""A client of the router's HTTP API for the command line: one blocking call, and errors as one line."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.config.loading import KUBERNETES_PORT

# Longer than any answer takes; shorter than a user's patience.
TIMEOUT_S = 30.0
# The timeout of a stream in which the router sends something every 15 s.
EVENTS_TIMEOUT_S = 60.0

# The errors of a connection that the other side ended without an answer.
ENDS = (ConnectionResetError, http.client.RemoteDisconnected, ssl.SSLEOFError)

DEFAULT_URL = "http://127.0.0.1:30000"
PORT_VARIABLE = "KVROUTER_PORT"
MAX_PORT = 65_535


def router_url(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the router's address. Raises SettingError if it is not valid.

    `given` may lack `http://`. Without it, the address is this machine at the port that `environ` gives `kvrouter
    serve`.
    """
    if given:
        return _checked(given if "://" in given else f"http://{given}", given)
    port = environ.get(PORT_VARIABLE, "")
    if not port or KUBERNETES_PORT.match(port):
        return DEFAULT_URL
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT):
        raise SettingError(f"{PORT_VARIABLE} is {port!r}: write the router's port, 1 to {MAX_PORT}, or pass --url")
    return f"http://127.0.0.1:{port}"


def _checked(url: str, given: str) -> str:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise SettingError(
            f"{given!r} is no address of a router: write --url (or KVROUTER_URL) like localhost:30000 or {DEFAULT_URL}"
        )
    return url.rstrip("/")


def client_context(ca_file: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Return the TLS settings for https. Raises SettingError.

    Without `ca_file`, the machine's own authorities are trusted.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"--ca-file {ca_file}: {error.strerror or error}; name a PEM file of certificates") from None
    if certificate:
        try:
            context.load_cert_chain(certificate, key or None)
        except (OSError, ssl.SSLError) as error:
            raise SettingError(
                f"--client-certificate {certificate}: {error.strerror or error}; name the PEM file of a certificate, and its "
                "key there or with --client-key"
            ) from None
    return context


class ClientError(Exception):
    """A router that cannot be reached, or refuses: one line with the cause and the fix.

    `status` is the HTTP status of the answer; None if there was none.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """A client of the router at `url`, as `router_url` returns it. `tls` is for https."""

    def __init__(self, url: str, api_key: str | None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self.api_key = api_key
        self.tls = tls
        # The Date header of the last answer.
        self.date: str | None = None
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make one call and return the decoded answer. Raises ClientError."""
        try:
            return msgspec.json.decode(self._answer(method, path, body))
        except msgspec.DecodeError:
            raise ClientError(f"the server at {self.url} is no router: its answer is not JSON; check --url") from None

    def text(self, path: str) -> str:
        """Return the text at a path. Raises ClientError."""
        return self._answer("GET", path).decode(errors="replace")

    def _answer(self, method: str, path: str, body: Any = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = urllib.request.Request(self.url + path, data, self._headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self.tls) as answer:
                self.date = answer.headers.get("date")
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise ClientError(_message_of(error), error.code) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClientError(self._unanswered(error)) from None

    def events(self, query: Sequence[tuple[str, str]], last_id: str) -> Iterator[tuple[str, str]]:
        """Yield id and data of each event after `last_id`, until the router ends the stream. Raises ClientError."""
        request = urllib.request.Request(f"{self.url}/events?{urlencode(query)}", headers=dict(self._headers))
        if last_id:
            request.add_header("last-event-id", last_id)
        try:
            with urllib.request.urlopen(request, timeout=EVENTS_TIMEOUT_S, context=self.tls) as answer:
                fields = {"id": last_id, "data": ""}
                for line in answer:
                    name, _, value = line.decode().rstrip("\n").partition(": ")
                    if name in fields:
                        fields[name] = value
                    elif not name and not value:
                        if fields["data"]:
                            yield fields["id"], fields["data"]
                        fields["data"] = ""
        except urllib.error.HTTPError as error:
            raise ClientError(_message_of(error), error.code) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClientError(self._unanswered(error, is_router=True)) from None

    def _unanswered(self, error: Exception, *, is_router: bool = False) -> str:
        """Return why no router answered, and the fix. `is_router` is True if the router had answered before."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.url} is not trusted here ({cause.verify_message}); pass --ca-file with its authority, "
                "and the host name that it is for"
            )
        if not is_router and isinstance(cause, ENDS):
            fix = "write https:// where the router has a certificate"
            if self.tls is not None:
                fix = "pass --client-certificate where the router wants one"
            return f"what listens on {self.url} ends the connection ({cause}); {fix}"
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ENDS):
            return (
                f"{self.url} does not take this client over TLS ({cause.reason or cause}); pass --client-certificate where the "
                "router wants one, or write http:// where it has none itself"
            )
        if is_router or isinstance(error, urllib.error.URLError):
            reason = getattr(cause, "strerror", None) or cause
            return f"no router answers on {self.url} ({reason}); start `kvrouter serve`, or pass --url"
        return f"what listens on {self.url} is no router ({error}); check --url"


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        body = msgspec.json.decode(error.read())
        message = str(body["error"]["message"])
        if body["error"]["code"] in ("invalid_api_key", "missing_scope"):
            message += " (pass --api-key, or set KVROUTER_API_KEY)"
        return message
    except (msgspec.DecodeError, KeyError, TypeError, OSError):
        return f"what listens there is no router: it answers {error.code}; check --url"
