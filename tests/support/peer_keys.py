# SPDX-License-Identifier: Apache-2.0
"""CURVE keys of engines that exchange chunks."""

from __future__ import annotations

from pathlib import Path

import zmq


class PeerKeys:
    """The key files of some engines, and the list of those that they admit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.list_file = folder / "peers"
        self.list_file.touch()

    def make(self, name: str) -> tuple[str, str]:
        """Return the file of a new secret key, and its public key."""
        public, secret = zmq.curve_keypair()
        file = self._folder / name
        file.write_bytes(secret)
        return str(file), public.decode()

    def admit(self, public: str, address: object) -> None:
        """Add a public key, with the address at which its engine lends, to the list."""
        with self.list_file.open("a") as lines:
            lines.write(f"{public} {address}\n")
