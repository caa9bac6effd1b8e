# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter explain`: which worker would get a prompt, and why."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, print_json, shaped
from kvrouter.router.base.common.errors import SettingError


@with_router
def explain(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="the model of a prompt, as registered")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="in place of a prompt: a request that was placed, by its x-request-id or its selection's id",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="FILE", help="token ids, separated by spaces, commas or lines; - for stdin")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="the prompt as text")] = None,
    messages: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="a chat as JSON: its messages, or a chat completion's body; - for stdin"),
    ] = None,
    lora_name: Annotated[str | None, typer.Option(metavar="NAME", help="the LoRA adapter of the request")] = None,
    cache_salt: Annotated[str | None, typer.Option(metavar="SALT", help="the cache salt of the request")] = None,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Show which worker would get a prompt, or got a request, and why.

    The answer shows hits by tier, what limits them, load and cost, in tokens.
    """
    prompts = (tokens is not None) + (prompt is not None) + (messages is not None)
    if request is not None:
        if prompts or model is not None or lora_name or cache_salt:
            raise SettingError(f"--request {request} names its prompt and model already: leave the other options out")
        _show_decision(client.call("GET", f"/decisions/{quote(request, safe='')}"), as_json=as_json)
        return
    if prompts != 1:
        raise SettingError(
            "explain needs a prompt or a request: give exactly one of --tokens FILE, --prompt TEXT, --messages FILE, "
            "--request ID"
        )
    if model is None:
        raise SettingError("explain needs the model of the prompt: give --model NAME; GET /v1/models lists them")
    body: dict[str, Any] = {}
    if tokens is not None:
        body["token_ids"] = read_tokens(tokens)
    elif messages is not None:
        body = read_chat(messages)
    else:
        body["prompt"] = prompt
    body |= {"model": model, "explain": True, "dry_run": True}
    if lora_name:
        body["lora_name"] = lora_name
    if cache_salt:
        body["cache_salt"] = cache_salt
    answer = client.call("POST", "/select", body)
    if as_json:
        print_json(answer)
        return
    from kvrouter.router.app.cli.tables import candidates_text, pull_line, text, tokens_line, worker_name

    num_tokens = shaped(lambda: answer["effective_prefill_tokens"] + answer["overlap"]["longest_matched"])
    out = console()
    if "tokens" in answer:
        out.print(shaped(lambda: tokens_line(answer["tokens"])), highlight=False)
    out.print(shaped(lambda: candidates_text(answer, num_tokens, out.width)), soft_wrap=True)
    out.print()
    to = text(answer["endpoint"])
    out.print(f"{text(worker_name(answer))} ({to}): {text(answer['reason'])}", highlight=False)
    if "pull" in answer:
        out.print(shaped(lambda: pull_line(answer["pull"])), highlight=False)


def _show_decision(answer: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    from kvrouter.router.app.cli.tables import candidates_text, outcome_line, prompts_text, pull_line, text, worker_name

    out = console()
    num_tokens = shaped(lambda: answer["num_tokens"])
    timestamp = shaped(lambda: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["time_s"])))
    out.print(
        f"{timestamp}  {text(answer['model'])}, {num_tokens} tokens{prompts_text(answer)}, proof: {text(answer['proof'])}",
        highlight=False,
    )
    out.print(shaped(lambda: candidates_text(answer, num_tokens, out.width)), soft_wrap=True)
    if (more := answer["compared"] - len(answer["candidates"])) > 0:
        out.print(f"... and {more} more workers", highlight=False)
    out.print()
    out.print(f"{text(worker_name(answer))} ({text(answer['endpoint'])}): {text(answer['reason'])}", highlight=False)
    if "pull" in answer:
        out.print(shaped(lambda: pull_line(answer["pull"])), highlight=False)
    out.print(shaped(lambda: outcome_line(answer)), highlight=False)


def _content(flag: str, source: str, form: str) -> str:
    """Return the text of a file, or of stdin for `-`. Raises SettingError, which names the expected `form`."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingError(f"{flag} {source} is not text; write {form}") from None
    except OSError as error:
        raise SettingError(f"cannot read {flag} {source}: {error.strerror}; name a readable file") from None


def read_chat(source: str) -> dict[str, Any]:
    """Return the body of a chat completion from a file or stdin, which may contain its messages alone.

    Raises SettingError.
    """
    form = 'messages like [{"role": "user", "content": "Hi"}]'
    try:
        decoded = msgspec.json.decode(_content("--messages", source, form).encode())
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SettingError(f"--messages {source} is not JSON; write {form}") from None
    body = {"messages": decoded} if isinstance(decoded, list) else decoded
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise SettingError(f"--messages {source} has no messages; write {form}")
    return body


def read_tokens(source: str) -> list[int]:
    """Return token ids from a file, or from stdin for `-`. Raises SettingError.

    The ids are separated by white space or commas, and brackets around them are allowed.
    """
    content = _content("--tokens", source, "token ids like [1, 2, 3]")
    words = re.split(r"[\s,]+", content.strip().removeprefix("[").removesuffix("]").strip())
    numbers = [number for number in words if number]
    for number in numbers:
        if not re.fullmatch(r"[0-9]{1,19}", number):
            raise SettingError(f"--tokens {source} has {number[:40]!r}, not a token id; write ids like [1, 2, 3]")
    if not numbers:
        raise SettingError(f"--tokens {source} is empty; write token ids like [1, 2, 3]")
    return [int(number) for number in numbers]
