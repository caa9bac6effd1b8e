# SPDX-License-Identifier: Apache-2.0
"""The findings of a diagnosis, and the store as it is shown."""
