# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter`. Every failure is one line on stderr: the cause and the fix.

Exit codes: 0 done, 1 failed, 2 a wrong flag or setting, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvrouter.router.cli.api_client import Client, ClientError
from kvrouter.router.cli.replay_command import replay
from kvrouter.router.cli.settings_flags import with_settings
from kvrouter.router.common.errors import RouterError, SettingError, StartError
from kvrouter.router.common.escaping import printable_json
from kvrouter.router.common.version import VERSION
from kvrouter.router.config.loading import Origin, given_flags, load_config
from kvrouter.router.config.settings import markdown, schema
from kvrouter.router.server.checks import check_settings, local_tokenizers

# asyncio and rich are imported where they are used: they take longer than to refuse a wrong flag.
if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

DEFAULT_URL = "http://127.0.0.1:30000"

# Wide enough for a row of either table when the output is no terminal, so that no cell is cut for `grep`.
PIPE_WIDTH = 400

app = typer.Typer(
    name="kvrouter",
    help="Routes requests to the engine replica with the least left to compute, by exact predictions of KV cache reuse.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

config_app = typer.Typer(help="Describe the settings.", add_completion=False, no_args_is_help=True)
app.add_typer(config_app, name="config")

# typer wraps click in some versions and carries its own copy in others; this is its base of usage errors in both.
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


@app.command()
@with_settings
def serve(config: Path | None, flags: dict[str, Any]) -> None:
    """Run the router.

    Every setting can also come from the YAML file (port: 30000) or the environment (KVROUTER_PORT=30000; lists are
    separated by spaces, as in KVROUTER_WORKERS). Flags override the environment, which overrides the file.
    """
    named = os.environ.get("KVROUTER_CONFIG")
    file = config if config is not None else Path(named) if named else None
    settings = load_config(file, os.environ, flags)
    origin = Origin(None if file is None else str(file), given_flags(flags))
    check_settings(settings, origin, os.environ)
    local = local_tokenizers(settings)
    # What a router is made of takes a second to import; a refusal and the client commands need none of it. All of it
    # stays, so there is nothing for the garbage collector to find.
    gc.disable()
    from kvrouter.router.server.app import serve as run_router
    from kvrouter.router.server.supervisor import supervise

    gc.freeze()
    gc.enable()
    if settings.processes > 1:
        # Each process loads its own.
        local.clear()
    _run(lambda: run_router(settings, origin, local) if settings.processes == 1 else supervise(settings, origin))


def _run(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start())


Url = Annotated[str, typer.Option(envvar="KVROUTER_URL", metavar="URL", help="where the router listens")]
Key = Annotated[
    str | None, typer.Option(envvar="KVROUTER_API_KEY", metavar="KEY", help="the router's API key", show_envvar=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]


@app.command()
def workers(url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False) -> None:
    """Show the workers: state, blocks held, and why credit is withheld."""
    from kvrouter.router.cli.tables import workers_table

    answer = Client(url, api_key).call("GET", "/workers")
    if as_json:
        _print_json(answer)
        return
    rows = _part(answer, "workers")
    if not rows:
        print("no worker is registered; POST /register, or start `kvrouter serve` with --worker")
        return
    _console().print(_shaped(lambda: workers_table(rows)))


@app.command()
def explain(
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="the model, as registered")],
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
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show which worker would get a prompt, and why: hits by tier, what limits them, load and cost, in tokens."""
    from kvrouter.router.cli.tables import candidates_table, text, tokens_line, worker_name

    if (tokens is not None) + (prompt is not None) + (messages is not None) != 1:
        raise SettingError("explain needs a prompt: give exactly one of --tokens FILE, --prompt TEXT, --messages FILE")
    body: dict[str, Any] = {}
    if tokens is not None:
        body["token_ids"] = read_tokens(tokens)
    elif messages is not None:
        body = read_chat(messages)
    else:
        body["prompt"] = prompt
    body |= {"model": model, "explain": True}
    if lora_name:
        body["lora_name"] = lora_name
    if cache_salt:
        body["cache_salt"] = cache_salt
    answer = Client(url, api_key).call("POST", "/select", body)
    if as_json:
        _print_json(answer)
        return
    num_tokens = _shaped(lambda: answer["effective_prefill_tokens"] + answer["overlap"]["disk"])
    console = _console()
    if "tokens" in answer:
        console.print(_shaped(lambda: tokens_line(answer["tokens"])), highlight=False)
    console.print(_shaped(lambda: candidates_table(answer, num_tokens)))
    console.print()
    to = text(answer["endpoint"])
    console.print(f"{text(worker_name(answer))} ({to}): {text(answer['reason'])}", highlight=False)


@config_app.command("schema")
def config_schema() -> None:
    """Show the JSON schema of the settings file."""
    _print_json(schema())


@config_app.command("markdown")
def config_markdown() -> None:
    """Show the settings as a table of Markdown: docs/reference/settings.md."""
    print(markdown(), end="")


@app.command()
def version() -> None:
    """Show the version."""
    print(f"kvrouter {VERSION}")


def _content(flag: str, source: str, form: str) -> str:
    """The text of a file or, for `-`, of stdin. form: what it should have. Raises SettingError."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingError(f"{flag} {source} is not text; write {form}") from None
    except OSError as error:
        raise SettingError(f"cannot read {flag} {source}: {error.strerror}; name a readable file") from None


def read_chat(source: str) -> dict[str, Any]:
    """The body of a chat completion from a file or stdin, or its messages alone. Raises SettingError."""
    form = 'messages like [{"role": "user", "content": "Hi"}]'
    try:
        found = msgspec.json.decode(_content("--messages", source, form).encode())
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SettingError(f"--messages {source} is not JSON; write {form}") from None
    body = {"messages": found} if isinstance(found, list) else found
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise SettingError(f"--messages {source} has no messages; write {form}")
    return body


def read_tokens(source: str) -> list[int]:
    """Token ids from a file or, for `-`, from stdin: numbers separated by white space or commas, brackets allowed.

    Raises SettingError."""
    content = _content("--tokens", source, "token ids like [1, 2, 3]")
    words = re.split(r"[\s,]+", content.strip().removeprefix("[").removesuffix("]").strip())
    found = [word for word in words if word]
    for word in found:
        if not re.fullmatch(r"[0-9]{1,19}", word):
            raise SettingError(f"--tokens {source} has {word[:40]!r}, not a token id; write ids like [1, 2, 3]")
    if not found:
        raise SettingError(f"--tokens {source} is empty; write token ids like [1, 2, 3]")
    return [int(word) for word in found]


def _console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def _print_json(answer: Any) -> None:
    print(printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()))


