# SPDX-License-Identifier: Apache-2.0
"""The threads of the peer tier over real sockets: chunks arrive, keys decide who reads, and everything ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.engine_patch.offload.peer import peer_client
from kvrouter.engine_patch.offload.peer.lender import Lender
from kvrouter.engine_patch.offload.peer.peer_access import PeerAccess
from kvrouter.engine_patch.offload.peer.peer_client import PeerClient
from kvrouter.engine_patch.offload.peer.peer_link import Outcome, Probed, ProbeJob, Pulled, PullJob, Question
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_server import PeerServer
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource
from kvrouter.engine_patch.offload.peer.peer_wire import VERSION, Hello, Welcome, encode, read_by_reader
from kvrouter.engine_patch.offload.peer.warmer import Warmer
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.peer.hand_over import Refused, Warm, Warmed, WarmEnd, WarmQuery, WarmStop, read_reply
from tests.support.peer_keys import PeerKeys
from tests.support.peer_world import CHUNK_BYTES, IDENTITY, Engine, World, content, key
from tests.support.ports import free_port
from tests.support.receiving_engine import ReceivingEngine

HOST = "127.0.0.1"
WAIT_S = 30.0
LOG = ThrottledLog(logging.getLogger("test"), time.monotonic)


class Pair:
    """An engine that lends and one that reads, with the real threads and sockets of both."""

    def __init__(self, stack: ExitStack, lending: PeerAccess, reading: PeerAccess, lends_disk: bool = False) -> None:
        world = World()
        self.lender = Engine(world, "lender", 8, has_disk=lends_disk, lends_disk=lends_disk)
        self.reader = Engine(world, "reader", 8)
        self.lender.store(key(1), key(2))
        self.source = PeerSource(HOST, free_port())
        welcome = Welcome(b"lender", self.lender.slots.base, CHUNK_BYTES)
        books = Lender(self.lender.tiers, lambda: self.lender.facts, welcome, self.lender.slots.checksum, 4)
        self.books = books
        warmer = Warmer(self.lender.tiers, CHUNK_BYTES, 8, time.monotonic, LOG)
        server = PeerServer(HOST, self.source.port, lending, books, warmer, time.monotonic, LOG)
        stack.callback(server.close)
        self.client = PeerClient(
            self.reader.plane, self.reader.slots, lambda: self.reader.facts, reading, time.monotonic, LOG
        )
        stack.callback(self.client.close)

    def do(self, work: Question | PullJob, count: int = 1, source: PeerSource | None = None) -> list[Outcome]:
        """Hand over a job, and return its outcomes."""
        self.client.submit(source or self.source, work)
        outcomes: list[Outcome] = []
        end_s = time.monotonic() + WAIT_S
        while len(outcomes) < count:
            assert time.monotonic() < end_s, "a job has no outcome"
            outcomes += self.client.poll()
            time.sleep(0.001)
        return outcomes

    def forgive(self) -> None:
        """Let the source be tried again at once."""
        for opened in self.client._links.values():
            opened.link._failure = None


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def wait_until(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_pair(stack: ExitStack) -> Pair:
    return Pair(stack, PeerAccess(HOST, None, None), PeerAccess(HOST, None, None))


def test_chunks_arrive_and_their_loan_ends(open_pair: Pair) -> None:
    pair = open_pair
    assert pair.do(ProbeJob(1, [key(1), key(9)], 0, in_s(WAIT_S))) == [Probed(1, [True, False], None)]
    outcomes = pair.do(PullJob(2, [key(1), key(9)], [3, 4], 0, in_s(WAIT_S)), 2)
    assert sorted(outcomes) == sorted([Pulled(key(9), 4, PeerMiss.EVICTED), Pulled(key(1), 3, None)])  # type: ignore[type-var]
    assert bytes(pair.reader.slot(3)) == content(key(1), 0)
    wait_until(lambda: not pair.books.lent_chunks)


@pytest.fixture
def disk_pair(stack: ExitStack) -> Pair:
    """Return a pair whose source has chunks 1 and 2 on disk alone."""
    pair = Pair(stack, PeerAccess(HOST, None, None), PeerAccess(HOST, None, None), lends_disk=True)
    for number in range(10, 18):
        pair.lender.store(key(number))
    return pair


def test_chunks_on_the_disk_of_an_idle_source_arrive_and_others_are_served_meanwhile(disk_pair: Pair) -> None:
    disk_pair.lender.disk.hangs = True
    disk_pair.client.submit(disk_pair.source, PullJob(1, [key(1), key(2)], [3, 4], 0, in_s(WAIT_S)))
    wait_until(lambda: disk_pair.books.is_waiting)
    assert disk_pair.do(ProbeJob(2, [key(1), key(9)], 0, in_s(WAIT_S))) == [Probed(2, [True, False], None)]
    assert disk_pair.do(PullJob(3, [key(17)], [5], 0, in_s(WAIT_S))) == [Pulled(key(17), 5, None)]
    disk_pair.lender.disk.hangs = False
    outcomes: list[Outcome] = []

    def have_come() -> bool:
        outcomes.extend(disk_pair.client.poll())
        return len(outcomes) == 2

    wait_until(have_come)
    assert sorted(outcomes) == [Pulled(key(1), 3, None), Pulled(key(2), 4, None)]  # type: ignore[type-var]
    assert bytes(disk_pair.reader.slot(3)) == content(key(1), 0)
    wait_until(lambda: not disk_pair.books.lent_chunks)


def test_a_source_whose_disk_hangs_frees_all_slots_after_the_deadline(disk_pair: Pair) -> None:
    disk_pair.lender.disk.hangs = True
    assert disk_pair.do(PullJob(1, [key(1), key(17)], [3, 4], 0, in_s(0.2)), 2) == [
        Pulled(key(1), 3, PeerMiss.DEADLINE),
        Pulled(key(17), 4, PeerMiss.DEADLINE),
    ]
    wait_until(lambda: not disk_pair.books.is_waiting)
    assert disk_pair.books.counts.disk_late == 1 and disk_pair.lender.cpu.usage.pinned == 0
    # The source is not given up for it.
    assert disk_pair.do(ProbeJob(2, [key(17)], 0, in_s(WAIT_S))) == [Probed(2, [True], None)]


def test_an_address_where_no_engine_listens_costs_the_deadline(open_pair: Pair) -> None:
    nobody = PeerSource(HOST, free_port())
    assert open_pair.do(ProbeJob(1, [key(1)], 0, in_s(0.05)), source=nobody) == [Probed(1, [False], PeerMiss.DEADLINE)]


def test_an_address_on_another_machine_needs_keys(open_pair: Pair) -> None:
    elsewhere = PeerSource("192.0.2.1", 5710)
    assert open_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S)), source=elsewhere) == [
        Probed(1, [False], PeerMiss.FORBIDDEN)
    ]
    assert open_pair.do(PullJob(2, [key(1)], [0], 0, in_s(WAIT_S)), source=elsewhere) == [
        Pulled(key(1), 0, PeerMiss.FORBIDDEN)
    ]


def test_noise_at_the_lending_socket_is_refused_and_counted(open_pair: Pair) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{HOST}:{open_pair.source.port}")
        for frames in ([b"noise"], [b"a", b"b"], [b""]):
            stranger.send_multipart(frames)
            assert stranger.poll(int(WAIT_S * 1000))
            assert isinstance(read_by_reader(stranger.recv()), Refused)
    assert open_pair.books.counts.bad_messages == 3
    assert open_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S))) == [Probed(1, [True], None)]


class Fault:
    """A function that raises at its first calls, and then does what it replaces."""

    def __init__(self, function: Callable[..., Any], calls: int = 1) -> None:
        self._function, self.left = function, calls

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("a fault for a test")
        return self._function(*arguments, **options)


# Functions of the fetching thread that raise: the object, found from the pair, and the function's name.
FAULTS_OF_A_PROBE: list[tuple[Callable[[Pair], Any], str]] = [
    (lambda pair: peer_client, "encode"),
    (lambda pair: peer_client, "read_by_reader"),
    (lambda pair: pair.client, "_connect"),
    (lambda pair: pair.client, "_facts"),
    (lambda pair: pair.client._access, "protect_client"),
    (lambda pair: pair.reader.plane, "add_peer"),
    (lambda pair: zmq.Poller, "poll"),
    (lambda pair: zmq.Socket, "connect"),
]


@pytest.mark.parametrize("place", range(len(FAULTS_OF_A_PROBE)))
def test_a_probe_has_an_outcome_whatever_is_raised(
    open_pair: Pair, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    find, name = FAULTS_OF_A_PROBE[place]
    owner = find(open_pair)
    function = getattr(owner, name)
    fault = Fault(function)
    if isinstance(owner, type):

        def method(*arguments: Any) -> Any:
            # The lending thread calls the methods of zmq's classes too.
            is_fetching = threading.current_thread() is open_pair.client._thread
            return (fault if is_fetching else function)(*arguments)

        # A function, not a callable object, becomes a method.
        monkeypatch.setattr(owner, name, method)
    else:
        monkeypatch.setattr(owner, name, fault)
    assert open_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S))) == [Probed(1, [False], PeerMiss.FAULT)]
    assert fault.left == 0
    # The thread goes on, and so does the source after a pause.
    open_pair.forgive()
    assert open_pair.do(ProbeJob(2, [key(1)], 0, in_s(WAIT_S))) == [Probed(2, [True], None)]


@pytest.mark.parametrize("name", ["read", "release", "remove_peer", "checksum", "submit"])
def test_each_chunk_has_one_outcome_whatever_is_raised(
    open_pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert open_pair.do(ProbeJob(1, [key(1), key(2)], 0, in_s(WAIT_S))) == [Probed(1, [True, True], None)]
    link = open_pair.client._links[open_pair.source].link
    if name == "checksum":
        fault = Fault(link._memory.checksum)
        link._memory = link._memory._replace(checksum=fault)
    elif name == "submit":
        fault = Fault(open_pair.client._checks.submit)
        monkeypatch.setattr(open_pair.client._checks, "submit", fault)
    else:
        fault = Fault(getattr(open_pair.reader.plane, name))
        monkeypatch.setattr(open_pair.reader.plane, name, fault)
    if name == "remove_peer":
        # The source is left because of another failure.
        monkeypatch.setattr(open_pair.reader.plane, "fails", True)
    outcomes = open_pair.do(PullJob(2, [key(1), key(2)], [3, 4], 0, in_s(WAIT_S)), 2)
    assert {(o.key, o.slot) for o in outcomes if isinstance(o, Pulled)} == {(key(1), 3), (key(2), 4)}
    misses = {o.miss for o in outcomes}
    assert misses == {"release": {None}, "remove_peer": {PeerMiss.GONE}}.get(name, {PeerMiss.FAULT})
    wait_until(lambda: fault.left == 0)
    monkeypatch.setattr(open_pair.reader.plane, "fails", False)
    open_pair.forgive()
    open_pair.do(PullJob(3, [key(1)], [3], 0, in_s(WAIT_S)))
    assert not open_pair.client.poll(), "a chunk has two outcomes"


def test_a_chunk_whose_transfer_cannot_be_polled_has_its_outcome_after_the_transfer(
    open_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(open_pair.reader.plane.is_done, 5)
    monkeypatch.setattr(open_pair.reader.plane, "is_done", fault)
    outcomes = open_pair.do(PullJob(2, [key(1), key(9)], [3, 4], 0, in_s(WAIT_S)), 2)
    assert sorted(outcomes) == sorted([Pulled(key(9), 4, PeerMiss.EVICTED), Pulled(key(1), 3, None)])  # type: ignore[type-var]
    assert fault.left == 0


@pytest.mark.parametrize("owner", ["tiers", "checksum", "books"])
def test_a_fault_at_the_source_is_an_answer_and_ends_the_loan(
    open_pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    assert open_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S))) == [Probed(1, [True], None)]
    books = open_pair.books
    if owner == "tiers":
        monkeypatch.setattr(books._tiers, "lend", Fault(books._tiers.lend))
    elif owner == "checksum":
        monkeypatch.setattr(books, "_checksum", Fault(books._checksum))
    else:
        monkeypatch.setattr(books, "_lend", Fault(books._lend))
    assert open_pair.do(PullJob(2, [key(1)], [3], 0, in_s(WAIT_S))) == [Pulled(key(1), 3, PeerMiss.FAULT)]
    assert books.lent_chunks == 0 and open_pair.lender.cpu.usage.pinned == 0
    open_pair.forgive()
    assert open_pair.do(PullJob(3, [key(1)], [3], 0, in_s(WAIT_S))) == [Pulled(key(1), 3, None)]


def test_the_lending_thread_goes_on_after_a_fault(open_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(open_pair.books.expire, 2)
    monkeypatch.setattr(open_pair.books, "expire", fault)
    wait_until(lambda: fault.left == 0)
    assert open_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S))) == [Probed(1, [True], None)]


@pytest.fixture
def keys(tmp_path: Path) -> PeerKeys:
    return PeerKeys(tmp_path)


@pytest.fixture
def closed_pair(stack: ExitStack, keys: PeerKeys, monkeypatch: pytest.MonkeyPatch) -> Pair:
    port = free_port()
    monkeypatch.setattr("tests.unit.test_peer_threads.free_port", lambda: port)
    (lender_file, lender_key), (reader_file, reader_key) = keys.make("lender"), keys.make("reader")
    keys.admit(lender_key, f"{HOST}:{port}")
    keys.admit(reader_key, f"{HOST}:1")
    lending, reading = (PeerAccess(HOST, file, str(keys.list_file)) for file in (lender_file, reader_file))
    return Pair(stack, lending, reading)


def test_listed_engines_read_with_their_keys(closed_pair: Pair) -> None:
    assert closed_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S))) == [Probed(1, [True], None)]
    assert closed_pair.do(PullJob(2, [key(1)], [3], 0, in_s(WAIT_S))) == [Pulled(key(1), 3, None)]


def test_a_listed_engine_reads_no_address_that_is_not_listed(closed_pair: Pair) -> None:
    assert closed_pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S)), source=PeerSource(HOST, 7)) == [
        Probed(1, [False], PeerMiss.FORBIDDEN)
    ]


@pytest.mark.parametrize("has_key", [False, True])
def test_a_stranger_gets_no_welcome(closed_pair: Pair, has_key: bool) -> None:
    """The metadata without which NIXL cannot read are in the welcome alone."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        if has_key:
            lines = Path(closed_pair.client._access._list_file or "").read_text().splitlines()
            public, secret = zmq.curve_keypair()
            stranger.curve_publickey, stranger.curve_secretkey = public, secret
            stranger.curve_serverkey = lines[0].split()[0].encode()
        stranger.linger = 0
        stranger.connect(f"tcp://{HOST}:{closed_pair.source.port}")
        stranger.send(encode(Hello(VERSION, IDENTITY, b"0")))
        # An engine that is listed is served meanwhile, so the stranger had the time to be.
        for number in range(5):
            assert closed_pair.do(ProbeJob(number, [key(1)], 0, in_s(WAIT_S))) == [Probed(number, [True], None)]
        assert not stranger.poll(300)


