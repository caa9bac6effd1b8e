# SPDX-License-Identifier: Apache-2.0
"""A client of Kubernetes' API that lists and watches pods (ADR 18).

It needs two GETs, which every API server since 1.16 has.

Source: Kubernetes documentation, API concepts: resource versions, watches, bookmarks, "410 Gone".
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
import msgspec

from kvrouter.router.base.common.bounded_read import read_whole
from kvrouter.router.base.common.hanging_call import HANG_S, CallHangs, HangingCall
from kvrouter.router.base.common.regular_file import read_regular
from kvrouter.router.follow.discovery.kubernetes.access import Access
from kvrouter.router.follow.discovery.kubernetes.pods import Pod, PodMetadata

# The pods on one page of a list; each has some ten kB.
PAGE_PODS = 250
LIST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
# The server ends a watch after a random time in this range, and the next watch continues from there. A connection that
# died unseen is noticed by then.
WATCH_S = (60, 90)
WATCH_GRACE_S = 15.0
# Ample, as etcd holds objects up to 1.5 MB.
MAX_EVENT_BYTES = 8 * 1024**2
MAX_PAGE_BYTES = 256 * 1024**2
MAX_PAGES = 400
MAX_REASON_CHARS = 300
# The bound on one file: a token has some kB, a bundle of all public authorities 0.2 MB.
MAX_CREDENTIAL_BYTES = 4 * 1024**2


class WatchExpired(Exception):
    """The refusal of a resource version that is too old to continue from: all pods must be listed again."""


class ClusterError(Exception):
    """The failure of a request to the API. The message names the reason and the remedy."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _PodList(msgspec.Struct):
    metadata: _ListMeta
    items: list[Pod]


class _Status(msgspec.Struct):
    message: str = ""
    code: int = 0


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class PodEvent(msgspec.Struct, frozen=True):
    """A change of one pod."""

    # ADDED, MODIFIED, DELETED, or BOOKMARK, whose pod has nothing but a resource version.
    type: str
    pod: Pod


_lists = msgspec.json.Decoder(_PodList)
_events = msgspec.json.Decoder(_Event)
_pods = msgspec.json.Decoder(Pod)
_statuses = msgspec.json.Decoder(_Status)


class Credentials(NamedTuple):
    """The contents of the files of an `Access`."""

    # As aiohttp takes it: True verifies by the system's authorities.
    tls: ssl.SSLContext | bool = True
    token: str | None = None


