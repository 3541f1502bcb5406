# SPDX-License-Identifier: Apache-2.0
"""What memory an engine has registered, under which names, and who keeps it alive."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from aiohixl import _core
from aiohixl.buffers import BufferInfo, inspect_buffer
from aiohixl.completion import CompletionQueue
from aiohixl.errors import ConfigError, RegionError
from aiohixl.events import Event
from aiohixl.kv import KVLayout
from aiohixl.kvcache import KVCache, encode_announcement
from aiohixl.npu import device_index
from aiohixl.region import ACCESS, Region, whole_number

__all__ = ["Registry"]

_PART = "{cache}\n{slot}"  # the name of a KV cache's part; users' names have no line feed

#: What a stopped peer may still touch although its engine is closed: leaking is safe, reusing is not.
_stuck_memory: list[list[object]] = []


class Registry:
    """The regions of one engine; their `Host`. `Engine` documents the methods of the same names."""

    def __init__(
        self,
        core: _core.Engine,
        queue: CompletionQueue,
        check: Callable[[], None],
        incarnation_of: Callable[[Any], bytes],
        emit: Callable[[Event], None],
        npu_id: int | None,
    ) -> None:
        self._core = core
        self.queue = queue
        self.check = check
        self.incarnation_of = incarnation_of
        self._emit = emit
        self._npu_id = npu_id
        self._regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._allocations: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._named: dict[str, Region] = {}
        # Peers may use a named region whether or not anybody here still holds it.
        self._kept: dict[int, Region] = {}

    def became_ready(self, region_id: int, status: int, sys_errno: int, reason: str) -> None:
        region = self._regions.get(region_id)
        if region is not None:
            region.became_ready(status, sys_errno, reason)

    def keep_for_ever(self, *pending: object) -> None:
        """All memory that a peer, or a library's call that does not return, may still touch; `pending` holds more.

        By a reference that nobody drops: what a module holds goes when the interpreter does, before native threads.
        """
        memory = [*self._kept.values(), *self._regions.values(), *pending]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        _stuck_memory.append(memory)

    def close(self, closed_status: int) -> None:
        """The engine has ended."""
        for region in list(self._regions.values()):
            if not region.ready:
                region.became_ready(closed_status, errno.ECANCELED, "the engine was closed")
        self._kept.clear()
        self._named.clear()

    def allocate(
        self, nbytes: int, name: str = "", *, access: str = "rw", device: str = "cpu", hidden: bool = False
    ) -> Region:
        """`hidden`: the name has a line feed, and peers do not list it."""
        self.check()
        self._check_name(name, part=hidden)
        place = self._place_named(device)
        size = whole_number(nbytes)
        if size is None or size <= 0:
            raise RegionError(f"allocate: a positive number of bytes, not {nbytes!r}")
        free = _available_memory() if place == "cpu" else None
        if free is not None and size > free:
            raise RegionError(f"allocate: {size} bytes asked for, {free} bytes of memory are available")
        region = self._region(name, access, nbytes=size, place=place)
        if place == "cpu":
            self._allocations[region.id] = region
        self._announce(region, name)
        return region

    def _place_named(self, device: object) -> str:
        """``cpu`` or ``npu:N``, as `allocate` was asked for it."""
        if device == "cpu":
            return "cpu"
        kind, colon, index = device.partition(":") if isinstance(device, str) else ("", "", "")
        if kind != "npu" or bool(colon) != index.isdigit() or not index.isascii():
            raise ConfigError(f"allocate: device is 'cpu', 'npu' or 'npu:N', not {device!r}")
        if not colon and self._npu_id is not None:
            return f"npu:{self._npu_id}"
        self._check_npu(f"npu:{int(index or 0)}", "allocate")
        return f"npu:{int(index)}"

    def _check_npu(self, device: str, what: str) -> None:
        index = device_index(device)
        if self._npu_id is None:
            raise RegionError(
                f"{what}: memory on device {device!r}, but this engine has no NPU: open it with "
                f"Engine(transports=['hixl'], npu_id={index}); tensors of an NPU come with torch_npu, the extra "
                "aiohixl[npu]"
            )
        if index != self._npu_id:
            raise RegionError(
                f"{what}: memory on device {device!r}, but this engine has NPU {self._npu_id}: an engine has one NPU; "
                f"open another with npu_id={index}, or move the data to 'npu:{self._npu_id}'"
            )

    def register(self, buffer: Any, name: str = "", *, access: str = "rw") -> Region:
        self.check()
        region = self._register(inspect_buffer(buffer), buffer, name, access)
        self._announce(region, name)
        return region

    def register_many(self, buffers: Mapping[str, Any], *, access: str = "rw") -> dict[str, Region]:
        self.check()
        if not isinstance(buffers, Mapping):
            raise ConfigError(f"register_many: a mapping of names to buffers, not {type(buffers).__name__}")
        infos = {name: inspect_buffer(buffer) for name, buffer in buffers.items()}
        for name, info in infos.items():
            self._check_name(name, required=True)
            self._check_registrable(info, name, access)
        regions = {name: self._register(info, buffers[name], name, access) for name, info in infos.items()}
        for name, region in regions.items():
            self._announce(region, name)
        return regions

    def register_kv(self, layers: Any, name: str = "kv", *, block_axis: int = 0, access: str = "rw") -> KVCache:
        self.check()
        self._check_name(name, required=True)
        axis = whole_number(block_axis)
        if axis is None:
            raise ConfigError(f"register_kv: block_axis is the number of an axis, not {block_axis!r}")
        layout, infos = KVLayout.from_layers(layers, block_axis=axis)
        for info in infos:
            self._check_access(info, name, access)
        if "w" in access:
            _check_distinct(layout, infos)
        regions = []
        for slot, info in enumerate(infos):
            part = _PART.format(cache=name, slot=slot)
            region = self._register(info, info.owner, part, access, strided=True)
            regions.append(region)
        root = self._region(name, "r", nbytes=0, layout=True)
        blob = encode_announcement(layout, regions)
        if len(blob) > _core.BLOB_MAX:
            raise ConfigError(
                f"register_kv: the layout's description has {len(blob)} bytes, more than {_core.BLOB_MAX}"
            )
        for slot, region in enumerate(regions):
            self._announce(region, _PART.format(cache=name, slot=slot))
        cache = KVCache(name, layout, regions, root)
        self._announce(root, name, blob)
        return cache

    def _register(self, info: BufferInfo, owner: Any, name: str, access: str, *, strided: bool = False) -> Region:
        self._check_name(name, part=strided)
        if strided:
            self._check_access(info, name, access)
        else:
            self._check_registrable(info, name, access)
        region = self._place(info, (owner, info.owner), name, access)
        region.readonly = info.readonly
        return region

    def _place(self, info: BufferInfo, keep: Any, name: str, access: str) -> Region:
        if info.device != "cpu":
            return self._region(name, access, nbytes=info.nbytes, addr=info.addr, owner=keep, place=info.device)
        for parent in self._allocations.values():
            if parent.addr <= info.addr and info.addr + info.nbytes <= parent.addr + parent.nbytes:
                offset = info.addr - parent.addr
                return self._region(
                    name,
                    access,
                    nbytes=info.nbytes,
                    parent=parent,
                    offset=offset,
                    owner=keep,
                )
        return self._region(name, access, nbytes=info.nbytes, addr=info.addr, owner=keep)

    def _region(self, name: str, access: str, *, nbytes: int, place: str = "cpu", **native: Any) -> Region:
        _check_access_word(access)
        try:
            region = Region(self, self._core, name=name, access=access, place=place, nbytes=nbytes, **native)
        except _core.StatusError as exc:
            status = self.queue.statuses[exc.status]
            detail = f": {os.strerror(exc.sys_errno)}" if status == "SYSTEM" else ""
            called = f" as {name!r}" if name else ""
            raise RegionError(f"cannot register {nbytes} bytes{called}{detail}") from None
        self._regions[region.id] = region
        return region

    def _check_access(self, info: BufferInfo, name: str, access: str) -> None:
        _check_access_word(access)
        if info.device != "cpu":
            self._check_npu(info.device, _called(info, name))
        if info.readonly and "w" in access:
            raise RegionError(
                f"{_called(info, name)} is read-only memory, and access {access!r} lets peers write: use access='r', "
                "or a copy"
            )

    def _check_registrable(self, info: BufferInfo, name: str, access: str) -> None:
        if not info.contiguous:
            raise RegionError(
                f"{_called(info, name)} is not contiguous (shape {info.shape}, strides {info.strides} bytes): register "
                "the whole of its memory, or use register_kv, which takes strides"
            )
        self._check_access(info, name, access)

    def _check_name(self, name: str, *, required: bool = False, part: bool = False) -> None:
        if not isinstance(name, str) or (required and not name):
            raise ConfigError(f"a name is a string that is not empty, not {name!r}")
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise ConfigError(f"a name is a string that UTF-8 can encode, not {name[:40]!r}") from None
        if size > _core.NAME_MAX or "\0" in name or ("\n" in name and not part):
            raise ConfigError(
                f"a name has at most {_core.NAME_MAX} bytes of UTF-8 without NUL and line feed: {name[:40]!r}"
            )
        if name in self._named:
            known = self._named[name]
            # Only what stands for a whole cache has no bytes of its own.
            what = repr(known) if known.nbytes else "a KV cache of that name"
            raise RegionError(f"{name!r} is registered already: {what}; deregister it first")

    def _announce(self, region: Region, name: str, blob: bytes = b"") -> None:
        if name:
            self._named[name] = region
            self._kept[region.id] = region
            region._announce(name.encode(), blob)

    # ---- what regions ask of their host ----

    def region_quarantined(self, region: Region, spans: tuple[tuple[int, int], ...], detail: str) -> None:
        self._emit(Event("quarantined", region=region, spans=spans, detail=detail))

    def region_released(self, region: Region, spans: tuple[tuple[int, int], ...]) -> None:
        self._emit(Event("released", region=region, spans=spans))
        if region.deregistered and not region.quarantined:
            self._kept.pop(region.id, None)

    def region_unnamed(self, region: Region) -> None:
        if self._named.get(region.name) is region:
            del self._named[region.name]

    def region_gone(self, region: Region) -> None:
        self.region_unnamed(region)
        if not region.quarantined:  # its memory must outlive whatever may still touch it
            self._kept.pop(region.id, None)


def _called(info: BufferInfo, name: str) -> str:
    return repr(name) if name else f"the buffer ({info.dtype}, shape {info.shape})"


def _check_distinct(layout: KVLayout, infos: list[BufferInfo]) -> None:
    """Refuse a tensor that was given twice. Parts that interleave share their extent and no byte, and are fine."""
    seen: dict[tuple[object, ...], tuple[int, str]] = {}
    for slot, info in zip(layout.slots(), infos, strict=True):
        first = seen.setdefault((info.addr, info.shape, info.strides, info.itemsize), slot)
        if first is not slot:
            raise ConfigError(
                f"layers: layer {first[0]} part {first[1]!r} and layer {slot[0]} part {slot[1]!r} are the same memory "
                f"({info.describe()}), so that writing one overwrites the other: pass a tensor of its own for each, or "
                "access='r'"
            )


def _check_access_word(access: object) -> None:
    if not isinstance(access, str) or access not in ACCESS:
        raise ConfigError(f"access: one of {', '.join(ACCESS)}, not {access!r}")


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
