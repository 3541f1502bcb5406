/* SPDX-License-Identifier: Apache-2.0 */
/* HIXL as the C core sees it: a table of plain functions, which the binding (provider_hixl.cc, a shared object of its own,
 * opened at run time) fills with calls of the C++ class hixl::Hixl. No exception, container or string of C++ crosses it.
 *
 * Every function answers HIXL's own status. The set of those is open: what is not named here is passed on as it is.
 * The binding holds no lock and starts no thread; which calls may meet is the caller's business (hixl_core.h). */
#ifndef HX_HIXL_H
#define HX_HIXL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HX_HIXL_ABI 1u

enum {
    HX_HIXL_SUCCESS = 0,
    HX_HIXL_PARAM_INVALID = 103900,
    HX_HIXL_TIMEOUT = 103901,
    HX_HIXL_NOT_CONNECTED = 103902,
    HX_HIXL_ALREADY_CONNECTED = 103903,
    HX_HIXL_UNSUPPORTED = 103905,
    HX_HIXL_RESOURCE_EXHAUSTED = 203900,
    HX_HIXL_FAILED = 503900,
};
#define HX_HIXL_THREW 0xffffffffu /* a C++ exception reached the binding */

enum { HX_HIXL_DEVICE = 0, HX_HIXL_HOST = 1 };       /* kinds of memory */
enum { HX_HIXL_READ = 0, HX_HIXL_WRITE = 1 };        /* directions */
enum { HX_HIXL_WAITING = 0, HX_HIXL_COMPLETED = 1 }; /* of a transfer; anything else has failed */

typedef struct hx_hixl_object hx_hixl_object_t; /* one hixl::Hixl */
typedef struct hx_hixl_name hx_hixl_name_t;     /* a peer's "ip:port" in the library's form */

/* As hixl::TransferOpDesc. */
typedef struct {
    uint64_t local, remote;
    uint64_t nbytes;
} hx_hixl_desc_t;

typedef struct {
    uint64_t user_data;
    int32_t status;
} hx_hixl_result_t;

typedef void (*hx_hixl_notify_fn)(void *to, const char *name, size_t name_len, const char *text, size_t text_len);

typedef struct {
    uint32_t abi;
    hx_hixl_object_t *(*create)(void); /* NULL: no memory */
    void (*destroy)(hx_hixl_object_t *);
    hx_hixl_name_t *(*name)(const char *text);
    void (*free_name)(hx_hixl_name_t *);
    uint32_t (*initialize)(hx_hixl_object_t *, const hx_hixl_name_t *local, const char *const *keys,
                           const char *const *values, size_t n);
    void (*finalize)(hx_hixl_object_t *);
    uint32_t (*add)(hx_hixl_object_t *, uint64_t addr, uint64_t nbytes, int32_t kind, void **handle_p);
    uint32_t (*drop)(hx_hixl_object_t *, void *handle);
    uint32_t (*connect)(hx_hixl_object_t *, const hx_hixl_name_t *peer, int32_t timeout_ms);
    uint32_t (*disconnect)(hx_hixl_object_t *, const hx_hixl_name_t *peer, int32_t timeout_ms);
    uint32_t (*post)(hx_hixl_object_t *, const hx_hixl_name_t *peer, int32_t direction, const hx_hixl_desc_t *descs,
                     size_t n, uint64_t user_data, void **request_p);
    uint32_t (*poll)(hx_hixl_object_t *, void *request, int32_t *status_p);
    /* Those of all peers that are not waiting any more; there is room for all that are with the library. */
    uint32_t (*poll_all)(hx_hixl_object_t *, hx_hixl_result_t *out, size_t max, size_t *n_p);
    uint32_t (*notify)(hx_hixl_object_t *, const hx_hixl_name_t *peer, const char *name, size_t name_len,
                       const char *text, size_t text_len, int32_t timeout_ms);
    uint32_t (*notifies)(hx_hixl_object_t *, hx_hixl_notify_fn each, void *to);
} hx_hixl_table_t;

/* The binding's one exported symbol. */
const hx_hixl_table_t *hx_hixl_binding(void);

#ifdef __cplusplus
}
#endif
#endif
