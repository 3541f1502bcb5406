/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "hixl_load.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PACKAGE                                                                                                     \
    "it comes with Huawei's CANN toolkit 9.1 or newer (package Ascend-cann-toolkit; then `source set_env.sh`), or " \
    "give "                                                                                                         \
    "Engine(hixl_library=...) the directory that holds it"

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static hx_vendor_t vendor; /* under mu until `loaded`, constant from then on */
static bool loaded;

/* Where the vendor's libraries are looked for: a directory (without the last slash), or "" for the loader's own path. */
static bool directory_of(const char *library, char dir[PATH_MAX], char text[HX_TEXT_MAX])
{
    struct stat st;
    const char *home = getenv("ASCEND_HOME_PATH");
    int n;
    if (!library) {
        n = home && home[0] ? snprintf(dir, PATH_MAX, "%s/lib64", home) : snprintf(dir, PATH_MAX, "%s", "");
        if (n > 0 && n < PATH_MAX && stat(dir, &st) < 0)
            dir[0] = 0; /* the variable is left over from another installation: the loader's path may know better */
        return n < PATH_MAX;
    }
    n = snprintf(dir, PATH_MAX, "%s", library);
    if (n >= PATH_MAX || stat(dir, &st) < 0) {
        snprintf(text, HX_TEXT_MAX, "hixl_library=%.400s: there is no such file or directory; %s", library, PACKAGE);
        return false;
    }
    char *slash = S_ISDIR(st.st_mode) ? dir + n : strrchr(dir, '/');
    if (!slash)
        snprintf(dir, PATH_MAX, ".");
    else if (slash != dir)
        *slash = 0;
    while ((n = (int)strlen(dir)) > 1 && dir[n - 1] == '/')
        dir[n - 1] = 0;
    return true;
}

/* In the directory, then by the loader. */
static void *open_library(const char *dir, const char *soname, char why[HX_TEXT_MAX])
{
    char path[PATH_MAX + 64];
    size_t at = 0;
    void *handle = NULL;
    if (dir[0]) {
        snprintf(path, sizeof path, "%s/%s", dir, soname);
        handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (!handle)
            at = (size_t)snprintf(why, HX_TEXT_MAX, "%s; ", dlerror());
    }
    if (!handle)
        handle = dlopen(soname, RTLD_NOW | RTLD_GLOBAL);
    if (!handle && at < HX_TEXT_MAX)
        snprintf(why + at, HX_TEXT_MAX - at, "%s", dlerror());
    return handle;
}

static bool missing(char text[HX_TEXT_MAX], const char *soname, const char *dir, const char *why)
{
    const char *home = getenv("ASCEND_HOME_PATH");
    char place[512];
    snprintf(place, sizeof place, "%.400s", dir);
    if (!dir[0] && home && home[0])
        snprintf(place, sizeof place, "ASCEND_HOME_PATH=%.300s (which has no lib64) and in", home);
    else if (!dir[0])
        snprintf(place, sizeof place, "ASCEND_HOME_PATH (not set) and in");
    snprintf(text, HX_TEXT_MAX, "cannot open %s: looked in %.400s%s the loader's path (%.300s); %s", soname, place,
             dir[0] ? " and in" : "", why, PACKAGE);
    return false;
}

static bool find_acl(hx_acl_t *acl, void *handle, char text[HX_TEXT_MAX])
{
    const struct {
        const char *name;
        void *to;
        bool optional;
    } list[] = {
        {"aclrtSetDevice", &acl->set_device, false},
        {"aclrtGetCurrentContext", &acl->get_context, false},
        {"aclrtSetCurrentContext", &acl->set_context, false},
        {"aclrtMalloc", &acl->malloc_device, false},
        {"aclrtFree", &acl->free_device, false},
        {"aclrtMemcpy", &acl->copy, false},
        {"aclrtQueryEventStatus", &acl->query_event, false},
        {"aclGetRecentErrMsg", &acl->recent_error, true},
        {"aclrtGetSocName", &acl->soc_name, true},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        void *symbol = dlsym(handle, list[i].name);
        memcpy(list[i].to, &symbol, sizeof symbol);
        if (!symbol && !list[i].optional) {
            snprintf(text, HX_TEXT_MAX, "libacl_rt.so has no %s: it is too old; %s", list[i].name, PACKAGE);
            return false;
        }
    }
    return true;
}

