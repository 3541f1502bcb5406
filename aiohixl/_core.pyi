# SPDX-License-Identifier: Apache-2.0
"""Types of the native core, ``_native/_core.pyx``. Names, payloads and paths are bytes; the package decodes them."""

from collections.abc import Callable, Collection, Generator
from contextvars import ContextVar
from typing import Any, Final, Generic, NoReturn, Self, TypedDict, TypeVar, final, type_check_only

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

# What `Endpoint.post` takes in `kind`.
WRITE: Final[int]
READ: Final[int]
NOTE: Final[int]
# Bits of a region's `access`: what its peers may do.
ACCESS_READ: Final[int]
ACCESS_WRITE: Final[int]
# `RemoteRegion.kind`
KIND_MEMFD: Final[int]
KIND_FOREIGN: Final[int]
KIND_LAYOUT: Final[int]
KIND_DEVICE: Final[int]
# The first item of what `Engine.next_event` answers.
EV_PEER_UP: Final[int]
EV_PEER_READY: Final[int]
EV_PEER_LOST: Final[int]
EV_CONNECT_FAILED: Final[int]
EV_REGION_ADD: Final[int]
EV_REGION_DEL: Final[int]
EV_NOTE: Final[int]
EV_REGION_READY: Final[int]
EV_DONE: Final[int]
EV_REFUSED: Final[int]
EV_COPIED: Final[int]
EV_NOTIFY: Final[int]
EV_WARNING: Final[int]
# Bits of an engine's `transports`.
TRANSPORT_SHM: Final[int]
TRANSPORT_HIXL: Final[int]
TRANSPORT_TCP: Final[int]
TRANSPORT_VERBS: Final[int]
FAULT_ACTIONS: Final[dict[str, int]]
# Bytes.
NAME_MAX: Final[int]
NOTE_MAX: Final[int]
TOPIC_MAX: Final[int]
BLOB_MAX: Final[int]
EPOCH_NOW: Final[int]
NO_INDEX: Final[int]

_Int64s = npt.NDArray[np.int64]
_LocalT = TypeVar("_LocalT", bound=Region)

class StatusError(Exception):
    status: int
    sys_errno: int
    index: int
    text: str
    def __init__(self, status: int, sys_errno: int = 0, index: int = 0xFFFFFFFFFFFFFFFF, text: str = "") -> None: ...

def statuses() -> dict[int, str]: ...
def providers() -> list[dict[str, str | bool]]: ...
def hixl_probe(binding: bytes, library: bytes | None = None) -> tuple[bool, str]: ...
def verbs_probe(binding: bytes) -> tuple[bool, str]: ...
def verbs_ports(binding: bytes) -> list[tuple[str, int, str, bool, int, int, int, str]]: ...

@type_check_only
class _Hixl(TypedDict):
    binding: bytes
    library: bytes | None
    local: bytes
    link: bytes
    device: int
    busy_poll_ns: int
    options: list[tuple[bytes, bytes]]

@type_check_only
class _Verbs(TypedDict):
    binding: bytes
    device: bytes
    port: int
    gid_index: int
    timeout: int
    service_level: int
    traffic_class: int

