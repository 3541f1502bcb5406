# SPDX-License-Identifier: Apache-2.0
# hx.h as Cython sees it: the same declarations in the same order, and nothing else.
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "hx.h" nogil:
    # C's bool; libcpp's of that name is for C++.
    ctypedef unsigned char hx_bool "bool"

    enum:
        HX_NAME_MAX
        HX_NOTE_MAX
        HX_TOPIC_MAX
        HX_BLOB_MAX
        HX_TEXT_MAX
        HX_INCARNATION_LEN
    uint64_t HX_EPOCH_NOW

    ctypedef enum hx_status_t:
        HX_OK
        HX_ERR_NO_MEMORY

    enum:
        HX_WRITE
        HX_READ
        HX_NOTE
        HX_ACCESS_READ
        HX_ACCESS_WRITE
        HX_KIND_MEMFD
        HX_KIND_FOREIGN
        HX_KIND_LAYOUT
        HX_KIND_DEVICE
        HX_EV_PEER_UP
        HX_EV_PEER_READY
        HX_EV_PEER_LOST
        HX_EV_CONNECT_FAILED
        HX_EV_REGION_ADD
        HX_EV_REGION_DEL
        HX_EV_NOTE
        HX_EV_REGION_READY
        HX_EV_DONE
        HX_EV_REFUSED
        HX_EV_COPIED
        HX_EV_NOTIFY
        HX_EV_WARNING
        HX_FAULT_DELAY
        HX_FAULT_FAIL
        HX_FAULT_STALL
        HX_FAULT_WEDGE
        HX_FAULT_DIE
        HX_TRANSPORT_SHM
        HX_TRANSPORT_HIXL
        HX_TRANSPORT_TCP
        HX_TRANSPORT_VERBS

    ctypedef struct hx_engine_t:
        pass
    ctypedef struct hx_endpoint_t:
        pass
    ctypedef struct hx_region_t:
        pass
    ctypedef struct hx_rregion_t:
        pass

    ctypedef struct hx_fault_t:
        uint64_t nth
        uint32_t action
        uint32_t status
        uint64_t delay_ns

    ctypedef struct hx_hixl_config_t:
        const char *binding
        const char *library
        const char *local
        const char *link
        int32_t device
        const char **keys
        const char **values
        size_t noptions
        uint64_t busy_poll_ns

    ctypedef struct hx_verbs_config_t:
        const char *binding
        const char *device
        int32_t port
        int32_t gid_index
        uint8_t timeout
        uint8_t service_level
        uint8_t traffic_class

    ctypedef struct hx_verbs_port_t:
        char device[64]
        char state[32]
        char gid[64]
        int32_t port
        int32_t gid_index
        uint32_t mtu
        uint32_t max_mtu
        hx_bool usable

    ctypedef struct hx_config_t:
        const char *name
        uint8_t incarnation[16]
        const void *secret
        size_t secret_len
        const char *unix_path
        const char *tcp_host
        uint16_t tcp_port
        uint32_t copy_threads
        uint32_t queue_depth
        uint32_t peer_depth
        uint32_t max_mappings
        uint64_t chunk
        uint64_t inline_limit
        uint64_t peer_timeout_ns
        uint64_t stall_timeout_ns
        uint64_t handshake_timeout_ns
        uint64_t cancel_grace_ns
        const hx_fault_t *faults
        size_t nfaults
        uint32_t transports
        uint32_t streams
        hx_bool checksum
        hx_bool zerocopy
        const hx_hixl_config_t *hixl
        const hx_verbs_config_t *verbs

    ctypedef struct hx_target_t:
        const char *path
        const char *tcp_host
        uint16_t tcp_port
        const char *name
        const uint8_t *incarnation
        uint64_t token

    ctypedef struct hx_completion_t:
        uint64_t token
        uint32_t status
        int32_t sys_errno
        uint64_t nbytes
        uint64_t elapsed_ns
        uint64_t index
        uint32_t quiesced
        uint32_t code
        char *detail

    ctypedef struct hx_event_t:
        uint32_t kind
        uint32_t status
        int32_t sys_errno
        uint64_t token
        uint64_t value
        hx_endpoint_t *ep
        hx_rregion_t *rregion
        uint32_t name_len
        uint32_t blob_len
        char *name
        char *blob

    ctypedef struct hx_segment_t:
        hx_region_t *local
        hx_rregion_t *remote
        uint64_t rkey
        const uint64_t *local_off
        const uint64_t *remote_off
        const uint64_t *nbytes
        uint64_t each
        size_t n

    ctypedef struct hx_post_t:
        uint32_t kind
        uint64_t token
        uint64_t epoch
        const hx_segment_t *segments
        size_t nsegments
        void *after
        hx_bool has_note
        hx_bool aborted
        const void *note
        size_t note_len
        const char *topic
        size_t topic_len

    ctypedef struct hx_stats_t:
        uint64_t posted, completed, inlined, nbytes, notes_in, notes_out, refused, zerocopied, zerocopy_copied
        uint64_t live_ops, live_regions, peers, mappings

    const char *hx_status_name(hx_status_t status)
    size_t hx_status_count()
    hx_status_t hx_status_at(size_t i)

    void hx_config_defaults(hx_config_t *config)
    hx_status_t hx_engine_open(const hx_config_t *config, hx_engine_t **engine_p, char *text)
    int hx_engine_fileno(const hx_engine_t *engine)
    uint16_t hx_engine_tcp_port(const hx_engine_t *engine)
    void hx_engine_set_epoch(hx_engine_t *engine, uint64_t epoch)
    size_t hx_engine_drain(hx_engine_t *engine, hx_completion_t *out, size_t max, hx_bool *more_p)
    hx_event_t *hx_engine_next_event(hx_engine_t *engine)
    void hx_event_free(hx_event_t *event)
    uint32_t hx_engine_stop(hx_engine_t *engine)
    void hx_engine_close_fds(hx_engine_t *engine)
    void hx_engine_free(hx_engine_t *engine)
    void hx_engine_before_fork(hx_engine_t *engine)
    void hx_engine_after_fork(hx_engine_t *engine)
    void hx_engine_forked(hx_engine_t *engine)
    void hx_engine_stats(hx_engine_t *engine, hx_stats_t *out)
    void hx_cancel(hx_engine_t *engine, uint64_t handle)
    hx_status_t hx_connect(hx_engine_t *engine, const hx_target_t *target)

    ctypedef struct hx_raw_region_t:
        const char *name
        uint64_t addr
        uint64_t nbytes
        hx_bool device

    hx_status_t hx_connect_raw(hx_engine_t *engine, const char *address, const hx_raw_region_t *regions, size_t n,
                               uint64_t token)
    void hx_engine_expect_notifies(hx_engine_t *engine, int change)
    hx_status_t hx_supersede(hx_engine_t *engine, const char *name, uint64_t epoch)

    hx_status_t hx_region_allocate(hx_engine_t *engine, uint64_t nbytes, uint32_t access, hx_region_t **region_p)
    hx_status_t hx_region_view(hx_region_t *parent, uint64_t offset, uint64_t nbytes, uint32_t access,
                               hx_region_t **region_p)
    hx_status_t hx_region_register(hx_engine_t *engine, void *addr, uint64_t nbytes, uint32_t access,
                                   hx_region_t **region_p)
    hx_status_t hx_region_device(hx_engine_t *engine, uint64_t addr, uint64_t nbytes, uint32_t access,
                                 hx_region_t **region_p)
    hx_status_t hx_region_copy(hx_region_t *region, uint64_t offset, void *host, uint64_t nbytes, hx_bool upload,
                               uint64_t token)
    hx_bool hx_region_is_ready(const hx_region_t *region)
    uint32_t hx_region_kind(const hx_region_t *region)
    hx_status_t hx_region_layout(hx_engine_t *engine, hx_region_t **region_p)
    hx_status_t hx_region_announce(hx_region_t *region, const char *name, size_t name_len, const void *blob,
                                   size_t blob_len)
    void *hx_region_addr(const hx_region_t *region)
    uint64_t hx_region_id(const hx_region_t *region)
    uint64_t hx_region_nbytes(const hx_region_t *region)
    void hx_region_unref(hx_region_t *region)
    hx_status_t hx_region_revoke(hx_region_t *region, const uint8_t *incarnation, const uint64_t *spans, size_t n,
                                 uint64_t token)
    hx_status_t hx_region_grant(hx_region_t *region, const uint8_t *incarnation, const uint64_t *spans, size_t n)
    hx_status_t hx_region_deregister(hx_region_t *region, uint64_t token)

    const char *hx_endpoint_name(const hx_endpoint_t *ep)
    const uint8_t *hx_endpoint_incarnation(const hx_endpoint_t *ep)
    uint64_t hx_endpoint_peer_epoch(const hx_endpoint_t *ep)
    uint64_t hx_endpoint_serial(const hx_endpoint_t *ep)
    hx_bool hx_endpoint_is_up(const hx_endpoint_t *ep)
    hx_bool hx_endpoint_is_local(const hx_endpoint_t *ep)
    uint32_t hx_endpoint_inflight(const hx_endpoint_t *ep)
    uint64_t hx_endpoint_epoch(const hx_endpoint_t *ep)
    hx_status_t hx_endpoint_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                                  const char **provider_p, char *text)
    const char *hx_endpoint_link(const hx_endpoint_t *ep)
    hx_bool hx_endpoint_is_raw(const hx_endpoint_t *ep)
    void hx_endpoint_expect(hx_endpoint_t *ep, int change)
    hx_status_t hx_endpoint_close(hx_endpoint_t *ep)
    hx_status_t hx_endpoint_credit(hx_endpoint_t *ep, uint32_t notes)
    void hx_endpoint_ref(hx_endpoint_t *ep)
    void hx_endpoint_unref(hx_endpoint_t *ep)
    uint64_t hx_rregion_id(const hx_rregion_t *rregion)
    uint64_t hx_rregion_nbytes(const hx_rregion_t *rregion)
    uint64_t hx_rregion_rkey(const hx_rregion_t *rregion)
    uint32_t hx_rregion_access(const hx_rregion_t *rregion)
    uint32_t hx_rregion_kind(const hx_rregion_t *rregion)
    hx_bool hx_rregion_alive(const hx_rregion_t *rregion)
    void hx_rregion_ref(hx_rregion_t *rregion)
    void hx_rregion_unref(hx_rregion_t *rregion)

    hx_status_t hx_post(hx_endpoint_t *ep, const hx_post_t *post, uint64_t *handle_p, uint64_t *index_p,
                        hx_bool *done_p)

    size_t hx_provider_count()
    const char *hx_provider_name(size_t i)
    hx_status_t hx_provider_probe(size_t i, char *text)

    hx_status_t hx_verbs_probe(const char *binding, char *text)
    size_t hx_verbs_ports(const char *binding, hx_verbs_port_t *out, size_t max)
    hx_status_t hx_hixl_probe(const char *binding, const char *library, char *text)
