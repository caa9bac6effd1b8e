# SPDX-License-Identifier: Apache-2.0
"""Faults that are put into the product on purpose, to see whether the simulation finds them.

A fault is an edit of a source file, made while Python imports it, so nothing on the disk changes. `put_in` must be called
before the first import of the product, because modules that are imported already stay as they are. No fault is in a
compiled module, whose place Python source cannot take.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvrouter"


class Edit(NamedTuple):
    """A text of a source file, and the text that takes its place."""

    # The file, relative to the root of the repository.
    path: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """The name of the module of the file."""
        return ".".join((PACKAGE, *Path(self.path).with_suffix("").parts))

    def source(self) -> str:
        """Return the edited source. Raises ValueError unless the text occurs once."""
        text = (ROOT / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"the text {self.old!r} occurs {text.count(self.old)} times in {self.path}, expected once")
        return text.replace(self.old, self.new)


class Mutation(NamedTuple):
    """One fault: an edit, or two where one check of the product does the work of another."""

    name: str
    path: str
    old: str
    new: str
    # The damage, in a sentence.
    fault: str
    also: Edit | None = None

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits, each of another file."""
        first = Edit(self.path, self.old, self.new)
        return (first,) if self.also is None else (first, self.also)


class _Loader(importlib.abc.InspectLoader):
    """Loads one module from its edited source."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def get_source(self, fullname: str) -> str:
        return self._edit.source()

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.get_source(fullname), str(ROOT / self._edit.path), "exec")
        return code

    def is_package(self, fullname: str) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of one fault before all other finders."""

    def __init__(self, mutation: Mutation) -> None:
        self._edits = {edit.module: edit for edit in mutation.edits}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        edit = self._edits.get(fullname)
        return None if edit is None else importlib.util.spec_from_loader(fullname, _Loader(edit))


def put_in(name: str) -> Mutation:
    """Put the fault of this name into the product. Raises ValueError if there is none, or if it came too late."""
    mutation = next((mutation for mutation in MUTATIONS if mutation.name == name), None)
    if mutation is None:
        raise ValueError(f"there is no fault {name!r}; there are: {', '.join(fault.name for fault in MUTATIONS)}")
    for edit in mutation.edits:
        edit.source()
        if edit.module in sys.modules:
            raise ValueError(f"{edit.module} is imported already, so its fault would change nothing")
    sys.meta_path.insert(0, _Finder(mutation))
    return mutation


_STREAMS = "router/follow/streams"
_FLEET = "router/follow/fleet"
_INGEST = "router/index/ingest"
_STORE = "router/index/store"
_LOAD = "router/route/load"

