# SPDX-License-Identifier: Apache-2.0
"""One posted transfer, as something to await.

A `Transfer` is in flight from the moment it exists. It can be awaited any number of times and by several tasks, and
it is a coroutine to asyncio, so that ``gather`` and ``TaskGroup.create_task`` take it; ``asyncio.wait`` wants tasks,
as it does for every coroutine: ``asyncio.wait([asyncio.ensure_future(t)])``.

When an await of it ends by cancellation, the caller may reuse its memory at once: the last awaiter's cancellation
recalls the transfer and waits until the native side has let go (at most `cancel_grace`; see `Transfer.quiesced`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Protocol

from aiohixl import _core
from aiohixl.completion import CompletionQueue, Record, wake
from aiohixl.errors import ClosedError, HixlError, make_error
from aiohixl.hixl import explain
from aiohixl.waiter import Waiter

__all__ = ["REASONS", "Transfer", "outlast", "wait_all"]

NO_INDEX = 0xFFFFFFFFFFFFFFFF


class Origin(Protocol):
    """Who posted it: a peer."""

    def describe(self, transfer: Transfer) -> str: ...
    def recall_parked(self, transfer: Transfer) -> bool: ...
    def quarantine(self, transfer: Transfer) -> None: ...
    def release(self, transfer: Transfer) -> None: ...


class Transfer(_core.TransferState, Coroutine[Any, Any, "Transfer"]):
    """A read, a write or a note on its way. Made by a peer's methods only."""

    __slots__ = ()

    _origin: Origin
    _queue: CompletionQueue
    _error: HixlError | None
    _unseen: _Unseen | None
    _waiters: list[Waiter] | None
    _quiescers: list[asyncio.Future[None]] | None
    _drivers: dict[asyncio.Task[Any] | None, Generator[Any, Any, Transfer]] | None
    kind: str
    #: The memory, while the native side may touch it.
    keep: Any
    #: Bytes that the transfer moves; once it has failed, those that had landed.
    nbytes: int
    #: Seconds from the post until the bytes were visible at their destination; None before.
    elapsed: float | None
    #: False from a failure until the native side has let go of the memory (see `wait_quiesced`).
    quiesced: bool

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<Transfer {self._origin.describe(self)} {state}>"

    @property
    def __name__(self) -> str:
        return self._origin.describe(self)  # what asyncio calls it in the repr of a task

    # ---- results ----

    def done(self) -> bool:
        """Whether it has completed, failed or was cancelled."""
        return self._done

    def exception(self) -> HixlError | None:
        """Why it failed, or None. Looking at it counts as awaiting it."""
        self._observe()
        return self._error

    def _observe(self) -> None:
        self._observed = True
        if self._unseen is not None:
            self._unseen.seen = True

    def complete_inline(self, elapsed_ns: int) -> None:
        self._done = self.quiesced = True
        self.elapsed = elapsed_ns * 1e-9
        self.keep = None

    def settle(self, record: Record) -> None:
        """A native record for its token. On the loop."""
        _, status, sys_errno, nbytes, elapsed_ns, index, quiesced, code, detail = record
        if not self._done:
            name = self._queue.statuses[status]
            self.elapsed = elapsed_ns * 1e-9
            error = None if name == "OK" else self._make_error(name, sys_errno, index, code, detail or "")
            if not quiesced:
                self._origin.quarantine(self)  # which tells how many bytes it was to move
            if error is not None:
                self._error = error
                self.nbytes = nbytes
            self._finish()
        elif quiesced:
            self._origin.release(self)
        if quiesced:
            self._let_go()

    def _let_go(self) -> None:
        self.quiesced = True
        self.keep = None
        if self._quiescers is not None:
            wake(self._quiescers)
            self._quiescers = None

    def fail(self, error: HixlError) -> None:
        """It was never handed to the native side, and will not be."""
        self._error = error
        self.nbytes = 0
        self._let_go()
        self._finish()

    def _finish(self) -> None:
        self._done = True
        if self._error is not None and not self._observed:
            self._unseen = _Unseen(self, self._error)
        if self._waiters is not None:
            self._queue.wake(self._waiters)
            self._waiters = None

    def _make_error(self, name: str, sys_errno: int, index: int, code: int, detail: str) -> HixlError:
        what = self._origin.describe(self)
        if name == "PROVIDER":
            return make_error(name, f"{what}: {explain(code, detail)}", code=code, detail=detail)
        text = f"{what}: {REASONS.get(name, name.lower())}"
        if index != NO_INDEX:
            text += f" (row {index})"
        if sys_errno:
            text += f": {os.strerror(sys_errno)}"
        if detail:
            text += f": {detail}"
        return make_error(name, text, sys_errno)

    # ---- cancelling ----

    def cancel(self) -> bool:
        """Ask for it to be recalled; false if it has completed already. Any thread. Await it to know that it ended."""
        if self._done:
            return False
        self._cancelling = True
        if self._handle:
            self._queue.core.cancel(self._handle)
        elif self._queue.on_loop():
            self._origin.recall_parked(self)
        else:  # parked transfers are the loop's; and one that a thread is posting looks again in `posted`
            self._queue.loop.call_soon_threadsafe(self.cancel)
        return True

    def detach(self) -> None:
        """Nobody will await it: a failure is not reported to the loop."""
        self._observe()

    def posted(self, handle: int) -> None:
        self._handle = handle
        if self._cancelling:  # cancelled on the loop while a thread was posting it
            self._queue.core.cancel(handle)

    async def wait_quiesced(self) -> None:
        """Return when neither side touches the memory any more: at once, except where `quiesced` is false.

        Cancelling this only stops waiting.
        """
        while not self.quiesced:
            await self._quiescer()

    def when_quiesced(self, callback: Callable[[], None]) -> None:
        """Call it on the loop once neither side touches the memory: now, if that is so."""
        if self.quiesced:
            callback()
            return
        self._quiescer().add_done_callback(lambda _: callback())

    def _quiescer(self) -> asyncio.Future[None]:
        if self._quiescers is None:
            self._quiescers = []
        return self._queue.waiter(self._quiescers)

    def take_turn(self) -> bool:
        return self._queue.take_turn()

    # ---- awaiting ----

    def _await(self) -> Generator[Any, Any, Transfer]:
        """What an await does where there is more to it than that it is complete."""
        if not self._done:
            yield from self._wait()
        elif self._queue.take_turn():
            self._observe()
            yield
        if self._error is not None:
            self._observe()
            raise self._error.with_traceback(None)
        return self

    def _waiter(self) -> Waiter:
        waiter = Waiter(self._queue.loop)
        if self._waiters is None:
            self._waiters = [waiter]
        else:
            self._waiters.append(waiter)
        self._queue.keep_turning()
        return waiter

    def _wait(self) -> Generator[Any, Any, None]:
        if not self._queue.on_loop():
            raise ClosedError(f"{self!r} belongs to another event loop; it can be awaited there only")
        waiter = self._waiter()
        try:
            yield from waiter.__await__()
        except (asyncio.CancelledError, GeneratorExit) as exc:  # GeneratorExit: the coroutine is thrown away
            if not self._done:
                self._leave(waiter)
                if self._waiters:
                    raise  # others wait on: only this await ends
                self.cancel()
                if isinstance(exc, asyncio.CancelledError):
                    yield from self._wait_until_done()
            self._observe()
            raise

    def _wait_until_done(self) -> Generator[Any, Any, None]:
        # A second cancellation changes nothing: the first one goes on when the memory is free. Bounded by cancel_grace.
        while not self._done:
            waiter = self._waiter()
            try:
                yield from waiter.__await__()
            except asyncio.CancelledError:
                self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        if self._waiters is not None and waiter in self._waiters:
            self._waiters.remove(waiter)

    # ---- what makes it a coroutine: each task that drives it has its own await ----

    def send(self, value: Any) -> Any:
        return self._step(lambda driver: driver.send(value))

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        error = val if val is not None else typ() if isinstance(typ, type) else typ
        driver = self._driver()
        if inspect.getgeneratorstate(driver) == inspect.GEN_CREATED:
            # Cancelled before its first step: begin the await, so that it ends as any other does.
            try:
                driver.send(None)
            except (StopIteration, HixlError):  # it had ended already, well or not
                self._drop()
                raise error from None
        return self._step(lambda driver: driver.throw(error))

    def close(self) -> None:
        self._driver().close()
        self._drop()

    def _driver(self) -> Generator[Any, Any, Transfer]:
        if self._drivers is None:
            self._drivers = {}
        task = _current_task()
        driver = self._drivers.get(task)
        if driver is None:
            driver = self._drivers[task] = self._await()
        return driver

    def _drop(self) -> None:
        if self._drivers is not None:
            self._drivers.pop(_current_task(), None)

    def _step(self, step: Callable[[Generator[Any, Any, Transfer]], Any]) -> Any:
        try:
            return step(self._driver())
        except BaseException:
            self._drop()
            raise


