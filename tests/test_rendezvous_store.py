# SPDX-License-Identifier: Apache-2.0
"""Leases and epochs, on a clock that the test turns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiohixl.rendezvous import MemoryStore, RefusedError
from aiohixl.wire import JoinRequest, WatchEvent

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


class Clock:
    """Both clocks of a store: monotonic seconds, and the wall clock that runs with it."""

    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self.now = 100.0
        self.offset = wall - self.now

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.offset


class Fixture:
    def __init__(self, clock: Clock | None = None, *, max_engines: int = 100, max_remembered: int = 100) -> None:
        self.clock = clock or Clock()
        self.store = MemoryStore(
            clock=self.clock,
            wall_clock=self.clock.wall,
            max_engines=max_engines,
            max_remembered=max_remembered,
        )
        self.events: list[WatchEvent] = []
        self.unsubscribe = self.store.subscribe(self.events.append)

    def heard(self) -> list[tuple[str, str, str | None]]:
        heard: list[tuple[str, str, str | None]] = [
            (event.kind, event.record.incarnation[0], event.reason) for event in self.events
        ]
        self.events.clear()
        return heard


@pytest.fixture
def f() -> Fixture:
    return Fixture()


@contextmanager
def refused(code: str, status: int) -> Iterator[pytest.ExceptionInfo[RefusedError]]:
    with pytest.raises(RefusedError) as caught:
        yield caught
    assert (caught.value.code, caught.value.status) == (code, status)


def test_a_join_gives_an_epoch_from_the_wall_clock(f: Fixture) -> None:
    record = f.store.join("x", JoinRequest(A, ("addr",), {"k": 1}, 5))
    assert record.epoch == int(f.clock.wall() * 1000)
    assert (record.name, record.addresses, record.capabilities, record.ttl) == ("x", ("addr",), {"k": 1}, 5)
    assert f.store.get("x") == record
    assert f.store.get("y") is None
    assert f.heard() == [("joined", "a", None)]


def test_joining_again_keeps_the_epoch_and_updates_the_rest(f: Fixture) -> None:
    first = f.store.join("x", JoinRequest(A))
    f.clock.now += 2
    assert f.store.join("x", JoinRequest(A)).epoch == first.epoch
    assert f.heard() == [("joined", "a", None)]
    again = f.store.join("x", JoinRequest(A, ("new",)))
    assert (again.epoch, again.addresses, again.age) == (first.epoch, ("new",), 2)
    assert f.heard() == [("updated", "a", None)]


def test_a_lease_ends_by_itself_unless_renewed(f: Fixture) -> None:
    f.store.join("x", JoinRequest(A, ttl=10))
    f.clock.now += 9
    assert f.store.renew("x", A).age == 9
    f.clock.now += 9.5
    assert f.store.get("x") is not None
    assert f.store.expire() == pytest.approx(0.5)
    f.clock.now += 0.5
    assert f.store.get("x") is None
    assert f.store.expire() == math.inf
    assert f.heard() == [("joined", "a", None), ("left", "a", "expired")]
    with refused("not_joined", 404):
        f.store.renew("x", A)


def test_expiry_is_exact_among_many(f: Fixture) -> None:
    for i in range(10):
        f.store.join(f"n{i}", JoinRequest(A, ttl=1 + i))
    for left in range(9, -1, -1):
        f.clock.now += 1
        assert [record.name for record in f.store.records()] == [f"n{i}" for i in range(10 - left, 10)]


def test_a_second_live_engine_is_refused_and_told_who_holds_the_name(f: Fixture) -> None:
    first = f.store.join("x", JoinRequest(A, ttl=10))
    f.clock.now += 4
    f.store.renew("x", A)
    f.clock.now += 3
    with refused("name_taken", 409) as caught:
        f.store.join("x", JoinRequest(B))
    holder = caught.value.holder
    assert holder is not None
    assert (holder.incarnation, holder.epoch) == (A, first.epoch)
    assert (holder.age, holder.since_renew, holder.expires_in) == (7, 3, 7)
    assert A in str(caught.value)
    assert "joined 7.0 s ago, renewed 3.0 s ago, lease ends in 7.0 s" in str(caught.value)
    f.clock.now += 7
    assert f.store.join("x", JoinRequest(B)).epoch > first.epoch


@pytest.mark.parametrize("how", [JoinRequest(B, replace=A), JoinRequest(B, force=True)], ids=["replace", "force"])
def test_taking_over(f: Fixture, how: JoinRequest) -> None:
    first = f.store.join("x", JoinRequest(A))
    assert f.store.join("x", how).epoch > first.epoch
    assert f.heard() == [("joined", "a", None), ("left", "a", "replaced"), ("joined", "b", None)]
    with refused("wrong_incarnation", 409) as caught:
        f.store.renew("x", A)
    assert caught.value.holder is not None
    assert caught.value.holder.incarnation == B
    with refused("wrong_incarnation", 409):
        f.store.leave("x", A)
    with refused("name_taken", 409):
        f.store.join("x", JoinRequest(A, epoch=first.epoch))


def test_replace_must_name_the_holder(f: Fixture) -> None:
    f.store.join("x", JoinRequest(A))
    with refused("name_taken", 409) as caught:
        f.store.join("x", JoinRequest(C, replace=B))
    assert B in str(caught.value)
    assert caught.value.field == "replace"
    f.store.leave("x", A)
    f.store.join("x", JoinRequest(C, replace=B))  # nobody is in the way any more


def test_leaving(f: Fixture) -> None:
    f.store.join("x", JoinRequest(A))
    f.store.leave("x", A)
    assert f.store.records() == ()
    assert f.heard() == [("joined", "a", None), ("left", "a", "left")]
    with refused("not_joined", 404):
        f.store.leave("x", A)


def test_epochs_grow_within_one_millisecond_and_when_the_wall_clock_jumps_back(f: Fixture) -> None:
    epochs = []
    for incarnation in (A, B, C):
        epochs.append(f.store.join("x", JoinRequest(incarnation)).epoch)
        f.store.leave("x", incarnation)
    f.clock.offset -= 1e6
    epochs.append(f.store.join("x", JoinRequest(A)).epoch)
    assert epochs == sorted(set(epochs))


def test_the_same_incarnation_keeps_its_epoch_after_its_lease_ended(f: Fixture) -> None:
    first = f.store.join("x", JoinRequest(A))
    f.clock.now += 60
    assert f.store.join("x", JoinRequest(A)).epoch == first.epoch
    f.clock.now += 60
    assert f.store.join("x", JoinRequest(A, epoch=first.epoch)).epoch == first.epoch


def test_a_restarted_server_gives_the_epoch_back_that_is_hinted() -> None:
    clock = Clock()
    before = Fixture(clock).store.join("x", JoinRequest(A)).epoch
    clock.now += 5
    store = Fixture(clock).store
    assert store.join("x", JoinRequest(A, epoch=before)).epoch == before
    store.leave("x", A)
    # Somebody else's hint does not get the epoch that A had.
    assert store.join("x", JoinRequest(B, epoch=before)).epoch > before


def test_a_hint_above_the_holders_epoch_was_granted_later_and_wins(f: Fixture) -> None:
    left_over = f.store.join("x", JoinRequest(A, epoch=1000))
    assert left_over.epoch == 1000
    assert f.store.join("x", JoinRequest(B, epoch=2000)).epoch == 2000
    with refused("name_taken", 409):
        f.store.join("x", JoinRequest(A, epoch=1000))


def test_epochs_stay_monotonic_for_names_dropped_from_memory() -> None:
    f = Fixture(max_remembered=2)
    future = int(f.clock.wall() * 1000) + 10**9
    f.store.join("x", JoinRequest(A, epoch=future))
    f.store.leave("x", A)
    for i in range(5):
        f.store.join(f"y{i}", JoinRequest(A))
        f.store.leave(f"y{i}", A)
    assert f.store.join("x", JoinRequest(B)).epoch > future


def test_the_number_of_engines_is_bounded_and_returns_when_they_leave() -> None:
    f = Fixture(max_engines=2)
    f.store.join("x", JoinRequest(A))
    f.store.join("y", JoinRequest(A))
    with refused("full", 503):
        f.store.join("z", JoinRequest(A))
    f.store.join("x", JoinRequest(A))
    f.store.join("y", JoinRequest(B, force=True))
    f.store.leave("x", A)
    f.store.join("z", JoinRequest(A))


def test_a_listener_may_call_the_store_and_may_go(f: Fixture) -> None:
    seen: list[int] = []
    f.store.subscribe(lambda event: seen.append(len(f.store.records())))
    for i in range(3):
        f.store.join(f"n{i}", JoinRequest(A, ttl=5))
    f.clock.now += 5
    assert f.store.records() == ()
    assert seen == [1, 2, 3, 0, 0, 0]
    f.unsubscribe()
    f.unsubscribe()
    f.events.clear()
    f.store.join("x", JoinRequest(A))
    assert f.events == []
