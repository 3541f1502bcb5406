/* SPDX-License-Identifier: Apache-2.0 */
/* The binding of libibverbs to the table of verbs.h, and nothing else: every decision but the choice of a port and a GID is the
 * core's. A shared object of its own, built where the library's headers are; in the core's build it is empty. */
#ifdef HX_VERBS_BINDING
#define _GNU_SOURCE
#include "verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define INLINE_MAX 64
#define RETRIES 6    /* after the first attempt; 7 is for ever, on some devices */
#define RNR_TIMER 12 /* 0.64 ms */
#define POST_MAX 64  /* work requests of one call */
#define SGES 16
#define READS_MAX 16

struct hx_verbs_device {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_port_attr port;
    union ibv_gid gid;
    uint32_t reads, sges, inline_max;
    int gid_index;
    uint8_t port_num, timeout, service_level, traffic_class;
};

enum { WHY = 200 };

struct hx_verbs_qp {
    hx_verbs_device_t *device;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    void *owner;
    uint32_t psn;
    _Atomic bool shut; /* given up: what is said of it is not of its owner's */
    enum ibv_mtu mtu;  /* of the port, when it was made: connect() runs beside a look at it */
};

/* 0: not usable; else the better the higher. RoCE v2 with a global or IPv4-mapped address is routed; link-local is not. */
static int rank_of(const struct ibv_gid_entry *entry, bool roce)
{
    static const uint8_t zero[16];
    bool local = entry->gid.raw[0] == 0xfe && (entry->gid.raw[1] & 0xc0) == 0x80;
    if (!memcmp(entry->gid.raw, zero, sizeof zero))
        return 0;
    if (!roce)
        return 1 + (entry->gid_index == 0);
    return 1 + (entry->gid_type == IBV_GID_TYPE_ROCE_V2 ? 4 : 0) + (local ? 0 : 2);
}

static bool choose_gid(hx_verbs_device_t *d, int wanted)
{
    bool roce = d->port.link_layer == IBV_LINK_LAYER_ETHERNET;
    int best = 0;
    for (int i = 0; i < d->port.gid_tbl_len; i++) {
        struct ibv_gid_entry entry;
        if ((wanted >= 0 && i != wanted) || ibv_query_gid_ex(d->context, d->port_num, (uint32_t)i, &entry, 0))
            continue;
        int rank = rank_of(&entry, roce);
        if (rank > best) {
            best = rank;
            d->gid = entry.gid;
            d->gid_index = i;
        }
    }
    return best > 0;
}

/* `why`: of the last that was looked at, why not. */
static bool open_port(struct ibv_device *device, hx_verbs_info_t *info, hx_verbs_device_t *d, char why[WHY])
{
    const char *name = ibv_get_device_name(device);
    struct ibv_device_attr attr;
    snprintf(why, WHY, "%.63s is iWARP, which needs the connection manager", name);
    if (device->transport_type == IBV_TRANSPORT_IWARP)
        return false;
    d->context = ibv_open_device(device);
    snprintf(why, WHY, "%.63s cannot be opened: %s", name, strerror(errno));
    if (!d->context)
        return false;
    snprintf(why, WHY, "%.63s has no active port", name);
    if (!ibv_query_device(d->context, &attr))
        for (uint8_t port = 1; port <= attr.phys_port_cnt; port++) {
            d->port_num = port;
            if ((info->port && info->port != port) || ibv_query_port(d->context, port, &d->port) ||
                d->port.state != IBV_PORT_ACTIVE)
                continue;
            if (!choose_gid(d, info->gid_index)) {
                if (info->gid_index >= 0)
                    snprintf(why, WHY, "port %u of %.63s has no GID %d", port, name, info->gid_index);
                else
                    snprintf(why, WHY, "port %u of %.63s has no GID", port, name);
                continue;
            }
            snprintf(info->device, sizeof info->device, "%s", name);
            info->port = port;
            info->gid_index = d->gid_index;
            info->max_wr = (uint32_t)(attr.max_qp_wr < attr.max_cqe ? attr.max_qp_wr : attr.max_cqe);
            info->max_sge = (uint32_t)attr.max_sge;
            info->max_sge_read = attr.max_sge_rd > 0 ? (uint32_t)attr.max_sge_rd : 1;
            info->max_message = d->port.max_msg_sz;
            info->max_reads = (uint32_t)(attr.max_qp_rd_atom < attr.max_qp_init_rd_atom ? attr.max_qp_rd_atom
                                                                                        : attr.max_qp_init_rd_atom);
            info->max_reads = info->max_reads < READS_MAX ? info->max_reads : READS_MAX;
            d->reads = info->max_reads;
            info->max_sge = info->max_sge < SGES ? info->max_sge : SGES;
            info->max_sge_read = info->max_sge_read < info->max_sge ? info->max_sge_read : info->max_sge;
            d->sges = info->max_sge;
            if (!d->reads || !d->sges)
                continue;
            return true;
        }
    ibv_close_device(d->context);
    d->context = NULL;
    return false;
}

