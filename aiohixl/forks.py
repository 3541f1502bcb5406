# SPDX-License-Identifier: Apache-2.0
"""What a fork means for the engines of a process: the parent's go on, the child's are dead (contract 12)."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["forget", "remember"]


class Forkable(Protocol):
    """An engine, as far as a fork is concerned."""

    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


_live: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()

# Other threads may run between these hooks, and may start, drop or fork too: one fork at a time, and each engine that
# was locked before is held, and let go after.
_lock = threading.Lock()
_forking: list[Forkable] = []


def remember(engine: Forkable) -> None:
    _live[id(engine)] = engine


def forget(engine: Forkable) -> None:
    _live.pop(id(engine), None)


def _before() -> None:
    _lock.acquire()
    _forking.extend(engine for ref in _live.valuerefs() if (engine := ref()) is not None)
    for engine in _forking:
        engine.before_fork()


def _after_in_parent() -> None:
    for engine in _forking:
        engine.after_fork_in_parent()
    _forking.clear()
    _lock.release()


def _after_in_child() -> None:
    for engine in _forking:
        engine.after_fork_in_child()
    _forking.clear()
    _lock.release()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