@pytest.mark.parametrize(
    ("host", "files", "words"),
    [
        ("0.0.0.0", (None, None), "peer_key_file"),
        ("10.0.0.1", (None, None), "peer_key_file"),
        (HOST, ("a", None), "belong together"),
        (HOST, (None, "b"), "belong together"),
        (HOST, ("missing", "missing"), "missing"),
    ],
)
def test_settings_that_would_open_the_cache_are_refused(
    host: str, files: tuple[str | None, str | None], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PeerAccess(host, *files)


class Receiver(ReceivingEngine):
    """An engine that receives a hand-over, and the connection that sends it the messages."""

    def __init__(self, stack: ExitStack, access: PeerAccess) -> None:
        super().__init__(stack, access)
        self.context = stack.enter_context(zmq.Context())

    def ask(self, message: Warm | WarmQuery | WarmStop) -> Warmed | Refused:
        with self.context.socket(zmq.DEALER) as sender:
            sender.connect(f"tcp://{HOST}:{self.port}")
            sender.send(encode(message))
            assert sender.poll(int(WAIT_S * 1000)), "no answer"
            reply = read_reply(sender.recv())
        assert reply is not None
        return reply

    def until_over(self, number: int) -> Warmed:
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            warmed = self.ask(WarmQuery(number))
            assert isinstance(warmed, Warmed)
            if warmed.end:
                return warmed
            time.sleep(0.001)
        raise AssertionError("a hand-over does not end")


def warm(number: int, port: int, within_s: float = WAIT_S) -> Warm:
    return Warm(number, HOST, port, 0, 1, 1 << 20, within_s)


def test_an_idle_engine_receives_a_hand_over_and_is_woken_to_announce_it(stack: ExitStack, open_pair: Pair) -> None:
    receiver = Receiver(stack, PeerAccess(HOST, None, None))
    assert isinstance(receiver.ask(warm(7, open_pair.source.port)), Warmed)
    assert receiver.until_over(7) == Warmed(7, WarmEnd.COMPLETE, 2, 2, 2 * CHUNK_BYTES, 0, 0, 0)
    assert receiver.woken.is_set()
    assert receiver.held() == {key(1), key(2)}


def test_a_second_hand_over_is_refused_while_one_goes_on_and_a_repeated_message_changes_nothing(
    stack: ExitStack,
) -> None:
    receiver = Receiver(stack, PeerAccess(HOST, None, None))
    nobody = free_port()
    first = receiver.ask(warm(1, nobody))
    assert receiver.ask(warm(1, nobody)) == first
    assert receiver.ask(warm(2, nobody)) == Refused(
        "busy", "another hand-over to this engine is under way: wait until it has ended"
    )
    stopped = receiver.ask(WarmStop(1))
    assert isinstance(stopped, Warmed) and stopped.end == WarmEnd.STOPPED


@pytest.mark.parametrize(
    "message",
    [
        Warm(1, HOST, 1, 1, 1, 1, 1.0),
        Warm(1, HOST, 1, -1, 1, 1, 1.0),
        Warm(1, HOST, 1, 0, 1_000, 1, 1.0),
        Warm(1, HOST, 0, 0, 1, 1, 1.0),
        Warm(1, "", 1, 0, 1, 1, 1.0),
        Warm(1, HOST, 1, 0, 1, 0, 1.0),
        Warm(1, HOST, 1, 0, 1, 1, float("nan")),
        Warm(1, HOST, 1, 0, 1, 1, 1e9),
        WarmQuery(5),
        WarmStop(5),
    ],
)
def test_a_hand_over_that_makes_no_sense_is_refused(stack: ExitStack, message: Warm | WarmQuery | WarmStop) -> None:
    assert isinstance(Receiver(stack, PeerAccess(HOST, None, None)).ask(message), Refused)


def test_an_address_on_another_machine_hands_nothing_over_without_keys(stack: ExitStack) -> None:
    receiver = Receiver(stack, PeerAccess(HOST, None, None))
    receiver.ask(Warm(1, "192.0.2.1", 5710, 0, 1, 1 << 20, WAIT_S))
    assert receiver.until_over(1).end == PeerMiss.FORBIDDEN.value


def test_threads_end_with_their_engine(stack: ExitStack) -> None:
    def names() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("kvrouter-")]

    pair = Pair(stack, PeerAccess(HOST, None, None), PeerAccess(HOST, None, None))
    pair.do(ProbeJob(1, [key(1)], 0, in_s(WAIT_S)))
    assert names()
    stack.close()
    assert not names()


def test_a_hand_over_whose_thread_cannot_start_is_unknown_and_ends_nothing_else(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmer = Warmer(Engine(World(), "reader", 8).tiers, CHUNK_BYTES, 8, time.monotonic, LOG)
    stack.callback(warmer.close)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            warmer.answer(warm(1, 1))
    assert isinstance(warmer.answer(WarmQuery(1)), Refused)
