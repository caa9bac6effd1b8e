# SPDX-License-Identifier: Apache-2.0
"""Settings, workers, their engines and the engines' caches: the things that everything else is about."""
