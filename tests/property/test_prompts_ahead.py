# SPDX-License-Identifier: Apache-2.0
"""The reuse that is expected beyond a hit, against its laws and against the reuse of simulated engines."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import concurrent_prediction
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.resume_rule import ResumeRule, resume_rule
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.route.load.prefix_tree import PromptPrefixes, names_of, step_of
from kvrouter.router.route.load.prompts_ahead import NOTHING, Coming, PromptAhead, PromptsAhead
from kvrouter.router.route.placement.expected_reuse import ReuseShares
from kvrouter.simulator.cache.shapes import SHAPES

BLOCK_TOKENS = 16
WORKER, OTHER = WorkerKey("m", "w0"), WorkerKey("m", "w1")
ANYWHERE = ResumeRule(BLOCK_TOKENS, None)
tokens = st.integers(0, 10_000)
# Prompts are paths in a small tree: runs of equal tokens, each of a kind and a length.
prompts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), min_size=1, max_size=4)


def ids_of(path: list[tuple[int, int]]) -> list[int]:
    return [1 + kind for kind, length in path for _ in range(length)]


def prepared(question: Question) -> PromptAhead:
    prefixes = PromptPrefixes([names_of(question, BLOCK_TOKENS, 1)], step_of(question, BLOCK_TOKENS))
    return PromptAhead(question, prefixes, BLOCK_TOKENS)


def by_tokens(ids: list[int]) -> PromptAhead:
    question = Question("m", len(ids), token_ids=np.array(ids, np.int64))
    return prepared(question)


def by_hashes(ids: list[int]) -> PromptAhead:
    """Return the same prompt with only the hashes of its blocks known; each hash covers all blocks up to its own."""
    hashes, value = [], 0
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        value = hash((value, tuple(ids[end - BLOCK_TOKENS : end]))) & (2**64 - 1)
        hashes.append(value)
    question = Question("m", len(ids), block_hashes=np.array(hashes, np.uint64))
    return prepared(question)


def common(some: list[int], others: list[int]) -> int:
    """Return how many leading tokens are the same."""
    return next(
        (number for number, (token, other_token) in enumerate(zip(some, others, strict=False)) if token != other_token),
        min(len(some), len(others)),
    )


@given(some=prompts, others=prompts)
def test_what_two_prompts_have_in_common_is_found_to_the_token_or_the_block(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    some_ids, other_ids = ids_of(some), ids_of(others)
    same = common(some_ids, other_ids)
    assert by_tokens(some_ids).common_tokens(by_tokens(other_ids)) == same
    assert by_hashes(some_ids).common_tokens(by_hashes(other_ids)) == same - same % BLOCK_TOKENS


@given(
    num_tokens=st.integers(1, 10_000),
    hit=tokens,
    full_attention=tokens,
    resumable=tokens,
    computed=tokens,
    answers=st.lists(st.tuples(tokens, tokens, tokens, tokens), max_size=8),
)
def test_an_expectation_is_never_below_the_hit_nor_above_what_can_be_reused(
    num_tokens: int,
    hit: int,
    full_attention: int,
    resumable: int,
    computed: int,
    answers: list[tuple[int, int, int, int]],
) -> None:
    shares = ReuseShares()
    for known_hit, can_be, will_be, reused in answers:
        shares.learn("m", shares.expect("m", 10_001, known_hit, 0, Coming(can_be, will_be, ())), reused)
    hit = min(hit, num_tokens - 1)
    expected = shares.expect("m", num_tokens, hit, full_attention, Coming(resumable, computed, ()))
    assert hit == expected.hit <= expected.tokens <= max(hit, num_tokens - 1)
    assert expected.tokens <= expected.computed
    if max(resumable, computed) <= hit:
        assert expected.tokens == hit
    assert shares.expect("m", num_tokens, hit, full_attention, NOTHING).tokens == hit


@given(paths=st.lists(prompts, min_size=1, max_size=12), path=prompts, gone=st.sets(st.integers(0, 11)))
def test_what_is_coming_is_the_longest_beginning_of_any_prompt_that_is_still_ahead(
    paths: list[list[tuple[int, int]]], path: list[tuple[int, int]], gone: set[int]
) -> None:
    ahead = PromptsAhead()
    sent = [by_tokens(ids_of(other)) for other in paths]
    for prompt in sent:
        ahead.add(WORKER, prompt, 10.0)
    for number in gone & set(range(len(sent))):
        ahead.settle(WORKER, sent[number].prefixes, 1.0)
    ids = ids_of(path)
    live = [ids_of(other) for number, other in enumerate(paths) if number not in gone]
    # Only the latest eight of the prompts that begin alike are compared.
    alike = [other for other in live if other[:16] == ids[:16] and len(other) > 16 and len(ids) > 16][-8:]
    longest = max((min(common(ids, other), len(ids) - 1) for other in alike), default=0)
    coming = ahead.coming(WORKER, by_tokens(ids), ANYWHERE, 5.0)
    assert (coming.computed, coming.resumable) == (longest - longest % BLOCK_TOKENS,) * 2
    assert ahead.coming(OTHER, by_tokens(ids), ANYWHERE, 5.0) is NOTHING
    ahead.expire(10.0)
    assert len(ahead) == 0 and ahead.coming(WORKER, by_tokens(ids), ANYWHERE, 5.0) is NOTHING


def test_what_is_remembered_of_prompts_and_of_models_is_bounded() -> None:
    ahead = PromptsAhead(max_prompts=3, max_units=1_000)
    sent = [by_tokens([number] * 300) for number in range(1, 6)]
    for prompt in sent:
        ahead.add(WORKER, prompt, 10.0)
    assert len(ahead) == 3
    ahead.add(WORKER, by_tokens([9] * 900), 10.0)
    assert len(ahead) == 1, "the oldest give way to a long one"
    ahead.add(WORKER, by_tokens([8] * 2_000), 10.0)
    assert len(ahead) == 0, "one that is longer than all that may be kept is not kept"
    ended = [by_tokens([7] * 300) for _ in range(3)]
    for prompt in ended:
        ahead.add(WORKER, prompt, 10.0)
        ahead.settle(WORKER, prompt.prefixes, 1.0)
    assert ahead.coming(WORKER, by_tokens([7] * 300), ANYWHERE, 5.0).computed == 0
    assert len(ahead) == 0, "what has ended is looked at once"
    shares = ReuseShares(max_models=2)
    for number in range(4):
        shares.learn(f"m{number}", shares.expect("m", 100, 0, 0, Coming(64, 64, ())), 0)
    assert len(shares) == 2


def test_a_rule_follows_from_the_groups() -> None:
    def rule(*groups: Group, **spec: object) -> ResumeRule | None:
        return resume_rule(build_catalog(groups, "learned", CatalogSpec(**spec)))  # type: ignore[arg-type]

    full, window = Group(0, "full_attention", 16), Group(1, "sliding_window", 16, 128)
    assert rule(full) == ResumeRule(16, None)
    assert rule(full, Group(1, "chunked_local_attention", 16, None, 64)) == ResumeRule(16, None)
    assert rule(full, window) == ResumeRule(16, 128)
    assert rule(full, Group(1, "mamba", 16)) == ResumeRule(16, 0)
    assert rule(full, window, whole_windows=True) == ResumeRule(16, None), "an engine that keeps windows everywhere"
    assert rule(Group(0, "encoder_only_attention", 16)) is None


def test_a_sparse_model_resumes_at_checkpoints_alone() -> None:
    sparse = ResumeRule(16, 128)
    assert sparse.resumable_tokens(1_000, (), 900) == 0
    assert sparse.resumable_tokens(1_000, (320, 640), 500) == 320
    assert sparse.resumable_tokens(1_000, (), 999) == 992
    assert sparse.resumable_tokens(992, (), 992) == 976, "its last token is computed in any case"
    assert sparse.resumable_tokens(120, (), 70) == 64, "its window covers all of a short prompt"


def test_shares_are_learned_from_what_engines_report() -> None:
    shares = ReuseShares()
    coming = Coming(512, 1_024, ())
    assert shares.expect("m", 2_000, 0, 0, coming).tokens == 512
    for _ in range(600):
        shares.learn("m", shares.expect("m", 2_000, 0, 0, coming), 1_024)
    assert shares.expect("m", 2_000, 0, 0, coming).tokens > 0.95 * 1_024, "an engine that keeps all windows"
    for _ in range(2_000):
        shares.learn("m", shares.expect("m", 2_000, 0, 0, coming), 0)
    assert shares.expect("m", 2_000, 0, 0, coming).tokens < 0.05 * 1_024, "an engine whose cache is too small"
    assert shares.expect("other", 2_000, 0, 0, coming).tokens == 512


@pytest.mark.parametrize("traffic", concurrent_prediction.TRAFFIC)
@pytest.mark.parametrize("shape", SHAPES)
def test_simulated_engines_reuse_what_is_expected(shape: str, traffic: str) -> None:
    options = argparse.Namespace(requests=60, rate=4.0, cache_tokens=400_000, cpu_tokens=0)
    samples = concurrent_prediction.run(shape, traffic, 7, options)
    assert len(samples) == options.requests
    assert all(sample.exact <= sample.expected for sample in samples)
    assert [sample.expected for sample in samples] == [sample.received for sample in samples]
    beyond = sum(sample.received > sample.exact for sample in samples)
    assert beyond == 0 if traffic == "alone" else beyond > 3
