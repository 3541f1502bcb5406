# SPDX-License-Identifier: Apache-2.0
"""A transfer that fails, by a plan: each status is its exception, the memory is free, and the next transfer is good."""

from __future__ import annotations

import pytest
from conftest import Start
from test_cancellation import faulty, overwrite

import aiohixl
from aiohixl.errors import STATUS_ERRORS
from aiohixl.testing import FaultPlan


async def test_contract_08_stalled_transfer_times_out(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0), stall_timeout=0.1)
    transfer = ground.peer.write(ground.source, ground.remote)
    with pytest.raises(aiohixl.TransferTimeoutError, match="stall_timeout") as caught:
        await transfer
    assert isinstance(caught.value, TimeoutError)
    overwrite(ground)
    assert transfer.quiesced
    await ground.still_good()


@pytest.mark.parametrize("status", sorted(STATUS_ERRORS))
async def test_every_status_of_a_transfer_is_its_exception(start: Start, status: str) -> None:
    ground = await faulty(start, FaultPlan().fail(1, status))
    first = ground.peer.write(ground.source[0:8], ground.remote[0:8])
    second = ground.peer.write(ground.source, ground.remote, note=b"n", topic="t")
    await first
    with pytest.raises(STATUS_ERRORS[status], match="write of 65536 bytes to peer 'b': ") as caught:
        await second
    assert type(caught.value) is STATUS_ERRORS[status]
    assert (await ground.b.notes("t").get()).aborted
    ground.model[0:8] = ground.here[0:8]
    overwrite(ground)
    assert second.quiesced
    await ground.still_good()


async def test_a_fault_with_a_status_that_does_not_exist() -> None:
    with pytest.raises(aiohixl.ConfigError, match="NOPE"):
        aiohixl.Engine("a", faults=FaultPlan().fail(0, "NOPE"))
