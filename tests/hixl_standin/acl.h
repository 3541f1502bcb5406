// SPDX-License-Identifier: Apache-2.0
// Stand-in for libacl_rt.so, a test double: the plain C calls that it offers, and what libcann_hixl.so needs of it.
#ifndef HIXL_STANDIN_ACL_H
#define HIXL_STANDIN_ACL_H

#include <cstddef>
#include <cstdint>

constexpr int ACL_INVALID_PARAM = 100000;
constexpr int ACL_REPEAT_INITIALIZE = 100002;
constexpr int ACL_RT_PARAM_INVALID = 107000;
constexpr int ACL_RT_INVALID_DEVICE = 107001;
constexpr int ACL_RT_CONTEXT_NULL = 107002;
constexpr int ACL_RT_NO_MEMORY = 207001;

enum AclMemcpyKind { ACL_HOST_TO_HOST, ACL_HOST_TO_DEVICE, ACL_DEVICE_TO_HOST, ACL_DEVICE_TO_DEVICE };
enum AclEventStatus { ACL_EVENT_NOT_READY = 0, ACL_EVENT_COMPLETE = 1 };

#pragma GCC visibility push(default)
extern "C" {
int aclInit(const char *config);
int aclFinalize();
int aclrtSetDevice(int32_t device);
int aclrtResetDevice(int32_t device);
int aclrtGetDevice(int32_t *device);
int aclrtGetDeviceCount(uint32_t *count);
int aclrtGetCurrentContext(void **context);
int aclrtSetCurrentContext(void *context);
const char *aclrtGetSocName();
// NULL when there is none. Per thread, cleared by reading; the text lasts until the thread's next call.
const char *aclGetRecentErrMsg();

int aclrtMalloc(void **address, size_t size, int policy);
int aclrtFree(void *address);
int aclrtMallocHost(void **address, size_t size);
int aclrtFreeHost(void *address);
int aclrtMemcpy(void *target, size_t target_max, const void *source, size_t count, int kind);

int aclrtCreateEvent(void **event);
int aclrtDestroyEvent(void *event);
int aclrtRecordEvent(void *event, void *stream);
int aclrtQueryEventStatus(void *event, int *status);
int aclrtSynchronizeEvent(void *event);

// The stand-in's own. An event that is complete after the delay; needs no context; aclrtDestroyEvent frees it.
void *hixl_standin_event(uint32_t delay_ms);

// For libcann_hixl.so.
void *hixl_standin_context_new(int32_t device);
void hixl_standin_context_destroy(void *context);
int32_t hixl_standin_context_device(void *context);
// The thread's live context or NULL; _swap makes `context` current as it is.
void *hixl_standin_context_current();
void hixl_standin_context_swap(void *context);

enum { STANDIN_PLAIN, STANDIN_DEVICE, STANDIN_PINNED };
// What [address, address + size) is, and where its bytes are (for PLAIN and PINNED: at their own address).
// -1 if it begins in device or pinned memory and ends outside of that allocation. For DEVICE, also whose.
int hixl_standin_shadow(uint64_t address, uint64_t size, uint64_t *shadow, int32_t *device);
// Sets the thread's recent error message (knob err_msg, once, instead of the text).
void hixl_standin_error(const char *text);
}
#pragma GCC visibility pop

#endif
