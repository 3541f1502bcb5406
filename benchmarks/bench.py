# SPDX-License-Identifier: Apache-2.0
"""Ratios against plain C on the same memory in the same run. Run by ``make bench``; never part of the tests.

The peer is another process. Each figure and its baseline are measured in turn, round by round, so that noise of the
machine meets both; a ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_hixl
import bench_tcp
import bench_verbs
import numpy as np
import uvloop
from figures import show

import aiohixl

MIB = 1 << 20
HERE = Path(__file__).resolve().parent
#: What each figure should reach: name -> (bound, whether more is better).
TARGETS = {
    "write_512MiB_vs_memcpy": (0.9, True),
    "await_4KiB_median_us": (5.0, False),
    "write_kv_8192x16KiB_vs_c_loop": (0.8, True),
}
BLOCKS, BLOCK = 8192, 16384


def compile_baseline(folder: str) -> ctypes.CDLL:
    out = Path(folder, "baseline.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(out), str(HERE / "baseline.c")], check=True)
    lib = ctypes.CDLL(str(out))
    lib.baseline_copy.restype = lib.baseline_blocks.restype = ctypes.c_double
    return lib


async def peer_main() -> None:
    async with aiohixl.Engine("bench-peer") as engine:
        await engine.allocate(512 * MIB, "bulk")
        memory = await engine.allocate(2 * BLOCKS * BLOCK)
        k, v = np.frombuffer(memoryview(memory), np.uint8).reshape(2, BLOCKS, BLOCK)
        await engine.register_kv([(k, v)], "kv")
        print(engine.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def peer_process() -> Iterator[str]:
    child = subprocess.Popen(
        [sys.executable, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.stdin.close()
        child.wait(10)


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(np.frombuffer(memoryview(array), np.uint8).ctypes.data)


async def bench_bulk(engine: aiohixl.Engine, peer: aiohixl.Peer, lib: Any, threads: int, rounds: int) -> dict[str, Any]:
    source = await engine.allocate(512 * MIB)
    np.frombuffer(memoryview(source), np.uint8)[:] = 7
    target = await engine.allocate(512 * MIB)  # a mapped memfd, as the peer's is
    remote = await peer.region("bulk")
    await peer.write(source, remote)
    await warm(lambda: peer.write(source, remote))
    ours, plain = [], []
    for _ in range(rounds):
        plain.append(lib.baseline_copy(pointer(target), pointer(source), ctypes.c_uint64(512 * MIB), threads))
        start = time.perf_counter()
        await peer.write(source, remote)
        ours.append(time.perf_counter() - start)
    us, them = statistics.median(ours), statistics.median(plain)
    return {
        "write_512MiB_vs_memcpy": them / us,
        "write_512MiB_GBps": 512 * MIB / us / 1e9,
        "memcpy_512MiB_GBps": 512 * MIB / them / 1e9,
    }


async def warm(post: Any) -> None:
    """Population of the importer's mapping goes on in the background after the first use."""
    for _ in range(3):
        await post()
    await asyncio.sleep(0.5)


async def bench_small(engine: aiohixl.Engine, peer: aiohixl.Peer, rounds: int) -> dict[str, Any]:
    source = await engine.allocate(MIB)
    remote = (await peer.region("bulk"))[0:4096]
    span = source[0:4096]
    await peer.write(span, remote)
    before = engine.stats()["inlined"]
    samples = []
    for _ in range(rounds * 2000):
        start = time.perf_counter_ns()
        await peer.write(span, remote)
        samples.append((time.perf_counter_ns() - start) / 1e3)
    samples.sort()
    foreign = engine.register(np.zeros(4096, np.uint8))
    queued = []  # foreign memory goes through a copy thread and the doorbell
    for _ in range(rounds * 200):
        start = time.perf_counter_ns()
        await peer.write(foreign, remote)
        queued.append((time.perf_counter_ns() - start) / 1e3)
    return {
        "await_4KiB_median_us": statistics.median(samples),
        "await_4KiB_p99_us": samples[int(len(samples) * 0.99)],
        "await_4KiB_inlined": engine.stats()["inlined"] - before,
        "await_4KiB_through_a_thread_median_us": statistics.median(queued),
    }


