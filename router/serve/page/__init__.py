# SPDX-License-Identifier: Apache-2.0
"""The web page for people: files that a browser loads."""
