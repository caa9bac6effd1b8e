# SPDX-License-Identifier: Apache-2.0
"""The engines that may exchange chunks, and the encryption of their control sockets.

With CURVE, a file lists the public keys of all engines, each with its address: only listed engines may read from this
engine, and it reads only from listed addresses. Without CURVE, engines exchange chunks only within one machine.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path

import zmq

from kvrouter.engine_patch.offload.peer.peer_source import PeerSource
from kvrouter.engine_patch.setup.client_gate import ClientList
from kvrouter.events.transport.curve import KEY, CurveClient, public_key, read_secret

LOCAL_NAMES = frozenset({"localhost"})
# Linux: the first is another one after each start of a machine, and the containers of a machine share it; the second is
# the network, which has a loopback interface of its own.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
# Hex digits that name a machine, 128 bits: no two machines share them.
MACHINE_CHARS = 32


class PeerAccess:
    """The keys of this engine and those of its peers."""

    def __init__(self, host: str, key_file: str | None, list_file: str | None) -> None:
        """Read the files.

        Args:
            host: The address at which this engine lends.
            key_file: The file with this engine's secret key; None: no encryption.
            list_file: The file that lists the public keys and addresses of the engines.

        Raises:
            ValueError: A file cannot be used, one of the two is missing, or `host` is not on this machine and there are
                no keys.
        """
        if (key_file is None) is not (list_file is None):
            raise ValueError("peer_key_file and peer_list_file belong together: set both, or neither")
        if key_file is None and not is_local(host):
            raise ValueError(
                f"peer_host is {host}, which other machines can reach: set peer_key_file and peer_list_file, or use "
                "127.0.0.1"
            )
        self.secret = None if key_file is None else read_secret(key_file)
        self.clients = None if list_file is None else ClientList(list_file)
        self._list_file = None if list_file is None else Path(list_file)

    @property
    def public_key(self) -> str:
        """This engine's public key, empty without keys."""
        return "" if self.secret is None else public_key(self.secret)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys on the socket that lends, before it binds."""
        if self.secret is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def protect_client(self, socket: zmq.Socket[bytes], source: PeerSource) -> bool:
        """Set the keys on a socket that reads, and return whether it may connect to that address."""
        if self._list_file is None:
            return is_local(source.host)
        listed_key = _public_key(self._list_file, source)
        if listed_key is None:
            return False
        CurveClient(listed_key, self.secret).apply(socket)
        return True


def _public_key(list_file: Path, source: PeerSource) -> str | None:
    """Return the public key that the list has for an address, or None; the file may have changed since it was read."""
    try:
        lines = list_file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[1] == str(source) and KEY.fullmatch(words[0].encode()):
            return words[0]
    return None


def is_local(host: str) -> bool:
    """Return whether an address or a name surely belongs to this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL_NAMES


def machine() -> str:
    """Return a name of the network whose loopback addresses this process uses, or "" where the system has none."""
    try:
        name = f"{BOOT_ID.read_text(encoding='ascii').strip()} {NETWORK.stat().st_ino}"
    except (OSError, UnicodeDecodeError):
        return ""
    return hashlib.sha256(name.encode()).hexdigest()[:MACHINE_CHARS]