static void describe_port(struct ibv_device *device, hx_verbs_device_t *d, hx_verbs_port_t *out)
{
    bool iwarp = device->transport_type == IBV_TRANSPORT_IWARP;
    char gid[INET6_ADDRSTRLEN] = "";
    *out = (hx_verbs_port_t){.port = d->port_num, .gid_index = -1};
    snprintf(out->device, sizeof out->device, "%.63s", ibv_get_device_name(device));
    snprintf(out->state, sizeof out->state, "%.31s", iwarp ? "iWARP" : ibv_port_state_str(d->port.state));
    out->mtu = 128u << d->port.active_mtu;
    out->max_mtu = 128u << d->port.max_mtu;
    bool found = choose_gid(d, -1);
    out->usable = found && !iwarp && d->port.state == IBV_PORT_ACTIVE;
    if (!found || !inet_ntop(AF_INET6, d->gid.raw, gid, sizeof gid))
        return;
    out->gid_index = d->gid_index;
    snprintf(out->gid, sizeof out->gid, "%s", gid);
}

static size_t list_ports(hx_verbs_port_t *out, size_t max)
{
    int n = 0;
    size_t count = 0;
    struct ibv_device **list = ibv_get_device_list(&n);
    for (int i = 0; list && i < n; i++) {
        hx_verbs_device_t d = {.context = ibv_open_device(list[i])};
        struct ibv_device_attr attr;
        if (!d.context)
            continue;
        for (d.port_num = 1; !ibv_query_device(d.context, &attr) && d.port_num <= attr.phys_port_cnt; d.port_num++)
            if (!ibv_query_port(d.context, d.port_num, &d.port) && count++ < max)
                describe_port(list[i], &d, &out[count - 1]);
        ibv_close_device(d.context);
    }
    if (list)
        ibv_free_device_list(list);
    return count;
}

static void close_device(hx_verbs_device_t *d)
{
    if (d->channel)
        ibv_destroy_comp_channel(d->channel);
    if (d->pd)
        ibv_dealloc_pd(d->pd);
    if (d->context)
        ibv_close_device(d->context);
    free(d);
}

static int set_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

static int open_device(hx_verbs_info_t *info, hx_verbs_device_t **device_p, char *text, size_t room)
{
    int n = 0;
    ibv_fork_init(); /* where the kernel does not copy pinned pages at a fork */
    struct ibv_device **list = ibv_get_device_list(&n);
    hx_verbs_device_t *d = calloc(1, sizeof *d);
    bool named = info->device[0] != 0, found = false, open = false;
    char wanted[HX_VERBS_NAME], why[WHY] = "";
    memcpy(wanted, info->device, sizeof wanted);
    for (int i = 0; list && d && i < n && !open; i++) {
        if (named && strcmp(ibv_get_device_name(list[i]), wanted))
            continue;
        found = true;
        open = open_port(list[i], info, d, why);
    }
    if (list)
        ibv_free_device_list(list);
    if (!open) {
        if (found)
            snprintf(text, room, "no RDMA device can be used: %s", why);
        else if (!n && !access("/sys/class/infiniband", F_OK) && access("/dev/infiniband", F_OK))
            snprintf(text, room,
                     "there is no /dev/infiniband here, which the kernel's RDMA devices are reached by: give it "
                     "to the container (docker: --device /dev/infiniband)");
        else
            snprintf(text, room, "there is no RDMA device%s%s", named ? " " : "", wanted);
        free(d);
        return ENODEV;
    }
    d->timeout = info->timeout;
    d->service_level = info->service_level;
    d->traffic_class = info->traffic_class;
    d->pd = ibv_alloc_pd(d->context);
    d->channel = d->pd ? ibv_create_comp_channel(d->context) : NULL;
    int error = !d->channel ? errno : set_nonblocking(d->channel->fd);
    if (!error)
        error = set_nonblocking(d->context->async_fd);
    if (error) {
        snprintf(text, room, "RDMA device %s cannot be used: %s", info->device, strerror(error));
        close_device(d);
        return error;
    }
    info->fd = d->channel->fd;
    info->async_fd = d->context->async_fd;
    info->cmd_fd = d->context->cmd_fd;
    *device_p = d;
    return 0;
}