def _part(answer: Any, name: str) -> Any:
    return _shaped(lambda: answer[name])


def _shaped(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (KeyError, TypeError):
        raise ClientError("the answer does not come from a router of this version; check --url") from None


@app.command()
def demo(
    replicas: Annotated[int, typer.Option(min=2, max=8, help="number of simulated replicas")] = 3,
    shape: Annotated[str, typer.Option(help="KV cache groups: gemma3, gpt-oss, qwen3-next or llama")] = "gemma3",
    requests: Annotated[int, typer.Option(min=1, max=500, help="number of prompts")] = 48,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows and the summary as JSON")] = False,
) -> None:
    """Start a router and simulated replicas, and compare every prediction with the actual reuse. Ends by itself."""
    from kvrouter.simulator.demo.demo import run_demo

    raise typer.Exit(run_demo(replicas=replicas, shape=shape, requests=requests, seed=seed, json_output=as_json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def sim(context: typer.Context) -> None:
    """Run simulated engine replicas: vLLM's scheduler and cache without a model."""
    from kvrouter.simulator.command import main as run_replica

    raise typer.Exit(run_replica(context.args))


app.command()(replay)


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the command."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(given or ["--help"], standalone_mode=False)
    except UsageProblem as problem:
        message = str(problem.format_message()) if hasattr(problem, "format_message") else str(problem)
        return _fail(f"{message.rstrip('.')}; see --help", EXIT_USAGE)
    except SettingError as error:
        return _fail(error.message, EXIT_USAGE)
    except (StartError, RouterError, ClientError) as error:
        return _fail(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has enough; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    # A router's message may hold the name of a worker.
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    print(f"kvrouter: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
