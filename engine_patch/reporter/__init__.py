# SPDX-License-Identifier: Apache-2.0
"""The stream of reports: what is held, counted, translated and sent."""
