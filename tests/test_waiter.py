# SPDX-License-Identifier: Apache-2.0
"""What an await of a transfer waits on: a future to its task, which goes on in the round that drained its record."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import pytest

from aiohixl.completion import CompletionQueue, NativeEvent, Record
from aiohixl.transfer import Transfer
from aiohixl.waiter import Waiter


class ScriptedCore:
    """A test double of the native engine: completes what it is told to."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def complete(self, transfer: Transfer) -> None:
        self.records.append((transfer.token, 0, 0, transfer.nbytes, 1000, -1, 1, 0, None))

    def drain(self) -> tuple[list[Record], bool]:
        records, self.records = self.records, []
        return records, False

    def next_event(self) -> NativeEvent | None:
        return None


class Origin:
    def describe(self, transfer: Transfer) -> str:
        return f"write of {transfer.nbytes} bytes"

    def recall_parked(self, transfer: Transfer) -> bool:
        transfer.fail(RuntimeError("recalled"))  # type: ignore[arg-type]
        return True

    def quarantine(self, transfer: Transfer) -> None: ...
    def release(self, transfer: Transfer) -> None: ...


class Bench:
    def __init__(self) -> None:
        self.core = ScriptedCore()
        self.queue = CompletionQueue(self.core, asyncio.get_running_loop(), lambda event: None)  # type: ignore[arg-type]

    def post(self) -> Transfer:
        transfer = Transfer(Origin(), self.queue, self.queue.new_token(), "write", 4096, None)
        self.queue.expect(transfer.token, transfer)
        return transfer

    async def awaited(self) -> tuple[Transfer, asyncio.Task[None], list[str]]:
        """A transfer, a task that waits for it, and where that writes "woken" when it goes on."""
        post, log = self.post(), list[str]()
        task = asyncio.create_task(waits(post, log, "woken"))
        await asyncio.sleep(0)
        return post, task, log

    async def as_callback(self, call: Callable[[], Any]) -> Any:
        """Call it as the loop does when the descriptor is readable: no task runs."""
        loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as exc:
                answer.set_result(exc)

        loop.call_soon(run)
        return await answer

    async def seen_after_drain(self, log: list[str]) -> Any:
        def drain() -> list[str]:
            self.queue._drain()
            return list(log)

        return await self.as_callback(drain)


async def waits(transfer: Transfer, log: list[str], name: str) -> None:
    await transfer
    log.append(name)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_the_task_goes_on_before_the_drain_returns(bench: Bench) -> None:
    log: list[str] = []
    posts = [bench.post() for _ in range(3)]
    tasks = [asyncio.create_task(waits(post, log, str(i))) for i, post in enumerate(posts)]
    await asyncio.sleep(0)
    for post in posts:
        bench.core.complete(post)
    assert await bench.seen_after_drain(log) == ["0", "1", "2"]
    await asyncio.gather(*tasks)


async def test_all_of_a_round_have_ended_when_the_first_task_goes_on(bench: Bench) -> None:
    first, second = bench.post(), bench.post()

    async def look() -> bool:
        await first
        return second.done()

    task = asyncio.create_task(look())
    await asyncio.sleep(0)
    bench.core.complete(first)
    bench.core.complete(second)
    await bench.as_callback(bench.queue._drain)
    assert await task


async def test_what_ends_inside_a_task_wakes_others_in_a_later_turn(bench: Bench) -> None:
    post, task, log = await bench.awaited()
    post.cancel()  # it was parked: it ends here, while this task runs
    log.append("the one that cancelled")
    with pytest.raises(RuntimeError, match="recalled"):
        await task
    assert log == ["the one that cancelled"]


async def test_a_round_inside_a_task_wakes_in_a_later_turn(bench: Bench) -> None:
    """As where loops are nested (notebooks): a task runs while the descriptor is served."""
    post, task, log = await bench.awaited()
    bench.core.complete(post)
    bench.queue._drain()
    assert log == []
    await asyncio.wait_for(task, 5)


async def test_a_debugged_loop_runs_each_task_by_itself(bench: Bench) -> None:
    post, task, log = await bench.awaited()
    bench.core.complete(post)
    asyncio.get_running_loop().set_debug(True)
    try:
        assert await bench.seen_after_drain(log) == []
        await task
    finally:
        asyncio.get_running_loop().set_debug(False)


