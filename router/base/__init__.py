# SPDX-License-Identifier: Apache-2.0
"""Values, metrics and connections that do not depend on routing."""
