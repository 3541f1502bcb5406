# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, one write: the smallest thing that moves bytes.

python examples/quickstart.py
"""

from __future__ import annotations

import asyncio

import numpy as np

import aiohixl


async def main() -> None:
    async with aiohixl.Engine("reader") as reader, aiohixl.Engine("writer") as writer:
        # Memory from allocate() is page-aligned and shareable; numpy and torch use it without a copy.
        inbox = await reader.allocate(1 << 20, name="inbox")
        source = await writer.allocate(1 << 20)
        np.frombuffer(memoryview(source), dtype=np.uint8)[:] = 7

        peer = await writer.connect(reader.address)
        target = await peer.region("inbox")
        transfer = peer.write(source, target)  # posted now
        await transfer  # the bytes are visible at the reader

        arrived = bool((np.frombuffer(memoryview(inbox), dtype=np.uint8) == 7).all())
        print(f"{transfer.nbytes} bytes by {peer.route(source, target).provider}, arrived: {arrived}")


if __name__ == "__main__":
    asyncio.run(main())
