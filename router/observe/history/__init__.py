# SPDX-License-Identifier: Apache-2.0
"""The traffic of the last day and the savings of the last weeks, summed over all processes and routers."""