async def sweep_inline(rounds: int) -> dict[str, Any]:
    """What one awaited write costs by size, inside the post and by a copy thread: the reason for `inline_limit`."""
    out: dict[str, Any] = {}
    with peer_process() as address:
        for how, limit in (("inline", MIB), ("thread", 0)):
            async with aiohixl.Engine("bench", inline_limit=limit) as engine:
                peer = await engine.connect(address)
                remote, source = await peer.region("bulk"), await engine.allocate(MIB)
                await warm(lambda p=peer, s=source, r=remote: p.write(s, r[:MIB]))
                for kib in (4, 16, 32, 64, 128, 256):
                    size, samples = kib << 10, []
                    for _ in range(rounds * 100):
                        start = time.perf_counter_ns()
                        await peer.write(source[:size], remote[:size])
                        samples.append((time.perf_counter_ns() - start) / 1e3)
                    out[f"{kib} KiB {how} us"] = statistics.median(samples)
    return out


async def bench_kv(engine: aiohixl.Engine, peer: aiohixl.Peer, lib: Any, threads: int, rounds: int) -> dict[str, Any]:
    memory = await engine.allocate(2 * BLOCKS * BLOCK)
    data = np.frombuffer(memoryview(memory), np.uint8)
    data[:] = np.random.default_rng(1).integers(0, 256, data.size, dtype=np.uint8)
    k, v = data.reshape(2, BLOCKS, BLOCK)
    cache = await engine.register_kv([(k, v)], "kv")
    remote = await peer.kv("kv")
    dice = np.random.default_rng(2)
    count = BLOCKS // 2  # of each part: 8,192 rows in all
    here, there = dice.permutation(BLOCKS)[:count], dice.permutation(BLOCKS)[:count]
    offsets = [np.concatenate([b * BLOCK, b * BLOCK + BLOCKS * BLOCK]).astype(np.uint64) for b in (there, here)]
    target = await engine.allocate(2 * BLOCKS * BLOCK)
    await warm(lambda: peer.write_kv(cache, here, there, remote=remote))

    def loop(n: int) -> float:
        result: float = lib.baseline_blocks(
            pointer(target),
            pointer(offsets[0]),
            pointer(memory),
            pointer(offsets[1]),
            ctypes.c_uint64(BLOCK),
            ctypes.c_uint64(2 * count),
            n,
        )
        return result

    loop(1)
    ours, one, many = [], [], []
    for _ in range(rounds):
        one.append(loop(1))
        many.append(loop(threads))
        start = time.perf_counter()
        await peer.write_kv(cache, here, there, remote=remote)
        ours.append(time.perf_counter() - start)
    us = statistics.median(ours)
    return {
        "write_kv_8192x16KiB_vs_c_loop": statistics.median(one) / us,
        "write_kv_8192x16KiB_vs_c_loop_by_as_many_threads": statistics.median(many) / us,
        "write_kv_8192x16KiB_GBps": 2 * count * BLOCK / us / 1e9,
    }


async def bench(rounds: int, threads: int | None) -> dict[str, Any]:
    options = {} if threads is None else {"copy_threads": threads}
    count = threads or min(4, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder, peer_process() as address:
        lib = compile_baseline(folder)
        async with aiohixl.Engine("bench", **options) as engine:
            peer = await engine.connect(address)
            return {
                **await bench_bulk(engine, peer, lib, count, rounds),
                **await bench_small(engine, peer, rounds),
                **await bench_kv(engine, peer, lib, count, rounds),
                "threads": count,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None, help="copy threads, here and in the baseline")
    parser.add_argument("--inline", action="store_true", help="only show where inline copies stop paying")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hixl", action="store_true", help="what awaiting costs with HIXL, over the stand-in")
    parser.add_argument("--tcp", action="store_true", help="the tcp transport beside plain C on TCP sockets")
    parser.add_argument("--verbs", action="store_true", help="the verbs transport beside ib_write_bw and plain C")
    bench_hixl.add_arguments(parser)
    bench_tcp.add_arguments(parser)
    args = parser.parse_args()
    if args.hixl:
        return bench_hixl.run(args)
    if args.tcp or args.netns:
        return bench_tcp.run(args)
    if args.verbs:
        return bench_verbs.run(args)
    if args.peer:
        uvloop.run(peer_main())
        return 0
    if args.inline:
        print(json.dumps(uvloop.run(sweep_inline(args.rounds)), indent=1))
        return 0
    figures = uvloop.run(bench(args.rounds, args.threads))
    assert TARGETS.keys() <= figures.keys(), "each goal has its figure"
    return show(figures, TARGETS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