static bool load(const char *binding, const char *library, char text[HX_TEXT_MAX])
{
    char dir[PATH_MAX], why[HX_TEXT_MAX] = "";
    if (!directory_of(library, dir, text))
        return false;
    /* What libcann_hixl.so and the binding need comes first, visible to all. */
    if (!open_library(dir, "libmetadef.so", why))
        return missing(text, "libmetadef.so", dir, why);
    void *acl = open_library(dir, "libacl_rt.so", why);
    if (!acl) /* CANN before 8.5 has the runtime in the larger library */
        acl = open_library(dir, "libascendcl.so", why);
    if (!acl)
        return missing(text, "libacl_rt.so", dir, why);
    void *hixl = open_library(dir, "libcann_hixl.so", why);
    if (!hixl)
        return missing(text, "libcann_hixl.so", dir, why);
    if (!find_acl(&vendor.acl, acl, text))
        return false;
    Dl_info info;
    void *some = dlsym(hixl, "_ZN4hixl4HixlC1Ev");
    bool known = some && dladdr(some, &info) && info.dli_fname;
    snprintf(why, sizeof why, "%.400s%slibcann_hixl.so", dir, dir[0] ? "/" : "");
    snprintf(vendor.where, sizeof vendor.where, "%.900s", known ? info.dli_fname : why);
    void *shim = dlopen(binding, RTLD_NOW | RTLD_LOCAL);
    if (!shim) {
        const char *error = dlerror();
        bool old = error && strstr(error, "undefined symbol");
        snprintf(text, HX_TEXT_MAX, "%.300s%s: %.350s; %s", old ? vendor.where : binding,
                 old ? " is too old, or not HIXL" : " cannot be opened", error ? error : "", PACKAGE);
        return false;
    }
    void *symbol = dlsym(shim, "hx_hixl_binding");
    const hx_hixl_table_t *(*table)(void) = NULL;
    memcpy(&table, &symbol, sizeof symbol);
    vendor.hixl = table ? table() : NULL;
    if (!vendor.hixl || vendor.hixl->abi != HX_HIXL_ABI) {
        snprintf(text, HX_TEXT_MAX, "%.900s is of another version of aiohixl: reinstall it", binding);
        return false;
    }
    return true;
}

static bool is_loaded(const char *library, char text[HX_TEXT_MAX])
{
    char path[PATH_MAX + 32], dir[PATH_MAX], wanted[PATH_MAX], have[PATH_MAX];
    if (!directory_of(library, dir, text))
        return false;
    snprintf(path, sizeof path, "%s/libcann_hixl.so", dir);
    return realpath(path, wanted) && realpath(vendor.where, have) && !strcmp(wanted, have);
}

hx_status_t hx_vendor_load(const char *binding, const char *library, const hx_vendor_t **vendor_p,
                           char text[HX_TEXT_MAX])
{
    pthread_mutex_lock(&mu);
    bool ok = loaded || load(binding, library, text);
    if (ok && !loaded) {
        loaded = true;
    } else if (ok && library && !is_loaded(library, text)) {
        ok = false; /* symbols are found process-wide: a second copy would be half used */
        snprintf(text, HX_TEXT_MAX, "hixl_library=%.300s: this process has opened %.300s already, and can have one",
                 library, vendor.where);
    }
    pthread_mutex_unlock(&mu);
    if (!ok)
        return HX_ERR_CONFIG;
    *vendor_p = &vendor;
    return HX_OK;
}

hx_status_t hx_hixl_probe(const char *binding, const char *library, char text[HX_TEXT_MAX])
{
    const hx_vendor_t *v;
    hx_status_t status = hx_vendor_load(binding, library, &v, text);
    if (status == HX_OK) {
        const char *soc = v->acl.soc_name ? v->acl.soc_name() : NULL;
        snprintf(text, HX_TEXT_MAX, "%.700s%s%.60s", v->where, soc ? ", SoC " : "", soc ? soc : "");
    }
    return status;
}
