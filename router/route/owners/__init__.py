# SPDX-License-Identifier: Apache-2.0
"""The workers that keep the responses of `/v1/responses`: a later request about a response goes to its worker."""
