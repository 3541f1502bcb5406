# SPDX-License-Identifier: Apache-2.0
"""Small experiments for `aiohixl.doctor`: does the kernel let us do it, here, as this user?

Each returns a `Trial` and leaves nothing behind. None raises.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

__all__ = ["Trial", "memfd", "pidfd", "populate_write", "sibling_write"]

#: Missing from the mmap module; the value is the same on every architecture that matters here.
_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True)
class Trial:
    ok: bool
    text: str


def _refused(call: str, exc: OSError) -> Trial:
    code = errno.errorcode.get(exc.errno or 0, str(exc.errno))
    return Trial(False, f"{call}: {code}, {exc.strerror}")


def memfd() -> Trial:
    """Memory as `Engine.allocate` makes it: memfd, allocated, sealed, mapped, and its seals hold."""
    nbytes = mmap.PAGESIZE
    try:
        fd = os.memfd_create("aiohixl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        return _refused("memfd_create", exc)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        with mmap.mmap(fd, nbytes) as view:
            view[:1] = b"x"
    except OSError as exc:
        os.close(fd)
        return _refused("sealing a memfd", exc)
    try:
        os.ftruncate(fd, 0)
    except OSError:
        return Trial(True, "works")
    finally:
        os.close(fd)
    return Trial(False, "a sealed memfd could be shrunk")


def populate_write() -> Trial:
    """Populating pages in one call, so that the first copy does not pay for page faults."""
    with mmap.mmap(-1, mmap.PAGESIZE) as view:
        try:
            view.madvise(_MADV_POPULATE_WRITE)
        except OSError as exc:
            return _refused("madvise", exc)
    return Trial(True, "works")


def pidfd() -> Trial:
    """A descriptor that tells of a process's end."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return _refused("pidfd_open", exc)
    return Trial(True, "works")


# Two processes that are siblings, as two engines are; a parent may do more to its child than siblings may.
_TARGET = """
import ctypes, sys
buffer = ctypes.create_string_buffer(8)
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
print(buffer.raw.decode(), flush=True)
"""
_WRITER = """
import ctypes, os, sys
class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.restype = ctypes.c_ssize_t
pid, addr, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
buffer = ctypes.create_string_buffer(text, len(text))
local = Iovec(ctypes.addressof(buffer), len(text))
remote = Iovec(addr, len(text))
done = libc.process_vm_writev(pid, ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote),
                              ctypes.c_ulong(1), ctypes.c_ulong(0))
print(0 if done == len(text) else ctypes.get_errno(), flush=True)
"""


def sibling_write(timeout: float = 10.0) -> Trial:
    """process_vm_writev from one child process into another. Takes about 0.1 s."""
    python = [sys.executable, "-I", "-S", "-c"]
    try:
        with subprocess.Popen([*python, _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
            assert target.stdout is not None
            try:
                addr = target.stdout.readline().strip()
                answer = subprocess.run(
                    [*python, _WRITER, str(target.pid), addr, "landed!!"],
                    capture_output=True,
                    text=True,
                    timeout=timeout,
                    check=False,
                )
                arrived = target.communicate("", timeout=timeout)[0].strip()
            finally:
                target.kill()
    except (OSError, subprocess.SubprocessError) as exc:
        return Trial(False, f"could not be tried: {exc}")
    if answer.returncode < 0:
        name = signal.Signals(-answer.returncode).name
        return Trial(False, f"the writer was killed by {name} (a seccomp profile?)")
    code = answer.stdout.strip()
    if code == "0" and arrived == "landed!!":
        return Trial(True, "works between processes of this user")
    if code.isdigit() and int(code):
        return Trial(False, f"{errno.errorcode.get(int(code), code)}, {os.strerror(int(code))}")
    return Trial(False, f"the bytes did not arrive {answer.stderr.strip()[-200:]}".rstrip())
