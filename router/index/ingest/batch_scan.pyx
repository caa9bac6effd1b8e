# SPDX-License-Identifier: Apache-2.0
"""One pass over batches of events in their wire form; `batch_scan.py` describes the call.

The scan knows where values begin and end, and reads hashes and parents. The general decoder interprets the other fields
of an event, once for each shape. A batch that is not exactly as expected is left to that decoder as a whole. No byte
outside the payload is read: every length is compared with the bytes that are left before it is used.
"""

import numpy as np
from msgspec.structs import replace

from kvrouter.events.vllm.messages import BlockRemoved, BlockStored

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

cdef extern from "msgpack_values.h" nogil:
    ctypedef struct Reader:
        const uint8_t *at
        const uint8_t *end

    ctypedef struct Span:
        const uint8_t *at
        size_t size

    size_t left(const Reader *reader) noexcept
    bint read_array(Reader *reader, size_t *count) noexcept
    bint read_map(Reader *reader, size_t *count) noexcept
    bint read_text(Reader *reader, Span *text) noexcept
    bint read_integer(Reader *reader, uint64_t *value) noexcept
    bint read_hash(Reader *reader, uint64_t *value) noexcept
    bint read_hashes(Reader *reader, uint64_t *out, size_t count) noexcept
    bint skip(Reader *reader, int depth) noexcept
    bint is_ascii(const Span *text) noexcept

cdef enum Role:
    TAG, HASHES, PARENT, SKIPPED, SHAPE, NAME

cdef enum:
    # The fields of `NAMES`. A stored event that is an array has its fields in this order.
    FIELDS = 16
    # The positions of vLLM's longest array, a stored event.
    STORED_POSITIONS = 15
    REMOVED_POSITIONS = 6
    # Extra keys are a list of lists.
    MAX_DEPTH = 6
    # Runs that are searched for the run of an event: an engine has some ten groups.
    MAX_OPEN_RUNS = 32
    # Runs of a batch. Beyond that many, runs are no better than single events.
    MAX_RUNS = 1_024
    # Runs after which no further payload is joined. Counting a run takes some microseconds.
    MAX_JOINED_RUNS = 64
    # Bounds the memory of one remembered shape; an engine's shapes have some 100 bytes.
    MAX_SHAPE_BYTES = 2_048
    # The size of an array of a tag and no hashes.
    MIN_EVENT_BYTES = 14

cdef const char **NAMES = [
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership",
    "session_id", "cache_salt",
]
cdef uint32_t *NAME_BYTES = [4, 12, 17, 9, 10, 7, 6, 9, 10, 9, 18, 28, 8, 9, 10, 10]
cdef int *ROLES = [
    TAG, HASHES, PARENT, SKIPPED, SHAPE, SKIPPED, SHAPE, NAME, SKIPPED, SHAPE, SHAPE, SHAPE, SHAPE, SHAPE, NAME, SKIPPED
]
cdef int *REMOVED = [0, 1, 6, 9, 12, 13]

cdef enum:
    TAG_AT = 0
    HASHES_AT = 1

cdef struct Found:
    # One event, as it was read.
    # A bit for each field that is there.
    uint32_t fields
    bint is_array
    bint stores
    bint has_parent
    size_t first_hash
    size_t hashes
    Span shape[FIELDS]

cdef struct Room:
    # The hashes of all events so far.
    uint64_t *hashes
    size_t used
    size_t size


cdef bint grow(Room *room, size_t count) noexcept nogil:
    cdef size_t size = room.size
    cdef void *moved
    if room.used + count <= size:
        return True
    while size < room.used + count:
        size *= 2
    moved = realloc(room.hashes, size * sizeof(uint64_t))
    if moved == NULL:
        return False
    room.hashes, room.size = <uint64_t *>moved, size
    return True


cdef bint read_field(Reader *reader, int field, Found *found, Room *room) noexcept nogil:
    cdef const uint8_t *start = reader.at
    cdef uint64_t parent
    cdef Span text
    cdef int role = ROLES[field]
    if found.fields & (1u << field):
        return False
    found.fields |= 1u << field
    if role == HASHES:
        if not read_array(reader, &found.hashes) or not grow(room, found.hashes):
            return False
        found.first_hash = room.used
        if not read_hashes(reader, room.hashes + room.used, found.hashes):
            return False
        room.used += found.hashes
        return True
    if role == PARENT or role == NAME:
        if left(reader) >= 1 and reader.at[0] == 0xC0:
            reader.at += 1
            return True
        if role == NAME:
            return read_text(reader, &text) and is_ascii(&text)
        found.has_parent = True
        return read_hash(reader, &parent)
    if not skip(reader, MAX_DEPTH if role == SKIPPED else 0):
        return False
    found.shape[field].at, found.shape[field].size = start, reader.at - start
    return True


