# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM accepts every `vllm serve` command of the pages: its flags exist, and their values are read."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from kvrouter.engine_patch.setup.settings import SWITCH
from tests.support.doc_blocks import all_blocks

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

# Stands for words that a page leaves out.
LEFT_OUT = "..."


def starts(program: str) -> list[tuple[str, list[str]]]:
    """Return where each command of a program stands in the pages, and the words behind the program."""
    commands = []
    for block in all_blocks():
        for command in block.commands if block.is_shell else ():
            words = shlex.split(command.replace("\\\n", " "), comments=True)
            if program in " ".join(words) and LEFT_OUT not in words:
                last = program.split()[-1]
                commands.append((str(block), words[words.index(last) + 1 :]))
    return commands


@pytest.fixture(scope="module")
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as environment:
        # The parser loads the plugins, and the patch would stay in this process, where other tests need unpatched vLLM.
        environment.setenv(SWITCH, "0")
        return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize(
    ("where", "words"), starts("vllm serve"), ids=lambda value: value if type(value) is str else ""
)
def test_vllm_takes_the_flags_of_a_page(parser: Any, where: str, words: list[str]) -> None:
    args = parser.parse_args(words)
    assert args.model_tag == words[0], where


def test_a_flag_that_vllm_lacks_is_refused(parser: Any) -> None:
    assert len(starts("vllm serve")) >= 4
    with pytest.raises(SystemExit):
        parser.parse_args(["model", "--no-such-flag"])