MUTATIONS: tuple[Mutation, ...] = (
    # Leases and commits.
    Mutation(
        "no_fence",
        f"{_STORE}/store.py",
        "            if holder != lease.value:\n",
        "            if False:\n",
        "A router whose lease was taken still writes.",
    ),
    Mutation(
        "lease_of_the_living",
        f"{_STORE}/leases.py",
        'if other is None or (not is_given_up(other) and await self._lives(LeaseValue.token_of(other) or "")):',
        "if other is None:",
        "A router takes the lease of a router that lives.",
    ),
    Mutation(
        "lease_of_the_dead",
        f"{_STORE}/leases.py",
        'return int(await self._transactions.reply(key, command("PTTL", key))) > 0',
        "return True",
        "No router takes over the workers of a router that died.",
    ),
    Mutation(
        "others_forgotten",
        f"{_STREAMS}/lease.py",
        "alone = head.lease <= self.number and self.number > 0 and not self._interrupted",
        "alone = self.number > 0",
        "A router continues from its memory although another one followed the worker meanwhile.",
    ),
    Mutation(
        "regained_after_others",
        f"{_STREAMS}/lease.py",
        "alone, entries = head.lease <= self.number, self._entries",
        "alone, entries = True, self._entries",
        "A router that takes a lost lease again overlooks that another one had it.",
    ),
    Mutation(
        "lost_commits_unseen",
        f"{_STREAMS}/lease.py",
        "if head.problem is not None or head.commits < self._entries or not self._is_ours(head.written):",
        "if head.problem is not None:",
        "A router overlooks that the store lost its last commits.",
    ),
    Mutation(
        "lost_entry_unseen",
        "router/index/store/store.py",
        "return CommitOutcome.STALE if head.commits < known else write(head)",
        "return write(head)",
        "A router writes an entry in the place of one that the store lost (found by the simulation).",
    ),
    Mutation(
        "stale_is_done",
        f"{_STREAMS}/lease.py",
        "done = outcome is CommitOutcome.STALE and await self._store.committed(self._worker) == (flush.epoch, last)",
        "done = outcome is CommitOutcome.STALE",
        "A commit that the store refuses as stale counts as written.",
    ),
    Mutation(
        "lease_kept_after_hold",
        f"{_STREAMS}/follower.py",
        "            await self._on(Event.HOLD_ENDED)\n            await self.lease.release()",
        "            await self._on(Event.HOLD_ENDED)",
        "A router that stops following a worker keeps its lease.",
        # This edit alone delays the next follower by two heartbeats, which show that the lease was given up.
        Edit(
            f"{_STREAMS}/lease.py",
            'return self._services.disowns(LeaseValue.token_of(value) or "", self._worker, self._other[1])',
            "return False",
        ),
    ),
    Mutation(
        "prepared_for_ever",
        f"{_STREAMS}/follower.py",
        "if self.lease.written != self._prepared:",
        "if self._prepared is None:",
        "A router begins from a state of the store that others have changed since.",
    ),
    Mutation(
        "continues_anything",
        f"{_STREAMS}/commits.py",
        "if not self._lead.continues(self._state.ingest.held, *self._lease.written):",
        "if False:",
        "A router goes on after its lease ended without writing again what the store lacks.",
    ),
    Mutation(
        "cut_commit_forgotten",
        f"{_STREAMS}/commits.py",
        "        if self.sending is not None:\n            # The last write was cut off",
        "        if False:\n            # The last write was cut off",
        "A commit that a change of the stream cut off is not written again (found by the simulation, seed 960020).",
    ),
    Mutation(
        "first_epoch_unwritten",
        f"{_STREAMS}/mirror_lead.py",
        "self._mirror.begin_epoch(self._worker, flush.epoch)",
        "pass",
        "The router that follows a worker keeps the blocks of the former epoch in its mirror.",
    ),
    Mutation(
        "release_lost",
        f"{_STREAMS}/lease.py",
        'return self._services.disowns(LeaseValue.token_of(value) or "", self._worker, self._other[1])',
        "return False",
        "A worker whose lease the store did not give back is followed by nobody (found by the simulation).",
    ),
    # The worth of another router's state.
    Mutation(
        "follower_unheard",
        f"{_STREAMS}/stream_view.py",
        "return facts.follower_problem\n",
        "return None\n",
        "The state that a dead router wrote stays live.",
    ),
    Mutation(
        "log_unheard",
        f"{_STREAMS}/stream_view.py",
        "if not facts.log_heard:",
        "if False:",
        "A router shows the state of other routers as live although it does not read their logs.",
        # This edit alone is harmless: a heartbeat vouches for no entry that was not read.
        Edit(
            f"{_FLEET}/membership.py",
            "hold.lease == shown.lease and hold.commits <= shown.commits:",
            "hold.lease == shown.lease:",
        ),
    ),
    Mutation(
        "any_heartbeat_vouches",
        f"{_FLEET}/membership.py",
        "if hold is not None and hold.lease == shown.lease and hold.commits <= shown.commits:",
        "if hold is not None:",
        "A heartbeat vouches for entries that were not read, and for another router's lease.",
    ),
    Mutation(
        "heartbeat_of_now",
        f"{_FLEET}/membership.py",
        "router.heard.append((made_s, heartbeat.holds))",
        "router.heard.append((now_s, heartbeat.holds))",
        "A heartbeat that the store brings back after an absence counts as written now.",
    ),
    Mutation(
        "late_heartbeat_is_new",
        f"{_FLEET}/membership.py",
        "beaten_s - router.arrived_s > LATE_S:",
        "False:",
        "A heartbeat that was under way for seconds counts as written when it arrived (found by the simulation, seed 100).",
    ),
    Mutation(
        "backlog_is_news",
        f"{_STREAMS}/peer_view.py",
        "is_news = lease != self.position.lease and not entry.is_backlog",
        "is_news = lease != self.position.lease",
        "The writer of an old log that is read from its beginning counts as alive (found by the simulation, seed 560004).",
    ),
    Mutation(
        "waits_as_holder",
        f"{_STREAMS}/lease.py",
        "        # The caller may have failed to load what it needs after an earlier take.\n        self._end()\n",
        "",
        "A router that waits for a lease again goes on showing the one that it had (found by the simulation, seed 560026).",
    ),
    Mutation(
        "logs_share_numbers",
        f"{_STORE}/leases.py",
        "number if head.lease else max(number, _milliseconds(self._wall_clock()))",
        "number",
        "The leases of each new log of a worker begin with 1 (found by the simulation, seed 550093).",
    ),
    Mutation(
        "second_heartbeat_is_new",
        f"{_FLEET}/membership.py",
        "if router.went_back or heartbeat.after < router.heartbeat.count:",
        "if False:",
        "Of several heartbeats that were under way for seconds, the second counts as written when it arrived (found by the "
        "simulation, seed 520002).",
    ),
    Mutation(
        "unwritten_unsaid",
        f"{_STREAMS}/held_workers.py",
        "return max((max(0.0, now_s - since_s[tag]) for since_s in waits if tag in since_s), default=0.0)",
        "return 0.0",
        "A heartbeat does not say that changes wait for the store.",
    ),
    Mutation(
        "dead_routers_count",
        f"{_FLEET}/membership.py",
        "return router.unchanged_looks < self._gone_looks",
        "return True",
        "Workers stay assigned to a router that died.",
    ),
    Mutation(
        "nobody_moves",
        f"{_STREAMS}/lease.py",
        "return not self.wanted and self._movable()",
        "return False",
        "A new router never gets workers of the others.",
    ),
    Mutation(
        "image_believed",
        f"{_STREAMS}/worker_state.py",
        "if self.peer.position.lease != before.lease or self.peer.position.commits < before.commits:",
        "if False:",
        "An older image of the store is live because of a word about later entries (found by the simulation).",
    ),
    Mutation(
        "old_heartbeat_is_news",
        f"{_FLEET}/membership.py",
        "        elif heartbeat.count < router.heartbeat.count:\n",
        "        elif False:\n",
        "A heartbeat that the store brings back counts as news (found by the simulation).",
    ),
    Mutation(
        "old_word_counts",
        f"{_FLEET}/membership.py",
        "HEARD_S = 1.5\n",
        "HEARD_S = 3.0\n",
        "A heartbeat vouches for twice the time after which an answer is to be no longer live.",
    ),
    # The log that other routers read.
    Mutation(
        "arrivals_unread",
        f"{_FLEET}/mirror_sync.py",
        "self._add(worker, change.place, change.added)",
        "pass",
        "Blocks that arrive reach no other router but with a checkpoint.",
    ),
    Mutation(
        "removals_unread",
        f"{_FLEET}/mirror_sync.py",
        "self.mirror.discard(worker, change.place, change.removed)",
        "pass",
        "Removals never reach the mirror.",
    ),
    Mutation(
        "reload_forgotten",
        f"{_FLEET}/mirror_sync.py",
        "            self._reloads[worker] = _Reloading(self._clock())\n",
        "",
        "A worker whose log has a hole is never loaded again.",
    ),
    Mutation(
        "epoch_continues",
        f"{_FLEET}/mirror_sync.py",
        "if slots is None or entry.opened_epoch or slots.epoch != entry.epoch:",
        "if slots is None:",
        "Other routers keep the blocks of an epoch that ended.",
    ),
    Mutation(
        "registry_unread",
        f"{_FLEET}/fleet.py",
        "due = version != self._version or self._clock() > read_s + REGISTRY_READ_S",
        "due = False",
        "A router never learns of workers that were registered elsewhere.",
    ),
    # The worker's own stream.
    Mutation(
        "blocks_outlive_their_epoch",
        f"{_INGEST}/worker_epoch.py",
        "        self.blocks.forget()\n",
        "",
        "Blocks survive the gap or the restart that voids them.",
    ),
    Mutation(
        "restart_ignored",
        f"{_INGEST}/stock_feed.py",
        'self._epoch.void_life(f"the engine restarted ({item.reason}); what it held before is void")',
        "pass",
        "The blocks of an engine that restarted stay.",
    ),
    Mutation(
        "lost_gap_ignored",
        f"{_INGEST}/stock_feed.py",
        'f"{lost} ({item.reason}); residency before seq {item.next_seq} was dropped and is learned again"\n            )',
        "lost\n            ) if False else None",
        "A gap that cannot be closed voids nothing.",
    ),
    Mutation(
        "gap_passed_over",
        "events/vllm/batch_cursor.py",
        "        if expected is None or seq == expected:\n            if self._to_prove",
        "        if expected is None or seq >= expected:\n            if self._to_prove",
        "A batch after a gap is handed out as the next one.",
    ),
    Mutation(
        "batches_handed_twice",
        "events/vllm/batch_cursor.py",
        "        if self._seen.has(batch):\n            return True\n        self._restart",
        "        if self._seen.has(batch):\n            self.items.append(batch)\n            return True\n        self._restart",
        "A batch that a replay brought is handed out again when the live socket brings it.",
    ),
    Mutation(
        "batch_overtakes_replay",
        "events/vllm/batch_cursor.py",
        "        if self._holding():\n",
        "        if False:\n",
        "Live batches do not wait for the end of a replay.",
    ),
    Mutation(
        "short_ring_ignored",
        "events/vllm/batch_cursor.py",
        'self._lose(expected, seq, "the publisher no longer has these batches")',
        "pass",
        "A replay that begins after the gap closes it.",
    ),
    Mutation(
        "any_replay_proves",
        "events/vllm/batch_cursor.py",
        "            if not self._seen.has(batch):\n                self._succeed",
        "            if False:\n                self._succeed",
        "A replay with another batch at the known seq proves the known life.",
    ),
    Mutation(
        "next_seq_proves",
        f"{_INGEST}/stock_feed.py",
        "if sign.start_s == contact.process_start_s:",
        "if True:",
        "The next seq of another process counts as a proof.",
    ),
    Mutation(
        "report_gap_ignored",
        "events/patch/cursor.py",
        "        if seq > expected:\n            if isinstance(message, Heartbeat):",
        "        if False:\n            if isinstance(message, Heartbeat):",
        "Lost reports of a patched engine are ignored.",
    ),
    Mutation(
        "patch_life_ignored",
        "events/patch/cursor.py",
        "            if epoch in self._past:\n                return False\n"
        '            self._enter_life(epoch, started_s, "its messages come")',
        "            self._epoch = epoch",
        "Reports of another life continue the former one.",
        # This edit alone is harmless: the first heartbeat of the new life proves nothing, and leads to a snapshot.
        Edit(
            f"{_INGEST}/patch_feed.py",
            "        if wrong:\n            place = wrong[0]",
            "        if False:\n            place = wrong[0]",
        ),
    ),
    Mutation(
        "heartbeat_not_compared",
        f"{_INGEST}/patch_feed.py",
        "        if wrong:\n            place = wrong[0]",
        "        if False:\n            place = wrong[0]",
        "Heartbeats whose sums differ from the index prove it.",
    ),
    Mutation(
        "one_removal_takes_all_copies",
        f"{_INGEST}/residency.py",
        "            left = hashes[counts == 1]",
        "            left = hashes",
        "A removal of one of several copies removes the block from the mirror and from the store.",
    ),
    Mutation(
        "doubt_without_end",
        f"{_STREAMS}/shown_worker.py",
        "    def _end_credit(self) -> None:\n        self.facts.overdue = True",
        "    def _end_credit(self) -> None:\n        self.facts.overdue = False",
        "A worker in doubt keeps its credit for ever.",
    ),
    Mutation(
        "removals_before_arrivals_lost",
        f"{_INGEST}/commit_backlog.py",
        "            transitions.left(change.removed)\n",
        "",
        "Removals do not reach the store while commits wait.",
    ),
    Mutation(
        "dead_connection_kept",
        "events/vllm/subscriber.py",
        "if self._loop is not None and self._loop.time() - self._connected_s > age_s:",
        "if False:",
        "The stream of an engine whose machine died without a word stays on the dead connection (found by the simulation).",
    ),
    Mutation(
        "answered_connection_kept",
        "events/vllm/subscriber.py",
        "return finding is Finding.SUCCESSOR or is_unheard",
        "return is_unheard",
        "The stream stays on the dead connection after a replay showed another process (found by the simulation, seed 600738).",
    ),
    Mutation(
        "unheard_connection_kept",
        "events/vllm/subscriber.py",
        "is_unheard = finding is Finding.BATCHES and ",
        "is_unheard = False and ",
        "A connection over which nothing came stays, although a check brings batches.",
    ),
    Mutation(
        "hole_accepted",
        "router/index/store/commit.py",
        "return commit.may_be_first if seq is None else commit.first_seq == seq + 1",
        "return seq is None or commit.first_seq == seq + 1",
        "A commit goes into an epoch whose earlier commits the store lost (found by the simulation).",
    ),
    Mutation(
        "removal_half_done",
        "router/follow/fleet/fleet.py",
        "            finally:\n                # The mirror drops the worker",
        "            except ValueError:\n                raise\n            else:\n                # The mirror drops the worker",
        "The mirror keeps a removed worker if the store takes no writes, and nobody follows the worker when it returns "
        "(found by the simulation).",
    ),
    # Counters and tables.
    Mutation(
        "loss_counted_twice",
        f"{_STREAMS}/lease.py",
        "self._metrics.leases_lost[how].inc()",
        "self._metrics.leases_lost[how].inc(2)",
        "A lost lease counts twice.",
    ),
    Mutation(
        "commit_uncounted",
        f"{_STREAMS}/lease.py",
        "self._metrics.commits[outcome.value].inc()",
        "pass",
        "No commit is counted.",
    ),
    Mutation(
        "ended_requests_kept",
        f"{_LOAD}/load_sync.py",
        "            del self._pending_ends[number]",
        "            pass",
        "Each request that ends another router's reservation stays in a table.",
    ),
    # Load and reservations.
    Mutation(
        "endings_denied",
        f"{_LOAD}/load_sync.py",
        "        if not self._table.others and problem is None:\n",
        "        if True:\n",
        "A router denies that another router may have a reservation.",
    ),
    Mutation(
        "unread_load_denies",
        f"{_LOAD}/load_sync.py",
        "        elif problem is None and self._clock() - self._read_s > MAX_READ_GAP_S:\n",
        "        elif False:\n",
        "A router that reads nothing denies that another router may have a reservation (found by the simulation).",
    ),
    Mutation(
        "early_denial",
        f"{_LOAD}/load_sync.py",
        "        all_heard_s = since_s + ALL_HEARD_S\n",
        "        all_heard_s = since_s\n",
        "A router that has just begun to read denies another router's reservation (found by the simulation).",
    ),
    Mutation(
        "denial_of_some",
        f"{_LOAD}/load_sync.py",
        "        all_heard_s = since_s + ALL_HEARD_S\n",
        "        all_heard_s = since_s + (0.0 if self._table.others else ALL_HEARD_S)\n",
        "A router that has heard some routers since it reads again denies the reservation of one that it has not heard (found by "
        "the simulation).",
    ),
    Mutation(
        "hang_unseen",
        f"{_LOAD}/load_sync.py",
        "        elif problem is None and self._read_s < all_heard_s:\n",
        "        elif False:\n",
        "A router whose connection hangs as soon as it reads denies another router's reservation (found by the simulation).",
    ),
    Mutation(
        "read_gap_ignored",
        f"{_LOAD}/load_sync.py",
        "            self._reading_since_s = now\n        self._read_s = now\n",
        "            pass\n        self._read_s = now\n",
        "A router that has just read its own message again, and has forgotten the other routers, denies their reservations.",
    ),
    Mutation(
        "dead_load_stays",
        f"{_LOAD}/load_sync.py",
        "silent = self._table.forget_silent(now - SILENT_S, now)",
        "silent: list[str] = []",
        "The load of a router that died stays for ever.",
    ),
    Mutation(
        "leaving_load_stays",
        f"{_LOAD}/load_sync.py",
        "            self._table.forget_process(message.process, now)\n            return",
        "            return",
        "The load of a router that leaves stays until it counts as silent.",
    ),
    Mutation(
        "whole_load_adds",
        f"{_LOAD}/load_table.py",
        "for worker in [worker for worker in stored if whole and worker not in totals]:",
        "for worker in []:",
        "A complete message does not end load whose message was lost.",
    ),
    Mutation(
        "released_twice",
        f"{_LOAD}/load_table.py",
        "            reservation.counts = False\n",
        "",
        "A reservation that the engine ended is subtracted again when it is released.",
    ),
    Mutation(
        "prefill_counted_after_release",
        f"{_LOAD}/load_table.py",
        "        reservation.prefill_tokens = 0\n        return True",
        "        return True",
        "The prefill of a reservation is subtracted twice.",
    ),
    # Found by the simulation.
    Mutation(
        "other_state_continues",
        "router/index/store/log_follower.py",
        "        if not self._continues(entry):\n",
        "        if False:\n",
        "A log with as many entries as were read, but others, is read on (found by the simulation).",
    ),
    Mutation(
        "old_registration_repeated",
        f"{_FLEET}/fleet.py",
        "and stored == self._known[worker]:",
        "and await self._store.registry.version() == self._version:",
        "A router compares the registry's version, not the registration, to see that nothing changes (found by the simulation).",
    ),
    Mutation(
        "older_registration_stays",
        f"{_STORE}/registry.py",
        "    return 0 < _revision(stored) < _revision(known)\n",
        "    return False\n",
        "A store that lost a registration and has an older one keeps that (found by the simulation).",
    ),
    Mutation(
        "change_from_memory",
        f"{_FLEET}/fleet.py",
        "            await self._read_changes()\n            follower =",
        "            follower =",
        "A drain undoes what another router changed a moment ago (found by the simulation).",
    ),
    Mutation(
        "first_heartbeat_is_new",
        f"{_FLEET}/membership.py",
        "self._first, arrived_s=beaten_s",
        "self._first, arrived_s=math.inf",
        "The first heartbeat after a router's start vouches, although it may have been under way (found by the simulation).",
    ),
    Mutation(
        "late_entry_is_news",
        f"{_FLEET}/membership.py",
        "return now_s - made_s <= HEARD_S",
        "return True",
        "The first entry of a lease counts as just made when it is read although it may have been under way for seconds.",
    ),
    Mutation(
        "lost_copies_unseen",
        "router/index/store/stored_worker.py",
        "if copies.pop(keys.COPIES_MARK, None) is not None or not head.has_mark:",
        "if copies.pop(keys.COPIES_MARK, None) is not None or True:",
        "Numbers of copies that the store evicted are read as none, so one removal takes a block with several copies (found by "
        "the simulation).",
    ),
    Mutation(
        "listed_from_memory",
        "router/follow/discovery/discovery.py",
        "            await self._fleet.read_changes()\n",
        "",
        "A changed list undoes what a client changed at another router (found by the simulation).",
    ),
)
