/* SPDX-License-Identifier: Apache-2.0 */
/* The vendor's libraries, opened once in a process and never closed (their threads and exit handlers would not survive). */
#ifndef HX_HIXL_LOAD_H
#define HX_HIXL_LOAD_H

#include "hixl.h"
#include "hx.h"

/* Of libacl_rt.so: the runtime's C functions. Those marked optional may be NULL. */
typedef struct {
    int (*set_device)(int32_t device);
    int (*get_context)(void **context_p);
    int (*set_context)(void *context);
    int (*malloc_device)(void **p, size_t nbytes, int policy);
    int (*free_device)(void *p);
    int (*copy)(void *to, size_t room, const void *from, size_t nbytes, int kind);
    int (*query_event)(void *event, int32_t *status_p);
    const char *(*recent_error)(void); /* optional */
    const char *(*soc_name)(void);     /* optional */
} hx_acl_t;

enum { HX_ACL_TO_DEVICE = 1, HX_ACL_TO_HOST = 2 }; /* aclrtMemcpyKind */
enum { HX_ACL_HUGE_FIRST = 0 };                    /* aclrtMemMallocPolicy */
enum { HX_ACL_EVENT_COMPLETE = 1 };                /* aclrtEventRecordedStatus */

typedef struct {
    const hx_hixl_table_t *hixl;
    hx_acl_t acl;
    char where[HX_TEXT_MAX]; /* the file that libcann_hixl.so came from */
} hx_vendor_t;

/* HX_ERR_CONFIG with a line that says which library is missing or too old, where it was looked for, and what brings it. */
hx_status_t hx_vendor_load(const char *binding, const char *library, const hx_vendor_t **vendor_p,
                           char text[HX_TEXT_MAX]);

#endif
