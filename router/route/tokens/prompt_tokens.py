# SPDX-License-Identifier: Apache-2.0
"""The tokens of one request as far as they are known, and the error that says why they are not."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.multimodal import Items

# Where the ids come from: the client, an engine's render endpoint, an engine's /tokenize, a tokenizer here, or nowhere.
Source = Literal["given", "render", "tokenize", "local", "none"]

# Why tokens are not known; labels of a metric.
Reason = Literal[
    "timeout",  # not found before the deadline
    "busy",  # too many requests wait for tokens
    "no_engine",  # no engine can be queried, and there is no tokenizer here
    "unreachable",  # the engine did not answer, or not with tokens
    "unauthorized",  # the engine wants an API key that it was not given
    "refused",  # the engine says that the request is wrong
    "unverified",  # nothing that answers is known to answer as the engine would
    "unsupported",  # a path, or a field of the request, that only the engine itself can turn into tokens
    "media",  # images, audio or video: known up to the first of them at most
    "embeds",  # prompt_embeds have no token ids
]

# English text has some four characters a token, and so have JSON and code; an estimate for load, never for credit.
BYTES_PER_TOKEN = 4


class FoundTokens(NamedTuple):
    """All the tokens of a prompt (int64), where they come from, and the images and the like among them."""

    ids: NDArray[np.int64]
    source: Source
    items: Items = ()


class Prompt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """num_tokens: its length, an estimate where not all ids are known. token_ids: int64, as the engine will have them.

    known_tokens: the number of known ids, from the beginning, if not all are; token_ids then has only these. problem:
    why not all are known, with the fix. refused: the engine says that the request itself is wrong, in `problem`.
    replaces: the ids may be sent in place of the text, as all engines of the model are known to make the same of one.
    items: the images and the like among the ids. broke_engine: an engine that was queried may have started it, and did
    not answer."""

    num_tokens: int
    token_ids: NDArray[np.int64] | None
    source: Source
    problem: str = ""
    known_tokens: int | None = None
    reason: Reason | None = None
    refused: bool = False
    replaces: bool = False
    items: Items = ()
    broke_engine: bool = False

    def question(self, model: str, **others: Any) -> Question:
        """What to ask the index: for the tokens that are known, of a prompt of this length. others: further fields of
        Question."""
        if self.token_ids is None or not len(self.token_ids):
            return Question(model, self.num_tokens, block_hashes=np.empty(0, np.uint64), **others)
        return Question(model, self.num_tokens, token_ids=self.token_ids, items=self.items, **others)


class TokensUnknown(Exception):
    """The tokens cannot be found, at least not this way. broke_engine: as in `Prompt`; no other engine should be
    queried then."""

    def __init__(self, reason: Reason, problem: str, *, broke_engine: bool = False) -> None:
        super().__init__(problem)
        self.reason: Reason = reason
        self.problem = problem
        self.broke_engine = broke_engine


def estimated_tokens(size_bytes: int) -> int:
    """Estimated tokens of this many bytes of text; at least one."""
    return max(1, size_bytes // BYTES_PER_TOKEN)
