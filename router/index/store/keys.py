# SPDX-License-Identifier: Apache-2.0
"""Every Redis key of the index, and the text forms used inside its values.

Keys begin with the number of their schema, `kvr:3:`, so that routers of two schemas can share a Redis during an upgrade
and neither reads the keys of the other (ADR 42). Only `kvr:schemas` is common to all schemas.

All keys of one worker share the hash tag `{model/worker_id}` (`{model/worker_id@3}` for dp_rank 3), so that one
commit is one transaction on one node of a cluster. Names come from users and from the wire. Each name is
percent-quoted, so that no brace, colon, slash or newline in it can reach another worker's keys.

| key | type | content |
|---|---|---|
| `kvr:schemas` | HASH | number of each schema that this Redis holds -> version of its first router; `SCHEMAS_ADOPTED` |
| `kvr:3:models` | SET | the quoted names of the models that have workers |
| `kvr:3:registrations` | STRING | number of changes ever made to the registry, which shows whether to read it again |
| `kvr:3:routers` | HASH | token of each router process -> its heartbeat (`heartbeat.py`) |
| `kvr:3:router:TOKEN` | STRING | lease of that router process: the number of its renewals; expires |
| `kvr:3:adopted` | HASH | worker's tag -> its registration in the former schema at its adoption (`schemas.py`) |
| `kvr:3:claims` | HASH | token of each router process -> the workers that its sources show it (`router_peers.py`) |
| `kvr:3:loads` | STREAM | load that router processes have in flight (`load_messages.py`); trimmed |
| `kvr:3:{history}:steps`, `:minutes` | STREAM | traffic that router processes counted (`history_entry.py`); trimmed |
| `kvr:3:{history}:day:DAY` | HASH | `model:sum` -> what was not computed on that day (`saved_days.py`); expires |
| `kvr:3:{history}:writer:NAME` | STRING | number of the last batch that this process wrote of both; expires |
| `kvr:3:response:ID` | STRING | owner of a stored response (`response_owner.py`); expires |
| `kvr:3:{model}:workers` | HASH | `worker_id@dp_rank` -> registration |
| `kvr:3:{tag}:meta` | HASH | `META_FIELDS` and the fields that the owner adds |
| `kvr:3:{tag}:EPOCH:gK:MEDIUM[:OWNER]` | STRING | 8-byte big-endian block hashes resident there at the checkpoint |
| `kvr:3:{tag}:EPOCH:copies` | HASH | place text + 8 bytes -> number of copies, only 2 or more, with its checksum; `COPIES_MARK` |
| `kvr:3:{tag}:log` | STREAM | one entry a commit, with its checksum; trimmed, never behind the checkpoint |
| `kvr:3:{tag}:lease` | STRING | `token:number` of the process that ingests this worker |
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK

# The number rises when a router of an earlier schema would misread or overwrite values of this one: for another form,
# another meaning, or a field that decides how a worker is judged. tests/golden/schema.json has the forms.
SCHEMA = 3
PREFIX = f"kvr:{SCHEMA}:"
# The schema before this one; its registrations are taken over.
FORMER_SCHEMA = 2
FORMER_PREFIX = f"kvr:{FORMER_SCHEMA}:"
FORMER_REGISTRATIONS = f"{FORMER_PREFIX}registrations"

SCHEMAS = "kvr:schemas"
# Present once the former registry was taken over: a record of that in ADOPTED without its version was lost, because a
# store that evicts keys takes each one alone. Routers that do not know the field skip it, as it is no number.
SCHEMAS_ADOPTED = f"{SCHEMA} adopted"
ADOPTED = f"{PREFIX}adopted"
# The field with the version up to which the former registry was adopted; no tag is equal to it.
ADOPTED_VERSION = "version"
MODELS = f"{PREFIX}models"
REGISTRATIONS = f"{PREFIX}registrations"
ROUTERS = f"{PREFIX}routers"
CLAIMS = f"{PREFIX}claims"
LOADS = f"{PREFIX}loads"
LOADS_MESSAGE = "m"
# All keys of the history have one hash tag, so that a process can write to them in one transaction.
_HISTORY = f"{PREFIX}{{history}}:"
HISTORY_STEPS = f"{_HISTORY}steps"
HISTORY_MINUTES = f"{_HISTORY}minutes"
HISTORY_MESSAGE = "m"

# The fields of `meta` that the store itself writes; a commit's own meta fields must not be named like these.
META_EPOCH = "epoch"  # the current epoch's name
META_SEQ = "seq"  # last committed seq of the epoch; absent before its first commit
META_COMMITS = "commits"  # number of log entries ever written for this worker; each entry carries its number
META_PLACES = "places"  # places of the checkpoint, quoted, with blocks and checksum: keys to UNLINK when it is voided
META_CHECKPOINT = "checkpoint"  # number of the last log entry whose changes the checkpoint has
META_SUM = "sum"  # checksum of epoch, seq, commits, places and checkpoint
META_LEASE = "lease"  # number of the last lease on this worker: each acquisition has a higher one
META_MARK = "mark"  # present if the epoch began with COPIES_MARK in its `copies`
META_UNREADABLE = "unreadable"  # why a router cannot read the stored values: the owner then opens a new epoch
# In the order in which `Head.of` takes them.
META_FIELDS = (
    *(META_EPOCH, META_SEQ, META_COMMITS, META_PLACES),
    *(META_LEASE, META_CHECKPOINT, META_SUM, META_MARK, META_UNREADABLE),
)

# The place and the hash of an entry of `copies` that stands for no block. It is written when an epoch begins and stays, so
# `copies` without it were lost: a store that evicts keys takes each one alone, and an absent key would mean that no block
# has several copies. Routers from before the mark read it as a block at a place that holds none.
COPIES_MARK = (Place(None, "mark"), 0)

# A number as routers write it: a count, or a seq, which can be any number of 64 bits that an engine sends.
_NUMBER = re.compile(rb"[0-9]{1,20}")
_UINT64_MAX = 2**64 - 1


def _quoted(name: str) -> str:
    # Lone surrogates are legal in JSON strings, hence in names; without surrogatepass they would raise here.
    return quote(name, safe="", errors="surrogatepass")


def _unquoted(text: str) -> str:
    return unquote(text, errors="surrogatepass")


def worker_tag(worker: WorkerKey) -> str:
    """Return the hash tag of all keys of `worker`, with its braces."""
    rank = f"@{worker.dp_rank}" if worker.dp_rank else ""
    return f"{{{_quoted(worker.model)}/{_quoted(worker.worker_id)}{rank}}}"


def meta(worker: WorkerKey) -> str:
    """Return the key of the worker's `meta`."""
    return f"{PREFIX}{worker_tag(worker)}:meta"


