# SPDX-License-Identifier: Apache-2.0
"""What crosses the socket between an engine and us: events, their encodings, the publisher and the subscriber."""
