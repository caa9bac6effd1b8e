# SPDX-License-Identifier: Apache-2.0
"""Files of the disk tier: manifest, records, identity."""
