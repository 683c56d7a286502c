/* Counts the live bytes of aligned allocations, which is how torch's CPU allocator takes every
 * tensor (c10/core/impl/alloc_cpu.cpp: posix_memalign with 64 bytes), in all threads, by itself:
 * loaded before torch, it sees what the C library is asked for and nothing of torch's own books. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20)

static struct { uintptr_t address; size_t size; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t live, peak;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static unsigned slot_of(uintptr_t address) {
    unsigned slot = (unsigned)((address >> 6) * 2654435761u) & (SLOTS - 1);
    while (table[slot].address && table[slot].address != address) slot = (slot + 1) & (SLOTS - 1);
    return slot;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = real_memalign(result, alignment, size);
    if (failed || alignment != 64) return failed;
    pthread_mutex_lock(&lock);
    unsigned slot = slot_of((uintptr_t)*result);
    table[slot].address = (uintptr_t)*result;
    table[slot].size = size;
    live += size;
    if (live > peak) peak = live;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *pointer) {
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (pointer && live) {
        pthread_mutex_lock(&lock);
        unsigned slot = slot_of((uintptr_t)pointer);
        if (table[slot].address == (uintptr_t)pointer) {
            live -= table[slot].size;
            table[slot].size = 0; /* the slot stays taken, so that probing still finds what lies behind it */
        }
        pthread_mutex_unlock(&lock);
    }
    real_free(pointer);
}

size_t malloc_count_live(void) { return live; }
size_t malloc_count_peak(void) { return peak; }
void malloc_count_reset(void) { peak = live; }
