# SPDX-License-Identifier: Apache-2.0
"""What this machine can do: providers, and the limits of the kernel that matter to them.

Answers come from trials wherever a trial is cheap: a limit that is read is
only shown, a call that is made is believed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohixl import __version__
from aiohixl.config import TRANSPORTS
from aiohixl.doctor import trials
from aiohixl.doctor.rdma import Port, ports
from aiohixl.hixl import BINDING
from aiohixl.verbs import BINDING as VERBS_BINDING

__all__ = ["Check", "Provider", "examine", "machine", "render"]


@dataclass(frozen=True)
class Provider:
    """``reason`` says what was found, ``remedy`` what would make an absent provider usable."""

    name: str
    usable: bool
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """``ok`` is None for a plain fact; ``note`` says what follows from it."""

    name: str
    ok: bool | None
    value: str
    note: str = ""


#: Distributions whose versions explain a figure or a failure.
_OPTIONAL = ("uvloop", "numpy", "torch", "transformers")

#: What brings a provider that is absent.
_REMEDIES = {
    "shm": "allow memfd_create and unix sockets (a seccomp profile that forbids them is the usual cause)",
    "tcp": "allow sockets on the loopback interface",
    "verbs": "install rdma-core (Debian: ibverbs-providers) and have an RDMA device with an active port; "
    "`rdma link add rxe0 type rxe netdev eth0` makes one in software",
    "hixl": "install Ascend CANN (its toolkit package brings libcann_hixl.so) and source its set_env.sh",
}


def _hixl() -> dict[str, Any]:
    """Whether Huawei's library can be loaded, which is all that can be tried without opening an NPU."""
    if not BINDING.exists():
        reason = f"this build lacks its binding, {BINDING.name}: build aiohixl again with a C++ compiler"
        return {"name": "hixl", "usable": False, "reason": reason}
    from aiohixl import _core  # here, where its absence is answered

    usable, reason = _core.hixl_probe(os.fsencode(BINDING))
    return {"name": "hixl", "usable": usable, "reason": reason}


def _verbs() -> dict[str, Any]:
    """Whether there is an RDMA device that would do."""
    if not VERBS_BINDING.exists():
        reason = (
            f"this build lacks its binding, {VERBS_BINDING.name}: build aiohixl again with libibverbs-dev installed"
        )
        return {"name": "verbs", "usable": False, "reason": reason}
    from aiohixl import _core  # here, where its absence is answered

    usable, reason = _core.verbs_probe(os.fsencode(VERBS_BINDING))
    return {"name": "verbs", "usable": usable, "reason": reason}


def _providers() -> list[Provider]:
    try:
        import aiohixl._core

        found: list[dict[str, Any]] = [e for e in aiohixl._core.providers() if e["name"] not in ("hixl", "verbs")]
        found += [_hixl(), _verbs()]
    except (ImportError, AttributeError) as exc:
        reason = f"the native core cannot be loaded: {exc}"
        return [Provider(name, False, reason, "build or reinstall aiohixl") for name in _REMEDIES]
    by_name = {entry["name"]: entry for entry in found}
    answer = []
    for name, remedy in _REMEDIES.items():
        entry = by_name.get(name)
        if entry is None:
            reason = TRANSPORTS[name] or "not part of this build"
            answer.append(Provider(name, False, reason, "a version of aiohixl that has it"))
            continue
        usable, reason = bool(entry["usable"]), str(entry["reason"])
        if usable and name == "shm" and not (trial := trials.memfd()).ok:
            usable, reason = False, trial.text
        answer.append(Provider(name, usable, reason, "" if usable else remedy))
    return answer


def _bytes(value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} B"


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _meminfo() -> dict[str, int]:
    """/proc/meminfo; kB turned into bytes, counts left as they are."""
    found = {}
    for line in (_read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) << (10 if words[-1] == "kB" else 0)
    return found


