# SPDX-License-Identifier: Apache-2.0
"""The models and cache salts that an API key may name. Pure.

A hit, predicted or delivered, shows that somebody has sent this prefix to that model under that salt. With a key that
is bound to its own salts, a client learns this only about its own prompts.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.errors import Forbidden


class KeyBounds(msgspec.Struct, frozen=True):
    """The bounds of one key. A field of None means that the key may name any."""

    key: str
    """The key's name, for errors and for the key's share of the caches' memory."""
    models: frozenset[str] | None = None
    """The names of models (their own names, not aliases) and of LoRA adapters."""
    cache_salts: frozenset[str] | None = None
    cache_salt: str | None = None
    """The salt that prompts without a salt get; it is also one of `cache_salts`."""
    foreign_salts: frozenset[str] = frozenset()
    """The salts that other keys give to their prompts. A request with this key may not name them."""

    @property
    def binds(self) -> bool:
        """Whether the key is kept from some models or salts."""
        return bool(self.models is not None or self.cache_salts is not None or self.cache_salt or self.foreign_salts)

    def salted(self, cache_salt: str | None) -> str | None:
        """Return the salt that a prompt gets: the client's own, or the key's if the client sent none."""
        return cache_salt or self.cache_salt

    def check_model(self, model: str, lora_name: str | None) -> None:
        """Raise Forbidden unless the key may name this model or, if there is one, this LoRA adapter."""
        name = lora_name or model
        if self.models is not None and name not in self.models:
            raise Forbidden(
                f"the API key {self.key} is bound to other models than {name!r}: name one of its own, or add this one to its "
                "`models` in the router's api_keys_file",
                code="model_not_allowed",
            )

    def check_other_adapter(self, field: str) -> None:
        """Raise Forbidden if the key is bound to models, and a request names an adapter in this field, not in `model`."""
        if self.models is not None:
            raise Forbidden(
                f"the API key {self.key} is bound to models, and {field} may name an adapter that is none of them: name the "
                "adapter as `model`",
                code="model_not_allowed",
            )

    def check_other_salt(self, salts: object) -> None:
        """Raise Forbidden unless the key may use this salt that is no text, such as a list with one for each prompt."""
        texts = [salt for salt in salts if isinstance(salt, str)] if isinstance(salts, list) else []
        is_readable = isinstance(salts, list) and len(texts) == len(salts)
        if self.cache_salts is None and (
            not self.foreign_salts or (is_readable and self.foreign_salts.isdisjoint(texts))
        ):
            return
        raise Forbidden(
            f"the API key {self.key} may not use every cache salt, and the cache_salt of this request is no text: send one "
            "text, and each prompt of a list with another salt as a request of its own",
            code="salt_not_allowed",
        )

    def unsalted(self, model: str, path: str) -> Forbidden:
        """Return the error for a path at which engines ignore the salt that this key must name."""
        return Forbidden(
            f"the API key {self.key} is bound to its own cache salts, and engines of {model!r} ignore `cache_salt` at {path}, "
            "so that other keys would share this prompt's cache: send it to /v1/chat/completions or /v1/completions",
            code="salt_not_allowed",
        )

    def check_salt(self, cache_salt: str | None, *, hashed: bool = False) -> None:
        """Raise Forbidden unless the key may use this cache salt.

        Args:
            cache_salt: The salt of the request, or None if it has none.
            hashed: Whether the prompt came as block hashes, from which the salt cannot be seen.
        """
        if cache_salt in self.foreign_salts and self.cache_salts is None:
            raise Forbidden(
                f"the cache_salt of this request belongs to another API key, whose cache {self.key} may not read: send "
                "another salt, or add it to the `cache_salts` of this key in the router's api_keys_file",
                code="salt_not_allowed",
            )
        if self.cache_salts is None or (cache_salt in self.cache_salts and not hashed):
            return
        remedy = "send token ids in place of block hashes" if hashed else "send one of these as `cache_salt`"
        raise Forbidden(
            f"the API key {self.key} is bound to its own cache salts: {remedy}, or change its `cache_salts` in the router's "
            "api_keys_file",
            code="salt_not_allowed",
        )
