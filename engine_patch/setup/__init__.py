# SPDX-License-Identifier: Apache-2.0
"""Settings, endpoints and features of the patch."""