class ClusterApi:
    """The pods of one namespace that a label selector selects."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        access: Access,
        selector: str,
        *,
        rng: random.Random,
        hang_s: float = HANG_S,
    ) -> None:
        """Begin without a request.

        Args:
            session: Sends the requests.
            access: The address of the API and the files with the credentials.
            selector: The label selector.
            rng: Varies the duration of watches.
            hang_s: How many seconds reading the files of `access` may take.
        """
        self._hang_s = hang_s
        self._session = session
        self._access = access
        self._selector = selector
        self._rng = rng
        self._path = f"{access.url}/api/v1/namespaces/{access.namespace}/pods"
        self._credentials = Credentials()
        self._read = HangingCall("read kubernetes credentials", self._read_files)

    async def pods(self) -> tuple[list[Pod], str]:
        """Return all pods, and the resource version of the list. Raises WatchExpired and ClusterError."""
        # A new certificate of the cluster's authority takes effect with the next list.
        await self._read_credentials()
        pods: list[Pod] = []
        continue_token = ""
        for _ in range(MAX_PAGES):
            params = {"labelSelector": self._selector, "limit": str(PAGE_PODS)}
            if continue_token:
                params["continue"] = continue_token
            try:
                async with asyncio.timeout(LIST_TIMEOUT_S), self._get(params, LIST_TIMEOUT_S) as answer:
                    await self._check(answer, "list")
                    page = _lists.decode(await read_whole(answer, MAX_PAGE_BYTES))
            except TimeoutError:
                raise ClusterError(f"{self._access.url} did not answer in {LIST_TIMEOUT_S:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise ClusterError(_unreached(self._access.url, error)) from None
            except (msgspec.MsgspecError, ValueError) as error:
                raise ClusterError(f"{self._access.url} answers no list of pods: {error}") from None
            pods += page.items
            continue_token = page.metadata.continue_
            if not continue_token:
                return pods, page.metadata.resource_version
        raise ClusterError(
            f"{self._access.url} lists more than {MAX_PAGES * PAGE_PODS} pods: narrow kubernetes_selector"
        )

    async def watch(self, version: str) -> AsyncIterator[PodEvent]:
        """Yield the changes after `version` until the server ends the watch. Raises WatchExpired and ClusterError.

        The first event is an empty BOOKMARK, as soon as the server accepts the watch.
        """
        await self._read_credentials()
        watch_s = self._rng.randint(*WATCH_S)
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(watch_s),
        }
        try:
            async with self._get(params, watch_s + WATCH_GRACE_S) as answer:
                await self._check(answer, "watch")
                yield PodEvent("BOOKMARK", Pod(PodMetadata()))
                async for line in _lines(answer):
                    yield _event_of(line)
        except TimeoutError:
            # The connection was dead, or the server does not keep to the time. The next watch misses nothing.
            return
        except (aiohttp.ClientError, OSError) as error:
            raise ClusterError(_unreached(self._access.url, error)) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ClusterError(f"{self._access.url} sends no events of pods: {error}") from None

    async def _read_credentials(self) -> None:
        """Read the files again, as tokens expire and certificates are replaced. Raises ClusterError."""
        try:
            self._credentials = await self._read.result(self._hang_s)
        except CallHangs:
            raise ClusterError(
                f"cannot read {self._access.token_file} (kubernetes_token_file) or {self._access.ca_file} "
                f"(kubernetes_ca_file): no answer in {self._hang_s:g} s; restore their mount"
            ) from None

    def _read_files(self) -> Credentials:
        tls: ssl.SSLContext | bool = True
        token = None
        if (file := self._access.ca_file) is not None:
            try:
                tls = ssl.create_default_context(cadata=read_regular(file, MAX_CREDENTIAL_BYTES).decode("ascii"))
            except (OSError, ValueError) as error:
                raise ClusterError(f"cannot read {file} (kubernetes_ca_file): {error}") from None
        if (file := self._access.token_file) is not None:
            try:
                token = read_regular(file, MAX_CREDENTIAL_BYTES).decode("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ClusterError(f"cannot read {file} (kubernetes_token_file): {error}") from None
        return Credentials(tls, token)

    def _get(self, params: Mapping[str, str], total_s: float) -> aiohttp.client._RequestContextManager:
        headers = {"accept": "application/json"}
        if self._credentials.token is not None:
            headers["authorization"] = f"Bearer {self._credentials.token}"
        timeout = aiohttp.ClientTimeout(total=total_s, connect=CONNECT_TIMEOUT_S)
        return self._session.get(
            self._path,
            params=params,
            headers=headers,
            timeout=timeout,
            ssl=self._credentials.tls,
            allow_redirects=False,
        )

    async def _check(self, answer: aiohttp.ClientResponse, verb: str) -> None:
        """Raise WatchExpired or ClusterError unless the status is 200."""
        if answer.status == HTTPStatus.OK:
            return
        if answer.status == HTTPStatus.GONE:
            raise WatchExpired
        where = f"pods in namespace {self._access.namespace!r}"
        if answer.status == HTTPStatus.UNAUTHORIZED:
            file = self._access.token_file or "no token at all (set kubernetes_token_file)"
            raise ClusterError(f"the API server rejects the credentials (401): it got {file}; give it a valid token")
        if answer.status == HTTPStatus.FORBIDDEN:
            raise ClusterError(
                f"the service account may not {verb} {where} (403): give it a Role with get, list and watch of pods"
            )
        raise ClusterError(f"the API server answers {answer.status} to {verb} {where}: {await _reason(answer)}")


def _event_of(line: bytes) -> PodEvent:
    event = _events.decode(line)
    if event.type == "ERROR":
        status = _statuses.decode(event.object)
        if status.code == HTTPStatus.GONE:
            raise WatchExpired
        raise ClusterError(f"the watch ended with {status.code}: {status.message[:MAX_REASON_CHARS]}")
    return PodEvent(event.type, _pods.decode(event.object))


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of the answer. Raises ValueError for a line of more than MAX_EVENT_BYTES."""
    # Not aiohttp's readline, which has a limit of its own.
    pieces: list[bytes] = []
    size_bytes = 0
    async for part in answer.content.iter_any():
        *ended, rest = part.split(b"\n")
        for line in ended:
            whole = b"".join((*pieces, line))
            pieces, size_bytes = [], 0
            if whole.strip():
                yield whole
        pieces.append(rest)
        size_bytes += len(rest)
        if size_bytes > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")


async def _reason(answer: aiohttp.ClientResponse) -> str:
    try:
        return _statuses.decode(await read_whole(answer, MAX_EVENT_BYTES)).message[:MAX_REASON_CHARS]
    except (msgspec.MsgspecError, ValueError):
        return answer.reason or "it does not say why"


def _unreached(url: str, error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return f"{url} is not trusted ({error}): set kubernetes_ca_file"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{url} cannot be reached: {error.os_error.strerror or error.os_error}"
    return f"{url} did not answer: {str(error) or type(error).__name__}"
