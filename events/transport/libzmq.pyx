# SPDX-License-Identifier: Apache-2.0
"""Messages of a ZMQ socket, read with libzmq's own functions; `libzmq.py` describes the call.

The functions are those of the libzmq with which pyzmq made the socket: they are looked up in pyzmq's own module, which is
loaded already. The layout of `zmq_msg_t`, 64 bytes, is that of zmq.h since libzmq 4.1. Where a function is not found,
every socket is left to pyzmq.
"""

import ctypes

import zmq

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR
from libc.stdint cimport uintptr_t

EMPTY, SPENT, FRAMES, SIZE, FAILED = range(5)

cdef enum:
    C_EMPTY = 0
    C_SPENT = 1
    C_FRAMES = 2
    C_SIZE = 3
    C_FAILED = 4
    DONTWAIT = 1

cdef union Message:
    unsigned char content[64]
    void *aligned

ctypedef int (*Take)(Message *) noexcept
ctypedef int (*Receive)(Message *, void *, int) noexcept
ctypedef void *(*Data)(Message *) noexcept
ctypedef size_t (*Size)(Message *) noexcept
ctypedef int (*Errno)() noexcept

cdef Take msg_init = NULL
cdef Take msg_close = NULL
cdef Take msg_more = NULL
cdef Receive msg_recv = NULL
cdef Data msg_data = NULL
cdef Size msg_size = NULL
cdef Errno last_errno = NULL
cdef bint is_loaded = False


def _address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _load():
    global msg_init, msg_close, msg_more, msg_recv, msg_data, msg_size, last_errno, is_loaded
    if zmq.zmq_version_info()[0] != 4:
        return
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.CDLL(_zmq.__file__)
        msg_init = <Take><uintptr_t>_address(library, "zmq_msg_init")
        msg_close = <Take><uintptr_t>_address(library, "zmq_msg_close")
        msg_more = <Take><uintptr_t>_address(library, "zmq_msg_more")
        msg_recv = <Receive><uintptr_t>_address(library, "zmq_msg_recv")
        msg_data = <Data><uintptr_t>_address(library, "zmq_msg_data")
        msg_size = <Size><uintptr_t>_address(library, "zmq_msg_size")
        last_errno = <Errno><uintptr_t>_address(library, "zmq_errno")
    except (ImportError, OSError, AttributeError):
        return
    is_loaded = True


_load()


cdef int read_one(void *handle, list frames, int max_frames, size_t max_bytes, size_t *size) except -1:
    """Read one message into `frames`, and return how that ended; C_SPENT stands for a whole message."""
    cdef Message message
    cdef int error
    cdef bint more = True
    size[0] = 0
    while more:
        if len(frames) == max_frames:
            return C_FRAMES
        msg_init(&message)
        if msg_recv(&message, handle, DONTWAIT) < 0:
            error = last_errno()
            msg_close(&message)
            if error == EINTR:
                # A signal came; the next frame still waits.
                continue
            if error == EAGAIN and not frames:
                return C_EMPTY
            return C_FAILED
        try:
            frames.append(PyBytes_FromStringAndSize(<const char *>msg_data(&message), msg_size(&message)))
            size[0] += msg_size(&message)
            more = msg_more(&message)
        finally:
            msg_close(&message)
    return C_SIZE if size[0] > max_bytes else C_SPENT


def read(socket, int most, Py_ssize_t most_bytes, int max_frames, size_t max_message_bytes):
    cdef void *handle
    cdef size_t size, total = 0
    cdef int ended = C_SPENT
    cdef list frames, messages = []
    if not is_loaded or not isinstance(socket, zmq.Socket) or socket.closed:
        return None
    handle = <void *><uintptr_t>socket.underlying
    while ended == C_SPENT and most > 0 and most_bytes > 0:
        frames = []
        ended = read_one(handle, frames, max_frames, max_message_bytes, &size)
        total += size
        if ended == C_SPENT:
            messages.append(frames)
            most -= 1
            most_bytes -= <Py_ssize_t>size
    return messages, ended, total
