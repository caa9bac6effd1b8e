# SPDX-License-Identifier: Apache-2.0
"""The files of the disk tier: manifest, records, identity."""