static int reg(hx_verbs_device_t *d, void *addr, uint64_t nbytes, bool local_write, bool remote_read, bool remote_write,
               hx_verbs_mr_t **mr_p, uint32_t *lkey_p, uint32_t *rkey_p)
{
    unsigned access = (local_write ? IBV_ACCESS_LOCAL_WRITE : 0) | (remote_read ? IBV_ACCESS_REMOTE_READ : 0) |
                      (remote_write ? IBV_ACCESS_REMOTE_WRITE : 0);
    struct ibv_mr *mr = ibv_reg_mr_iova(d->pd, addr, nbytes, (uintptr_t)addr % HX_VERBS_PAGE, access);
    if (!mr)
        return errno;
    *mr_p = (hx_verbs_mr_t *)mr;
    *lkey_p = mr->lkey;
    *rkey_p = mr->rkey;
    return 0;
}

static int dereg(hx_verbs_mr_t *mr)
{
    return ibv_dereg_mr((struct ibv_mr *)mr);
}

static int shut(hx_verbs_qp_t *q)
{
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    atomic_store(&q->shut, true);
    return ibv_modify_qp(q->qp, &error, IBV_QP_STATE);
}

/* It may take long: with soft-RoCE, for as long as a network card that is down keeps a packet of it, up to 50 seconds. */
static int destroy(hx_verbs_qp_t *q)
{
    int failed = q->qp ? ibv_destroy_qp(q->qp) : 0;
    if (failed)
        return failed;
    q->qp = NULL;
    failed = q->cq ? ibv_destroy_cq(q->cq) : 0; /* waits for whoever is in event() with it */
    if (!failed)
        free(q);
    return failed;
}

/* The port's address, which the next queue pairs tell their peers. While it is down, it may have none: then it is as it was. */
static void look_again(hx_verbs_device_t *d)
{
    static const union ibv_gid none;
    struct ibv_port_attr port;
    union ibv_gid gid;
    if (!ibv_query_port(d->context, d->port_num, &port))
        d->port = port;
    if (!ibv_query_gid(d->context, d->port_num, d->gid_index, &gid) && memcmp(&gid, &none, sizeof gid))
        d->gid = gid;
}

static int create(hx_verbs_device_t *d, uint32_t depth, void *owner, hx_verbs_qp_t **qp_p, hx_verbs_address_t *address,
                  uint32_t *inline_p)
{
    hx_verbs_qp_t *q = calloc(1, sizeof *q);
    if (!q)
        return ENOMEM;
    look_again(d); /* the event that it has changed may be on its way yet */
    q->device = d;
    q->owner = owner;
    q->cq = ibv_create_cq(d->context, (int)depth, q, d->channel, 0);
    struct ibv_qp_init_attr init = {
        .qp_context = q,
        .send_cq = q->cq,
        .recv_cq = q->cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = depth,
                .max_recv_wr = 1,
                .max_send_sge = d->sges,
                .max_recv_sge = 1,
                .max_inline_data = INLINE_MAX},
    };
    q->qp = q->cq ? ibv_create_qp(d->pd, &init) : NULL;
    if (q->cq && !q->qp) { /* what goes inline is a wish */
        init.cap.max_inline_data = 0;
        q->qp = ibv_create_qp(d->pd, &init);
    }
    d->inline_max = q->qp ? init.cap.max_inline_data : 0;
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = d->port_num,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };
    int error = !q->qp ? errno : 0;
    if (!error)
        error = ibv_modify_qp(q->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (!error && getrandom(&q->psn, sizeof q->psn, 0) != sizeof q->psn)
        error = errno;
    if (error) {
        destroy(q);
        return error;
    }
    q->psn &= 0xffffff;
    q->mtu = d->port.active_mtu;
    *address =
        (hx_verbs_address_t){.qpn = q->qp->qp_num, .psn = q->psn, .mtu = q->mtu, .reads = d->reads, .lid = d->port.lid};
    memcpy(address->gid, d->gid.raw, sizeof address->gid);
    *inline_p = d->inline_max;
    *qp_p = q;
    return 0;
}

static int connect_qp(hx_verbs_qp_t *q, const hx_verbs_address_t *peer)
{
    hx_verbs_device_t *d = q->device;
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = peer->mtu < q->mtu ? (enum ibv_mtu)peer->mtu : q->mtu,
        .dest_qp_num = peer->qpn,
        .rq_psn = peer->psn,
        .max_dest_rd_atomic = (uint8_t)d->reads,
        .min_rnr_timer = RNR_TIMER,
        .ah_attr = {.is_global = 1,
                    .dlid = (uint16_t)peer->lid,
                    .port_num = d->port_num,
                    .sl = d->service_level,
                    .grh = {.sgid_index = (uint8_t)d->gid_index, .traffic_class = d->traffic_class, .hop_limit = 64}},
    };
    memcpy(attr.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
    int error = ibv_modify_qp(q->qp, &attr,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS,
        .sq_psn = q->psn,
        .timeout = d->timeout,
        .retry_cnt = RETRIES,
        .rnr_retry = RETRIES,
        .max_rd_atomic = (uint8_t)(peer->reads < d->reads ? peer->reads : d->reads),
    };
    if (!error)
        error = ibv_modify_qp(q->qp, &send,
                              IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_MAX_QP_RD_ATOMIC);
    return error ? error : ibv_req_notify_cq(q->cq, 0);
}