def _yama() -> Check:
    value = _read("/proc/sys/kernel/yama/ptrace_scope")
    if value is None:
        return Check("ptrace scope", True, "no Yama", "processes of one user may copy to each other's memory")
    meanings = {
        "0": "processes of one user may copy to each other's memory",
        "1": "only descendants may be written to: memory not from allocate() cannot go by shm",
        "2": "needs CAP_SYS_PTRACE: memory not from allocate() cannot go by shm",
        "3": "nobody may: memory not from allocate() cannot go by shm",
    }
    return Check("ptrace scope", value == "0", value, meanings.get(value, "unknown value"))


def _memlock() -> Check:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    note = (
        ""
        if soft == resource.RLIM_INFINITY
        else "verbs pins no more without CAP_IPC_LOCK (root has it); raise: ulimit -l"
    )
    return Check("memlock", None, _bytes(soft), note)


def _nofile() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    note = "each mapped region and each peer costs descriptors" if soft <= 1024 else ""
    return Check("open files", None, f"{soft} (hard {hard})", note)


def _kernel_checks() -> list[Check]:
    memory = _meminfo()
    tried = [
        Check(name, trial.ok, trial.text, "" if trial.ok else note)
        for name, trial, note in (
            ("memfd with seals", trials.memfd(), "shm cannot work without it"),
            ("MADV_POPULATE_WRITE", trials.populate_write(), "needs Linux 5.14; first writes will be slower"),
            ("process_vm_writev", trials.sibling_write(), "memory not from allocate() cannot go by shm"),
            ("pidfd", trials.pidfd(), "needs Linux 5.3; a killed peer may be noticed late"),
        )
    ]
    pages = memory.get("HugePages_Total", 0)
    return [
        *tried,
        _yama(),
        _memlock(),
        _nofile(),
        Check("vm.max_map_count", None, _read("/proc/sys/vm/max_map_count") or "unknown"),
        Check("cores", None, f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        Check("page size", None, _bytes(os.sysconf("SC_PAGE_SIZE"))),
        Check("memory available", None, _bytes(memory.get("MemAvailable", 0))),
        Check("huge pages", None, f"{pages} of {_bytes(memory.get('Hugepagesize', 0))}" if pages else "none"),
    ]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    for key in ("model name", "Model", "CPU part"):
        if match := re.search(rf"^{key}\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE):
            return match[1]
    return platform.machine()


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "memory_bytes": _meminfo().get("MemTotal", 0),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": {"aiohixl": __version__, **{name: _version(name) for name in _OPTIONAL}},
    }


def _ports() -> list[dict[str, Any]]:
    try:
        return [asdict(port) for port in ports()]
    except (ImportError, AttributeError):  # the core cannot be loaded, which is said elsewhere
        return []


def examine() -> dict[str, Any]:
    """Everything, ready for JSON. ``ok`` is true if at least one provider is usable."""
    providers = _providers()
    return {
        "ok": any(provider.usable for provider in providers),
        "providers": [asdict(provider) for provider in providers],
        "rdma_ports": _ports(),
        "kernel": [asdict(check) for check in _kernel_checks()],
        "machine": machine(),
        "executable": sys.executable,
    }


def render(found: dict[str, Any]) -> str:
    """The same for people."""
    here = found["machine"]
    lines = [f"{here['cpu']}, Linux {here['kernel']} {here['architecture']}, Python {here['python']}"]
    lines.append(", ".join(f"{name} {version or 'absent'}" for name, version in here["versions"].items()))
    lines += ["", "providers"]
    for provider in found["providers"]:
        word = "usable" if provider["usable"] else "absent"
        lines.append(f"  {provider['name']:<6} {word}  {provider['reason']}")
        if provider["remedy"]:
            lines.append(f"{'':<17}to get it: {provider['remedy']}")
    if found["rdma_ports"]:
        lines += ["", "RDMA ports"]
    for entry in found["rdma_ports"]:
        port = Port(**entry)
        lines.append(f"  {port.device + ' port ' + str(port.port):<20} {'ok ' if port.usable else 'NO '} {port}")
    lines += ["", "kernel"]
    for check in found["kernel"]:
        word = {True: "ok", False: "NO", None: ""}[check["ok"]]
        note = f" ({check['note']})" if check["note"] else ""
        lines.append(f"  {check['name']:<20} {word:<3} {check['value']}{note}")
    return "\n".join(lines)
