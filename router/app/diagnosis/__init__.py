# SPDX-License-Identifier: Apache-2.0
"""The problems of a fleet, with the evidence for each and its fix."""