class _Unseen:
    """Goes with its failed transfer, and complains if nobody has looked at it; most do not fail, and have none."""

    __slots__ = ("context", "loop", "seen")

    def __init__(self, transfer: Transfer, error: HixlError) -> None:
        self.seen = False
        self.loop = transfer._queue.loop
        self.context = {
            "message": "a failed Transfer was never awaited",
            "exception": error,
            "transfer": repr(transfer),
        }

    def __del__(self) -> None:
        if not self.seen and not self.loop.is_closed():
            self.loop.call_exception_handler(self.context)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


#: What a status says of a transfer, in a sentence with the transfer's description before it.
REASONS = {
    "REMOTE_ACCESS": "the owner does not allow it: the region was deregistered, its key is stale, its access bits "
    "forbid it, or the span was revoked; ask the peer, and look the region up again",
    "BOUNDS": "outside its region; nothing moved",
    "OVERLAP": "two rows write the same destination bytes; nothing moved",
    "NO_PATH": "no transport of this build reaches that memory; peer.route() says why",
    "REGION_CLOSED": "the local region is deregistered, or could not be set up",
    "TIMEOUT": "no progress for stall_timeout",
    "ABORTED": "aborted because this side closed the peer or the engine",
    "CANCELLED": "cancelled",
    "FAULT": "the kernel refused the copy",
    "CONNECTION": "its data connection dropped, or could not be made; a part may have landed: post it again",
    "CHECKSUM": "what arrived is not what was sent; none of it counts: post it again",
    "PEER_LOST": "the peer is lost: it ended, froze, closed, or a newer engine took its name; connect again",
    "QUEUE_FULL": "the queue is full; post less at a time from threads, or post on the loop, where posts park",
    "CLOSED": "the engine is closed",
    "CONFIG": "after= is for NPU memory: this path has no NPU to wait for",
    "NO_MEMORY": "not enough memory to post it",
}


async def outlast(transfers: Iterable[Transfer]) -> asyncio.CancelledError | None:
    """Wait until each has ended, however; a cancellation that comes meanwhile cancels them all and is answered."""
    todo = list(transfers)
    cancelled: asyncio.CancelledError | None = None
    for transfer in todo:
        while not transfer.done():
            try:
                await transfer
            except HixlError:
                pass
            except asyncio.CancelledError as exc:
                cancelled = cancelled or exc
                for other in todo:
                    other.cancel()
        transfer.exception()  # seen
    return cancelled


async def wait_all(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Wait until every one has ended and let go of its memory; then raise the one error, or an `ExceptionGroup`.

    Cancelling this cancels them all, waits until they have ended, and goes on.
    """
    todo = list(transfers)
    cancelled = await outlast(todo)
    if cancelled is not None:
        raise cancelled
    for transfer in todo:
        await transfer.wait_quiesced()
    errors = list({id(e): e for t in todo if (e := t.exception()) is not None}.values())
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several transfers failed", errors)
    if todo and todo[0].take_turn():
        await asyncio.sleep(0)
    return todo
