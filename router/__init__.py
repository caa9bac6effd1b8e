# SPDX-License-Identifier: Apache-2.0
"""Follows engines' caches, and routes requests to where their prefix is."""

import sys

from kvrouter.router.base.common import compiled

if not compiled.wanted():
    sys.meta_path.insert(0, compiled.SourceFinder)
