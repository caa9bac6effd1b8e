# SPDX-License-Identifier: Apache-2.0
"""The traffic between an engine and the router: events, their encodings, the publisher and the subscriber."""