cdef int field_of(Span name, int expected) noexcept nogil:
    """Return the field of this name, FIELDS if there is none. The search begins at the expected field."""
    cdef int i, field
    for i in range(FIELDS):
        field = expected + i
        if field >= FIELDS:
            field -= FIELDS
        if NAME_BYTES[field] == name.size and memcmp(NAMES[field], name.at, name.size) == 0:
            return field
    return FIELDS


cdef int read_tag(Reader *reader, Found *found) noexcept nogil:
    """Return 1 for a stored or removed event, 0 for another one, -1 if the tag is not text."""
    cdef Span tag
    cdef const uint8_t *start = reader.at
    if not read_text(reader, &tag):
        return -1
    found.fields |= 1u << TAG_AT
    found.shape[TAG_AT].at, found.shape[TAG_AT].size = start, reader.at - start
    if tag.size == 11 and memcmp(tag.at, "BlockStored", 11) == 0:
        found.stores = True
        return 1
    return tag.size == 12 and memcmp(tag.at, "BlockRemoved", 12) == 0


cdef int read_event(Reader *reader, Found *found, Room *room) noexcept nogil:
    """Return 1 for a stored or removed event, 0 for a skipped event of another type, -1 for the general decoder."""
    cdef size_t count, i
    cdef const uint8_t *start = reader.at
    cdef Span name
    cdef int field, expected, known, positions
    found.fields, found.has_parent, found.stores, found.hashes = 0, False, False, 0
    found.is_array = not read_map(reader, &count)
    if found.is_array:
        reader.at = start
        if not read_array(reader, &count):
            return -1
    if count == 0:
        return -1
    if not found.is_array and (
        not read_text(reader, &name) or name.size != 4 or memcmp(name.at, NAMES[TAG_AT], 4) != 0
    ):
        return -1
    known = read_tag(reader, found)
    if known < 0:
        return -1
    if known == 0:
        reader.at = start
        return 0 if skip(reader, MAX_DEPTH) else -1
    if found.is_array:
        positions = STORED_POSITIONS if found.stores else REMOVED_POSITIONS
        for i in range(1, count):
            if i >= <size_t>positions:
                if not skip(reader, MAX_DEPTH):
                    return -1
            elif not read_field(reader, <int>i if found.stores else REMOVED[i], found, room):
                return -1
    else:
        expected = 1
        for i in range(1, count):
            if not read_text(reader, &name):
                return -1
            field = field_of(name, expected)
            if field == FIELDS:
                if not skip(reader, MAX_DEPTH):
                    return -1
                continue
            if not read_field(reader, field, found, room):
                return -1
            expected = field + 1
    return 1 if found.fields & (1u << HASHES_AT) else -1


cdef bint same_shape(Found *one, Found *other) noexcept nogil:
    cdef int field
    if one.fields != other.fields or one.is_array != other.is_array:
        return False
    for field in range(FIELDS):
        if one.fields & (1u << field) and (ROLES[field] == SHAPE or ROLES[field] == TAG):
            if one.shape[field].size != other.shape[field].size:
                return False
            if memcmp(one.shape[field].at, other.shape[field].at, one.shape[field].size) != 0:
                return False
    return True


cdef bytes shape_key(Found *found):
    cdef int field
    parts = [b"%d %d " % (found.is_array, found.fields)]
    for field in range(FIELDS):
        if found.fields & (1u << field) and (ROLES[field] == SHAPE or ROLES[field] == TAG):
            parts.append(PyBytes_FromStringAndSize(<const char *>found.shape[field].at, found.shape[field].size))
    return b"".join(parts)


cdef struct Event:
    int run
    bint is_root
    size_t first_hash
    size_t hashes

cdef struct Run:
    Found shape
    size_t events
    size_t hashes
    size_t roots
    # Whether an event has several hashes.
    bint several
    # Where the next hash and the next root are written.
    uint64_t *hashes_at
    uint64_t *roots_at


