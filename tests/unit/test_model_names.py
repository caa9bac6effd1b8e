# SPDX-License-Identifier: Apache-2.0
"""Meanings of a request's `model`: models, aliases, adapters, and the workers that have them."""

from __future__ import annotations

import pytest

from kvrouter.router.base.common.errors import UnknownModel
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.engines.engine_lists import ServedModels, served_in
from kvrouter.router.model.workers.model_names import ModelNames, ServedModel, unserved_problem
from kvrouter.router.model.workers.registration import CatalogSpec, Registration

BASE, OTHER = "base", "other"


def worker(
    worker_id: str, model: str = BASE, rank: int = 0, lora: str | None = None, paths: dict[str, str] | None = None
) -> Registration:
    return Registration(
        worker=WorkerKey(model, worker_id, rank),
        url=f"http://{worker_id}:1",
        lora_name=lora,
        catalog=None if paths is None else CatalogSpec(lora_paths=paths),
    )


def names(*registrations: Registration, listed: dict[str, dict[str, str]] | None = None, **aliases: str) -> ModelNames:
    model_names = ModelNames(aliases)
    model_names.learn(registrations, listed or {})
    return model_names


def test_a_registered_model_is_found_by_its_name() -> None:
    assert names(worker("w0")).resolve(BASE) == ServedModel(BASE)


def test_an_alias_stands_for_a_model_or_an_adapter_and_wins_over_a_model_of_its_name() -> None:
    model_names = names(worker("w0", lora="style"), worker("w1", OTHER), gpt=BASE, nice="style", other=BASE)
    assert model_names.resolve("gpt") == ServedModel(BASE)
    assert model_names.resolve("nice") == ServedModel(BASE, "style", frozenset({"w0"}))
    assert model_names.resolve(OTHER) == ServedModel(BASE)


def test_an_adapter_belongs_to_the_workers_that_have_it() -> None:
    model_names = names(
        worker("w0", lora="style"),
        worker("w1", paths={"style": "/a"}),
        worker("w2"),
        worker("w3"),
        worker("w2", rank=1),
        listed={"http://w2:1": {"style": "/a", "tone": "/b"}},
    )
    assert model_names.resolve("style") == ServedModel(BASE, "style", frozenset({"w0", "w1", "w2"}))
    assert model_names.resolve("tone") == ServedModel(BASE, "tone", frozenset({"w2"}))


def test_an_alias_of_nothing_is_named_until_a_worker_serves_what_it_stands_for() -> None:
    aliases = {"gpt": BASE, "nice": "style", "gone": "nobody", BASE: "another"}
    registered = [worker("w0")]
    model_names = ModelNames(aliases)
    assert model_names.unserved_aliases() == aliases
    model_names.learn(registered, {})
    assert model_names.unserved_aliases() == {"nice": "style", "gone": "nobody", BASE: "another"}
    model_names.learn(registered, {"http://w0:1": {"style": "/a"}})
    assert model_names.unserved_aliases() == {"gone": "nobody", BASE: "another"}


def test_an_unknown_name_gets_an_error_with_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match="base, gpt, style"):
        names(worker("w0", lora="style"), gpt=BASE, gone="nobody").resolve("x")
    with pytest.raises(UnknownModel, match="none yet"):
        ModelNames({}).resolve("x")


def test_an_alias_without_workers_is_named_with_its_model() -> None:
    with pytest.raises(UnknownModel, match="'fast', an alias of 'gema'; registered models: base"):
        names(worker("w0"), fast="gema").resolve("fast")


def test_an_adapter_of_two_models_is_ambiguous() -> None:
    model_names = names(worker("w0", lora="style"), worker("w1", OTHER, lora="style"))
    with pytest.raises(UnknownModel) as caught:
        model_names.resolve("style")
    assert caught.value.code == "ambiguous_model"


def test_names_of_removed_workers_are_forgotten() -> None:
    model_names = names(worker("w0", lora="style"))
    model_names.learn([worker("w1", OTHER)], {})
    assert model_names.names() == [OTHER]
    with pytest.raises(UnknownModel):
        model_names.resolve("style")


def test_names_lists_every_name_that_a_request_may_use() -> None:
    assert names(worker("w0", lora="style"), gpt=BASE, gone="nobody").names() == [BASE, "gpt", "style"]


def test_an_engines_list_names_its_adapters_and_their_paths() -> None:
    answer = b"""{"object": "list", "data": [
        {"id": "base", "root": "/models/base", "parent": null, "max_model_len": 9},
        {"id": "style", "root": "/adapters/style", "parent": "base"}]}"""
    assert served_in(answer) == ServedModels(("base",), {"style": "/adapters/style"}, "/models/base")
    assert served_in(b'{"data": []}') == ServedModels()


def test_an_unserved_name_is_reported_with_the_flags_that_fix_it() -> None:
    problem = unserved_problem("gemma", ("google/gemma-3-27b-it", "other"), ())
    assert "serves google/gemma-3-27b-it, other" in problem and "--served-model-name gemma" in problem
    assert "model=google/gemma-3-27b-it" in problem and "--model-alias gemma=google/gemma-3-27b-it" in problem
    assert not unserved_problem("other", ("google/gemma-3-27b-it", "other"), ())
    assert not unserved_problem("style", ("base",), ("style",))
    assert not unserved_problem("gemma", (), ()), "the engine did not say"


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b'{"data": [{}]}', b'{"data": 3}', b"[" * 5000])
def test_an_answer_that_is_not_a_list_of_models_is_ignored(answer: bytes) -> None:
    assert served_in(answer) is None
