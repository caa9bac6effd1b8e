# SPDX-License-Identifier: Apache-2.0
"""The reader of proxied requests: it turns a client's request into a placement request.

A placement request has the model, the prompt's tokens, the session, and the length of the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar
from urllib.parse import unquote

import msgspec

import kvrouter.router.serve.proxy.headers as h
from kvrouter.router.base.common.errors import BadQuestion, UnknownResponse
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.json_arrays import LONG_BODY_BYTES
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.observe.quality.request_watch import RequestWatch
from kvrouter.router.route.owners.response_owner import ResponseOwner
from kvrouter.router.route.owners.response_owners import ResponseOwners
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.tokens.client_body import (
    RESPONSES_PATH,
    ClientBody,
    is_given,
    is_text,
    read_as_python,
    read_client_body,
    value_of,
)
from kvrouter.router.route.tokens.forward_ids import forwarded_body
from kvrouter.router.route.tokens.prompt_tokens import Prompt, estimated_tokens
from kvrouter.router.route.tokens.proxied_paths import AUDIO, WITH_PROMPT, WITHOUT_PROMPT
from kvrouter.router.route.tokens.without_cache import engines_without_cache
from kvrouter.router.serve.access.key_bounds import made_salt
from kvrouter.router.serve.proxy.attempts import Attempts
from kvrouter.router.serve.proxy.downstream import ClientRequest
from kvrouter.router.serve.proxy.foreign_content import check_content
from kvrouter.router.serve.proxy.form_body import read_form_model
from kvrouter.router.serve.proxy.kv_source import LATER_PATHS, ClientSources, may_name_source, may_pull, without_sources
from kvrouter.router.serve.proxy.kv_transfer_params import is_received
from kvrouter.router.serve.proxy.openai_body import (
    Changes,
    OpenAIBody,
    changed_body,
    openai_body,
    repeated_field,
    with_fields,
)

# SGLang's other name of an adapter, besides `model`.
ADAPTER_FIELD = "lora_path"
# The fields that the router checks for a key, so engines must not read other values of them.
RULED_FIELDS = ("model", "cache_salt", "previous_response_id", "request_id", ADAPTER_FIELD)
# The fields of `/v1/responses` that name a response, and the rule for them where a client has no key. Other clients of the
# same engines may have one.
RESPONSE_IDS = ("previous_response_id", "request_id")
IDS_RULE = "a response belongs to the client that made it, so router and engine must read the same ids"

# Whisper makes 50 tokens of a second, which takes 32 kB in a WAV file and 8 to 16 kB in an MP3 file. This estimate is
# used for the load alone.
AUDIO_BYTES_PER_TOKEN = 512

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Tokens(Protocol):
    """The part of `TextTokenizer` that the reader uses."""

    async def prompt(
        self, path: str, model: str, body: ClientBody, *, authorization: str | None = None, space: str = ""
    ) -> Prompt:
        """Return the prompt's tokens, or an estimate of their number. Raises BadQuestion if the body cannot be read."""
        ...


class Request:
    """One request under way."""

    def __init__(self, client: ClientRequest, watch: RequestWatch, request_id: bytes) -> None:
        self.client = client
        # Observes each step of the request.
        self.watch = watch
        self.request_id = request_id
        # The worker that the client requires, by its percent-encoded route name.
        self.pin = h.header(client.headers, h.PIN)
        self.attempts = Attempts(client.path, pinned=self.pin is not None)
        # The body and headers for the engine.
        self.body = client.body
        self.headers = client.headers
        # The client's body by its fields, once it is read; None for a form.
        self.client_body: ClientBody | None = None
        # The method for the engine, and the path with the query.
        self.method = "POST"
        self.url = client.url
        # Whether the engine may keep the answer as a response that later requests name.
        self.may_be_stored = False
        # The response that the body continues and whose owner is known, or None.
        self.former_id: str | None = None
        # The place that the request has now, or None.
        self.placement: Placement | None = None

    def record(self) -> None:
        """Record the placement: once the request is written to its worker, or before something else may run."""
        if self.placement is not None:
            self.placement.record()

    def caller(self) -> int:
        """Return a number for the API key and the session of the request, 0 without both."""
        bounds, session = self.client.bounds, h.header(self.client.headers, h.SESSION_ID)
        return 0 if bounds is None and session is None else hash((bounds and (bounds.key, bounds.tenant), session))


