# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a buffer are: address, extent, shape and strides of anything array-like.

Nothing is copied and no framework is imported. Tensors are recognised by
their methods, so this module works with torch, and without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import RegionError

__all__ = ["BufferInfo", "inspect_buffer"]

# DLPack's device types, to name the device in an error rather than number it.
_DLPACK_CPU = 1
_DLPACK_DEVICES = {
    2: "cuda",
    3: "cuda_host",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    11: "rocm_host",
    12: "ext_dev",
    13: "cuda_managed",
    14: "oneapi",
}


@dataclass(frozen=True)
class BufferInfo:
    """One buffer's memory, and the object that keeps it alive.

    ``nbytes`` runs from ``addr`` to just past the last byte that the buffer
    touches, gaps between strided elements included. ``strides`` are in bytes,
    one for each axis of ``shape``. ``contiguous`` means C order without gaps.
    Keep ``owner`` for as long as the memory is used.
    """

    addr: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device: str
    readonly: bool
    owner: object = field(repr=False, compare=False)
    contiguous: bool

    def describe(self) -> str:
        """Return dtype, shape and strides in one phrase, for error messages."""
        return f"{self.dtype}, shape {self.shape}, strides {self.strides} bytes, on {self.device}"


def inspect_buffer(obj: object, *, writable: bool = False) -> BufferInfo:
    """Find the memory behind ``obj`` without copying it.

    Takes torch tensors of the CPU and of an Ascend NPU (``device`` is then
    ``npu:0`` and so on, and ``addr`` of no use to the CPU), numpy arrays,
    anything with the buffer protocol, ``__array_interface__`` or (on the CPU)
    ``__dlpack__``. The buffer export
    of a ``bytearray`` or ``mmap`` is held, so that it cannot be resized while
    the result lives; a tensor's storage is held, whatever the tensor is
    pointed at later.

    Raises `RegionError` for anything else, for empty buffers, negative
    strides, memory of another device and, with ``writable=True``, for
    read-only buffers.
    """
    cls = type(obj)
    if all(hasattr(cls, name) for name in ("data_ptr", "stride", "element_size")):
        info = _from_tensor(obj)
    elif isinstance(obj, np.ndarray):
        info = _from_array(obj, obj, cls.__name__)
    else:
        info = _from_protocol(obj)
    if writable and info.readonly:
        raise RegionError(
            f"a {_name(obj)} ({info.describe()}) is read-only, so nothing can be received into it: "
            "pass writable memory, or register it for reading only"
        )
    return info


def _name(obj: object) -> str:
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _from_protocol(obj: object) -> BufferInfo:
    """Try the buffer protocol, then ``__array_interface__``, then DLPack."""
    try:
        view = memoryview(obj)  # type: ignore[arg-type]  # a TypeError says that it is no buffer
    except TypeError:
        pass
    except (BufferError, ValueError) as exc:  # a closed mmap, a released view, an export refused
        raise RegionError(f"a {_name(obj)} does not give its memory away: {exc}") from exc
    else:
        return _from_memoryview(view, obj)
    # Looked up where attributes are stored: instances with a catch-all __getattr__ have every attribute.
    cls = type(obj)
    if hasattr(cls, "__array_interface__") or "__array_interface__" in getattr(obj, "__dict__", ()):
        try:
            array = np.asarray(obj)
        except Exception as exc:  # the interface is the user's code and may raise anything
            raise RegionError(f"a {_name(obj)} has an unusable __array_interface__: {exc}") from exc
        return _from_array(array, obj, _name(obj))
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return _from_dlpack(obj)
    if hasattr(cls, "__cuda_array_interface__"):
        raise _unreachable(obj, "cuda", tuple(getattr(obj, "shape", ())))
    hint = ""
    if isinstance(obj, (list, tuple, dict)):
        hint = "; for the layers of a KV cache use register_kv, for several buffers register_many"
    raise RegionError(
        f"a {_name(obj)} is not a buffer: expected a numpy array, a torch tensor, or an object with "
        f"the buffer protocol, __array_interface__ or __dlpack__{hint}"
    )


def _from_tensor(obj: Any) -> BufferInfo:
    shape = tuple(int(n) for n in obj.shape)
    layout = str(getattr(obj, "layout", "strided")).rpartition(".")[2]
    device = _device_of(obj)
    if device != "cpu" and not device.startswith("npu:"):
        raise _unreachable(obj, device, shape)
    if layout != "strided":
        raise RegionError(
            f"a {_name(obj)} of shape {shape} has layout {layout!r}, whose values do not stand at fixed "
            "strides: pass a strided tensor (for instance .to_dense())"
        )
    for lazy in ("is_conj", "is_neg"):
        if getattr(obj, lazy, bool)():
            raise RegionError(
                f"a {_name(obj)} of shape {shape} is a lazy view ({lazy}() is true): its memory holds "
                "other values than it shows; pass .resolve_conj().resolve_neg()"
            )
    try:
        itemsize = int(obj.element_size())
        strides = tuple(int(n) * itemsize for n in obj.stride())
        addr = int(obj.data_ptr())
        # An alias: `t.data = ...` or `t.set_()` re-points the caller's tensor and
        # would free the storage that a reference to `t` alone seems to hold.
        owner = obj.detach() if hasattr(obj, "detach") else obj
    except (RuntimeError, NotImplementedError, TypeError) as exc:
        raise RegionError(f"a {_name(obj)} of shape {shape} has no memory of its own: {exc}") from exc
    dtype = str(obj.dtype).rpartition(".")[2]
    return _build(obj, addr, shape, strides, itemsize, dtype, readonly=False, owner=owner, device=device)


