/* SPDX-License-Identifier: Apache-2.0 */
/* A small fuzzer for where there is no clang: gcc's -fsanitize-coverage=trace-pc tells which places of the core were
 * reached, and an input that reaches a new one joins the corpus. The harness runs in a child, which has the input at hand
 * in shared memory: it survives the child, and is written to a file.
 *
 *     fuzz_x [-max_total_time=SECONDS] [-artifact_prefix=PREFIX] [-seed=N] CORPUS...    corpus folders, or single files */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { INPUT_MAX = 1 << 16, PLACES = 1 << 16, KEPT = 4096, HUNG = 60 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
int LLVMFuzzerInitialize(int *argc, char ***argv);
void fuzz_end(void);
void __sanitizer_cov_trace_pc(void);

typedef struct {
    size_t size;
    uint64_t runs, places, kept;
    uint8_t data[INPUT_MAX];
} shared_t;

static shared_t *now;
static uint8_t reached[PLACES];
static _Atomic uint32_t fresh;
static uint64_t dice = 1;

static struct {
    uint8_t *data;
    size_t size;
} corpus[KEPT];
static size_t ncorpus;

/* Called at each place of the core, by any thread of it: two that reach one for the first time count it twice, no harm. */
__attribute__((no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc(void)
{
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    uint8_t *place = &reached[(pc ^ pc >> 16) % PLACES];
    if (!__atomic_load_n(place, __ATOMIC_RELAXED)) {
        __atomic_store_n(place, 1, __ATOMIC_RELAXED);
        atomic_fetch_add(&fresh, 1);
    }
}

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max)
{
    for (uint64_t i = 0, n = 1 + draw_below(&dice, 4); i < n; i++) {
        size_t at = size ? draw_below(&dice, size) : 0, k = 1 + draw_below(&dice, 32);
        switch (draw_below(&dice, 4)) {
        case 0:
            if (size)
                data[at] ^= (uint8_t)(1u << draw_below(&dice, 8));
            break;
        case 1:
            if (size)
                data[at] = (uint8_t)draw(&dice);
            break;
        case 2:
            k = k < size - at ? k : size - at;
            memmove(data + at, data + at + k, size - at - k);
            size -= k;
            break;
        default:
            k = k < max - size ? k : max - size;
            memmove(data + at + k, data + at, size - at);
            for (size_t j = 0; j < k; j++)
                data[at + j] = (uint8_t)draw(&dice);
            size += k;
        }
    }
    return size;
}

static void keep(const uint8_t *data, size_t size)
{
    size_t at = ncorpus < KEPT ? ncorpus++ : draw_below(&dice, KEPT);
    free(corpus[at].data);
    corpus[at].data = malloc(size + 1);
    memcpy(corpus[at].data, data, size);
    corpus[at].size = size;
    now->kept = ncorpus;
}

static void take_file(const char *path)
{
    static uint8_t bytes[INPUT_MAX];
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "fuzz: %s: %s\n", path, strerror(errno));
        _exit(2);
    }
    keep(bytes, fread(bytes, 1, sizeof bytes, file));
    fclose(file);
}

static void take(const char *path)
{
    DIR *dir = opendir(path);
    char name[4096];
    if (!dir) {
        take_file(path);
        return;
    }
    for (const struct dirent *e; (e = readdir(dir));)
        if (e->d_name[0] != '.') {
            snprintf(name, sizeof name, "%s/%s", path, e->d_name);
            take_file(name);
        }
    closedir(dir);
}

static void try_one(void)
{
    static uint8_t exact[INPUT_MAX];
    memcpy(exact, now->data, now->size);
    LLVMFuzzerTestOneInput(exact, now->size);
    now->runs++;
}

static int child(double until, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-')
            take(argv[i]);
    size_t given = ncorpus;
    LLVMFuzzerInitialize(&argc, &argv);
    for (size_t i = 0; i < given; i++) {
        memcpy(now->data, corpus[i].data, corpus[i].size);
        now->size = corpus[i].size;
        try_one();
    }
    atomic_store(&fresh, 0);
    while (seconds() < until) {
        size_t from = ncorpus ? draw_below(&dice, ncorpus) : 0;
        now->size = ncorpus ? corpus[from].size : 0;
        if (ncorpus)
            memcpy(now->data, corpus[from].data, now->size);
        for (uint64_t i = 0, n = 1 + draw_below(&dice, 5); i < n; i++)
            now->size = LLVMFuzzerCustomMutator(now->data, now->size, INPUT_MAX, (unsigned)(draw(&dice) >> 16));
        try_one();
        if (atomic_exchange(&fresh, 0))
            keep(now->data, now->size);
    }
    for (size_t i = 0; i < PLACES; i++)
        now->places += reached[i];
    now->size = SIZE_MAX; /* from here on no input is to blame */
    fuzz_end();
    for (size_t i = 0; i < ncorpus; i++)
        free(corpus[i].data);
    ncorpus = 0;
    return 0;
}

static int to_blame(const char *prefix, const char *what, const char *self)
{
    char path[4096];
    if (now->size == SIZE_MAX) {
        fprintf(stderr, "fuzz: %s at the end, after %llu inputs\n", what, (unsigned long long)now->runs);
        return EXIT_FAILURE;
    }
    uint64_t name = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < now->size; i++)
        name = (name ^ now->data[i]) * 0x100000001b3ull;
    snprintf(path, sizeof path, "%s%s-%016llx", prefix, what, (unsigned long long)name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(now->data, 1, now->size, file) != now->size || fclose(file))
        fprintf(stderr, "fuzz: %s: %s\n", path, strerror(errno));
    fprintf(stderr, "fuzz: %s after %llu inputs; the input is %s; once more: %s -max_total_time=0 %s\n", what,
            (unsigned long long)now->runs, path, self, path);
    return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    const char *prefix = "";
    double time = 60;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-max_total_time=", 16))
            time = atof(argv[i] + 16);
        else if (!strncmp(argv[i], "-artifact_prefix=", 17))
            prefix = argv[i] + 17;
        else if (!strncmp(argv[i], "-seed=", 6))
            dice = strtoull(argv[i] + 6, NULL, 10) | 1;
    }
    now = mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double until = seconds() + time;
    pid_t pid = fork();
    if (!pid)
        exit(child(until, argc, argv)); /* with the leak check that exit brings */
    uint64_t seen = 0;
    int status, idle = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        usleep(100000);
        idle = now->runs == seen ? idle + 1 : 0;
        seen = now->runs;
        if (idle > HUNG * 10) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return to_blame(prefix, "hang", argv[0]);
        }
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        return to_blame(prefix, "crash", argv[0]);
    printf("%s: %llu inputs, %llu of them kept, %llu places reached, no finding\n", argv[0],
           (unsigned long long)now->runs, (unsigned long long)now->kept, (unsigned long long)now->places);
    return now->runs ? EXIT_SUCCESS : EXIT_FAILURE;
}
