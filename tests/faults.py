# SPDX-License-Identifier: Apache-2.0
"""Memory that is not there until the test says so (userfaultfd): whoever touches it, the kernel too, stands still."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
from collections.abc import Iterator

import numpy as np
import pytest

NUMBERS = {"x86_64": 323, "aarch64": 282}  # of the system call
API, REGISTER, ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04  # <linux/userfaultfd.h>


class Missing:
    """``memory``, of zeros; `touched` tells whether somebody waits for it, `bring` lets all go on."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd, self._nbytes = fd, nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.memory = np.frombuffer(self._map, np.uint8)
        self._start = self.memory.ctypes.data
        fcntl.ioctl(fd, API, bytearray(struct.pack("<QQQ", 0xAA, 0, 0)))
        fcntl.ioctl(fd, REGISTER, bytearray(struct.pack("<QQQQ", self._start, nbytes, 1, 0)))

    def touched(self) -> bool:
        return bool(select.select([self._fd], [], [], 0)[0])

    def bring(self) -> None:
        fcntl.ioctl(self._fd, ZEROPAGE, bytearray(struct.pack("<QQQq", self._start, self._nbytes, 0, 0)))


@contextlib.contextmanager
def missing(nbytes: int) -> Iterator[Missing]:
    fd = ctypes.CDLL(None).syscall(NUMBERS.get(platform.machine(), -1), os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        pytest.skip("userfaultfd is not allowed: run as root, or set vm.unprivileged_userfaultfd=1")
    try:
        yield Missing(fd, nbytes)
    finally:
        os.close(fd)  # which lets go whoever waits still
