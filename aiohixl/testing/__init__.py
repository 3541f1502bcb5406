# SPDX-License-Identifier: Apache-2.0
"""Helps to test what uses aiohixl: misfortune on demand, two engines that know each other, and the suite that every
provider passes."""

from __future__ import annotations

from aiohixl.config import Fault
from aiohixl.testing.conformance import CONFORMANCE, Bench, Check, Held, Memory, allocated, foreign, npu
from aiohixl.testing.faults import FaultPlan
from aiohixl.testing.pair import engine_pair

__all__ = [
    "CONFORMANCE",
    "Bench",
    "Check",
    "Fault",
    "FaultPlan",
    "Held",
    "Memory",
    "allocated",
    "engine_pair",
    "foreign",
    "npu",
]
