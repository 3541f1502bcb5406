# SPDX-License-Identifier: Apache-2.0
"""Keeping one name at the rendezvous, across its restarts and the network's bad moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from aiohixl.errors import RendezvousError
from aiohixl.rendezvous.backoff import Backoff
from aiohixl.rendezvous.http import HttpClient
from aiohixl.rendezvous.refusal import RefusedError
from aiohixl.wire import (
    MAX_EPOCH_HINT,
    VERSION,
    JoinRequest,
    Record,
    RenewRequest,
    WireError,
    encode_name,
)

__all__ = ["Lease"]

_T = TypeVar("_T")
_ANSWER = 10.0


class Lease:
    """A name, the request that took it, and the task that renews it."""

    def __init__(
        self,
        http: HttpClient,
        name: str,
        request: JoinRequest,
        on_lost: Callable[[RendezvousError], object] | None,
        on_rejoined: Callable[[Record], object] | None,
    ) -> None:
        self.name = name
        self.record: Record | None = None
        self.last_error: RendezvousError | None = None
        self._http = http
        self._path = f"/v1/engines/{encode_name(name)}"
        self._request = request
        self._instance = ""
        self._lost = False
        self.ended = False
        self._on_lost = on_lost
        self._on_rejoined = on_rejoined
        self._task: asyncio.Task[None] | None = None

    async def join(self, patience: float) -> Record:
        """Ask for the name once, or again: repeating it with the same incarnation changes nothing."""
        what = f"join of {self.name!r}"
        body = {"version": VERSION, **self._request.to_json()}
        answer = await self._http.call(what, "PUT", self._path, patience=patience, body=body)
        try:
            record = Record.from_json(answer.get("record"), where="record")
        except WireError as exc:
            raise self._http.garbage(what, exc) from exc
        if (record.name, record.incarnation) != (self.name, self._request.incarnation):
            raise self._http.garbage(what, "it answers for another engine")
        self.record = record
        self._instance = answer["instance"]
        # From now on we only ever return to what is ours: no take-over, and the epoch we were given.
        epoch = min(record.epoch, MAX_EPOCH_HINT)
        self._request = replace(self._request, epoch=epoch, replace=None, force=False)
        return record

    @property
    def running(self) -> bool:
        """Whether the name is ours and being renewed."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def stop(self) -> None:
        """Stop renewing without a word to the server."""
        if self._task is not None:
            self._task.cancel()

    async def end(self, patience: float) -> bool:
        """Stop renewing and leave; whether the server confirmed."""
        self.ended = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        if self._lost:
            return False
        path = f"{self._path}?incarnation={self._request.incarnation}"
        try:
            await self._http.call(f"leave of {self.name!r}", "DELETE", path, patience=patience)
        except RendezvousError:
            return False
        return True

    async def _keep(self) -> None:
        backoff = Backoff()
        pause = self._request.ttl / 3
        delay = pause * random.uniform(0.8, 1.0)
        while True:
            await asyncio.sleep(delay)
            try:
                await self._renew(min(_ANSWER, max(1.0, pause)))
            except RendezvousError as exc:
                self.last_error = exc
                if isinstance(exc, RefusedError) and exc.code in ("name_taken", "wrong_incarnation"):
                    self._lost, self.record = True, None
                    self._call(self._on_lost, exc)
                    return
                delay = min(backoff.next(), pause)
            else:
                self.last_error = None
                backoff.reset()
                delay = pause * random.uniform(0.8, 1.0)

    async def _renew(self, patience: float) -> None:
        body = {"version": VERSION, **RenewRequest(self._request.incarnation).to_json()}
        what = f"renewal of {self.name!r}"
        try:
            answer = await self._http.call(what, "POST", f"{self._path}/renew", patience=patience, body=body)
            if answer["instance"] == self._instance:
                return
        except RefusedError as exc:
            if exc.code != "not_joined":
                raise
        record = await self.join(patience)
        self._call(self._on_rejoined, record)

    def _call(self, callback: Callable[[_T], object] | None, value: _T) -> None:
        # A callback that fails must not end the renewals.
        try:
            if callback is not None:
                callback(value)
        except Exception as exc:
            context = {"message": f"a rendezvous callback for {self.name!r} failed", "exception": exc}
            asyncio.get_running_loop().call_exception_handler(context)
