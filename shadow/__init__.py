# SPDX-License-Identifier: Apache-2.0
"""What the choices of another router leave unused, by this router's index."""