def log(worker: WorkerKey) -> str:
    """Return the key of the worker's log."""
    return f"{PREFIX}{worker_tag(worker)}:log"


def lease(worker: WorkerKey) -> str:
    """Return the key of the worker's lease."""
    return f"{PREFIX}{worker_tag(worker)}:lease"


def response_owner(response_id: str) -> str:
    """Return the key of the owner of a stored response."""
    return f"{PREFIX}response:{_quoted(response_id)}"


def savings(day: str) -> str:
    """Return the key of a day's savings; `day` is like 2026-11-27."""
    return f"{_HISTORY}day:{day}"


def savings_field(model: str, column: str) -> str:
    """Return the field of a day's savings that holds one sum of a model."""
    return f"{_quoted(model)}:{column}"


def parse_savings_field(field: bytes) -> tuple[str, str]:
    """Return the model and the sum that a field of a day's savings names. Raises ValueError if no router writes it."""
    model, _, column = field.decode("ascii").partition(":")
    if savings_field(_unquoted(model), column) != field.decode("ascii"):
        raise ValueError(f"{field!r} names no sum")
    return _unquoted(model), column


def history_writer(name: str) -> str:
    """Return the key that holds the number of the last batch that a process wrote to the history."""
    return f"{_HISTORY}writer:{_quoted(name)}"


def router_lease(token: str) -> str:
    """Return the key of a router process's lease."""
    return f"{PREFIX}router:{_quoted(token)}"


