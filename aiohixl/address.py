# SPDX-License-Identifier: Apache-2.0
"""Where an engine listens: unix sockets for its own host, TCP for others."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from aiohixl.config import parse_host_port
from aiohixl.errors import ConfigError

__all__ = ["Address", "SocketFile", "format_tcp", "looks_like_address", "parse_addresses"]

_UNIX_PATH_MAX = 107  # sun_path, with its terminator, has 108 bytes on Linux
_YOUNG = 5.0  # seconds


class Address(NamedTuple):
    """One place to connect to: a unix path, or a host and port."""

    path: str | None
    host: str | None
    port: int

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else format_tcp(self.host or "", self.port)


def format_tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def looks_like_address(text: str) -> bool:
    return "://" in text


def parse_addresses(text: str) -> list[Address]:
    """One or several addresses, separated by commas, in the order in which to try them."""
    out = []
    for item in text.split(","):
        if item.startswith("unix://") and len(item) > 7:
            if "\0" in item or len(item[7:].encode("utf-8", "surrogateescape")) > _UNIX_PATH_MAX:
                raise ConfigError(
                    f"address: a unix socket's path has at most {_UNIX_PATH_MAX} bytes without NUL: {item!r}"
                )
            out.append(Address(item[7:], None, 0))
        elif item.startswith("tcp://"):
            host, port = parse_host_port(item, "address")
            out.append(Address(None, host, port))
        else:
            raise ConfigError(f"address: unix:///path or tcp://host:port, several separated by commas, not {item!r}")
    return out


class SocketFile:
    """A name for a unix socket in a directory that is this user's only.

    A lock file beside it is held while the engine lives, so that whoever comes later can tell what a killed process
    left behind, and removes it.
    """

    def __init__(self) -> None:
        directory = _private_directory()
        _sweep(directory)
        base = directory / secrets.token_hex(6)
        self.path = str(base.with_suffix(".sock"))
        self._lock_path = base.with_suffix(".lock")
        self._lock = os.open(self._lock_path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        if self._lock < 0:
            return
        for path in (self.path, self._lock_path):
            Path(path).unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Drop the lock's descriptor only: in a forked child the files are the parent's."""
        # Forgotten first, closed second: closing lets other threads run, and the child of a fork that comes in between
        # would close whatever had got the number meanwhile.
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _private_directory() -> Path:
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(runtime, "aiohixl")] if runtime else []
    candidates += [Path(tempfile.gettempdir(), f"aiohixl-{uid}"), Path("/tmp", f"aiohixl-{uid}")]
    problems = []
    for path in dict.fromkeys(candidates):
        if len(os.fsencode(path)) + 1 + 17 > _UNIX_PATH_MAX:
            problems.append(f"{path}: too long for a unix socket")
            continue
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            info = path.lstat()
        except OSError as exc:
            problems.append(f"{path}: {exc.strerror}")
            continue
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid or info.st_mode & 0o077:
            problems.append(f"{path}: not a directory of uid {uid} with mode 0700")
            continue
        return path
    raise ConfigError(
        f"no private directory for the engine's unix socket: {'; '.join(problems)}; remove it, or set XDG_RUNTIME_DIR "
        "or TMPDIR to a directory of yours"
    )


def _sweep(directory: Path) -> None:
    for lock in directory.glob("*.lock"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its engine lives
        else:
            # Its owner may have created it just now and not locked it yet: leave young ones alone.
            if os.fstat(fd).st_mtime < time.time() - _YOUNG:
                lock.with_suffix(".sock").unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        finally:
            os.close(fd)
