# SPDX-License-Identifier: Apache-2.0
"""The stream of reports: translates events, counts resident blocks, and sends both to readers."""