def copies(worker: WorkerKey, epoch: str) -> str:
    """Return the key of the numbers of copies in `epoch`."""
    return f"{PREFIX}{worker_tag(worker)}:{_quoted(epoch)}:copies"


def of_epochs(worker: WorkerKey) -> str:
    """Return the pattern of the keys of all epochs of `worker`. Its other keys have one part fewer."""
    return f"{PREFIX}{worker_tag(worker)}:*:*"


def residents(worker: WorkerKey, epoch: str, place: Place) -> str:
    """Return the key of the block hashes that `worker` held at `place` of `epoch` at its checkpoint."""
    return f"{PREFIX}{worker_tag(worker)}:{_quoted(epoch)}:{place_text(place)}"


def registry(model: str, prefix: str = PREFIX) -> str:
    """Return the key of a model's registrations, in the schema of `prefix`."""
    return f"{prefix}{{{_quoted(model)}}}:workers"


def registry_key_parts() -> tuple[str, str]:
    """Return the parts of a `registry` key before and after the quoted model."""
    before, _, after = registry("*").partition(_quoted("*"))
    return before, after


def is_model_member(member: bytes) -> bool:
    """Return whether `model_member` can have written this."""
    try:
        parse_model_member(member)
    except ValueError:
        return False
    return True


def models(prefix: str = PREFIX) -> str:
    """Return the key of the models that have workers, in the schema of `prefix`."""
    return f"{prefix}models"


def model_member(model: str) -> str:
    """Return the member of `models` that stands for `model`."""
    return _quoted(model)


def parse_number(data: bytes) -> int:
    """Return a number of 0 or more from its stored form.

    Raises ValueError for any other text; `int` alone would also take spaces, signs and `1_0`.
    """
    if _NUMBER.fullmatch(data) is None or (number := int(data)) > _UINT64_MAX:
        raise ValueError(f"{data!r} is no number")
    return number


def parse_model_member(member: bytes) -> str:
    """Return the model of a member of `models`. Raises ValueError for values that `model_member` never writes."""
    model = _unquoted(member.decode("ascii"))
    if model_member(model) != member.decode("ascii"):
        raise ValueError(f"{member!r} names no model")
    return model


def registry_field(worker: WorkerKey) -> str:
    """Return the field of `registry` that stands for `worker`."""
    return f"{_quoted(worker.worker_id)}@{worker.dp_rank}"


def parse_registry_field(model: str, field: bytes) -> WorkerKey:
    """Return the worker of a field of `registry`. Raises ValueError for values that `registry_field` never writes."""
    worker_id, _, rank = field.decode("ascii").rpartition("@")
    worker = WorkerKey(model, _unquoted(worker_id), parse_number(rank.encode()))
    if registry_field(worker) != field.decode("ascii") or worker.dp_rank > MAX_DP_RANK:
        raise ValueError(f"{field!r} names no worker")
    return worker


def place_text(place: Place) -> str:
    """Return `Place.text` with medium and owner quoted: the same for ordinary names, unambiguous for all."""
    group = "-" if place.group_idx is None else str(place.group_idx)
    owner = "" if place.ownership is None else f":{_quoted(place.ownership)}"
    return f"g{group}:{_quoted(place.medium)}{owner}"


def parse_place(text: str) -> Place:
    """Return the place that `place_text` wrote as `text`. Raises ValueError for texts that it never writes."""
    group, medium, *owner = text.split(":")
    place = Place(
        None if group == "g-" else parse_number(group[1:].encode()),
        _unquoted(medium),
        _unquoted(owner[0]) if owner else None,
    )
    if place_text(place) != text:
        raise ValueError(f"{text!r} names no place")
    return place


def copies_field(place: Place, block_hash: int) -> bytes:
    """Return the field of `copies` that stands for a block at a place."""
    return place_text(place).encode("ascii") + block_hash.to_bytes(8, "big")


def parse_copies_field(field: bytes) -> tuple[Place, int]:
    """Return the place and the block hash of a field of `copies`. Raises ValueError."""
    return parse_place(field[:-8].decode("ascii")), int.from_bytes(field[-8:], "big")
