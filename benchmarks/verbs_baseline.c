/* SPDX-License-Identifier: Apache-2.0 */
/* What plain C does with libibverbs: a 4 KiB RDMA WRITE, a READ of eight bytes behind it that says that it has landed,
 * and one wait for both. Two processes, each with an end of a reliable queue pair that is set up as the engine's is.
 * For each line with a number on stdin, so many times; answers with the median in microseconds. bench_verbs.py compiles
 * this, and loads it as well, to do the same from a loop of Python's.
 *
 * usage: verbs_baseline DEVICE PORT GID_INDEX SOCKET [target]
 * SOCKET is a descriptor: the other process has its other end. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SIZE 4096u
#define FLUSH 8u
#define MOST 100000 /* samples of a line */
#define OR_DIE(fine)                                                             \
    do {                                                                         \
        if (!(fine)) {                                                           \
            fprintf(stderr, "verbs_baseline: %s: %s\n", #fine, strerror(errno)); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

/* What each end must know of the other. */
typedef struct {
    union ibv_gid gid;
    uint64_t memory;
    uint32_t qpn, psn, rkey, lid;
} about_t;

typedef struct {
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr, *sink;
    about_t there;
} end_t;

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static struct ibv_context *open_named(const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;
    for (int i = 0; list && list[i] && !context; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name))
            context = ibv_open_device(list[i]);
    if (list)
        ibv_free_device_list(list);
    return context;
}

static struct ibv_mr *registered(struct ibv_pd *pd, size_t nbytes)
{
    void *memory = aligned_alloc(SIZE, SIZE);
    OR_DIE(memory);
    memset(memory, 7, SIZE);
    struct ibv_mr *mr =
        ibv_reg_mr(pd, memory, nbytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    OR_DIE(mr);
    return mr;
}

static void swap(int other, const about_t *mine, about_t *theirs)
{
    OR_DIE(write(other, mine, sizeof *mine) == sizeof *mine);
    OR_DIE(read(other, theirs, sizeof *theirs) == sizeof *theirs);
}

static void join(const end_t *e, const struct ibv_port_attr *port, uint8_t port_num, uint8_t gid_index, uint8_t reads,
                 uint32_t psn)
{
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT,
        .port_num = port_num,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };
    struct ibv_qp_attr receive = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = port->active_mtu,
        .dest_qp_num = e->there.qpn,
        .rq_psn = e->there.psn,
        .max_dest_rd_atomic = reads,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .dlid = (uint16_t)e->there.lid,
                    .port_num = port_num,
                    .grh = {.dgid = e->there.gid, .sgid_index = gid_index, .hop_limit = 64}},
    };
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS,
        .sq_psn = psn,
        .timeout = 14,
        .retry_cnt = 6,
        .rnr_retry = 6,
        .max_rd_atomic = reads,
    };
    OR_DIE(!ibv_modify_qp(e->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    OR_DIE(!ibv_modify_qp(e->qp, &receive,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    OR_DIE(!ibv_modify_qp(e->qp, &send,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_MAX_QP_RD_ATOMIC));
}

/* An end that can be written to and that can write; `other` is a socket to the other process. */
static end_t set_up(const char *device, uint8_t port_num, uint8_t gid_index, int other)
{
    struct ibv_context *context = open_named(device);
    OR_DIE(context);
    struct ibv_device_attr limits;
    struct ibv_port_attr port;
    OR_DIE(!ibv_query_device(context, &limits));
    OR_DIE(!ibv_query_port(context, port_num, &port));
    struct ibv_pd *pd = ibv_alloc_pd(context);
    OR_DIE(pd);
    end_t e = {.channel = ibv_create_comp_channel(context), .mr = registered(pd, SIZE), .sink = registered(pd, FLUSH)};
    OR_DIE(e.channel);
    OR_DIE(!fcntl(e.channel->fd, F_SETFL, fcntl(e.channel->fd, F_GETFL) | O_NONBLOCK));
    e.cq = ibv_create_cq(context, 512, NULL, e.channel, 0);
    OR_DIE(e.cq);
    struct ibv_qp_init_attr wanted = {
        .send_cq = e.cq,
        .recv_cq = e.cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 512, .max_recv_wr = 1, .max_send_sge = 16, .max_recv_sge = 1, .max_inline_data = 64},
    };
    e.qp = ibv_create_qp(pd, &wanted);
    OR_DIE(e.qp);
    about_t here = {.memory = (uintptr_t)e.mr->addr,
                    .qpn = e.qp->qp_num,
                    .psn = (uint32_t)getpid() & 0xffffff,
                    .rkey = e.mr->rkey,
                    .lid = port.lid};
    OR_DIE(!ibv_query_gid(context, port_num, gid_index, &here.gid));
    swap(other, &here, &e.there);
    int reads = limits.max_qp_rd_atom < 16 ? limits.max_qp_rd_atom : 16;
    join(&e, &port, port_num, gid_index, (uint8_t)reads, here.psn);
    about_t ready;
    swap(other, &here, &ready); /* nothing is sent to an end that is not there yet */
    return e;
}

/* ---- the initiator ---- */

static end_t mine;

/* Answers the descriptor to wait on. */
int verbs_baseline_start(const char *device, int port_num, int gid_index, int other)
{
    mine = set_up(device, (uint8_t)port_num, (uint8_t)gid_index, other);
    return mine.channel->fd;
}

void verbs_baseline_post(void)
{
    struct ibv_sge from = {(uintptr_t)mine.mr->addr, SIZE, mine.mr->lkey};
    struct ibv_sge to = {(uintptr_t)mine.sink->addr, FLUSH, mine.sink->lkey};
    struct ibv_send_wr flush = {
        .sg_list = &to,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {mine.there.memory, mine.there.rkey},
    };
    struct ibv_send_wr first = {
        .next = &flush,
        .sg_list = &from,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_WRITE,
        .wr.rdma = {mine.there.memory, mine.there.rkey},
    };
    struct ibv_send_wr *bad;
    OR_DIE(!ibv_req_notify_cq(mine.cq, 0)); /* first: what completes before it rings no bell */
    OR_DIE(!ibv_post_send(mine.qp, &first, &bad));
}

/* Once the descriptor is readable. */
void verbs_baseline_take(void)
{
    struct ibv_cq *cq;
    struct ibv_wc wc;
    void *context;
    OR_DIE(!ibv_get_cq_event(mine.channel, &cq, &context));
    ibv_ack_cq_events(cq, 1);
    OR_DIE(ibv_poll_cq(cq, 1, &wc) == 1);
    OR_DIE(wc.status == IBV_WC_SUCCESS);
}

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    static uint64_t samples[MOST];
    int n;
    OR_DIE(argc >= 5);
    int other = atoi(argv[4]);
    struct pollfd wanted = {.fd = verbs_baseline_start(argv[1], atoi(argv[2]), atoi(argv[3]), other), .events = POLLIN};
    if (argc > 5)
        return read(other, &n, 1) != 0; /* its memory is written to, until the other process ends */
    while (scanf("%d", &n) == 1 && n > 0 && n <= MOST) {
        for (int i = 0; i < n; i++) {
            uint64_t start = now_ns();
            verbs_baseline_post();
            OR_DIE(poll(&wanted, 1, 10000) == 1);
            verbs_baseline_take();
            samples[i] = now_ns() - start;
        }
        qsort(samples, (size_t)n, sizeof samples[0], ascending);
        printf("%.3f\n", (double)samples[n / 2] / 1e3);
        fflush(stdout);
    }
    return 0;
}
