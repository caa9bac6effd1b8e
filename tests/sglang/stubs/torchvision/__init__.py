# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchvision, which has no build for this torch.

SGLang's configurations import torchvision, but no text model uses it.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any


class Unused(types.ModuleType):
    """A module that has every name and accepts every call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _module(name: str) -> Unused:
    module = Unused(f"torchvision.{name}")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
    return module


io: Any = _module("io")
transforms: Any = _module("transforms")
transforms.functional = _module("transforms.functional")
transforms.v2 = _module("transforms.v2")
transforms.v2.functional = _module("transforms.v2.functional")

__version__ = "0.0"