NO_HASHES = np.empty(0, np.uint64)


cdef object without_blocks(object event):
    """Return the fields that an event shares with others of its shape; small, because the result is remembered."""
    if type(event) is BlockRemoved:
        return replace(event, block_hashes=NO_HASHES)
    return replace(event, block_hashes=NO_HASHES, parent_block_hash=None, lora_name=None, session_id=None)


cdef class Scan:
    """The scan of consecutive payloads, which must outlive it."""

    cdef Reader reader
    cdef Room room
    cdef Event *events
    cdef size_t event_count
    cdef size_t events_size
    cdef Run *runs
    cdef int run_count
    # Runs from here on may take further events.
    cdef int first_open
    cdef int last_run
    cdef bint stores
    cdef size_t runs_size
    # The event that stands for the shape of each run, and the single events with the number of runs before each.
    cdef list heads
    cdef list singles
    # The first event, run and single event of the payload that was begun last.
    cdef size_t first_event
    cdef int first_run
    cdef int first_single

    def __cinit__(self):
        self.room.size = 1024
        self.room.hashes = <uint64_t *>malloc(self.room.size * sizeof(uint64_t))
        self.runs_size = 8
        self.runs = <Run *>malloc(self.runs_size * sizeof(Run))
        self.events_size = 64
        self.events = <Event *>malloc(self.events_size * sizeof(Event))
        if self.room.hashes == NULL or self.runs == NULL or self.events == NULL:
            raise MemoryError
        self.heads = []
        self.singles = []

    def __dealloc__(self):
        free(self.room.hashes)
        free(self.events)
        free(self.runs)

    cdef int run_of(self, Found *found) except -2:
        """Return the open run of this shape, or a new one."""
        cdef int i, run
        cdef int open_runs
        cdef void *moved
        if found.stores != self.stores:
            self.stores = found.stores
            self.first_open = self.run_count
        open_runs = self.run_count - self.first_open
        for i in range(min(open_runs, MAX_OPEN_RUNS)):
            # Most often it is the run of the event before, or the run after that, because groups take turns.
            run = self.first_open + (self.last_run - self.first_open + i) % open_runs
            if same_shape(&self.runs[run].shape, found):
                return run
        if <size_t>self.run_count == self.runs_size:
            moved = realloc(self.runs, 2 * self.runs_size * sizeof(Run))
            if moved == NULL:
                raise MemoryError
            self.runs, self.runs_size = <Run *>moved, 2 * self.runs_size
        run = self.run_count
        self.run_count += 1
        self.runs[run].shape = found[0]
        self.runs[run].events = self.runs[run].hashes = self.runs[run].roots = 0
        self.runs[run].several = False
        return run

    cdef bint has_room(self, size_t count) noexcept:
        """Return whether there is room for as many further events."""
        cdef size_t size = self.events_size
        cdef void *moved
        while size < self.event_count + count:
            size *= 2
        if size > self.events_size:
            moved = realloc(self.events, size * sizeof(Event))
            if moved == NULL:
                return False
            self.events, self.events_size = <Event *>moved, size
        return True

    cdef begin(self, bytes payload):
        """Begin to read a payload, which `drop` can undo."""
        self.reader.at = <const uint8_t *>PyBytes_AS_STRING(payload)
        self.reader.end = self.reader.at + len(payload)
        self.first_event, self.first_run, self.first_single = self.event_count, self.run_count, len(self.singles)

    cdef drop(self):
        """Forget everything of the payload that was begun last. No other payload can follow."""
        cdef Event *event
        while self.event_count > self.first_event:
            self.event_count -= 1
            event = &self.events[self.event_count]
            self.runs[event.run].events -= 1
            self.runs[event.run].hashes -= event.hashes
            self.runs[event.run].roots -= event.is_root
        self.run_count = self.first_run
        del self.heads[self.first_run :]
        del self.singles[self.first_single :]

    cdef tuple read(self, dict shapes, object read):
        """Read a payload, and return its rank in a tuple, or None to leave it to the general decoder."""
        cdef size_t fields, count
        cdef uint64_t rank_value
        rank = None
        if not read_array(&self.reader, &fields) or not 2 <= fields <= 3:
            return None
        if left(&self.reader) < 9 or self.reader.at[0] != 0xCB:
            return None
        self.reader.at += 9
        if not read_array(&self.reader, &count) or not self.read_events(count, shapes, read):
            return None
        if fields == 3:
            if left(&self.reader) == 1 and self.reader.at[0] == 0xC0:
                self.reader.at += 1
            elif left(&self.reader) >= 1 and (self.reader.at[0] < 0x80 or 0xCC <= self.reader.at[0] <= 0xCE):
                if not read_integer(&self.reader, &rank_value):
                    return None
                rank = rank_value
            else:
                return None
        return (rank,) if self.reader.at == self.reader.end else None

    cdef bint read_events(self, size_t count, dict shapes, object read) except -1:
        """Read all events of a payload; return False to leave it to the general decoder."""
        cdef Found found
        cdef size_t i
        cdef int kind, run
        cdef const uint8_t *start
        cdef Event *event
        if count > left(&self.reader) // MIN_EVENT_BYTES or not self.has_room(count):
            return False
        for i in range(count):
            start = self.reader.at
            kind = read_event(&self.reader, &found, &self.room)
            if kind < 0:
                return False
            if kind == 1:
                run = self.run_of(&found)
                if run >= MAX_RUNS:
                    return False
                if run == len(self.heads):
                    key = shape_key(&found)
                    if len(key) > MAX_SHAPE_BYTES:
                        return False
                    head = shapes.get(key)
                    if head is None:
                        head = read(PyBytes_FromStringAndSize(<const char *>start, self.reader.at - start))
                        if head is None:
                            return False
                        if type(head) is BlockRemoved or (type(head) is BlockStored and head.medium == "GPU"):
                            head = shapes[key] = without_blocks(head)
                        else:
                            # The meaning of this event depends on more than its shape.
                            self.run_count -= 1
                            kind = 0
                            self.add_single(head)
                    if kind == 1:
                        self.heads.append(head)
            else:
                head = read(PyBytes_FromStringAndSize(<const char *>start, self.reader.at - start))
                if head is None:
                    return False
                self.add_single(head)
            if kind == 1:
                event = &self.events[self.event_count]
                self.event_count += 1
                event.run, event.first_hash, event.hashes = run, found.first_hash, found.hashes
                event.is_root = found.stores and not found.has_parent and found.hashes > 0
                self.runs[run].events += 1
                self.runs[run].hashes += found.hashes
                self.runs[run].roots += event.is_root
                self.last_run = run
        return True

    cdef add_single(self, object event):
        self.singles.append((self.run_count, event))
        self.first_open = self.last_run = self.run_count

    cdef list collect(self):
        cdef int run
        cdef size_t i
        cdef Event *event
        cdef uint64_t[::1] view
        runs = []
        for i in range(self.event_count):
            self.runs[self.events[i].run].several |= self.events[i].hashes > 1
        for run in range(self.run_count):
            hashes = np.empty(self.runs[run].hashes, np.uint64)
            roots = NO_HASHES
            if self.runs[run].hashes:
                view = hashes
                self.runs[run].hashes_at = &view[0]
            if self.runs[run].roots:
                roots = np.empty(self.runs[run].roots, np.uint64)
                view = roots
                self.runs[run].roots_at = &view[0]
            runs.append((self.heads[run], hashes, self.runs[run].events, roots, self.runs[run].several))
        for i in range(self.event_count):
            event = &self.events[i]
            run = event.run
            if event.hashes:
                memcpy(self.runs[run].hashes_at, &self.room.hashes[event.first_hash], event.hashes * sizeof(uint64_t))
                self.runs[run].hashes_at += event.hashes
            if event.is_root:
                self.runs[run].roots_at[0] = self.room.hashes[event.first_hash]
                self.runs[run].roots_at += 1
        for place, single in reversed(self.singles):
            runs.insert(place, single)
        return runs


def scan(list payloads not None, dict shapes not None, object read):
    cdef Scan state = Scan()
    cdef int taken = 0
    rank = None
    for payload in payloads:
        if payload is None:
            raise TypeError("a payload is bytes, not None")
        state.begin(payload)
        named = state.read(shapes, read)
        if named is None or (taken and named[0] != rank):
            state.drop()
            break
        rank = named[0]
        taken += 1
        if state.singles or state.run_count > MAX_JOINED_RUNS:
            # A single event may change what later events teach; many runs take long to count.
            break
    return (rank, taken, state.collect()) if taken else None
