# SPDX-License-Identifier: Apache-2.0
"""The Redis commands that routers use, each a function of a `Keyspace` and the command's words.

A command, an option or a form that no router uses raises `NotBuilt`, which ends the simulation: a new use in the product
must be built here, and compared with a real server in `test_store_contract.py`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from tests.simulation.store.keyspace import NO_INTEGER, WRONG_TYPE, Command, Keyspace, Members, ReplyError
from tests.simulation.store.stream import MAX_ID, Entry, EntryId, Stream

SYNTAX = "ERR syntax error"
NO_ID = "ERR Invalid stream ID specified as stream command argument"
_INT64 = range(-(2**63), 2**63)


class NotBuilt(NotImplementedError):
    """A use of the store that the simulation does not have."""


class Status(bytes):
    """A reply that is no data, such as OK."""


class NullArray:
    """The reply of an EXEC that was not executed and of an XREAD without news."""


OK = Status(b"OK")
NULL_ARRAY = NullArray()

# bytes, int, None, a list of these, a Status, a NullArray or a ReplyError.
Reply = Any


class Order(NamedTuple):
    """One command of the server."""

    execute: Callable[[Keyspace, Command], Reply]
    # The number of words, with the name; a negative number is the least.
    words: int
    # Whether a replica, and a server that cannot write to its disk, refuse it.
    writes: bool = False
    # Whether a server without memory refuses it.
    grows: bool = False


ZERO = ord("0")
# Fewer digits than a number of 64 bits can have.
SURE_DIGITS = 19


def integer(text: bytes) -> int:
    """Return a number of 64 bits as Redis reads it. Raises ReplyError."""
    if text.isdigit() and text[0] != ZERO and len(text) < SURE_DIGITS:
        return int(text)
    if re.fullmatch(rb"-?[1-9][0-9]{0,18}|0", text) and (number := int(text)) in _INT64:
        return number
    raise ReplyError(NO_INTEGER)


# -- keys


def _unlink(space: Keyspace, words: Command) -> int:
    return sum(space.find(key) is not None and space.drop(key) for key in words[1:])


def _type(space: Keyspace, words: Command) -> Status:
    match space.find(words[1]):
        case None:
            return Status(b"none")
        case bytes():
            return Status(b"string")
        case Members():
            return Status(b"set")
        case Stream():
            return Status(b"stream")
    return Status(b"hash")


def _exists(space: Keyspace, words: Command) -> int:
    return sum(space.find(key) is not None for key in words[1:])


def _expire(unit_ms: int) -> Callable[[Keyspace, Command], int]:
    def execute(space: Keyspace, words: Command) -> int:
        _, key, text = words
        return _expire_at(space, key, space.now_ms + integer(text) * unit_ms)

    return execute


def _pexpireat(space: Keyspace, words: Command) -> int:
    _, key, text = words
    return _expire_at(space, key, integer(text))


def _expire_at(space: Keyspace, key: bytes, deadline_ms: int) -> int:
    value = space.find(key)
    if value is None:
        return 0
    if deadline_ms <= space.now_ms:
        space.drop(key)
        return 1
    space.deadlines[key] = deadline_ms
    space.put(key, value, (b"PEXPIREAT", key, b"%d" % deadline_ms))
    return 1


def _pttl(space: Keyspace, words: Command) -> int:
    if space.find(words[1]) is None:
        return -2
    deadline = space.deadlines.get(words[1])
    return -1 if deadline is None else deadline - space.now_ms


def _scan(space: Keyspace, words: Command) -> list[Any]:
    """Return the names in the order of their checksums, which changes of other keys do not move."""
    cursor, options = int(words[1]), _pairs_of(words[2:])
    count = integer(options.pop(b"COUNT", b"10"))
    pattern = glob(options.pop(b"MATCH", b"*"))
    if options:
        raise NotBuilt(words)
    names = sorted((zlib.crc32(key), key) for key in list(space.values) if space.find(key) is not None)
    left = [(number, key) for number, key in names if number >= cursor]
    # Names of one checksum come together, because a cursor cannot separate them.
    number_after = left[count][0] if len(left) > count else None
    if number_after is not None and number_after <= left[0][0]:
        number_after = next((number for number, _ in left if number > left[0][0]), None)
    now = [key for number, key in left if number_after is None or number < number_after]
    return [b"%d" % (number_after or 0), [key for key in now if pattern.fullmatch(key)]]


def glob(pattern: bytes) -> re.Pattern[bytes]:
    """Return the pattern of SCAN as a regular expression; sets of characters are not built."""
    parts = []
    for token in re.findall(rb"\\.|.", pattern, re.DOTALL):
        if token == b"[":
            raise NotBuilt(pattern)
        parts.append({b"*": b".*", b"?": b"."}.get(token) or re.escape(token[-1:]))
    return re.compile(b"".join(parts), re.DOTALL)


def _flushall(space: Keyspace, words: Command) -> Status:
    space.clear()
    return OK


# -- STRING


def _get(space: Keyspace, words: Command) -> bytes | None:
    return space.text(words[1])


def _set(space: Keyspace, words: Command) -> Status | None:
    _, key, value, *options = words
    only_new, deadline = False, None
    rest = iter(options)
    for option in rest:
        match option.upper():
            case b"NX":
                only_new = True
            case b"EX" | b"PX" | b"PXAT" as name:
                number = integer(next(rest, b""))
                if number <= 0:
                    raise ReplyError("ERR invalid expire time in 'set' command")
                deadline = {b"EX": space.now_ms + 1_000 * number, b"PX": space.now_ms + number, b"PXAT": number}[name]
            case _:
                raise NotBuilt(words)
    if space.find(key) is not None and only_new:
        return None
    space.deadlines.pop(key, None)
    effect: Command = (b"SET", key, value)
    if deadline is not None:
        space.deadlines[key] = deadline
        effect = (*effect, b"PXAT", b"%d" % deadline)
    space.put(key, value, effect)
    return OK


def _incr(space: Keyspace, words: Command) -> int:
    return _incrby(space, (*words, b"1"))


def _incrby(space: Keyspace, words: Command) -> int:
    _, key, text = words
    amount = integer(text)
    text_before = space.text(key)
    number = amount if text_before is None else integer(text_before) + amount
    if number not in _INT64:
        raise ReplyError("ERR increment or decrement would overflow")
    space.put(key, b"%d" % number, (b"INCRBY", key, text))
    return number


# -- HASH


def _hset(space: Keyspace, words: Command) -> int:
    _, key, *parts = words
    if len(parts) % 2:
        raise ReplyError("ERR wrong number of arguments for 'hset' command")
    fields = space.fields(key)
    before = len(fields)
    fields.update(zip(parts[::2], parts[1::2], strict=True))
    space.put(key, fields, words)
    return len(fields) - before


def _hsetnx(space: Keyspace, words: Command) -> int:
    _, key, name, value = words
    fields = space.fields(key)
    if name in fields:
        return 0
    fields[name] = value
    space.put(key, fields, words)
    return 1


def _hget(space: Keyspace, words: Command) -> bytes | None:
    return space.fields(words[1]).get(words[2])


def _hmget(space: Keyspace, words: Command) -> list[bytes | None]:
    fields = space.fields(words[1])
    return [fields.get(name) for name in words[2:]]


def _hgetall(space: Keyspace, words: Command) -> list[bytes]:
    return [part for pair in space.fields(words[1]).items() for part in pair]


def _hlen(space: Keyspace, words: Command) -> int:
    return len(space.fields(words[1]))


def _hdel(space: Keyspace, words: Command) -> int:
    fields = space.fields(words[1])
    before = len(fields)
    for name in words[2:]:
        fields.pop(name, None)
    if len(fields) < before:
        space.put(words[1], fields, words)
    return before - len(fields)


def _hincrby(space: Keyspace, words: Command) -> int:
    _, key, name, text = words
    amount = integer(text)
    fields = space.fields(key)
    try:
        number = integer(fields.get(name, b"0")) + amount
    except ReplyError:
        raise ReplyError("ERR hash value is not an integer") from None
    if number not in _INT64:
        raise ReplyError("ERR increment or decrement would overflow")
    fields[name] = b"%d" % number
    space.put(key, fields, words)
    return number


# -- SET


def _sadd(space: Keyspace, words: Command) -> int:
    members = space.members(words[1])
    before = len(members)
    members.update(dict.fromkeys(words[2:]))
    if len(members) > before:
        space.put(words[1], members, words)
    return len(members) - before


def _srem(space: Keyspace, words: Command) -> int:
    members = space.members(words[1])
    before = len(members)
    for member in words[2:]:
        members.pop(member, None)
    if len(members) < before:
        space.put(words[1], members, words)
    return before - len(members)


def _smembers(space: Keyspace, words: Command) -> list[bytes]:
    return list(space.members(words[1]))


# -- streams


def entry_id(text: bytes, number: int = 0) -> EntryId:
    """Return the id that `text` names; `number` stands for a second part that is missing. Raises ReplyError."""
    if not (found := re.fullmatch(rb"([0-9]{1,20})(?:-([0-9]{1,20}))?", text)):
        raise ReplyError(NO_ID)
    parts = int(found[1]), number if found[2] is None else int(found[2])
    if max(parts) > MAX_ID[0]:
        raise ReplyError(NO_ID)
    return parts


def id_text(entry: EntryId) -> bytes:
    """Return the text of an id."""
    return b"%d-%d" % entry


def _xadd(space: Keyspace, words: Command) -> bytes:
    key, rest = words[1], list(words[2:])
    length = None
    if rest[0].upper() == b"MAXLEN":
        if rest[1] != b"~":
            raise NotBuilt(words)
        length = integer(rest[2])
        if length < 0:
            raise ReplyError("ERR The MAXLEN argument must be >= 0.")
        del rest[:3]
    text, *fields = rest
    if not fields or len(fields) % 2:
        raise ReplyError("ERR wrong number of arguments for 'xadd' command")
    wanted = None if text == b"*" else entry_id(text)
    if wanted == (0, 0):
        raise ReplyError("ERR The ID specified in XADD must be greater than 0-0")
    stream = space.stream(key) or space.new_stream()
    if wanted is not None and wanted <= stream.last_id:
        raise ReplyError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
    added = wanted or stream.next_id(space.now_ms)
    stream.add(added, tuple(fields))
    options: Command = ()
    if length is not None:
        stream.trim_length(length)
        options = (b"MAXLEN", b"~", b"%d" % length)
    space.put(key, stream, (b"XADD", key, *options, id_text(added), *fields))
    space.news[key] = None
    return id_text(added)


def _xtrim(space: Keyspace, words: Command) -> int:
    _, key, how, about, text = words
    if how.upper() != b"MINID" or about != b"~":
        raise NotBuilt(words)
    oldest = entry_id(text)
    stream = space.stream(key)
    dropped = 0 if stream is None else stream.trim_older(oldest)
    if stream is not None and dropped:
        space.put(key, stream, words)
    return dropped


def _xrevrange(space: Keyspace, words: Command) -> Reply:
    _, key, last, first, *options = words
    count = _count(words, options)
    high = MAX_ID if last == b"+" else entry_id(last, MAX_ID[1])
    low = (0, 0) if first == b"-" else entry_id(first)
    stream = space.stream(key)
    if stream is None:
        return []
    if count is not None and count <= 0:
        return NULL_ARRAY
    return list(map(_shown, stream.between(low, high)[::-1][:count]))


def _count(words: Command, options: list[bytes]) -> int | None:
    if not options:
        return None
    name, text = options
    if name.upper() != b"COUNT":
        raise NotBuilt(words)
    return integer(text)


def _shown(entry: Entry) -> list[Any]:
    return [id_text(entry[0]), list(entry[1])]


class ReadRequest(NamedTuple):
    """The parts of an XREAD."""

    # How many entries of each stream, None for all.
    limit: int | None
    # How long it waits, 0 for ever and None not at all.
    block_ms: int | None
    # Each stream, and the id after which it is read.
    after: tuple[tuple[bytes, bytes], ...]


# A waiting XREAD is read again with each entry of its streams.
@lru_cache(maxsize=64)
def read_request(words: Command) -> ReadRequest:
    """Return the parts of an XREAD. Raises ReplyError."""
    count = block_ms = None
    rest = list(words[1:])
    while rest[0].upper() != b"STREAMS":
        name, text = rest[0].upper(), rest[1]
        if name == b"COUNT":
            # A number below 1 means all.
            count = max(0, integer(text)) or None
        elif name == b"BLOCK":
            block_ms = integer(text)
        else:
            raise NotBuilt(words)
        del rest[:2]
    names = rest[1:]
    if not names or len(names) % 2:
        raise ReplyError("ERR Unbalanced 'xread' list of streams: for each stream key an ID or '$' must be specified.")
    half = len(names) // 2
    if {b"$", b"+"} & {*names[half:]}:
        raise NotBuilt(words)
    return ReadRequest(count, block_ms, tuple(zip(names[:half], names[half:], strict=True)))


def _xread(space: Keyspace, words: Command) -> Reply:
    request = read_request(words)
    streams = [(key, space.stream(key), entry_id(text)) for key, text in request.after]
    found = []
    for key, stream, last in streams:
        if stream is not None and last < stream.last_id and (entries := stream.after(last, request.limit)):
            found.append([key, list(map(_shown, entries))])
    return found or NULL_ARRAY


def _pairs_of(words: Iterable[bytes]) -> dict[bytes, bytes]:
    rest = iter(words)
    return {name.upper(): next(rest, b"") for name in rest}


COMMANDS: dict[bytes, Order] = {
    b"DEL": Order(_unlink, -2, writes=True),
    b"UNLINK": Order(_unlink, -2, writes=True),
    b"TYPE": Order(_type, 2),
    b"EXISTS": Order(_exists, -2),
    b"EXPIRE": Order(_expire(1_000), 3, writes=True),
    b"PEXPIRE": Order(_expire(1), 3, writes=True),
    b"PEXPIREAT": Order(_pexpireat, 3, writes=True),
    b"PTTL": Order(_pttl, 2),
    b"SCAN": Order(_scan, -2),
    b"FLUSHALL": Order(_flushall, -1, writes=True),
    b"GET": Order(_get, 2),
    b"SET": Order(_set, -3, writes=True, grows=True),
    b"INCR": Order(_incr, 2, writes=True, grows=True),
    b"INCRBY": Order(_incrby, 3, writes=True, grows=True),
    b"HSET": Order(_hset, -4, writes=True, grows=True),
    b"HSETNX": Order(_hsetnx, 4, writes=True, grows=True),
    b"HGET": Order(_hget, 3),
    b"HMGET": Order(_hmget, -3),
    b"HGETALL": Order(_hgetall, 2),
    b"HLEN": Order(_hlen, 2),
    b"HDEL": Order(_hdel, -3, writes=True),
    b"HINCRBY": Order(_hincrby, 4, writes=True, grows=True),
    b"SADD": Order(_sadd, -3, writes=True, grows=True),
    b"SREM": Order(_srem, -3, writes=True),
    b"SMEMBERS": Order(_smembers, 2),
    b"XADD": Order(_xadd, -5, writes=True, grows=True),
    b"XTRIM": Order(_xtrim, -4, writes=True),
    b"XREVRANGE": Order(_xrevrange, -4),
    b"XREAD": Order(_xread, -4),
}

__all__ = ["COMMANDS", "NULL_ARRAY", "OK", "WRONG_TYPE", "NotBuilt", "Order", "Reply", "ReplyError", "Status"]
