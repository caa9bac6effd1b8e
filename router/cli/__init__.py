# SPDX-License-Identifier: Apache-2.0
"""The entry points of the command line, at the name that installed scripts have. The commands are in `app/cli`."""
