# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m kvrouter.simulator`, which runs simulated replicas."""

import sys

from kvrouter.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
