# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter`; each of its commands is a function of a module of this room.

Every failure is one line on stderr: the cause and the fix. Exit codes: 0 done, 1 failed, 2 a wrong flag or setting, 130
interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

# The modules of commands import slow modules (asyncio, rich, the router) where they use them, because all commands are
# imported even to refuse a wrong flag.
from kvrouter.router.app.cli.api_client import ClientError
from kvrouter.router.app.cli.config import config_example, config_markdown, config_schema
from kvrouter.router.app.cli.demo import demo
from kvrouter.router.app.cli.doctor import doctor
from kvrouter.router.app.cli.explain import explain
from kvrouter.router.app.cli.fleet_changes import add, drain, remove, undrain, warm
from kvrouter.router.app.cli.history import history
from kvrouter.router.app.cli.replay import replay
from kvrouter.router.app.cli.savings import savings
from kvrouter.router.app.cli.serve import epp, serve
from kvrouter.router.app.cli.shadow import shadow
from kvrouter.router.app.cli.sim import sim
from kvrouter.router.app.cli.tail import tail
from kvrouter.router.app.cli.workers import workers
from kvrouter.router.base.common.errors import RouterError, SettingError, StartError
from kvrouter.router.base.common.escaping import masked
from kvrouter.router.base.common.version import VERSION

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

NAME = "kvrouter"

# The help text is as wide as the terminal, up to this number of columns; by default it is never wider than 80.
HELP_MAX_WIDTH = 160

app = typer.Typer(
    name=NAME,
    help="Routes requests to the engine replica with the least left to compute, by exact predictions of KV cache reuse.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_MAX_WIDTH},
)

config_app = typer.Typer(
    help="Describe the settings, or print an example of their file.", add_completion=False, no_args_is_help=True
)
config_app.command("schema")(config_schema)
config_app.command("example")(config_example)
config_app.command("markdown")(config_markdown)

for command in (
    serve,
    epp,
    workers,
    add,
    remove,
    drain,
    undrain,
    warm,
    explain,
    tail,
    doctor,
    history,
    savings,
    replay,
    shadow,
    demo,
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(sim)
app.add_typer(config_app, name="config")

# typer wraps click in some versions and contains its own copy in others; this is the base of usage errors in both.
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"{NAME} {VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code. `arguments` are those of the process if None."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(words or ["--help"], prog_name=NAME, standalone_mode=False)
    except UsageProblem as problem:
        message = str(problem.format_message()) if hasattr(problem, "format_message") else str(problem)
        # The library's messages end with a full stop, or with the question `Did you mean 'workers'?`.
        ending = " See --help" if message.endswith("?") else "; see --help"
        return _fail(message.rstrip(".") + ending, EXIT_USAGE)
    except SettingError as error:
        return _fail(error.message, EXIT_USAGE)
    except (StartError, RouterError, ClientError) as error:
        return _fail(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has enough. Without this, Python would report another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    # A router's message may contain the name of a worker, with any characters.
    line = masked(" ".join(message.split()))
    print(f"{NAME}: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
