# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that compare the router with a real SGLang. Without SGLang, these tests are skipped."""

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

# SGLang reads these variables on import. Its radix cache uses the Python core unless a test names another one.
os.environ.update(SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="python", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
TESTS = Path(__file__).parents[1]

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # SGLang's own kit of cache fixtures imports this module, which would import all of SGLang's benchmarks.
    kit = types.ModuleType("sglang.test.test_utils")
    kit.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules[kit.__name__] = kit
    with warnings.catch_warnings():
        # SGLang warns of parts that are missing without a GPU, and of parts that its dependencies deprecate.
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.test.kits.unified_radix_cache.mixins")


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("KVROUTER_TEST_SEED", "20261"))
