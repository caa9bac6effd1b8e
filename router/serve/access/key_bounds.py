# SPDX-License-Identifier: Apache-2.0
"""The models and cache salts that an API key may name, and the salts that the router makes for it. Pure.

A hit, predicted or delivered, shows that somebody has sent this prefix to that model under that salt. With a key that
is bound to its own salts, or with salts that the router makes, a client learns this only about its own prompts.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.errors import BadQuestion, Forbidden
from kvrouter.router.serve.access.salt_maker import SaltMaker


class KeyBounds(msgspec.Struct, frozen=True):
    """The bounds of one key, or of one tenant that a request with it names. A field of None allows any value."""

    key: str
    """The key's name, for errors and for the key's share of the caches' memory; empty for a request without a key."""
    models: frozenset[str] | None = None
    """The names of models (their own names, not aliases) and of LoRA adapters."""
    cache_salts: frozenset[str] | None = None
    cache_salt: str | None = None
    """The salt that prompts without a salt get; it is also one of `cache_salts`."""
    foreign_salts: frozenset[str] = frozenset()
    """The salts that other keys give to their prompts. A request with this key may not name them."""
    maker: SaltMaker | None = None
    """The maker of the salts of all prompts; None if clients and keys name them."""
    tenant: str | None = None
    """The tenant that the key's entry or a request's header names; None: the key is its own tenant."""
    tenant_header: str | None = None
    """The header that requests with this key must name their tenant in, if the key speaks for several tenants."""
    is_operators: bool = False
    """Whether the key reads the events of all tenants, so that its questions may name any salt."""

    @property
    def binds(self) -> bool:
        """Whether engines must read the same model and salt as the router."""
        return bool(self.models is not None or self.salts_all or self.cache_salt or self.foreign_salts)

    @property
    def salts_all(self) -> bool:
        """Whether all prompts must have a salt, so that an engine that ignores salts must not get them."""
        return self.maker is not None or self.cache_salts is not None

    @property
    def caller(self) -> str:
        """The name of the client to which salts, responses and shares of memory belong: its tenant, or else its key.

        No key's name has a space, so none is the name of a tenant. Raises BadQuestion if a request must name its tenant
        and does not.
        """
        if self.tenant is not None:
            return f"tenant {self.tenant}"
        if self.tenant_header is not None:
            raise BadQuestion(
                f"the request names no tenant: send its name in the header {self.tenant_header}, from which this router makes "
                "the cache salt",
                code="tenant_missing",
            )
        return self.key

    def salted(self, cache_salt: str | None) -> str | None:
        """Return the salt that a prompt gets: the one made here, else the client's own, else the key's.

        Raises BadQuestion as `caller` does.
        """
        if self.maker is not None:
            return self.maker.make(self.caller, cache_salt)
        return cache_salt or self.cache_salt

    def asked_salt(self, cache_salt: str | None) -> str | None:
        """Return the salt of a question: as `salted`, but a salt that an operator names counts. Raises BadQuestion."""
        return cache_salt if cache_salt and self.is_operators else self.salted(cache_salt)

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
        """Raise Forbidden unless the key may use a salt that is no text, such as a list with one for each prompt.

        Raise BadQuestion if the salt is to be combined with that of the tenant.
        """
        if self.maker is not None:
            if self.maker.combines:
                raise BadQuestion(
                    "cache_salt is no text: send one text, and prompts with different salts as separate requests",
                    code="invalid_cache_salt",
                )
            return
        texts = [salt for salt in salts if isinstance(salt, str)] if isinstance(salts, list) else []
        is_readable = isinstance(salts, list) and len(texts) == len(salts)
        if self.cache_salts is None and (
            not self.foreign_salts or (is_readable and self.foreign_salts.isdisjoint(texts))
        ):
            return
        raise Forbidden(
            f"the API key {self.key} may not use every cache salt, and the cache_salt of this request is no text: send one "
            "text, and prompts with different salts as separate requests",
            code="salt_not_allowed",
        )

    def unsalted(self, model: str, path: str) -> Forbidden:
        """Return the error for a path at which engines ignore the salt that every prompt must have."""
        if self.maker is not None:
            return Forbidden(
                f"this router makes the cache salts, and engines of {model!r} ignore `cache_salt` at {path}, so that tenants "
                "would share this prompt's cache: send it to /v1/chat/completions or /v1/completions",
                code="salt_not_allowed",
            )
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
        if self.maker is not None:
            if hashed and not self.is_operators:
                raise Forbidden(
                    "this router makes the cache salts, and block hashes do not show whose salt they have: send token ids in "
                    "place of block hashes",
                    code="salt_not_allowed",
                )
            return
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


def made_salt(bounds: KeyBounds | None, cache_salt: str | None) -> str:
    """Return a prompt's salt if the router has made it, else ""."""
    return "" if bounds is None or bounds.maker is None else cache_salt or ""