def _device_of(obj: Any) -> str:
    """``cpu``, ``npu:0``, or whatever else the tensor says."""
    kind, _, index = str(obj.device).partition(":")
    if kind == "npu":
        return f"npu:{index or 0}"
    return kind if kind == "cpu" else str(obj.device)


def _from_array(array: np.ndarray[Any, Any], obj: object, what: str) -> BufferInfo:
    if array.dtype.hasobject:
        raise RegionError(
            f"a {what} of dtype {array.dtype} and shape {array.shape} holds references to Python objects, "
            "which mean nothing in another process: pass plain numbers or bytes"
        )
    return _build(
        obj,
        int(array.__array_interface__["data"][0]),
        array.shape,
        array.strides,
        array.itemsize,
        _dtype_name(array.dtype),
        readonly=not array.flags.writeable,
        owner=array if array is obj else (array, obj),
    )


def _from_memoryview(view: memoryview, obj: object) -> BufferInfo:
    if any(n >= 0 for n in view.suboffsets or ()):
        raise RegionError(
            f"a {_name(obj)} of shape {view.shape} keeps its rows behind pointers (suboffsets): "
            "pass memory that is addressed by strides"
        )
    shape = tuple(view.shape or ())
    strides = tuple(view.strides or ())
    try:
        dtype = np.dtype(view.format)
    except TypeError:
        dtype = np.dtype((np.void, view.itemsize))  # a struct format numpy cannot spell: bytes to us
    if dtype.hasobject:
        raise RegionError(f"a {_name(obj)} of shape {shape} holds references to Python objects")
    name = _dtype_name(dtype) if dtype.itemsize == view.itemsize else f"void{view.itemsize * 8}"
    addr = 0
    if view.nbytes and min(strides, default=0) >= 0:
        addr = _view_address(view, obj)
    return _build(obj, addr, shape, strides, view.itemsize, name, readonly=view.readonly, owner=(view, obj))


def _view_address(view: memoryview, obj: object) -> int:
    try:
        array = np.frombuffer(view, np.uint8) if view.c_contiguous else np.asarray(view)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, BufferError) as exc:
        raise RegionError(
            f"a {_name(obj)} of format {view.format!r}, shape {view.shape} and strides {view.strides} "
            f"cannot be addressed: {exc}; pass it as bytes, .cast('B')"
        ) from exc
    return int(array.__array_interface__["data"][0])


def _from_dlpack(obj: Any) -> BufferInfo:
    try:
        kind, index = obj.__dlpack_device__()
        kind, index = int(kind), int(index)
    except Exception as exc:  # the exporter's code and may raise anything
        raise RegionError(f"a {_name(obj)} does not say through DLPack where its memory is: {exc}") from exc
    shape = tuple(getattr(obj, "shape", ()))
    if kind != _DLPACK_CPU:
        raise _unreachable(obj, f"{_DLPACK_DEVICES.get(kind, f'dlpack_device_{kind}')}:{index}", shape)
    try:
        array = np.from_dlpack(obj)
    except Exception as exc:
        raise RegionError(
            f"a {_name(obj)} of shape {shape} cannot be taken through DLPack: {exc}; a dtype that numpy "
            "lacks can be passed as an integer view of the same size"
        ) from exc
    return _from_array(array, obj, _name(obj))


def _unreachable(obj: object, device: str, shape: tuple[int, ...]) -> RegionError:
    where = (
        "the device 'meta', which has shapes but no memory: create it on a real device"
        if device == "meta"
        else f"device {device!r}, whose memory no provider here reaches: move it to the host (.cpu()), or "
        "see `aiohixl doctor` for the providers and what each one lacks"
    )
    return RegionError(f"a {_name(obj)} of shape {shape} is on {where}")


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """One spelling for numpy and torch; foreign byte order stays visible, since the bytes differ."""
    return dtype.name if dtype.isnative or dtype.names else dtype.str


def _build(
    obj: object,
    addr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    dtype: str,
    *,
    readonly: bool,
    owner: object,
    device: str = "cpu",
) -> BufferInfo:
    what = f"a {_name(obj)} ({dtype}, shape {shape}, strides {strides} bytes)"
    if itemsize == 0 or 0 in shape:
        raise RegionError(f"{what} is empty: there is nothing to register")
    if any(s < 0 for n, s in zip(shape, strides, strict=True) if n > 1):
        raise RegionError(
            f"{what} runs backwards in memory (a negative stride): pass it unflipped, or a contiguous copy"
        )
    if addr == 0:
        raise RegionError(f"{what} has no memory behind it (its address is null)")
    extent, expected, contiguous = itemsize, itemsize, True
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1:  # the stride of an axis of length 1 is never used and may be anything
            extent += (n - 1) * stride
            contiguous = contiguous and stride == expected
            expected *= n
    return BufferInfo(addr, extent, shape, strides, itemsize, dtype, device, readonly, owner, contiguous)
