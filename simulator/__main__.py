# SPDX-License-Identifier: Apache-2.0
"""`python -m kvrouter.simulator`: simulated replicas."""

import sys

from kvrouter.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
