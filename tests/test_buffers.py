# SPDX-License-Identifier: Apache-2.0
"""Every kind of buffer is found where it is and kept alive, or refused by name with the reason."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiohixl.buffers import BufferInfo, inspect_buffer
from aiohixl.errors import ConfigError, RegionError
from aiohixl.kv import KVLayout


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: install the test requirements (aiohixl[test])")


def bytes_at(info: BufferInfo) -> bytes:
    return ctypes.string_at(info.addr, info.nbytes)


# --- numpy ----------------------------------------------------------------


def test_numpy_array() -> None:
    a = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    info = inspect_buffer(a)
    assert (info.addr, info.nbytes) == (a.ctypes.data, 96)
    assert (info.shape, info.strides, info.itemsize) == ((2, 3, 4), (48, 16, 4), 4)
    assert (info.dtype, info.device, info.readonly, info.contiguous) == ("int32", "cpu", False, True)
    assert bytes_at(info) == a.tobytes()


@pytest.mark.parametrize(
    ("view", "contiguous"),
    [
        (lambda a: a[:, 1], False),
        (lambda a: a[::2], True),  # one row is left: its stride does not matter
        (lambda a: a.transpose(2, 0, 1), False),
        (lambda a: a[:, ::2, ::3], False),
        (lambda a: a[1, 2, 3, ...], True),
        (lambda a: a[:, None, :, None], True),
        (lambda a: a[::-1][:1], True),
        (lambda a: a[1:, 1:], True),
        (lambda a: a[..., 1:], False),
    ],
)
def test_numpy_views(view: Callable[[Any], Any], contiguous: bool) -> None:
    part = view(np.arange(24, dtype=np.int32).reshape(2, 3, 4))
    last = part[(*[slice(-1, None)] * part.ndim, ...)]
    info = inspect_buffer(part)
    assert info.addr == part.ctypes.data
    assert info.nbytes == last.ctypes.data + 4 - part.ctypes.data
    assert (info.shape, info.strides) == (part.shape, part.strides)
    assert info.contiguous == contiguous == part.flags.c_contiguous


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("f2", "float16"),
        ("i1", "int8"),
        ("?", "bool"),
        ("c8", "complex64"),
        ("M8[s]", "datetime64[s]"),
        (">f4", ">f4" if sys.byteorder == "little" else "float32"),
        ([("a", "i4"), ("b", "i4")], "void64"),
    ],
)
def test_numpy_dtypes(dtype: Any, name: str) -> None:
    assert inspect_buffer(np.zeros(3, dtype)).dtype == name


def test_numpy_readonly() -> None:
    a = np.zeros((2, 3))
    a.flags.writeable = False
    assert inspect_buffer(a).readonly
    with pytest.raises(RegionError, match=r"a numpy.ndarray \(float64, shape \(2, 3\).* is read-only"):
        inspect_buffer(a, writable=True)
    assert not inspect_buffer(np.zeros(2), writable=True).readonly


# --- the buffer protocol --------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "dtype", "shape", "readonly"),
    [
        (b"abcd", "uint8", (4,), True),
        (bytearray(b"abcd"), "uint8", (4,), False),
        (memoryview(bytearray(b"abcd")), "uint8", (4,), False),
        (memoryview(b"abcd").cast("B", (2, 2)), "uint8", (2, 2), True),
        (array.array("f", [1, 2]), "float32", (2,), False),
        (array.array("q", [1, 2]), "int64", (2,), False),
        ((ctypes.c_uint16 * 3)(1, 2, 3), "uint16", (3,), False),
        ((ctypes.c_char * 3)(), "bytes8", (3,), False),
        (ctypes.c_double(1), "float64", (), False),
    ],
)
def test_buffer_protocol(obj: Any, dtype: str, shape: tuple[int, ...], readonly: bool) -> None:
    info = inspect_buffer(obj)
    assert (info.dtype, info.shape, info.readonly) == (dtype, shape, readonly)
    assert info.contiguous
    assert bytes_at(info) == bytes(memoryview(obj).cast("B"))
    if not readonly:
        ctypes.memset(info.addr, 7, info.nbytes)
        assert bytes(memoryview(obj).cast("B")) == b"\7" * info.nbytes


def test_ctypes_struct_is_bytes() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int8), ("b", ctypes.c_int32))

    pairs = (Pair * 3)()
    info = inspect_buffer(pairs)
    assert (info.addr, info.nbytes, info.itemsize) == (ctypes.addressof(pairs), 24, 8)
    assert info.dtype == "void64"


def test_strided_memoryview() -> None:
    data = bytearray(range(16))
    info = inspect_buffer(memoryview(data)[1::3])
    assert (info.shape, info.strides, info.nbytes) == ((5,), (3,), 13)
    assert not info.contiguous
    assert bytes_at(info) == bytes(range(1, 14))


def test_bytearray_cannot_be_resized_while_in_use() -> None:
    data = bytearray(8)
    info = inspect_buffer(data)
    with pytest.raises(BufferError):
        data.extend(b"more")
    del info
    data.extend(b"more")


def test_mmap(tmp_path: Path) -> None:
    with mmap.mmap(-1, 8192) as m:
        m[:4] = b"page"
        info = inspect_buffer(m, writable=True)
        assert info.nbytes == 8192
        assert info.addr % mmap.PAGESIZE == 0
        assert bytes_at(info)[:4] == b"page"
        with pytest.raises(BufferError):
            m.close()
        del info
    with pytest.raises(RegionError, match=r"a mmap.mmap does not give its memory away"):
        inspect_buffer(m)

    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
        with pytest.raises(RegionError, match="read-only"):
            inspect_buffer(m, writable=True)
        assert inspect_buffer(m).readonly


def test_released_memoryview() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(RegionError, match="released"):
        inspect_buffer(view)


# --- other protocols ------------------------------------------------------


class Interface:
    """Exports an array through ``__array_interface__`` alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__


