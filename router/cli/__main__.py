# SPDX-License-Identifier: Apache-2.0
"""`python -m kvrouter.router.cli`: the same as `kvrouter`."""

from kvrouter.router.cli.commands import main

if __name__ == "__main__":
    main()
