# SPDX-License-Identifier: Apache-2.0
"""Is there an RDMA device? Tests of the verbs transport skip without one."""

from __future__ import annotations

import os

import pytest

from aiohixl import _core
from aiohixl.verbs import BINDING

if BINDING.exists():
    USABLE, SAYS = _core.verbs_probe(os.fsencode(BINDING))
else:
    USABLE, SAYS = False, "this build has no binding to libibverbs"
needs_device = pytest.mark.skipif(
    not USABLE, reason=f"{SAYS}: `make test-rdma` runs this in a virtual machine with RDMA in software"
)
#: The virtual machine says that its devices are nobody else's.
own_machine = pytest.mark.skipif(
    "RDMAVM" not in os.environ,
    reason="it needs RDMA devices that are nobody else's: `make test-rdma` runs it in a machine of its own",
)
