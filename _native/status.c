/* SPDX-License-Identifier: Apache-2.0 */
#include "hx.h"

static const struct {
    hx_status_t status;
    const char *name;
} names[] = {
    {HX_OK, "OK"},
    {HX_ERR_REMOTE_ACCESS, "REMOTE_ACCESS"},
    {HX_ERR_BOUNDS, "BOUNDS"},
    {HX_ERR_OVERLAP, "OVERLAP"},
    {HX_ERR_NO_PATH, "NO_PATH"},
    {HX_ERR_REGION_CLOSED, "REGION_CLOSED"},
    {HX_ERR_PINNED, "PINNED"},
    {HX_ERR_TIMEOUT, "TIMEOUT"},
    {HX_ERR_ABORTED, "ABORTED"},
    {HX_ERR_CANCELLED, "CANCELLED"},
    {HX_ERR_FAULT, "FAULT"},
    {HX_ERR_PROVIDER, "PROVIDER"},
    {HX_ERR_CONNECTION, "CONNECTION"},
    {HX_ERR_CHECKSUM, "CHECKSUM"},
    {HX_ERR_UNREACHABLE, "UNREACHABLE"},
    {HX_ERR_PEER_LOST, "PEER_LOST"},
    {HX_ERR_MISMATCH, "MISMATCH"},
    {HX_ERR_AUTH, "AUTH"},
    {HX_ERR_STALE, "STALE"},
    {HX_ERR_QUEUE_FULL, "QUEUE_FULL"},
    {HX_ERR_CLOSED, "CLOSED"},
    {HX_ERR_CONFIG, "CONFIG"},
    {HX_ERR_NO_MEMORY, "NO_MEMORY"},
    {HX_ERR_SYSTEM, "SYSTEM"},
    {HX_ERR_INTERNAL, "INTERNAL"},
};

#define COUNT (sizeof names / sizeof names[0])

const char *hx_status_name(hx_status_t status)
{
    for (size_t i = 0; i < COUNT; i++)
        if (names[i].status == status)
            return names[i].name;
    return "INTERNAL"; /* a number that is not in the table is a bug of ours */
}

size_t hx_status_count(void)
{
    return COUNT;
}

hx_status_t hx_status_at(size_t i)
{
    return names[i].status;
}
