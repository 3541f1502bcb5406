# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, and forks of this one: started, asked, stopped, killed and always waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

CHILDREN = Path(__file__).parent / "children"
PATIENCE = 30.0  # seconds; only ever reached by a failure


class Child:
    """A child script that answers JSON lines. Made by `child`."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Any) -> None:
        self.process = process
        self.pid = process.pid
        self.address = ""
        self._errors = errors
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.BaseTransport | None = None

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self.process.stdout
        )

    def stderr(self) -> str:
        self._errors.seek(0)
        return str(self._errors.read().decode("utf-8", "replace"))

    def send(self, do: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    async def answer(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            line = await self._reader.readline()
        assert line, f"child {self.pid} ended without an answer; it said: {self.stderr()}"
        message = json.loads(line)
        assert "failed" not in message, f"child {self.pid}: {message['failed']}"
        return message["answer"]

    async def ask(self, do: str, **arguments: Any) -> Any:
        """What the child answers; fails with its traceback when it could not."""
        self.send(do, **arguments)
        return await self.answer()

    def stop(self) -> None:
        """SIGSTOP; on return every thread of it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), self.stderr()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()  # a stopped process dies of it, too
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        if self._transport is not None:
            self._transport.close()
        self._errors.close()


@contextlib.asynccontextmanager
async def child(name: str = "child", *, script: str = "peer.py", **options: Any) -> AsyncIterator[Child]:
    """An engine of that name and options in a new process; `Child.address` is its address."""
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [sys.executable, str(CHILDREN / script), name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        running = Child(process, errors)
        try:
            await running.listen()
            running.address = await running.answer()
            yield running
        finally:
            running.close()
            await asyncio.sleep(0)  # the pipe's transport closes on the next turn
            await asyncio.sleep(0)


async def until(condition: Callable[[], bool], what: str) -> None:
    """For what no event tells: look until it is so."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


def forked(run: Callable[[], Any]) -> Any:
    """What `run` answers in a forked child of this process (JSON); its traceback is this one's failure."""
    out, into = os.pipe()
    ended = 0
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(out)
            try:
                message: dict[str, Any] = {"answer": run()}
            except BaseException:
                message = {"failed": traceback.format_exc()}
            os.write(into, json.dumps(message).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(into)
    try:
        text = b""
        while True:
            ready, _, _ = select.select([out], [], [], PATIENCE)
            if not ready:
                raise AssertionError(f"the forked child hangs; it is at {_where(pid)}")
            piece = os.read(out, 1 << 16)
            if not piece:
                break
            text += piece
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, ended = os.waitpid(pid, 0)
        os.close(out)
    assert text, f"the forked child died without an answer: wait status {ended:#x}"
    message = json.loads(text)
    assert "failed" not in message, f"in the forked child:\n{message['failed']}"
    return message["answer"]


def _where(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError as exc:
        return str(exc)


def run_python(source: str, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, bounded."""
    return subprocess.run(
        [sys.executable, *flags, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