static int post(hx_verbs_qp_t *q, const hx_verbs_wr_t *list, size_t n, size_t *posted_p)
{
    *posted_p = 0;
    while (*posted_p < n) {
        struct ibv_send_wr wrs[POST_MAX], *bad = NULL;
        struct ibv_sge sges[POST_MAX * SGES];
        size_t count = 0, nsge = 0;
        for (; count < POST_MAX && *posted_p + count < n; count++) {
            const hx_verbs_wr_t *wr = &list[*posted_p + count];
            struct ibv_sge *first = &sges[nsge];
            for (uint32_t i = 0; i < wr->nsge; i++)
                sges[nsge++] = (struct ibv_sge){wr->sge[i].addr, wr->sge[i].nbytes, wr->sge[i].lkey};
            wrs[count] = (struct ibv_send_wr){
                .wr_id = wr->id,
                .next = &wrs[count + 1],
                .sg_list = first,
                .num_sge = (int)wr->nsge,
                .opcode = wr->read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
                .send_flags = (wr->signalled ? IBV_SEND_SIGNALED : 0) | (wr->inlined ? IBV_SEND_INLINE : 0),
                .wr.rdma = {wr->remote, wr->rkey},
            };
        }
        wrs[count - 1].next = NULL;
        int error = ibv_post_send(q->qp, wrs, &bad);
        if (error) {
            *posted_p += bad ? (size_t)(bad - wrs) : 0;
            return error;
        }
        *posted_p += count;
    }
    return 0;
}

static int event(hx_verbs_device_t *d, void **owner_p)
{
    struct ibv_cq *cq;
    void *context;
    if (ibv_get_cq_event(d->channel, &cq, &context))
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    *owner_p = ((hx_verbs_qp_t *)context)->owner;
    ibv_req_notify_cq(cq, 0);
    ibv_ack_cq_events(cq, 1); /* last: from here on it may be destroyed */
    return 1;
}

static int poll_cq(hx_verbs_qp_t *q, hx_verbs_wc_t *out, int n)
{
    struct ibv_wc wc[32];
    int found = ibv_poll_cq(q->cq, n < 32 ? n : 32, wc);
    for (int i = 0; i < found; i++)
        out[i] = (hx_verbs_wc_t){wc[i].wr_id, wc[i].status, wc[i].vendor_err};
    return found;
}

/* NULL: nobody cares any more. */
static void *owner_of(const hx_verbs_qp_t *q, char *text)
{
    if (!atomic_load(&q->shut))
        return q->owner;
    text[0] = 0;
    return NULL;
}

static int async_event(hx_verbs_device_t *d, void **owner_p, char *text, size_t room)
{
    struct ibv_async_event ev;
    if (ibv_get_async_event(d->context, &ev))
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    *owner_p = NULL;
    snprintf(text, room, "%s", ibv_event_type_str(ev.event_type));
    switch (ev.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_PATH_MIG_ERR:
        *owner_p = owner_of(ev.element.qp->qp_context, text);
        break;
    case IBV_EVENT_CQ_ERR:
        *owner_p = owner_of(ev.element.cq->cq_context, text);
        break;
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
    case IBV_EVENT_PATH_MIG:
        text[0] = 0;
        break;
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_PORT_ACTIVE:
        look_again(d);
        break;
    default:
        break;
    }
    ibv_ack_async_event(&ev);
    return ev.event_type == IBV_EVENT_DEVICE_FATAL ? -1 : 1;
}

static int meaning(uint32_t status)
{
    switch (status) {
    case IBV_WC_REM_ACCESS_ERR:
        return HX_VERBS_ACCESS;
    case IBV_WC_WR_FLUSH_ERR:
        return HX_VERBS_FLUSHED;
    default:
        return HX_VERBS_OTHER;
    }
}

static const char *name_of(uint32_t status)
{
    return ibv_wc_status_str((enum ibv_wc_status)status);
}

__attribute__((visibility("default"))) const hx_verbs_table_t *hx_verbs_binding(void)
{
    static const hx_verbs_table_t table = {
        .abi = HX_VERBS_ABI,
        .open = open_device,
        .close = close_device,
        .ports = list_ports,
        .reg = reg,
        .dereg = dereg,
        .create = create,
        .connect = connect_qp,
        .shut = shut,
        .destroy = destroy,
        .post = post,
        .event = event,
        .poll = poll_cq,
        .async = async_event,
        .meaning = meaning,
        .name = name_of,
    };
    return &table;
}
#endif
