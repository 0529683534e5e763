/* The threads that run a kernel together, and their memory. Every function `x_team` is run by all threads of a team, which
 * split the work.
 */
#pragma once
#include "cpu_vectors.h"

extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

/* each thread's own memory, kept between calls; slot 0 is for use within a team, the others
 * are the caller's, which the team shares: 1 partial attention, 2 activations between layers */
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

INLINE void share(Team me, int64_t total, int64_t *low, int64_t *high) {
    *low = total * me.id / me.count, *high = total * (me.id + 1) / me.count;
}