class RequestReader:
    """The reader of all requests of one proxy."""

    def __init__(
        self,
        tokens: Tokens,
        resolve: Callable[[str], ServedModel],
        models: Callable[[], list[str]],
        takes_salt: Callable[[str, str], bool],
        authorization: Callable[[h.Headers], bytes | None],
        owners: ResponseOwners,
        sources: ClientSources,
    ) -> None:
        self._tokens = tokens
        # Returns the model that a request's `model` means.
        self._resolve = resolve
        # Returns the registered models.
        self._models = models
        # Returns whether all engines of a model apply `cache_salt` at a path.
        self._takes_salt = takes_salt
        # Returns the Authorization that engines get for a client's headers.
        self._authorization = authorization
        self._owners = owners
        self._sources = sources

    async def read(self, request: Request) -> PlacementRequest:
        """Return the placement request, and set `request.body` and `request.headers` for the engine.

        Raises BadQuestion if the body or its model is not valid, UnknownModel if no worker serves the model, Forbidden if
        the client's key may not use it, and the errors of `_owner_of`.
        """
        client = request.client
        if client.path in AUDIO:
            return self._read_form(request)
        client_body, body = await self._body(client)
        request.client_body = client_body
        request.headers = h.as_json(client.headers)
        name = self._name_of(body.model)
        served = self._resolve(name)
        changes: Changes = {}
        if client.bounds is not None:
            if body.has_other_salt:
                client.bounds.check_other_salt(body.cache_salt)
            if is_given(client_body.fields, ADAPTER_FIELD):
                client.bounds.check_other_adapter(ADAPTER_FIELD)
            if client.bounds.salts_all and not client.bounds.is_operators:
                await _in_thread(client.body, check_content, client_body.fields)
            if client.path not in WITHOUT_PROMPT:
                salt = client.bounds.salted(body.salt)
                if salt is not None and salt != body.salt:
                    body.cache_salt = changes["cache_salt"] = salt
        self._check_bounds(client, served, body.salt)
        if name not in (served.model, served.lora_name) and body.model is not None:
            # The engine does not know the aliases that this router gives its models.
            changes["model"] = served.lora_name or served.model
        names_source = False
        if may_name_source(client_body.fields):
            pruned, named = await _in_thread(client.body, without_sources, client_body.fields)
            names_source = bool(named) and self._sources.trusted
            if named and not names_source:
                self._sources.count(named)
                changes |= pruned
                request.client_body = client_body = changed_body(client_body, pruned)
        if changes:
            request.body = await _in_thread(client.body, with_fields, client_body.raw, changes)
        owner = None
        if client.path == RESPONSES_PATH:
            owner = await self._owner_of(request, client_body, served)
        question = await self._question(request, client_body, body, served)
        placement_request = _placement_request(request, question, body.limit_tokens, owner)
        if names_source or not may_pull(client.path, client_body):
            placement_request = msgspec.structs.replace(placement_request, may_pull=False)
        elif client.path in LATER_PATHS:
            placement_request = msgspec.structs.replace(placement_request, pulls_declared=True)
        answers = body.answers
        if answers == 1 and not body.use_beam_search and not is_received(client_body):
            return placement_request
        return msgspec.structs.replace(placement_request, answers=answers, is_comparable=False)

    async def _body(self, client: ClientRequest) -> tuple[ClientBody, OpenAIBody]:
        """Return the client's body and its fields.

        The engine judges a body that its own reader may understand, unless a rule must hold for what the engine reads.
        Raises BadQuestion if there is such a rule, or if the body is not JSON.
        """
        rule = _rule_of(client)
        try:
            client_body = await _in_thread(client.body, read_client_body, client.path, client.body)
            body = openai_body(client_body)
        except BadQuestion as error:
            python_body = await _in_thread(client.body, read_as_python, client.path, client.body)
            if python_body is None:
                raise
            if rule is not None:
                raise BadQuestion(f"{error.message}; {rule}: send JSON in UTF-8 (RFC 8259)", code=error.code) from None
            return python_body, openai_body(python_body, lambda field: json.loads(bytes(field)))
        names: tuple[str, ...] = RULED_FIELDS
        if rule is None and client.path == RESPONSES_PATH and not client_body.fields.keys().isdisjoint(RESPONSE_IDS):
            rule, names = IDS_RULE, RESPONSE_IDS
        if rule is not None:
            repeated = await _in_thread(client.body, repeated_field, client.body, names)
            if repeated is not None:
                text = f"the body has more than one field {repeated}; {rule}: send it once"
                raise BadQuestion(text, code="malformed_body")
        return client_body, body

    async def _owner_of(self, request: Request, body: ClientBody, served: ServedModel) -> ResponseOwner | None:
        """Return the owner of the response that a body of `/v1/responses` continues, or None if it continues none.

        Without API keys, a response that is not known is left to an engine.

        Raises:
            BadQuestion: An id of a response is no text that the router can read, and the client has a key.
            UnknownResponse: The client's key has no such response.
            OwnerGone: The response is gone with its worker.
            Conflict: The body's `request_id` is the id of a response of another caller.
            StoreDown: The response is not known here, and Redis does not answer.
        """
        client = request.client
        request.may_be_stored = bytes(memoryview(body.fields.get("store", b"true"))[: len(b"false") + 1]) != b"false"
        caller = caller_of(client)
        own_id, former_id = _text(body, "request_id", caller), _text(body, "previous_response_id", caller)
        if own_id is not None:
            # A client of a gateway has no key, and its engines may keep responses of keys.
            await self._owners.check_free(own_id, caller)
        if former_id is None:
            return None
        owner = await self._owners.find(former_id, caller)
        if owner is not None and owner.worker.model == served.model:
            request.attempts.pin()
            request.former_id = former_id
            return owner
        if owner is not None or caller:
            raise UnknownResponse(former_id)
        return None

    def _read_form(self, request: Request) -> PlacementRequest:
        """Return the placement request for a form with audio, whose number of tokens is estimated.

        No engine reads a cache salt from a form, so the router adds none, and refuses the forms of keys with salts.
        """
        client = request.client
        form = read_form_model(h.header(client.headers, b"content-type"), client.body)
        name = self._name_of(form.name)
        served = self._resolve(name)
        self._check_bounds(client, served, None)
        if name not in (served.model, served.lora_name) and form.name is not None:
            request.body = form.renamed(client.body, served.lora_name or served.model)
        prompt = Prompt(max(1, len(client.body) // AUDIO_BYTES_PER_TOKEN), None, "none")
        question = prompt.question(served.model, lora_name=served.lora_name, worker_ids=served.worker_ids)
        return _placement_request(request, question, None, None)

    async def _question(
        self, request: Request, client_body: ClientBody, body: OpenAIBody, served: ServedModel
    ) -> Question:
        """Return the question for the index, and put the prompt's token ids into `request.body` if possible."""
        client = request.client
        if client.path in WITHOUT_PROMPT:
            return Prompt(1, None, "none").question(served.model, worker_ids=served.worker_ids)
        if client.path not in WITH_PROMPT:
            prompt = Prompt(estimated_tokens(len(request.body)), None, "none")
            return prompt.question(
                served.model, cache_salt=body.salt, lora_name=served.lora_name, worker_ids=served.worker_ids
            )
        authorization = self._authorization(client.headers)
        try:
            if body.has_other_salt:
                raise BadQuestion("cache_salt is no text, so its hashes are not known")
            if body.salt is not None and not is_text(body.salt):
                body.cache_salt = None
                raise BadQuestion("cache_salt has half of a character, so its hashes are not known")
            prompt = await self._tokens.prompt(
                client.path,
                served.model,
                client_body,
                authorization=None if authorization is None else authorization.decode("latin-1"),
                space=made_salt(client.bounds, body.salt),
            )
        except BadQuestion as error:
            # The engine reports what is wrong with the body.
            prompt = Prompt(estimated_tokens(len(request.body)), None, "none", error.message)
        if prompt.broke_engine:
            request.attempts.tokens_failed()
        request.body = forwarded_body(client.path, request.body, prompt)
        return prompt.question(
            served.model,
            cache_salt=body.salt,
            lora_name=served.lora_name,
            worker_ids=served.worker_ids,
            without_cache=engines_without_cache(client_body),
        )

    def _name_of(self, model: Any) -> str:
        """Return the requested model's name, or the only model if the body names none.

        Raises BadQuestion if the body names no model and there are several, or if the name is not a non-empty string.
        """
        if isinstance(model, str) and model:
            return model
        models = self._models()
        if model is None and len(models) == 1:
            # vLLM does the same.
            return models[0]
        names = ", ".join(map(printable, models)) or "none yet"
        raise BadQuestion(f"model must name one of the registered models: {names}", code="invalid_model")

    def _check_bounds(self, client: ClientRequest, served: ServedModel, cache_salt: str | None) -> None:
        """Raise Forbidden unless the client's key may name this model and, where a prompt is cached, this salt."""
        bounds = client.bounds
        if bounds is None:
            return
        bounds.check_model(served.model, served.lora_name)
        if client.path in WITHOUT_PROMPT:
            return
        if bounds.salts_all and not self._takes_salt(served.model, client.path):
            raise bounds.unsalted(served.model, client.path)
        bounds.check_salt(cache_salt or None)


async def _in_thread(body: bytes, work: Callable[Args, Result], *args: Args.args, **options: Args.kwargs) -> Result:
    """Return the result of work on a body, which runs in a thread if the body is long."""
    if len(body) < LONG_BODY_BYTES:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)


def caller_of(client: ClientRequest) -> str:
    """Return the name of the client's tenant or API key; "" for a client without either, also as the owner of a response.

    Raises BadQuestion if the request must name its tenant and does not.
    """
    return "" if client.bounds is None else client.bounds.caller


def _rule_of(client: ClientRequest) -> str | None:
    """Return the rule for which router and engine must read the same body alike, or None if there is none."""
    bounds = client.bounds
    if bounds is not None and bounds.maker is not None:
        return "the cache salt is made here, so router and engine must read the same fields"
    if bounds is not None and bounds.binds:
        return (
            f"the API key {bounds.key} is bound to models or cache salts, so router and engine must read the same ones"
        )
    if client.path == RESPONSES_PATH and caller_of(client):
        return "a response belongs to the API key that made it, so router and engine must read the same ids"
    return None


def _text(body: ClientBody, name: str, caller: str) -> str | None:
    """Return a field of the body if it is a text, or None. The engine reports other values.

    Raises BadQuestion if only the engine may be able to read the text, and there is a caller whose responses it may name.
    """
    raw = body.fields.get(name)
    # A long value of another type would take long to decode.
    if raw is None or bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        text = value_of(raw)
        if isinstance(text, str):
            return text
        raise ValueError("it is too long for an id")
    except (msgspec.MsgspecError, ValueError):
        if caller:
            raise BadQuestion(f"{name} is no text in UTF-8: send the id of a response", code="malformed_body") from None
        return None


def _placement_request(
    request: Request, question: Question, max_tokens: int | None, owner: ResponseOwner | None
) -> PlacementRequest:
    session = h.header(request.client.headers, h.SESSION_ID)
    pinned: Pin | str | None = None if request.pin is None else unquote(request.pin.decode("latin-1"))
    if owner is not None:
        # No other worker has the response, whatever the client requires.
        pinned = Pin(owner.worker.worker_id, owner.worker.dp_rank)
    return PlacementRequest(
        question,
        session_id=None if session is None else session.decode("latin-1"),
        max_tokens=max_tokens,
        pinned=pinned,
        is_owned=owner is not None,
        conversation_tokens=0 if owner is None else owner.conversation_tokens,
        key_name=caller_of(request.client),
        request_id=request.request_id.decode("latin-1"),
    )