async def test_a_task_that_ends_the_program_does_not_keep_others_from_going_on(bench: Bench) -> None:
    log: list[str] = []
    first, second = bench.post(), bench.post()

    async def leave() -> None:
        await first
        raise SystemExit(3)

    leaving = asyncio.create_task(leave())
    staying = asyncio.create_task(waits(second, log, "on"))
    await asyncio.sleep(0)
    bench.core.complete(first)
    bench.core.complete(second)
    assert isinstance(await bench.as_callback(bench.queue._drain), SystemExit)
    await asyncio.wait_for(staying, 5)
    assert log == ["on"]
    with pytest.raises(SystemExit):
        leaving.result()


async def test_an_event_that_ends_the_program_does_not_keep_tasks_from_going_on(bench: Bench) -> None:
    post, task, log = await bench.awaited()

    def leave() -> None:
        raise SystemExit(3)

    bench.queue.after_drain = leave
    bench.core.complete(post)
    assert isinstance(await bench.as_callback(bench.queue._drain), SystemExit)
    await asyncio.wait_for(task, 5)
    assert log == ["woken"]


async def test_each_goes_on_in_its_own_context(bench: Bench) -> None:
    tag = contextvars.ContextVar("tag", default="none")
    post, seen = bench.post(), []

    async def look(name: str) -> None:
        tag.set(name)
        await post
        seen.append(tag.get())

    tasks = [asyncio.create_task(look(name)) for name in "ab"]
    await asyncio.sleep(0)
    bench.core.complete(post)
    await bench.as_callback(bench.queue._drain)
    await asyncio.gather(*tasks)
    assert seen == ["a", "b"]
    assert tag.get() == "none"


async def test_a_task_that_is_cancelled_in_the_round_that_completes_its_transfer(bench: Bench) -> None:
    first, second = bench.post(), bench.post()

    async def end_the_other() -> None:
        await first
        other.cancel("not needed")

    one = asyncio.create_task(end_the_other())
    await asyncio.sleep(0)
    other = asyncio.create_task(waits(second, [], "other"))
    await asyncio.sleep(0)
    bench.core.complete(first)
    bench.core.complete(second)
    await bench.as_callback(bench.queue._drain)
    await one
    with pytest.raises(asyncio.CancelledError, match="not needed"):
        await other


def python_task(coro: Generator[Any, Any, Any] | Any) -> Any:
    return asyncio.tasks._PyTask(coro, loop=asyncio.get_running_loop())  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [asyncio.create_task, python_task], ids=["C", "Python"])
async def test_tasks_of_both_kinds_wait_on_it(bench: Bench, make: Callable[[Any], Any]) -> None:
    log: list[str] = []
    post, never = bench.post(), bench.post()
    task, late = make(waits(post, log, "woken")), make(waits(never, log, "late"))
    await asyncio.sleep(0)
    assert "Waiter of a transfer, pending" in repr(task)
    bench.core.complete(post)
    await bench.as_callback(bench.queue._drain)
    await asyncio.wait_for(task, 5)
    late.cancel()
    await asyncio.sleep(0)
    assert log == ["woken"]
    never.fail(RuntimeError("gone"))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await late


async def test_it_is_a_future_to_whoever_drives_a_transfer_by_hand() -> None:
    called: list[Any] = []
    loop = asyncio.get_running_loop()
    waiter = Waiter(loop)
    assert asyncio.isfuture(waiter)
    with pytest.raises(asyncio.InvalidStateError):
        waiter.result()
    waiter.add_done_callback(lambda ended: called.append("plain"))
    waiter.add_done_callback(called.append)
    assert waiter.remove_done_callback(called.append) == 1
    assert waiter.end()
    assert not waiter.end()
    assert not waiter.cancel()
    waiter.run()
    assert called == ["plain"]
    waiter.add_done_callback(lambda ended: called.append("late"))
    await asyncio.sleep(0)
    assert called == ["plain", "late"]
    waiter.result()
    cancelled = Waiter(loop)
    cancelled.add_done_callback(called.append)
    assert cancelled.cancel("why")
    await asyncio.sleep(0)
    assert called[2:] == [cancelled]
    assert cancelled.cancelled()
    with pytest.raises(asyncio.CancelledError, match="why"):
        cancelled.result()
