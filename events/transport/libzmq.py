# SPDX-License-Identifier: Apache-2.0
"""The fallback for `libzmq.pyx`, which reads all waiting messages of a socket in one call of libzmq's own functions.

pyzmq needs 3 us for a message of three frames, several times what libzmq needs. Where there was no C compiler, this
fallback leaves every socket to pyzmq.
"""

from __future__ import annotations

from typing import Any

# How a reading ended: no message is left, a budget is spent, a message has too many frames, a message is too large, or
# the socket failed, which its next use by pyzmq explains.
EMPTY, SPENT, FRAMES, SIZE, FAILED = range(5)


def read(
    socket: Any, most: int, most_bytes: int, max_frames: int, max_message_bytes: int
) -> tuple[list[list[bytes]], int, int] | None:
    """Read messages, without waiting for any; return None to leave the socket to pyzmq.

    Returns the messages as lists of frames, how the reading ended, and the bytes of all frames. A message with which it
    ended as FRAMES or SIZE is not among the messages.

    Args:
        socket: A socket of pyzmq.
        most: The budget of messages.
        most_bytes: The budget of bytes in the messages.
        max_frames: The most frames of a message.
        max_message_bytes: The most bytes of a message.
    """
    return None
