# SPDX-License-Identifier: Apache-2.0
"""`python -m kvrouter.simulator`: one simulated replica."""

import sys

from kvrouter.simulator.server import main

if __name__ == "__main__":
    sys.exit(main())
