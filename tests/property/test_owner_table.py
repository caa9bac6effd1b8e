# SPDX-License-Identifier: Apache-2.0
"""The table of the owners of responses beside a plain model: expiry, bound and order, whatever happens when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.owners.owner_table import OwnerTable
from kvrouter.router.route.owners.response_owner import ResponseOwner, packed, unpacked

MAX_COUNT, TTL_S = 4, 10.0

ids = st.sampled_from("abcdefgh")
owners = st.builds(
    ResponseOwner,
    # Names come from the wire, where a text may hold a lone surrogate.
    st.builds(WorkerKey, st.text(min_size=1), st.text(min_size=1), st.integers(0, 9)),
    st.text(alphabet="abc._-", max_size=5),
    st.none() | st.floats(0, 2e9),
    st.integers(0, 2**40),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ids, owners, st.booleans()),
        st.tuples(st.just("drop"), ids),
        st.tuples(st.just("wait"), st.floats(0, 6)),
    ),
    max_size=40,
)


@given(steps)
def test_the_table_forgets_exactly_what_is_too_old_or_has_no_room(taken: list[tuple[object, ...]]) -> None:
    now_s = 0.0
    table = OwnerTable(lambda: now_s, max_count=MAX_COUNT, ttl_s=TTL_S)
    # The known responses, the oldest first.
    known: dict[str, tuple[ResponseOwner, bool, float]] = {}
    for step in taken:
        if step[0] == "wait":
            now_s += step[1]  # type: ignore[operator]
        elif step[0] == "drop":
            table.drop(str(step[1]))
            known.pop(str(step[1]), None)
        else:
            _, response_id, owner, made_here = step
            assert isinstance(response_id, str) and isinstance(owner, ResponseOwner) and isinstance(made_here, bool)
            known = {name: entry for name, entry in known.items() if entry[2] > now_s}
            known.pop(response_id, None)
            known[response_id] = (owner, made_here, now_s + TTL_S)
            expected = None
            if len(known) > MAX_COUNT:
                oldest_id = next(iter(known))
                expected = oldest_id if known.pop(oldest_id)[1] else None
            assert table.put(response_id, owner, made_here=made_here) == expected
        assert len(table) <= MAX_COUNT
        for response_id in "abcdefgh":
            entry = known.get(response_id)
            assert table.find(response_id) == (entry[0] if entry is not None and entry[2] > now_s else None)


@given(owners)
def test_an_owner_is_read_as_it_was_written(owner: ResponseOwner) -> None:
    assert unpacked(packed(owner)) == owner
