# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over every kind of memory that this build reaches."""

from __future__ import annotations

import pytest

from aiohixl.testing import CONFORMANCE, Bench, Check, FaultPlan, Memory, allocated, engine_pair, foreign

KINDS = {"allocated": allocated, "foreign": foreign}


@pytest.mark.parametrize("check", CONFORMANCE.values(), ids=CONFORMANCE)
@pytest.mark.parametrize("there", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("here", KINDS.values(), ids=KINDS)
async def test_conformance(check: Check, here: Memory, there: Memory) -> None:
    async with engine_pair() as (a, b, peer):
        await check(Bench(a, b, peer, here, there))


@pytest.mark.parametrize("check", CONFORMANCE.values(), ids=CONFORMANCE)
async def test_conformance_behind_the_fault_provider(check: Check) -> None:
    """A plan that delays every third transfer changes nothing but time."""
    plan = FaultPlan()
    for nth in range(0, 60, 3):
        plan.delay(nth, 0.003)
    async with engine_pair(plan) as (a, b, peer):
        await check(Bench(a, b, peer))
