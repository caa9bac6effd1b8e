# SPDX-License-Identifier: Apache-2.0
"""The findings of a diagnosis, and the view of the store that the API shows."""
