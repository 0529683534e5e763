/* Teams of threads and their scratch memory. All threads of a team call a function x_team, which splits the work among them.
 */
#pragma once
#include "cpu_vectors.h"

extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

/* Scratch memory of each thread, kept between calls. Slot 0 is the thread's own within a team. Slots 1 and 2 are taken by the
 * calling thread and shared by its team: 1 for the results of attention chunks, 2 for activations between layers. */
static __thread struct { char *at; size_t size; } scratch_slot[3];

static void *scratch(int slot, size_t size) {
    if (scratch_slot[slot].size < size) {
        free(scratch_slot[slot].at);
        size = (size + size / 2 + 4095) & ~(size_t)4095;
        scratch_slot[slot].at = aligned_alloc(64, size);
        scratch_slot[slot].size = scratch_slot[slot].at ? size : 0;
        if (!scratch_slot[slot].at) abort();
    }
    return scratch_slot[slot].at;
}

typedef struct { int id, count; } Team;

INLINE Team team(void) { return (Team){omp_get_thread_num(), omp_get_num_threads()}; }
#define BARRIER _Pragma("omp barrier")

/* this thread's part, low .. high - 1, of `total` items */
INLINE void share(Team me, int64_t total, int64_t *low, int64_t *high) {
    *low = total * me.id / me.count, *high = total * (me.id + 1) / me.count;
}
