/* SPDX-License-Identifier: Apache-2.0 */
/* libibverbs as the C core sees it: a table of plain functions, filled by the binding (provider_verbs.c, a shared object of its
 * own that is linked to the library and opened at run time). The core is built without the library's headers.
 *
 * Calls answer 0 or an errno, unless they say otherwise. A queue pair has a completion queue of its own that holds a
 * completion for each of its work requests, so that it cannot overrun; all of a device share one completion channel. */
#ifndef HX_VERBS_H
#define HX_VERBS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hx.h"

#define HX_VERBS_ABI 1u
#define HX_VERBS_NAME 64
/* A registration begins at its address's offset in such a page: the kernel wants what its own pages give, which have 4 to
 * 64 KiB. */
#define HX_VERBS_PAGE 65536u

typedef struct hx_verbs_device hx_verbs_device_t;
typedef struct hx_verbs_qp hx_verbs_qp_t;
typedef struct hx_verbs_mr hx_verbs_mr_t;

typedef struct {
    char device[HX_VERBS_NAME];                        /* NULL terminated; in: "" for the first that is active */
    int32_t port;                                      /* in: 0 for the first that is active */
    int32_t gid_index;                                 /* in: -1 to choose */
    uint8_t timeout, service_level, traffic_class;     /* in: see hx_verbs_config_t */
    uint32_t max_wr, max_sge, max_sge_read, max_reads; /* reads: outstanding ones of a queue pair */
    uint64_t max_message;                              /* bytes */
    int32_t fd, async_fd, cmd_fd; /* of the completion channel; of asynchronous events; of the device */
} hx_verbs_info_t;

/* What one end tells the other. */
typedef struct {
    uint8_t gid[16];
    uint32_t qpn, psn, mtu, reads;
    uint32_t lid;
} hx_verbs_address_t;

typedef struct {
    uint64_t addr;
    uint32_t nbytes, lkey;
} hx_verbs_sge_t;

typedef struct {
    uint64_t id, remote;
    uint32_t rkey, nsge;
    const hx_verbs_sge_t *sge;
    bool read, signalled, inlined;
} hx_verbs_wr_t;

typedef struct {
    uint64_t id;
    uint32_t status, vendor; /* status 0: done */
} hx_verbs_wc_t;

/* What a status means to us; the name is the library's. */
enum { HX_VERBS_OTHER, HX_VERBS_ACCESS, HX_VERBS_FLUSHED };

typedef struct {
    uint32_t abi;
    int (*open)(hx_verbs_info_t *info, hx_verbs_device_t **device_p, char *text, size_t room);
    void (*close)(hx_verbs_device_t *device);
    size_t (*ports)(hx_verbs_port_t *out, size_t max); /* how many there are */
    int (*reg)(hx_verbs_device_t *device, void *addr, uint64_t nbytes, bool local_write, bool remote_read,
               bool remote_write, hx_verbs_mr_t **mr_p, uint32_t *lkey_p, uint32_t *rkey_p);
    int (*dereg)(hx_verbs_mr_t *mr);
    /* inline: bytes that a write may carry in itself. */
    int (*create)(hx_verbs_device_t *device, uint32_t depth, void *owner, hx_verbs_qp_t **qp_p,
                  hx_verbs_address_t *address, uint32_t *inline_p);
    int (*connect)(hx_verbs_qp_t *qp, const hx_verbs_address_t *peer); /* armed from here on */
    int (*shut)(hx_verbs_qp_t *qp);    /* nothing more is posted; 0: it neither sends nor takes anything in any more */
    int (*destroy)(hx_verbs_qp_t *qp); /* 0: nothing of it touches memory any more; else it is there still */
    int (*post)(hx_verbs_qp_t *qp, const hx_verbs_wr_t *list, size_t n, size_t *posted_p);
    /* 1: *owner_p's queue has completions, and is armed again; 0: none; negative: the device is gone. */
    int (*event)(hx_verbs_device_t *device, void **owner_p);
    int (*poll)(hx_verbs_qp_t *qp, hx_verbs_wc_t *out, int n); /* how many; negative: it is broken */
    /* As event(), of asynchronous events, in words ("": nothing that anybody need know); *owner_p of those after which a
     * queue pair does no more, else NULL. */
    int (*async)(hx_verbs_device_t *device, void **owner_p, char *text, size_t room);
    int (*meaning)(uint32_t status);
    const char *(*name)(uint32_t status);
} hx_verbs_table_t;

/* The binding's one exported symbol. */
const hx_verbs_table_t *hx_verbs_binding(void);

#endif
