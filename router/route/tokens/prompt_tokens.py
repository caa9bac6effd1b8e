# SPDX-License-Identifier: Apache-2.0
"""The known tokens of one request, and the error that says why tokens are not known."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.multimodal import Items

# The source of the ids: the client, an engine's render endpoint, an engine's /tokenize, a tokenizer in this process, or
# none.
Source = Literal["given", "render", "tokenize", "local", "none"]

# The reasons why tokens are not known; labels of a metric.
Reason = Literal[
    "timeout",  # not found before the deadline
    "busy",  # too many requests wait for tokens
    "no_engine",  # no engine can be queried, and this process has no tokenizer for the model
    "unreachable",  # the engine did not answer, or not with tokens
    "unauthorized",  # the engine wants an API key that it was not given
    "refused",  # the engine says that the request is wrong
    "unverified",  # nothing that answers is known to answer as the engine would
    "unsupported",  # a path, or a field of the request, that only the engine itself can turn into tokens
    "not_looked_up",  # a path, a list or a field for which the router never looks for tokens, whatever the settings
    "media",  # images, audio or video: known up to the first of them at most
    "embeds",  # prompt_embeds have no token ids
]

# English text has some four characters a token, and so have JSON and code. It is an estimate for load, never for
# credit.
BYTES_PER_TOKEN = 4


class FoundTokens(NamedTuple):
    """All tokens of a prompt (int64), their source, and the images and other media among them."""

    ids: NDArray[np.int64]
    source: Source
    items: Items = ()


class Prompt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request's prompt, with its tokens as far as they are known."""

    # Length of the prompt; an estimate where not all ids are known.
    num_tokens: int
    # The known ids from the beginning (int64), as the engine will have them; None if none is known.
    token_ids: NDArray[np.int64] | None
    source: Source
    # Why some token ids are not known, and how to fix that.
    problem: str = ""
    # The number of known ids if not all are known; None otherwise.
    known_tokens: int | None = None
    # The kind of problem, None if there is none.
    reason: Reason | None = None
    # Whether the engine says that the request itself is wrong; `problem` has its message.
    refused: bool = False
    # Whether the ids may be sent in place of the text, because all engines of the model are known to make the same ids
    # of a text.
    replaces: bool = False
    # Images and other media among the ids.
    items: Items = ()
    # Whether a queried engine may have begun to process the request and then failed to answer.
    broke_engine: bool = False
    # The number of prompts, of which `num_tokens` is the sum.
    num_prompts: int = 1
    # The prompts of a list that were looked up; the last one is the list's last prompt. Empty for one prompt.
    parts: tuple[Prompt, ...] = ()
    # Whether the length of the list's other prompts is exact.
    others_counted: bool = False

    def question(self, model: str, **others: Any) -> Question:
        """Return the question to the index for this prompt's known tokens and length.

        Args:
            model: The model of the prompt.
            **others: Further fields of `Question`.
        """
        if self.token_ids is None or not len(self.token_ids):
            if self.num_prompts > 1:
                others |= self._list_fields(model, others)
            return Question(model, self.num_tokens, block_hashes=np.empty(0, np.uint64), **others)
        return Question(model, self.num_tokens, token_ids=self.token_ids, items=self.items, **others)

    def _list_fields(self, model: str, others: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the question for a list of prompts."""
        hashed = {name: others[name] for name in HASHED if name in others}
        return {
            "num_prompts": self.num_prompts,
            "parts": tuple(part.question(model, **hashed) for part in self.parts),
            "others_counted": self.others_counted,
        }


# The fields of a question that decide the hashes and the hits of each prompt.
HASHED = ("lora_name", "cache_salt", "without_cache")


class TokensUnknown(Exception):
    """The error for tokens that cannot be found, at least not in this way."""

    def __init__(self, reason: Reason, problem: str, *, broke_engine: bool = False, num_prompts: int = 1) -> None:
        super().__init__(problem)
        self.reason: Reason = reason
        self.problem = problem
        # As in `Prompt`: no other engine should be queried then.
        self.broke_engine = broke_engine
        self.num_prompts = num_prompts


def estimated_tokens(size_bytes: int) -> int:
    """Return the estimated number of tokens of this many bytes of text; at least one."""
    return max(1, size_bytes // BYTES_PER_TOKEN)