@final
class Engine:
    def __new__(
        cls,
        name: bytes,
        incarnation: bytes,
        *,
        secret: bytes | None = None,
        unix_path: bytes | None = None,
        tcp_host: bytes | None = None,
        tcp_port: int = 0,
        options: dict[str, int] | None = None,
        # (nth, action, status, delay in nanoseconds)
        faults: list[tuple[int, int, int, int]] | None = None,
        transports: int = 1,
        hixl: _Hixl | None = None,
        verbs: _Verbs | None = None,
    ) -> Self: ...
    @property
    def tcp_port(self) -> int: ...
    def fileno(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    # ([(token, status, errno, nbytes, elapsed_ns, index, quiesced, code, detail)], whether there may be more)
    def drain(self) -> tuple[list[tuple[int, int, int, int, int, int, int, int, str | None]], bool]: ...
    # (kind, status, errno, token, value, endpoint, remote region, name, blob)
    def next_event(
        self,
    ) -> tuple[int, int, int, int, int, Endpoint | None, RemoteRegion | None, bytes, bytes] | None: ...
    def cancel(self, handle: int) -> None: ...
    def connect(
        self,
        token: int,
        *,
        path: bytes | None = None,
        host: bytes | None = None,
        port: int = 0,
        name: bytes | None = None,
        incarnation: bytes | None = None,
    ) -> None: ...
    # regions: (name, address, length, whether it is an NPU's)
    def connect_raw(self, token: int, address: bytes, regions: list[tuple[bytes, int, int, bool]]) -> None: ...
    def expect_notifies(self, change: int) -> None: ...
    def supersede(self, name: bytes, epoch: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def stop(self) -> int: ...
    def close_fds(self) -> None: ...
    def before_fork(self) -> None: ...
    def after_fork(self) -> None: ...
    def forked(self) -> None: ...

@disjoint_base
class Region:
    def __new__(
        cls,
        engine: Engine,
        nbytes: int,
        access: int,
        addr: int = 0,
        owner: object = None,
        parent: Region | None = None,
        offset: int = 0,
        layout: bool = False,
        device: bool = False,
    ) -> Self: ...
    readonly: bool
    device: str
    _quarantine: dict[int, tuple[tuple[int, int], ...]]
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def owner(self) -> object: ...
    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    # `addr`: of host memory, which must stay until EV_COPIED answers `token`.
    def _copy(self, token: int, offset: int, addr: int, nbytes: int, upload: bool) -> None: ...
    def _announce(self, name: bytes, blob: bytes) -> None: ...
    # `spans`: rows of (offset, nbytes); without an incarnation, for every peer.
    def _revoke(self, incarnation: bytes | None, spans: _Int64s, token: int) -> None: ...
    def _grant(self, incarnation: bytes | None, spans: _Int64s) -> None: ...
    def _deregister(self, token: int) -> None: ...

@final
class RemoteRegion:
    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def id(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    @property
    def access(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def alive(self) -> bool: ...

@final
class Endpoint:
    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> bytes: ...
    @property
    def peer_epoch(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def is_up(self) -> bool: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def inflight(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def link(self) -> str: ...
    @property
    def is_raw(self) -> bool: ...
    def route(self, local: Region, remote: RemoteRegion) -> tuple[str | None, str]: ...
    def expect(self, change: int) -> None: ...
    def close(self) -> None: ...
    def credit(self, notes: int) -> None: ...
    def post(
        self,
        kind: int,
        token: int,
        # (local, remote, rkey, local offsets, remote offsets, length or lengths)
        segments: list[tuple[_LocalT, RemoteRegion, int, _Int64s, _Int64s, int | _Int64s]],
        *,
        epoch: int = ...,
        note: bytes | None = None,
        topic: bytes = b"",
        aborted: bool = False,
        after: int = 0,
    ) -> int: ...

_TransferT = TypeVar("_TransferT", bound=TransferState)

@disjoint_base
class QueueState:
    def __init__(self, awaits_per_turn: int) -> None: ...
    def new_token(self) -> int: ...
    def take_turn(self) -> bool: ...

@disjoint_base
class Extent:
    target: Any
    offset: int
    nbytes: int

@final
class Answer: ...

@disjoint_base
class TransferState:
    # What they mean is said by `aiohixl.transfer.Transfer`, which also says of what types the private ones are.
    elapsed: float | None
    keep: Any
    kind: str
    nbytes: int
    quiesced: bool
    token: int
    _handle: int
    _done: bool
    _cancelling: bool
    _observed: bool
    def __init__(self, origin: object, queue: QueueState, token: int, kind: str, nbytes: int, keep: object) -> None: ...
    def __await__(self) -> Generator[Any, Any, Self]: ...

@final
class Poster(Generic[_TransferT]):
    def __init__(
        self,
        endpoint: Endpoint,
        queue: QueueState,
        scopes: ContextVar[Any],
        parked: Collection[object],
        remote: type,
        transfer: type[_TransferT],
        moment: Callable[[Any, str], tuple[int, object]],
        held: Callable[[Any, object], object],
    ) -> None: ...
    def post(
        self, origin: object, kind: int, name: str, local: object, remote: object, after: object
    ) -> _TransferT | None: ...
