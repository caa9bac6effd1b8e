# SPDX-License-Identifier: Apache-2.0
"""NIXL, the library that copies chunks from the memory of one engine to that of another.

The reader copies: it reads the source's memory into its own slots, and nobody ever writes into another engine's memory.
Source: nixl-cu12 1.5.1, module `nixl_cu12._api`. Its functions for serialized descriptors use pickle, so addresses are exchanged as
numbers.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# The packages in which NIXL comes, by CUDA version; both work without CUDA.
PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
BACKEND = "UCX"
HOST_MEMORY = "DRAM"
# NIXL's own thread looks for work after this time even if no event of the network wakes it.
PROGRESS_WAIT_US = 10_000
# The only error after which NIXL surely writes nothing more.
DISCONNECTED = "REMOTE_DISCONNECT"


class Copy(NamedTuple):
    """One copy of `size_bytes` bytes from an address of the source to an address of this engine."""

    source_address: int
    address: int
    size_bytes: int


class PlaneError(Exception):
    """NIXL could not begin or finish a transfer, which writes nothing from here on."""


class DataPlane(Protocol):
    """The part of NIXL that the peer tier uses."""

    @property
    def metadata(self) -> bytes:
        """The data that another engine needs to reach this engine's memory."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Return the name of the engine with this metadata. Raise PlaneError."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget an engine; never raise."""
        ...

    def read(self, name: str, copies: Sequence[Copy]) -> Any:
        """Begin to copy from an engine, and return the transfer. Raise PlaneError."""
        ...

    def is_done(self, transfer: Any) -> bool:
        """Return whether the transfer has ended well. Raise PlaneError if it ended otherwise."""
        ...

    def release(self, transfer: Any) -> None:
        """Forget a transfer that has ended; never raise."""
        ...

    def close(self) -> None:
        """Release everything; never raise."""
        ...


class NixlPlane:
    """An agent of NIXL for one region of host memory."""

    def __init__(self, name: str, address: int, size_bytes: int) -> None:
        """Register the memory.

        Raises:
            ValueError: NIXL is not installed, or refuses; the text names the fix.
        """
        api = _api()
        try:
            self._agent = _agent(api, name)
            self._registered = self._agent.register_memory([(address, size_bytes, 0, "")], HOST_MEMORY)
            self._metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise ValueError(
                f"NIXL cannot serve the peer tier ({error}): see UCX_TLS, or leave peer_port out"
            ) from error

    @property
    def metadata(self) -> bytes:
        """The data that another engine needs to reach this engine's memory."""
        return self._metadata

    def add_peer(self, metadata: bytes) -> str:
        """Return the name of the engine with this metadata. Raise PlaneError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PlaneError(str(error)) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget an engine; never raise."""
        _quietly(self._agent.remove_remote_agent, name)

    def read(self, name: str, copies: Sequence[Copy]) -> Any:
        """Begin to copy from an engine, and return the transfer. Raise PlaneError."""
        transfer = None
        try:
            here = self._agent.get_xfer_descs([(copy.address, copy.size_bytes, 0) for copy in copies], HOST_MEMORY)
            there = self._agent.get_xfer_descs(
                [(copy.source_address, copy.size_bytes, 0) for copy in copies], HOST_MEMORY
            )
            transfer = self._agent.initialize_xfer("READ", here, there, name)
            state = self._agent.transfer(transfer)
        except Exception as error:
            if transfer is not None and not self._is_cancelled(transfer):
                return transfer
            raise PlaneError(str(error)) from error
        if state == "ERR" and self._is_cancelled(transfer):
            raise PlaneError("NIXL refused the transfer")
        return transfer

    def _is_cancelled(self, transfer: Any) -> bool:
        """Forget a transfer that failed, and return True; False if NIXL cannot cancel it, so that it may still write."""
        try:
            self._agent.release_xfer_handle(transfer)
        except Exception:
            return False
        return True

    def is_done(self, transfer: Any) -> bool:
        """Return whether the transfer has ended well. Raise PlaneError if it ended otherwise."""
        try:
            state = self._agent.check_xfer_state(transfer)
        except Exception as error:
            if DISCONNECTED in f"{type(error).__name__} {error}":
                raise PlaneError(str(error)) from error
            # After any other error the bytes may still arrive, so the transfer counts as under way.
            return False
        if state == "ERR":
            raise PlaneError("NIXL reported an error")
        return bool(state == "DONE")

    def release(self, transfer: Any) -> None:
        """Forget a transfer that has ended; never raise."""
        _quietly(self._agent.release_xfer_handle, transfer)

    def close(self) -> None:
        """Release the registered memory; never raise."""
        _quietly(self._agent.deregister_memory, self._registered)


def _api() -> Any:
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ValueError(
        "peer_port is set, and NIXL is not installed: pip install --no-deps nixl-cu12, or leave peer_port out"
    )


def _agent(api: Any, name: str) -> Any:
    """Return an agent whose own thread sleeps until an event of the network.

    NIXL's Python class lets that thread wait for 0 µs (1.5.1): it keeps a core busy even while nothing is fetched, and competes
    with the thread that copies. The class has no argument for this, so its inner agent is replaced, which has no backend
    and no thread yet.
    """
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    # A version of NIXL that differs here keeps its own agent, which works, too.
    with contextlib.suppress(AttributeError, TypeError):
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_WAIT_US
        config.syncMode = api.nixlBind.NIXL_THREAD_SYNC_NONE
        agent.agent = api.nixlBind.nixlAgent(name, config)
    agent.create_backend(BACKEND, {})
    return agent


def _quietly(function: Any, argument: Any) -> None:
    """Call a function whose errors have no consequence, because what it releases is not used again."""
    with contextlib.suppress(Exception):
        function(argument)
