# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of the demo, carries their answers to the report, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohixl.demo import report
from aiohixl.demo.child import GRACE, LINE_LIMIT
from aiohixl.demo.model import ENVIRONMENT
from aiohixl.demo.transport import STAND_IN, Carrier

__all__ = ["ChildError", "Family", "Worker", "run_model", "run_synthetic"]

#: Seconds: the first start converts the weights, on a slow machine without haste.
LOAD_TIMEOUT = 300.0
RUN_TIMEOUT = 120.0
_SHM = Carrier()


class ChildError(RuntimeError):
    """A process of the demo failed. ``traceback`` is the child's own, or empty."""

    traceback = ""


class Worker:
    """The parent's end of one process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._in = process.stdin
        self._out = process.stdout

    async def expect(self, event: str, within: float) -> dict[str, Any]:
        """The next event, which must be ``event``; else `ChildError` with what the child said."""
        try:
            async with asyncio.timeout(within):
                line = await self._out.readline()
        except TimeoutError:
            raise ChildError(f"{self.name}: no {event!r} within {within:g} s") from None
        if not line:
            code = await self.process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            raise ChildError(f"{self.name} ended ({how}) before its {event!r}")
        message: dict[str, Any] = json.loads(line)
        if message["event"] == "failed":
            failure = ChildError(f"{self.name} failed: {message['error']}")
            failure.traceback = message["traceback"]
            raise failure
        if message["event"] != event:
            raise ChildError(f"{self.name} said {message['event']!r} where {event!r} was expected")
        return message

    def go(self) -> None:
        self._in.write(b"go\n")

    async def stop(self) -> None:
        """Ask it to end by closing its stdin, then make sure."""
        self._in.close()
        try:
            async with asyncio.timeout(GRACE + 2):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Family:
    """All processes of one run. Leaving the block ends them: politely when all went well, else at once."""

    def __init__(self) -> None:
        self._children: list[Worker] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is not None:
            for child in self._children:
                child.kill()
        # The rendezvous was born first and goes last.
        for child in reversed(self._children):
            await child.stop()

    async def start(self, name: str, module: str, config: dict[str, Any], *args: str) -> Worker:
        """``python -m aiohixl.demo.<module>`` with ``config`` on its stdin, which ps does not show."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"aiohixl.demo.{module}",
            *args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            env={**os.environ, **ENVIRONMENT},
            # Ctrl-C is for the parent alone; it ends the children itself.
            start_new_session=True,
        )
        child = Worker(name, process)
        self._children.append(child)
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode() + b"\n")
        return child


async def _split(
    family: Family,
    module: tuple[str, str],
    args: tuple[tuple[str, ...], tuple[str, ...]],
    config: dict[str, Any],
    carrier: Carrier,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rendezvous, prefill and decode; returns the two results."""
    token = secrets.token_urlsafe(24)
    rendezvous = await family.start("rendezvous", "rendezvous", {"token": token})
    where = await rendezvous.expect("ready", LOAD_TIMEOUT)
    shared = {**config, "rendezvous": where["url"], "token": token, "prefill": "prefill", "device": carrier.device}
    here, there = ({**shared, "engine": carrier.options(npu_id)} for npu_id in (0, 1))
    prefill = await family.start("prefill", module[0], here, *args[0])
    decode = await family.start("decode", module[1], there, *args[1])
    await asyncio.gather(prefill.expect("ready", LOAD_TIMEOUT), decode.expect("ready", LOAD_TIMEOUT))
    decode.go()
    # gather, not a group: the first to fail is the one worth hearing about.
    results = await asyncio.gather(prefill.expect("result", RUN_TIMEOUT), decode.expect("result", RUN_TIMEOUT))
    return results[0], results[1]


async def _try_out(family: Family, carrier: Carrier, say: Callable[[str], None]) -> None:
    """Open HIXL once, so that what is missing is said before a model is loaded, and by whom it is played as well."""
    if carrier.name == "hixl":
        trial = await family.start("transport", "transport", {"engine": carrier.options(0)})
        found = await trial.expect("result", RUN_TIMEOUT)
        await trial.stop()
        say(f"hixl: {found['library']}" + (f", {STAND_IN}" if found["stand_in"] else ""))


async def run_model(tokens: int, say: Callable[[str], None], carrier: Carrier = _SHM) -> dict[str, Any]:
    """The demo on the real model; the report as a dictionary. `ChildError` if a process fails."""
    threads = min(len(os.sched_getaffinity(0)), 8)
    config: dict[str, Any] = {"tokens": tokens, "threads": threads}
    async with Family() as family:
        await _try_out(family, carrier, say)
        say("reference: the whole job in a single process")
        reference = await family.start("reference", "reference", config)
        expected = await reference.expect("result", LOAD_TIMEOUT)
        await reference.stop()
        say("split: rendezvous, prefill and decode as three processes")
        config["prompt_tokens"] = len(expected["prompt"])
        prefill, decode = await _split(family, ("prefill", "decode"), ((), ()), config, carrier)
    return report.of_model(expected, prefill, decode, threads)


async def run_synthetic(say: Callable[[str], None], carrier: Carrier = _SHM) -> dict[str, Any]:
    """The same transfer without a model: a Llama-2-7B-shaped cache and checksums."""
    started = time.monotonic()
    async with Family() as family:
        await _try_out(family, carrier, say)
        say("three processes, a cache in the shape of Llama-2-7B")
        roles = (("prefill",), ("decode",))
        prefill, decode = await _split(family, ("synthetic", "synthetic"), roles, {}, carrier)
    return report.of_synthetic(prefill, decode, time.monotonic() - started)
