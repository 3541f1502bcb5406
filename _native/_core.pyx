# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, binding=True, embedsignature=True, auto_pickle=False, boundscheck=False, wraparound=False
"""Thin handles over the native core: they acquire, release, convert and check a status. Nothing here decides.

Failures are raised as `StatusError` with the native status; the package turns that into its own exceptions, with the
words that only it knows.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

cimport hx

WRITE = hx.HX_WRITE
READ = hx.HX_READ
NOTE = hx.HX_NOTE
ACCESS_READ = hx.HX_ACCESS_READ
ACCESS_WRITE = hx.HX_ACCESS_WRITE
KIND_MEMFD = hx.HX_KIND_MEMFD
KIND_FOREIGN = hx.HX_KIND_FOREIGN
KIND_LAYOUT = hx.HX_KIND_LAYOUT
KIND_DEVICE = hx.HX_KIND_DEVICE
EV_PEER_UP = hx.HX_EV_PEER_UP
EV_PEER_READY = hx.HX_EV_PEER_READY
EV_PEER_LOST = hx.HX_EV_PEER_LOST
EV_CONNECT_FAILED = hx.HX_EV_CONNECT_FAILED
EV_REGION_ADD = hx.HX_EV_REGION_ADD
EV_REGION_DEL = hx.HX_EV_REGION_DEL
EV_NOTE = hx.HX_EV_NOTE
EV_REGION_READY = hx.HX_EV_REGION_READY
EV_DONE = hx.HX_EV_DONE
EV_REFUSED = hx.HX_EV_REFUSED
EV_COPIED = hx.HX_EV_COPIED
EV_NOTIFY = hx.HX_EV_NOTIFY
EV_WARNING = hx.HX_EV_WARNING
TRANSPORT_SHM = hx.HX_TRANSPORT_SHM
TRANSPORT_HIXL = hx.HX_TRANSPORT_HIXL
TRANSPORT_TCP = hx.HX_TRANSPORT_TCP
TRANSPORT_VERBS = hx.HX_TRANSPORT_VERBS
FAULT_ACTIONS = {
    "delay": hx.HX_FAULT_DELAY,
    "fail": hx.HX_FAULT_FAIL,
    "stall": hx.HX_FAULT_STALL,
    "wedge": hx.HX_FAULT_WEDGE,
    "die": hx.HX_FAULT_DIE,
}
NAME_MAX = hx.HX_NAME_MAX
NOTE_MAX = hx.HX_NOTE_MAX
TOPIC_MAX = hx.HX_TOPIC_MAX
BLOB_MAX = hx.HX_BLOB_MAX
EPOCH_NOW = hx.HX_EPOCH_NOW
NO_INDEX = 0xFFFFFFFFFFFFFFFF

cdef enum:
    DRAIN_MAX = 256


class StatusError(Exception):
    """A native call answered a status other than OK."""

    def __init__(self, status, sys_errno=0, index=NO_INDEX, text=""):
        super().__init__(status, sys_errno, index, text)
        self.status = status
        self.sys_errno = sys_errno
        self.index = index
        self.text = text


cdef int check(hx.hx_status_t status) except -1:
    if status != hx.HX_OK:
        raise StatusError(<int>status, errno)
    return 0


def statuses():
    """Every status of the core: number -> name."""
    return {
        <int>hx.hx_status_at(i): hx.hx_status_name(hx.hx_status_at(i)).decode()
        for i in range(hx.hx_status_count())
    }


def providers():
    """The providers of this build: name, usable, and a line that says why or why not."""
    cdef char text[hx.HX_TEXT_MAX]
    cdef hx.hx_status_t status
    out = []
    for i in range(hx.hx_provider_count()):
        text[0] = 0
        status = hx.hx_provider_probe(i, text)
        out.append({"name": hx.hx_provider_name(i).decode(), "usable": status == hx.HX_OK,
                    "reason": text.decode("utf-8", "replace")})
    return out


def hixl_probe(bytes binding not None, bytes library=None):
    """(whether HIXL's library can be loaded, versions and places or what is missing)."""
    cdef char text[hx.HX_TEXT_MAX]
    cdef const char *where = binding
    cdef const char *wanted = NULL
    cdef hx.hx_status_t status
    if library is not None:
        wanted = library
    text[0] = 0
    with nogil:
        status = hx.hx_hixl_probe(where, wanted, text)
    return status == hx.HX_OK, text.decode("utf-8", "replace")


def verbs_probe(bytes binding not None):
    """(whether there is an RDMA device that would do, which; or what is missing)."""
    cdef char text[hx.HX_TEXT_MAX]
    cdef const char *where = binding
    cdef hx.hx_status_t status
    text[0] = 0
    with nogil:
        status = hx.hx_verbs_probe(where, text)
    return status == hx.HX_OK, text.decode("utf-8", "replace")


def verbs_ports(bytes binding not None):
    """For each port of each RDMA device: (device, port, state, usable, MTU, largest MTU, GID index, GID)."""
    cdef hx.hx_verbs_port_t[64] ports
    cdef const char *where = binding
    cdef size_t i, n
    with nogil:
        n = hx.hx_verbs_ports(where, ports, 64)
    if n > 64:
        n = 64
    return [(ports[i].device.decode(), ports[i].port, ports[i].state.decode(), bool(ports[i].usable), ports[i].mtu,
             ports[i].max_mtu, ports[i].gid_index, ports[i].gid.decode()) for i in range(n)]


@cython.final
cdef class Engine:
    cdef hx.hx_engine_t *engine
    cdef hx.hx_completion_t records[DRAIN_MAX]
    cdef object __weakref__

    def __cinit__(self, bytes name not None, bytes incarnation not None, *, bytes secret=None, bytes unix_path=None,
                  bytes tcp_host=None, uint16_t tcp_port=0, dict options=None, list faults=None,
                  uint32_t transports=hx.HX_TRANSPORT_SHM, dict hixl=None, dict verbs=None):
        cdef hx.hx_config_t config
        cdef hx.hx_hixl_config_t library
        cdef hx.hx_verbs_config_t rdma
        cdef bytes word
        cdef const char **words = NULL
        cdef char text[hx.HX_TEXT_MAX]
        cdef hx.hx_status_t status
        cdef hx.hx_fault_t *rules = NULL
        if len(incarnation) != hx.HX_INCARNATION_LEN:
            raise ValueError("incarnation: 16 bytes")
        hx.hx_config_defaults(&config)
        config.name = name
        memcpy(config.incarnation, PyBytes_AS_STRING(incarnation), 16)
        if secret is not None:
            config.secret = PyBytes_AS_STRING(secret)
            config.secret_len = PyBytes_GET_SIZE(secret)
        if unix_path is not None:
            config.unix_path = unix_path
        if tcp_host is not None:
            config.tcp_host = tcp_host
            config.tcp_port = tcp_port
        config.transports = transports
        for key, value in (options or {}).items():
            if key == "copy_threads":
                config.copy_threads = value
            elif key == "queue_depth":
                config.queue_depth = value
            elif key == "peer_depth":
                config.peer_depth = value
            elif key == "max_mappings":
                config.max_mappings = value
            elif key == "chunk":
                config.chunk = value
            elif key == "inline_limit":
                config.inline_limit = value
            elif key == "peer_timeout_ns":
                config.peer_timeout_ns = value
            elif key == "stall_timeout_ns":
                config.stall_timeout_ns = value
            elif key == "handshake_timeout_ns":
                config.handshake_timeout_ns = value
            elif key == "streams":
                config.streams = value
            elif key == "checksum":
                config.checksum = 1 if value else 0
            elif key == "zerocopy":
                config.zerocopy = 1 if value else 0
            elif key == "cancel_grace_ns":
                config.cancel_grace_ns = value
            else:
                raise KeyError(key)
        try:
            if faults:
                rules = <hx.hx_fault_t *>calloc(len(faults), sizeof(hx.hx_fault_t))
                if not rules:
                    raise MemoryError
                for i, (nth, action, fault_status, delay_ns) in enumerate(faults):
                    rules[i].nth = nth
                    rules[i].action = action
                    rules[i].status = fault_status
                    rules[i].delay_ns = delay_ns
                config.faults = rules
                config.nfaults = len(faults)
            if hixl is not None:
                words = fill_hixl(&library, hixl)
                config.hixl = &library
            if verbs is not None:
                memset(&rdma, 0, sizeof(rdma))
                word = verbs["binding"]
                rdma.binding = PyBytes_AS_STRING(word)
                word = verbs["device"]
                rdma.device = PyBytes_AS_STRING(word)
                rdma.port = verbs["port"]
                rdma.gid_index = verbs["gid_index"]
                rdma.timeout = verbs["timeout"]
                rdma.service_level = verbs["service_level"]
                rdma.traffic_class = verbs["traffic_class"]
                config.verbs = &rdma
            text[0] = 0
            with nogil:
                status = hx.hx_engine_open(&config, &self.engine, text)
        finally:
            free(rules)
            free(words)
        if status != hx.HX_OK:
            raise StatusError(<int>status, errno, NO_INDEX, text.decode("utf-8", "replace"))

    def __dealloc__(self):
        if self.engine:
            with nogil:
                hx.hx_engine_stop(self.engine)
            hx.hx_engine_free(self.engine)

    def fileno(self):
        return hx.hx_engine_fileno(self.engine)

    @property
    def tcp_port(self):
        return hx.hx_engine_tcp_port(self.engine)

    def set_epoch(self, uint64_t epoch):
        hx.hx_engine_set_epoch(self.engine, epoch)

    def drain(self):
        """Up to a budget of completions, and whether there may be more: then nothing will ring."""
        cdef hx.hx_bool more = False
        cdef size_t i, n = hx.hx_engine_drain(self.engine, self.records, DRAIN_MAX, &more)
        cdef list out = []
        for i in range(n):
            c = &self.records[i]
            out.append((c.token, c.status, c.sys_errno, c.nbytes, c.elapsed_ns, c.index, c.quiesced, c.code,
                        None if c.detail == NULL else take_text(&c.detail)))
        return out, bool(more)

    def next_event(self):
        """(kind, status, errno, token, value, endpoint, remote region, name, blob), or None."""
        cdef hx.hx_event_t *ev = hx.hx_engine_next_event(self.engine)
        if not ev:
            return None
        try:
            return (ev.kind, ev.status, ev.sys_errno, ev.token, ev.value,
                    wrap_endpoint(self, ev.ep) if ev.ep else None,
                    wrap_rregion(self, ev.rregion) if ev.rregion else None,
                    PyBytes_FromStringAndSize(ev.name, ev.name_len),
                    PyBytes_FromStringAndSize(ev.blob, ev.blob_len))
        finally:
            hx.hx_event_free(ev)

    def cancel(self, uint64_t handle):
        hx.hx_cancel(self.engine, handle)

    def connect(self, uint64_t token, *, bytes path=None, bytes host=None, uint16_t port=0, bytes name=None,
                bytes incarnation=None):
        cdef hx.hx_target_t target
        memset(&target, 0, sizeof(target))
        target.token = token
        if path is not None:
            target.path = path
        if host is not None:
            target.tcp_host = host
            target.tcp_port = port
        if name is not None:
            target.name = name
        if incarnation is not None:
            if len(incarnation) != hx.HX_INCARNATION_LEN:
                raise ValueError("incarnation: 16 bytes")
            target.incarnation = <const uint8_t *>PyBytes_AS_STRING(incarnation)
        check(hx.hx_connect(self.engine, &target))

    def connect_raw(self, uint64_t token, bytes address not None, list regions not None):
        """`regions`: (name, address, length, whether it is an NPU's). The same events answer as for `connect`."""
        cdef size_t i, n = len(regions)
        cdef hx.hx_raw_region_t *raw = <hx.hx_raw_region_t *>calloc(n + 1, sizeof(hx.hx_raw_region_t))
        cdef bytes name
        cdef bint device
        if not raw:
            raise MemoryError
        try:
            for i in range(n):
                name, addr, nbytes, device = regions[i]
                raw[i].name = PyBytes_AS_STRING(name)
                raw[i].addr = addr
                raw[i].nbytes = nbytes
                raw[i].device = device
            check(hx.hx_connect_raw(self.engine, PyBytes_AS_STRING(address), raw, n, token))
        finally:
            free(raw)

    def expect_notifies(self, int change):
        """Count those who wait for HIXL's own notifications: they are fetched for them only."""
        hx.hx_engine_expect_notifies(self.engine, change)

    def supersede(self, bytes name not None, uint64_t epoch):
        check(hx.hx_supersede(self.engine, name, epoch))

    def stats(self):
        cdef hx.hx_stats_t s
        hx.hx_engine_stats(self.engine, &s)
        return {"posted": s.posted, "completed": s.completed, "inlined": s.inlined, "nbytes": s.nbytes,
                "notes_in": s.notes_in, "notes_out": s.notes_out, "refused": s.refused, "zerocopied": s.zerocopied,
                "zerocopy_copied": s.zerocopy_copied, "live_ops": s.live_ops,
                "live_regions": s.live_regions, "peers": s.peers, "mappings": s.mappings}

    def stop(self):
        """Aborts what is in flight and joins every native thread. What remains to drain can be drained after.

        Answers how many peers stood still in mid-copy: what they could reach must not be reused.
        """
        cdef uint32_t stuck
        with nogil:
            stuck = hx.hx_engine_stop(self.engine)
        return stuck

    def close_fds(self):
        """After `stop`, once nobody watches `fileno()` any more."""
        hx.hx_engine_close_fds(self.engine)

    def before_fork(self):
        with nogil:
            hx.hx_engine_before_fork(self.engine)

    def after_fork(self):
        hx.hx_engine_after_fork(self.engine)

    def forked(self):
        hx.hx_engine_forked(self.engine)


# What `hixl` has under the names of hx_hixl_config_t. Its bytes must outlive the use of `library`, and so must the
# array that is answered.
cdef const char **fill_hixl(hx.hx_hixl_config_t *library, dict hixl) except NULL:
    cdef list options = hixl["options"]
    cdef size_t i, n = len(options)
    cdef bytes key, value, text
    cdef const char **words = <const char **>calloc(2 * n + 1, sizeof(char *))
    if not words:
        raise MemoryError
    try:
        memset(library, 0, sizeof(hx.hx_hixl_config_t))
        text = hixl["binding"]
        library.binding = PyBytes_AS_STRING(text)
        if hixl["library"] is not None:
            text = hixl["library"]
            library.library = PyBytes_AS_STRING(text)
        text = hixl["local"]
        library.local = PyBytes_AS_STRING(text)
        text = hixl["link"]
        library.link = PyBytes_AS_STRING(text)
        library.device = hixl["device"]
        library.busy_poll_ns = hixl["busy_poll_ns"]
        for i in range(n):
            key, value = options[i]
            words[i] = PyBytes_AS_STRING(key)
            words[n + i] = PyBytes_AS_STRING(value)
        library.keys = words
        library.values = words + n
        library.noptions = n
    except BaseException:
        free(words)
        raise
    return words


cdef str take_text(char **text_p):
    text = text_p[0].decode("utf-8", "replace")
    free(text_p[0])
    text_p[0] = NULL
    return text


@cython.no_gc_clear
cdef class Region:
    """Registered local memory; exports it by the buffer protocol. `owner` is kept as long as the region is."""

    cdef hx.hx_region_t *region
    cdef readonly Engine engine
    cdef readonly object owner
    cdef public bint readonly  # its memory cannot be written: exported as such
    # These are `aiohixl.region`'s; C looks at them with every post.
    cdef public object device
    cdef public dict _quarantine

    def __cinit__(self, Engine engine not None, uint64_t nbytes, uint32_t access, uint64_t addr=0, object owner=None,
                  Region parent=None, uint64_t offset=0, bint layout=False, bint device=False):
        cdef hx.hx_status_t status
        if parent is not None:
            status = hx.hx_region_view(parent.region, offset, nbytes, access, &self.region)
        elif layout:
            status = hx.hx_region_layout(engine.engine, &self.region)
        elif device:
            status = hx.hx_region_device(engine.engine, addr, nbytes, access, &self.region)
        elif addr:
            status = hx.hx_region_register(engine.engine, <void *><uintptr_t>addr, nbytes, access, &self.region)
        else:
            with nogil:
                status = hx.hx_region_allocate(engine.engine, nbytes, access, &self.region)
        check(status)
        self.engine = engine
        self.owner = owner

    def __dealloc__(self):
        hx.hx_region_unref(self.region)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if hx.hx_region_kind(self.region) == hx.HX_KIND_DEVICE:
            raise BufferError("the CPU cannot read an NPU's memory: use upload(), download() or download_into()")
        PyBuffer_FillInfo(buffer, self, hx.hx_region_addr(self.region), hx.hx_region_nbytes(self.region),
                          self.readonly, flags)

    @property
    def addr(self):
        return <uintptr_t>hx.hx_region_addr(self.region)

    @property
    def nbytes(self):
        return hx.hx_region_nbytes(self.region)

    @property
    def id(self):
        return hx.hx_region_id(self.region)

    @property
    def kind(self):
        return hx.hx_region_kind(self.region)

    @property
    def is_ready(self):
        return bool(hx.hx_region_is_ready(self.region))

    def _copy(self, uint64_t token, uint64_t offset, uintptr_t addr, uint64_t nbytes, bint upload):
        """Between a device region and host memory, which must stay until EV_COPIED answers."""
        check(hx.hx_region_copy(self.region, offset, <void *>addr, nbytes, upload, token))

    def _announce(self, bytes name not None, bytes blob not None):
        check(hx.hx_region_announce(self.region, PyBytes_AS_STRING(name), len(name), PyBytes_AS_STRING(blob),
                                    len(blob)))

    def _revoke(self, bytes incarnation, const int64_t[:, ::1] spans, uint64_t token):
        check(hx.hx_region_revoke(self.region, incarnation_of(incarnation),
                                  <const uint64_t *>&spans[0, 0] if spans.shape[0] else NULL, spans.shape[0], token))

    def _grant(self, bytes incarnation, const int64_t[:, ::1] spans):
        check(hx.hx_region_grant(self.region, incarnation_of(incarnation),
                                 <const uint64_t *>&spans[0, 0] if spans.shape[0] else NULL, spans.shape[0]))

    def _deregister(self, uint64_t token):
        check(hx.hx_region_deregister(self.region, token))


cdef const uint8_t *incarnation_of(bytes incarnation) except? NULL:
    if incarnation is None:
        return NULL
    if len(incarnation) != hx.HX_INCARNATION_LEN:
        raise ValueError("incarnation: 16 bytes")
    return <const uint8_t *>PyBytes_AS_STRING(incarnation)


@cython.final
@cython.no_gc
cdef class RemoteRegion:
    """A peer's announced region."""

    cdef hx.hx_rregion_t *rregion
    cdef Engine engine

    def __init__(self):
        raise TypeError("remote regions come from a peer")

    def __dealloc__(self):
        hx.hx_rregion_unref(self.rregion)

    @property
    def id(self):
        return hx.hx_rregion_id(self.rregion)

    @property
    def nbytes(self):
        return hx.hx_rregion_nbytes(self.rregion)

    @property
    def rkey(self):
        return hx.hx_rregion_rkey(self.rregion)

    @property
    def access(self):
        return hx.hx_rregion_access(self.rregion)

    @property
    def kind(self):
        return hx.hx_rregion_kind(self.rregion)

    @property
    def alive(self):
        return bool(hx.hx_rregion_alive(self.rregion))


cdef RemoteRegion wrap_rregion(Engine engine, hx.hx_rregion_t *rregion):
    cdef RemoteRegion self = RemoteRegion.__new__(RemoteRegion)
    hx.hx_rregion_ref(rregion)
    self.rregion = rregion
    self.engine = engine
    return self


@cython.final
@cython.no_gc
cdef class Endpoint:
    """Our side of one peer."""

    cdef hx.hx_endpoint_t *ep
    cdef readonly Engine engine

    def __init__(self):
        raise TypeError("endpoints come from an engine")

    def __dealloc__(self):
        hx.hx_endpoint_unref(self.ep)

    @property
    def name(self):
        return hx.hx_endpoint_name(self.ep).decode("utf-8", "replace")

    @property
    def incarnation(self):
        return PyBytes_FromStringAndSize(<const char *>hx.hx_endpoint_incarnation(self.ep), hx.HX_INCARNATION_LEN)

    @property
    def peer_epoch(self):
        return hx.hx_endpoint_peer_epoch(self.ep)

    @property
    def serial(self):
        return hx.hx_endpoint_serial(self.ep)

    @property
    def is_up(self):
        return bool(hx.hx_endpoint_is_up(self.ep))

    @property
    def is_local(self):
        return bool(hx.hx_endpoint_is_local(self.ep))

    @property
    def inflight(self):
        return hx.hx_endpoint_inflight(self.ep)

    @property
    def epoch(self):
        """What a permission given now is judged by: see `post`."""
        return hx.hx_endpoint_epoch(self.ep)

    def route(self, Region local not None, RemoteRegion remote not None):
        """(provider, why), or (None, why not)."""
        cdef char text[hx.HX_TEXT_MAX]
        cdef const char *provider = NULL
        text[0] = 0
        status = hx.hx_endpoint_route(self.ep, local.region, remote.rregion, &provider, text)
        reason = text.decode("utf-8", "replace")
        return (provider.decode() if status == hx.HX_OK else None), reason

    @property
    def link(self):
        """Of its path by hixl; empty where it has none."""
        return hx.hx_endpoint_link(self.ep).decode("ascii", "replace")

    @property
    def is_raw(self):
        return bool(hx.hx_endpoint_is_raw(self.ep))

    def expect(self, int change):
        """Count those who wait for an announcement: heartbeats run for them."""
        hx.hx_endpoint_expect(self.ep, change)

    def close(self):
        check(hx.hx_endpoint_close(self.ep))

    def credit(self, uint32_t notes):
        check(hx.hx_endpoint_credit(self.ep, notes))

    def post(self, uint32_t kind, uint64_t token, list segments not None, *, uint64_t epoch=hx.HX_EPOCH_NOW,
             bytes note=None, bytes topic=b"", bint aborted=False, uintptr_t after=0):
        """Rows grouped by pair of regions: (local, remote, rkey, local offsets, remote offsets, length or lengths)."""
        cdef hx.hx_segment_t *segs
        cdef hx.hx_post_t post
        cdef uint64_t handle = 0, index = NO_INDEX
        cdef hx.hx_bool done = False
        cdef hx.hx_status_t status
        cdef Region local
        cdef RemoteRegion remote
        cdef const int64_t[::1] loff, roff, lens
        cdef size_t i, n = len(segments)
        keep = []
        segs = <hx.hx_segment_t *>calloc(n + 1, sizeof(hx.hx_segment_t))
        if not segs:
            raise MemoryError
        try:
            for i in range(n):
                local, remote, rkey, loff_obj, roff_obj, nbytes = segments[i]
                loff = loff_obj
                roff = roff_obj
                if loff.shape[0] != roff.shape[0]:
                    raise ValueError("offset arrays of different lengths")
                segs[i].local = local.region
                segs[i].remote = remote.rregion
                segs[i].rkey = rkey
                segs[i].n = loff.shape[0]
                if segs[i].n:
                    segs[i].local_off = <const uint64_t *>&loff[0]
                    segs[i].remote_off = <const uint64_t *>&roff[0]
                if isinstance(nbytes, int):
                    segs[i].each = nbytes
                else:
                    lens = nbytes
                    if lens.shape[0] != loff.shape[0]:
                        raise ValueError("offset and length arrays of different lengths")
                    if segs[i].n:
                        segs[i].nbytes = <const uint64_t *>&lens[0]
                    keep.append(lens)
                keep.append(loff)
                keep.append(roff)
            memset(&post, 0, sizeof(post))
            post.kind = kind
            post.token = token
            post.epoch = epoch
            post.segments = segs
            post.nsegments = n
            post.after = <void *>after
            post.aborted = aborted
            post.topic = PyBytes_AS_STRING(topic)
            post.topic_len = len(topic)
            if note is not None:
                post.has_note = True
                post.note = PyBytes_AS_STRING(note)
                post.note_len = len(note)
            with nogil:
                status = hx.hx_post(self.ep, &post, &handle, &index, &done)
        finally:
            free(segs)
        if status != hx.HX_OK:
            raise StatusError(<int>status, 0, index)
        return -1 - <int64_t>handle if done else handle


cdef Endpoint wrap_endpoint(Engine engine, hx.hx_endpoint_t *ep):
    cdef Endpoint self = Endpoint.__new__(Endpoint)
    hx.hx_endpoint_ref(ep)
    self.ep = ep
    self.engine = engine
    return self


include "short_way.pxi"
