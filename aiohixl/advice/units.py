# SPDX-License-Identifier: Apache-2.0
"""Figures for people: bytes in powers of 1024, rates in bits as links are sold, seconds; three digits."""

from __future__ import annotations

__all__ = ["format_bytes", "format_rate", "format_seconds"]


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_bytes(nbytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def format_rate(bytes_per_second: float) -> str:
    bits = bytes_per_second * 8
    return f"{_three(bits / 1e9)} Gbit/s" if bits >= 1e9 else f"{_three(bits / 1e6)} Mbit/s"


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{_three(seconds)} s"
    return f"{_three(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_three(seconds * 1e6)} µs"