class DLPack:
    """Exports an array through DLPack alone, from whatever device it is told to claim."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device, self.shape = array, device, array.shape

    def __dlpack__(self, **kwargs: Any) -> Any:
        assert self.device[0] == 1, "asked for memory of another device"
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("export", [Interface, DLPack])
def test_array_interface_and_dlpack(export: Callable[[Any], Any]) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4).copy()  # owns its memory
    for view in (a, a.T, a[:, ::2]):
        info = inspect_buffer(export(view))
        assert (info.addr, info.shape, info.strides) == (view.ctypes.data, view.shape, view.strides)
        assert info.dtype == "float32"
    gone = weakref.ref(a)
    del a, view
    gc.collect()
    assert gone() is not None
    assert bytes_at(info) == np.arange(11, dtype=np.float32).tobytes()


def test_broken_exporters() -> None:
    class Broken:
        __array_interface__ = {"shape": (3,), "typestr": "<f4", "data": "nowhere", "version": 3}  # noqa: RUF012

    class Raises(DLPack):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise NotImplementedError("no device")

    class Dtype(DLPack):
        def __dlpack__(self, **kwargs: Any) -> Any:
            raise BufferError("dtype not known")

    with pytest.raises(RegionError, match="Broken has an unusable __array_interface__"):
        inspect_buffer(Broken())
    with pytest.raises(RegionError, match="does not say through DLPack where its memory is: no device"):
        inspect_buffer(Raises(np.zeros(3)))
    with pytest.raises(RegionError, match="cannot be taken through DLPack: dtype not known"):
        inspect_buffer(Dtype(np.zeros(3)))


@pytest.mark.parametrize(
    ("device", "name"),
    [((2, 1), "cuda:1"), ((10, 0), "rocm:0"), ((12, 3), "ext_dev:3"), ((99, 0), "device_99:0")],
)
def test_dlpack_of_another_device(device: tuple[int, int], name: str) -> None:
    with pytest.raises(RegionError, match=rf"DLPack of shape \(3, 4\) is on device '.*{name}'.*\.cpu\(\)"):
        inspect_buffer(DLPack(np.zeros((3, 4)), device))


def test_cuda_array_interface_names_the_device() -> None:
    class Cuda:
        shape = (3,)
        __cuda_array_interface__: object = None

    with pytest.raises(RegionError, match="is on device 'cuda'"):
        inspect_buffer(Cuda())


# --- what no buffer is ----------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (None, "a NoneType is not a buffer"),
        ("text", "a str is not a buffer"),
        (3, "a int is not a buffer"),
        ([np.zeros(3)], "a list is not a buffer.*register_many"),
        (np.zeros((3, 0)), r"a numpy.ndarray \(float64, shape \(3, 0\).* is empty"),
        (b"", r"a bytes \(uint8, shape \(0,\), strides \(1,\) bytes\) is empty"),
        (np.zeros((4, 3))[::-1], r"shape \(4, 3\), strides \(-24, 8\) bytes\) runs backwards"),
        (
            memoryview(b"abc")[::-1],
            r"a memoryview \(uint8, shape \(3,\), strides \(-1,\) bytes\) runs backwards",
        ),
        (np.array([None, 1]), "dtype object and shape .* holds references"),
        (np.zeros(2, [("a", object)]), "holds references"),
        (array.array("i"), "is empty"),
        ((ctypes.py_object * 2)(), "holds references"),
    ],
)
def test_refused(obj: Any, message: str) -> None:
    with pytest.raises(RegionError, match=message):
        inspect_buffer(obj)


def test_an_object_with_every_attribute_is_no_buffer() -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: 0

    with pytest.raises(RegionError, match="Anything is not a buffer"):
        inspect_buffer(Anything())


# --- tensors --------------------------------------------------------------


class FakeTensor:
    """What is asked of a tensor, without torch: to claim devices that this machine lacks."""

    def __init__(self, device: str = "cpu", addr: int = 0) -> None:
        self.device, self.addr = device, addr
        self.shape, self.dtype, self.layout = (2, 3), "torch.float16", "torch.strided"

    def data_ptr(self) -> int:
        assert self.device.startswith(("cpu", "npu")), "asked for an address of another device"
        return self.addr

    def stride(self) -> tuple[int, ...]:
        return (3, 1)

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize("device", ["cuda:1", "xpu", "mps:0", "npux:0"])
def test_tensor_on_a_device_names_it(device: str) -> None:
    with pytest.raises(RegionError, match=rf"FakeTensor of shape \(2, 3\) is on device '{device}'.*doctor"):
        inspect_buffer(FakeTensor(device))
    with pytest.raises(RegionError, match=f"layer 1 part 'v': .*device '{device}'"):
        KVLayout.from_layers([np.zeros(2), (np.zeros(2), FakeTensor(device))])


@pytest.mark.parametrize(("claimed", "device"), [("npu:3", "npu:3"), ("npu", "npu:0"), ("npu:0", "npu:0")])
def test_tensor_of_an_npu(claimed: str, device: str) -> None:
    """Described as it is, and not touched: the address means nothing to the CPU."""
    tensor = FakeTensor(claimed, addr=0x12C0_0000_0000)
    info = inspect_buffer(tensor, writable=True)
    assert (info.addr, info.nbytes, info.device) == (0x12C0_0000_0000, 12, device)
    assert (info.shape, info.strides, info.dtype, info.contiguous) == ((2, 3), (6, 2), "float16", True)
    assert f"on {device}" in info.describe()
    layout, infos = KVLayout.from_layers([(tensor, tensor)])
    assert [part.device for part in infos] == [device, device]
    assert layout.nblocks == 2


def test_storage_of_an_npu_tensor_is_held() -> None:
    class Alias(FakeTensor):
        def detach(self) -> FakeTensor:
            return storage

    storage = FakeTensor("npu:0", addr=1 << 40)
    assert inspect_buffer(Alias("npu:0", addr=1 << 40)).owner is storage


def test_tensor_by_its_methods() -> None:
    memory = np.arange(6, dtype=np.float16)
    info = inspect_buffer(FakeTensor(addr=memory.ctypes.data))
    assert (info.dtype, info.shape, info.strides, info.nbytes) == ("float16", (2, 3), (6, 2), 12)
    assert bytes_at(info) == memory.tobytes()
    with pytest.raises(RegionError, match="no memory behind it"):
        inspect_buffer(FakeTensor())


def test_torch_tensors(torch: Any) -> None:
    for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool"):
        t = torch.zeros((2, 3, 4), dtype=getattr(torch, dtype))
        for view in (t, t.transpose(0, 2), t[:, 1:], t[..., ::2]):
            info = inspect_buffer(view, writable=True)
            size = t.element_size()
            assert (info.addr, info.itemsize, info.dtype) == (view.data_ptr(), size, dtype)
            assert info.shape == tuple(view.shape)
            assert info.strides == tuple(n * size for n in view.stride())
            assert info.contiguous == view.is_contiguous()
            assert type(info.shape) is tuple
    assert inspect_buffer(torch.zeros(3, requires_grad=True)).dtype == "float32"
    assert inspect_buffer(torch.nn.Parameter(torch.zeros(3))).nbytes == 12
    with torch.inference_mode():
        assert inspect_buffer(torch.zeros(3)).nbytes == 12
    same = np.zeros(2, np.float16)
    assert inspect_buffer(same).dtype == inspect_buffer(torch.from_numpy(same)).dtype


def test_torch_tensor_is_kept_when_its_owner_points_it_elsewhere(torch: Any) -> None:
    t = torch.arange(1000, dtype=torch.int64)
    info = inspect_buffer(t)
    before = bytes_at(info)
    t.data = torch.zeros(1)
    del t
    gc.collect()
    others = [torch.full((1000,), -1, dtype=torch.int64) for _ in range(20)]
    assert info.addr not in [other.data_ptr() for other in others]
    assert bytes_at(info) == before


def test_torch_tensors_without_memory(torch: Any) -> None:
    with pytest.raises(RegionError, match=r"shape \(2, 3\) is on the device 'meta'"):
        inspect_buffer(torch.zeros((2, 3), device="meta"))
    with pytest.raises(RegionError, match=r"shape \(2, 3\) has layout 'sparse_coo'"):
        inspect_buffer(torch.zeros((2, 3)).to_sparse())
    with pytest.raises(RegionError, match=r"is_conj\(\) is true"):
        inspect_buffer(torch.zeros(3, dtype=torch.complex64).conj())
    with pytest.raises(RegionError, match="is empty"):
        inspect_buffer(torch.zeros((3, 0)))
    with pytest.raises(ConfigError, match=r"layer 0 part 'kv' .* overlap"):
        KVLayout.from_layers([torch.zeros(4, 1).expand(4, 8)])


def test_torch_cache_moves_into_a_numpy_cache(torch: Any) -> None:
    """[heads, tokens-of-blocks] caches as models make them, seen through a view, and a paged one."""
    k = torch.randn(1, 3, 8 * 16, 64).to(torch.bfloat16)
    blocks = k[0].unflatten(1, (8, 16)).transpose(0, 1)  # [nblocks, heads, tokens, dim], not contiguous
    paged = np.zeros((10, 3, 16, 64), np.uint16)
    ours, [source] = KVLayout.from_layers([blocks])
    theirs, [target] = KVLayout.from_layers([torch.from_numpy(paged).view(torch.bfloat16)])
    assert ours.mismatch(theirs) is None
    assert "dtype is bfloat16 here and uint16" in str(ours.mismatch(KVLayout.from_layers([paged])[0]))
    rows = ours.descriptors(theirs, 0, "kv", [0, 1, 7], [4, 5, 9])
    assert len(rows[0]) == 9
    for at, to, n in zip(*(row.tolist() for row in rows), strict=True):
        ctypes.memmove(target.addr + to, source.addr + at, n)
    got = torch.from_numpy(paged).view(torch.bfloat16)
    assert torch.equal(got[[4, 5, 9]], blocks[[0, 1, 7]])
    assert not paged[[0, 1, 2, 3, 6, 7, 8]].any()


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, numpy, aiohixl.kv, aiohixl.kv_json, aiohixl.buffers as b\n"
        "b.inspect_buffer(numpy.zeros(3))\n"
        "print([m for m in ('torch', 'torch_npu', 'aiohttp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_array_interface_of_the_instance() -> None:
    class Plain:
        pass

    class Everything:
        def __getattr__(self, name: str) -> Any:
            return self

    a = np.arange(6, dtype=np.int16).reshape(2, 3)
    exporter: Any = Plain()
    exporter.array, exporter.__array_interface__ = a, a.__array_interface__
    info = inspect_buffer(exporter)
    assert (info.addr, info.shape, info.dtype, info.readonly) == (a.ctypes.data, (2, 3), "int16", False)
    with pytest.raises(RegionError, match="not a buffer"):
        inspect_buffer(Everything())
