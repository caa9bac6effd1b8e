# SPDX-License-Identifier: Apache-2.0
"""An extension that runs inside an engine and reports which blocks each cache group and tier holds."""
