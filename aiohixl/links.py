# SPDX-License-Identifier: Apache-2.0
"""The link that HIXL uses is in part a choice of the whole process: an environment variable that HIXL reads.

Engines whose links differ cannot live side by side where one of them needs the variable.
"""

from __future__ import annotations

import os
import threading
import weakref

from aiohixl.errors import ConfigError

__all__ = ["VARIABLE", "claim", "release"]

VARIABLE = "HCCL_INTRA_ROCE_ENABLE"


class _Process:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: owner -> name of its engine, link, whether HIXL looks at the variable for it
        self.claims: weakref.WeakKeyDictionary[object, tuple[str, str, bool]] = weakref.WeakKeyDictionary()
        self.set_by_us = False
        self.before: str | None = None

    def restore(self) -> None:
        """The variable as the user had it, once nobody of ours needs it any more."""
        if not self.set_by_us or any(link == "roce" and bound for _, link, bound in self.claims.values()):
            return
        self.set_by_us = False
        if self.before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self.before


_process = _Process()


def claim(owner: object, name: str, link: str, by_environment: bool) -> None:
    """Before an engine opens HIXL; `ConfigError` where the process cannot have that link now.

    `owner` is any object that lives as long as the engine; `release` must follow.
    """
    with _process.lock:
        for other, taken, bound in _process.claims.values():
            if bound and by_environment and taken != link and "roce" in (taken, link):
                raise ConfigError(
                    f"engine {name!r}: link={link!r}, but engine {other!r} of this process uses link={taken!r}, and to "
                    f"HIXL {VARIABLE} says which for the whole process: give both the same link, or use two processes"
                )
        if link == "hccs" and by_environment and os.environ.get(VARIABLE) == "1":
            raise ConfigError(
                f"engine {name!r}: link='hccs', but {VARIABLE}=1 in the environment makes HIXL use RoCE: unset it, or "
                "give link='roce'"
            )
        _process.claims[owner] = name, link, by_environment
        if link == "roce" and by_environment and not _process.set_by_us:
            _process.set_by_us = True
            _process.before = os.environ.get(VARIABLE)
            os.environ[VARIABLE] = "1"


def release(owner: object) -> None:
    """Its engine has ended. Harmless when it has no claim."""
    with _process.lock:
        _process.claims.pop(owner, None)
        _process.restore()


def _forget() -> None:
    """A forked child has none of its parent's engines, and the lock may be held by a thread that it does not have."""
    _process.lock = threading.Lock()
    _process.claims.clear()
    _process.restore()


os.register_at_fork(after_in_child=_forget)
