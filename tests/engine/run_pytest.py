# SPDX-License-Identifier: Apache-2.0
"""pytest as a script, so that `versions.run_under` can run tests under another version of vLLM."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
