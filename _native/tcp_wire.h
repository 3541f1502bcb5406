/* SPDX-License-Identifier: Apache-2.0 */
/* What travels on a data connection, after its handshake on the control thread (data_hello.c). docs/tcp-protocol.md
 * describes it byte by byte. Little-endian, fixed-width; every field is bounded before anything is allocated or touched.
 *
 * A message is a head, `nrows` rows, and for WRITE and DATA `nbytes` bytes of payload. Rows name offsets in one region of
 * the receiver: nobody speaks in addresses. */
#ifndef HX_TCP_WIRE_H
#define HX_TCP_WIRE_H

#include <stdint.h>

#define HX_TCP_MAGIC 0x31544148u /* "HAT1" */
#define HX_TCP_ROWS_MAX 4096u
#define HX_TCP_MESSAGE_MAX (4u << 20) /* bytes of payload */

typedef enum {
    HX_TCP_WRITE = 1, /* rows, payload: into the receiver's region; answered by DONE */
    HX_TCP_READ = 2,  /* rows: out of the receiver's region; answered by DATA, or by DONE with a status */
    HX_TCP_DATA = 3,  /* payload: what READ `id` asked for, its rows one after the other */
    HX_TCP_DONE = 4,  /* WRITE or READ `id` is over, with `status`; its bytes are visible if that is 0 */
} hx_tcp_type_t;

#define HX_TCP_CHECKSUM 1u /* flag: both fields hold a CRC-32C; what is asked with it is answered with it */

typedef struct {
    uint32_t magic;
    uint16_t type, flags;
    uint32_t nrows, status;
    uint64_t id, region, rkey, nbytes;
    uint64_t epoch;    /* the newest revocation that the permission of a WRITE or READ knew of */
    uint32_t crc;      /* of the payload */
    uint32_t head_crc; /* of this head, with this field 0, and the rows */
} hx_tcp_head_t;

_Static_assert(sizeof(hx_tcp_head_t) == 64, "wire format");

typedef struct {
    uint64_t off, nbytes;
} hx_tcp_row_t;

_Static_assert(sizeof(hx_tcp_row_t) == 16, "wire format");

#endif
