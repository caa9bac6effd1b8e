# SPDX-License-Identifier: Apache-2.0
"""YAML of an operator's file, whose every fault is a SettingError. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import yaml

from kvrouter.router.base.common.errors import SettingError

T = TypeVar("T")


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which names the line of a value that looks like a date or number and is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. Raises YAMLError."""
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:
            # For `2024-13-45` PyYAML raises ValueError, for `!!int ""` IndexError, for `!!bool x` KeyError.
            raise yaml.constructor.ConstructorError(None, None, "wrong value", node.start_mark) from None


def read_yaml(text: str, where: str, form: str, read: Callable[[Loader], T] = Loader.get_single_data) -> T:
    """Return what `read` makes of a text in YAML. Raises SettingError, whose message contains no part of the text.

    Args:
        text: The content of a file.
        where: The name of the file in the message.
        form: The text that says what to write.
        read: Reads the loader of the text; by default into lists, dictionaries and scalars.
    """
    try:
        loader = Loader(text)
        try:
            return read(loader)
        finally:
            loader.dispose()
    except SettingError:
        raise
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise SettingError(f"{where}{line} is not YAML: {form}") from None
