# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that an engine lends to a peer that probes the path between them.

The peer asks by a note on a topic of its own; the answer is a note as well, once the memory stands announced under a
name that nobody lists. It is lent to one peer at a time, at most `SCRATCH_BYTES`, and taken back when the peer says so,
when it is lost, or after `LOAN_SECONDS`. It holds zeros and what probes wrote: nothing of the application's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from aiohixl.errors import HixlError, RemoteAccessError, TransferTimeoutError
from aiohixl.notes import Note
from aiohixl.region import Region, RemoteRegion
from aiohixl.transfer import Transfer

__all__ = ["LOAN_SECONDS", "PROBE_TOPIC", "SCRATCH_BYTES", "Lender", "ScratchDesk"]

#: Never delivered to `Engine.notes`.
PROBE_TOPIC = "\nprobe"
SCRATCH_BYTES = 64 << 20
LOAN_SECONDS = 90.0
_NAME = "\nprobe {id}"
_WHY_LENGTH = 1024
#: Loans that have begun or wait for the one before to be back; notes on their way to one peer.
_MOST_WAITING, _MOST_ANSWERS = 4, 16


class Lender(Protocol):
    """What is asked of a peer here; `Peer` is one."""

    name: str

    @property
    def serial(self) -> int: ...
    def note_probe(self, payload: bytes) -> Transfer: ...
    async def lent(self, name: str, *, wait: float) -> RemoteRegion: ...
    def lost_error(self) -> HixlError: ...


class _Loan:
    def __init__(self, peer: Lender, loan_id: str, nbytes: int) -> None:
        self.peer = peer
        self.id = loan_id
        self.nbytes = nbytes
        self.over = asyncio.Event()


class ScratchDesk:
    """One per engine, both ends: it lends, and it asks others to. On the loop only."""

    def __init__(
        self,
        allocate: Callable[[int, str], Region],
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._allocate = allocate
        self._spawn = spawn
        self._loan: _Loan | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._answering: Counter[int] = Counter()
        self._asked: dict[tuple[int, str], asyncio.Future[dict[str, Any]]] = {}

    # ---- lending ----

    def noted(self, note: Note) -> None:
        """A note on `PROBE_TOPIC`. What is not understood is left alone: the peer may be of another version."""
        peer: Lender = note.peer
        try:
            message = json.loads(note.payload)
            what, loan_id = message["do"], message["id"]
            if not isinstance(loan_id, str) or len(loan_id) > 32 or not loan_id.isalnum() or not loan_id.isascii():
                return
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if what == "lend":
            self._asked_to_lend(peer, loan_id, message.get("nbytes"))
        elif what == "return":
            if self._loan is not None and self._loan.peer is peer and self._loan.id == loan_id:
                self._loan.over.set()
        elif what in ("lent", "refused"):
            future = self._asked.get((peer.serial, loan_id))
            if future is not None and not future.done():
                future.set_result(message)

    def _asked_to_lend(self, peer: Lender, loan_id: str, nbytes: object) -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes <= SCRATCH_BYTES:
            self._answer(peer, loan_id, "refused", why=f"it lends up to {SCRATCH_BYTES} bytes")
        elif self._loan is not None and (not self._loan.over.is_set() or self._waiting >= _MOST_WAITING):
            self._answer(
                peer,
                loan_id,
                "refused",
                why=f"it is being probed by {self._loan.peer.name!r} already; try again in a few seconds",
            )
        else:
            self._loan = _Loan(peer, loan_id, nbytes)
            self._waiting += 1
            self._spawn(self._lend(self._loan), "scratch memory")

    async def _lend(self, loan: _Loan) -> None:
        region: Region | None = None
        try:
            async with self._turn:  # the one before may not be back yet
                try:
                    region = self._allocate(loan.nbytes, _NAME.format(id=loan.id))
                    await region
                    self._answer(loan.peer, loan.id, "lent")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOAN_SECONDS):
                            await loan.over.wait()
                except HixlError as exc:
                    self._answer(loan.peer, loan.id, "refused", why=str(exc))
                finally:
                    if region is not None:
                        # What is pinned is told by the event 'quarantined'; a closed engine has taken it back itself.
                        with contextlib.suppress(HixlError):
                            await region.deregister()
        finally:
            loan.over.set()
            self._waiting -= 1
            if self._loan is loan:
                self._loan = None

    def _answer(self, peer: Lender, loan_id: str, what: str, why: str | None = None) -> None:
        message = {"do": what, "id": loan_id} if why is None else {"do": what, "id": loan_id, "why": why[:_WHY_LENGTH]}
        serial = peer.serial
        if self._answering[serial] >= _MOST_ANSWERS:
            return  # it asks faster than it takes answers
        with contextlib.suppress(HixlError):  # it is lost: then it waits for nothing
            answer = peer.note_probe(json.dumps(message).encode())
            answer.detach()
            self._answering[serial] += 1
            answer.when_quiesced(lambda: self._answered(serial))

    def _answered(self, serial: int) -> None:
        self._answering[serial] -= 1
        if not self._answering[serial]:
            del self._answering[serial]

    def lost(self, peer: Lender) -> None:
        if self._loan is not None and self._loan.peer is peer:
            self._loan.over.set()
        for (serial, _), future in self._asked.items():
            if serial == peer.serial and not future.done():
                future.set_exception(peer.lost_error())

    # ---- borrowing ----

    def allocate(self, nbytes: int) -> Region:
        """The near end of a probe: memory of our own that nobody sees."""
        return self._allocate(nbytes, "")

    @contextlib.asynccontextmanager
    async def borrowed(self, peer: Lender, nbytes: int, wait: float) -> AsyncIterator[RemoteRegion]:
        """``async with``: memory of `peer`, ready to use."""
        loan_id = secrets.token_hex(8)
        key = peer.serial, loan_id
        future = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            try:
                async with asyncio.timeout(wait):
                    await peer.note_probe(json.dumps({"do": "lend", "id": loan_id, "nbytes": nbytes}).encode())
                    answer = await future
            except TimeoutError:
                raise TransferTimeoutError(
                    f"probe of peer {peer.name!r}: asked to lend {nbytes} bytes, it did not answer within {wait:g} s; "
                    "its event loop is busy, its notes are not taken, or its aiohixl cannot be probed"
                ) from None
            if answer["do"] == "refused":
                raise RemoteAccessError(
                    f"probe of peer {peer.name!r}: it does not lend {nbytes} bytes for it: {answer.get('why', '')}"
                )
            yield await peer.lent(_NAME.format(id=loan_id), wait=wait)
        finally:
            del self._asked[key]
            if future.done() and not future.cancelled():
                future.exception()  # told by whatever came here first
            self._answer(peer, loan_id, "return")
