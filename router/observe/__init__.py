# SPDX-License-Identifier: Apache-2.0
"""What is predicted, decided and found, beside what came of it."""
