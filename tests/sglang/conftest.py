# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that hold the router against a real SGLang. Without SGLang these tests are skipped."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import unittest
import warnings
from pathlib import Path

import pytest

# SGLang reads these when it is imported. The Python core of its radix cache, where a test asks for no other.
os.environ.update(SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="python", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
TESTS = Path(__file__).parents[1]

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # What SGLang's own kit of cache fixtures imports beside them drags in all its benchmarks.
    kit = types.ModuleType("sglang.test.test_utils")
    kit.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules[kit.__name__] = kit
    with warnings.catch_warnings():
        # Of what is missing without a GPU, and of what its dependencies deprecate.
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.test.kits.unified_radix_cache.mixins")


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("KVROUTER_TEST_SEED", "20261"))
