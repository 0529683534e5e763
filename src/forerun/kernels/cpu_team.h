/* A team of threads, and the scratch memory of each.
 *
 * A job is a list of stages, a stage a number of chunks. The chunks of a stage run in any order, on any threads; a stage begins
 * when all chunks of the stage before it are done. What a chunk computes must not depend on the thread. Each thread first takes
 * the chunks of its own share, in order, so that it reads memory in order, and then those that other threads have not taken yet.
 * So a thread that has lost its core delays the others by one chunk at most, and a thread that sleeps delays nobody.
 *
 * The threads are started by the first job and kept; after a fork, by the first job of the child. The calling thread is member
 * 0 of the team. One job runs at a time; other callers wait. A thread that waits spins for SPIN_NS and then sleeps until the next
 * stage opens.
 */
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "cpu_vectors.h"

/* Scratch memory of each thread, kept between calls. Slot 0 is for a chunk; a thread finds there what its earlier chunks of the
 * same stage left. The others are taken by the calling thread and shared by its team: slot 1 for the results of attention
 * chunks, 2 for activations, 3 for the job. */
static __thread struct { char *at; size_t size; } scratch_slot[4];

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

/* run: computes one chunk of a stage. first: whether it is the thread's first chunk of this stage. given, at: for run */
typedef struct Stage Stage;
struct Stage {
    void (*run)(const Stage *stage, int64_t chunk, int first);
    const void *given;
    int64_t at, chunks;
};
typedef struct { Stage *stages; int64_t count; } Job;

/* append a stage; one without chunks is left out */
INLINE void add_stage(Job *job, void (*run)(const Stage *, int64_t, int), const void *given, int64_t at, int64_t chunks) {
    if (chunks > 0) job->stages[job->count++] = (Stage){run, given, at, chunks};
}

/* the number of parts of this size in a total, the last one perhaps smaller */
INLINE int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

enum { MOST_THREADS = 256, SPIN_NS = 40000, CHUNK_BITS = 24 };

/* Stages have numbers, which never repeat. Stage number n is described by now[n & 1]. Its memory is read only by a thread that
 * has a chunk of it, since only such a thread keeps the job from ending. */
static struct {
    _Alignas(128) uint64_t open;     /* the number of the stage that runs; between jobs, of an empty one */
    int sleepers;
    _Alignas(128) struct { const Stage *stage; int64_t chunks; int members; } now[2];
    const Stage *end;                /* behind the last stage of the job */
    _Alignas(128) int64_t done;      /* finished chunks of the stage that runs */
    struct { _Alignas(128) uint64_t taken; } share[MOST_THREADS]; /* of each member: stage number << CHUNK_BITS | next chunk */
    pthread_mutex_t lock;            /* held while a job runs */
    int workers;                     /* threads that were started */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

#define GET(at) __atomic_load_n(&(at), __ATOMIC_SEQ_CST)
#define SET(at, value) __atomic_store_n(&(at), value, __ATOMIC_SEQ_CST)
#define ADD_TO(at, value) __atomic_add_fetch(&(at), value, __ATOMIC_SEQ_CST)

INLINE long futex(int operation, uint32_t value) { /* on the lower half of pool.open */
    return syscall(SYS_futex, &pool.open, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Open a stage, and wake the threads that sleep. stage NULL: the job is done. */
static void open_stage(const Stage *stage, int members) {
    const uint64_t number = pool.open + 1;
    SET(pool.now[number & 1].stage, stage);
    SET(pool.now[number & 1].chunks, stage ? stage->chunks : 0);
    SET(pool.now[number & 1].members, members);
    SET(pool.done, 0);
    SET(pool.open, number);
    if (GET(pool.sleepers)) futex(FUTEX_WAKE, MOST_THREADS);
}

/* Take the next chunk low <= chunk < high of a member's share of a stage. -1: none is left, or the stage is over. */
static int64_t take(int member, uint64_t number, int64_t low, int64_t high) {
    uint64_t taken = GET(pool.share[member].taken);
    int64_t next;
    do {
        next = taken >> CHUNK_BITS == number ? (int64_t)(taken & (((uint64_t)1 << CHUNK_BITS) - 1)) : low;
        /* While the stage is open, another number is an older one, and then nothing of this share was taken. A stage with a
         * chunk that nobody took stays open, so the exchange fails if it has ended since. */
        if (next == high || GET(pool.open) != number) return -1;
    } while (!__atomic_compare_exchange_n(&pool.share[member].taken, &taken, number << CHUNK_BITS | (uint64_t)(next + 1), 0,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return next;
}

/* Compute chunks of a stage until none is left. Whoever finishes the last one opens the next stage. */
static void work(int id, uint64_t number) {
    const Stage *stage = GET(pool.now[number & 1].stage);
    const int64_t chunks = GET(pool.now[number & 1].chunks);
    const int members = GET(pool.now[number & 1].members);
    if (id >= members) return;
    int64_t mine = 0;
    for (int i = 0; i < members; i++) {
        const int member = (id + i) % members;
        const int64_t low = chunks * member / members, high = chunks * (member + 1) / members;
        for (int64_t chunk; (chunk = take(member, number, low, high)) >= 0; mine++) stage->run(stage, chunk, !mine);
    }
    if (mine && ADD_TO(pool.done, mine) == chunks) open_stage(stage + 1 < pool.end ? stage + 1 : NULL, members);
}

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE __asm__ volatile("yield")
#else
#define PAUSE
#endif

INLINE int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

static void wait_past(uint64_t number) { /* until another stage is open */
    const int64_t end = nanoseconds() + SPIN_NS;
    do {
        for (int i = 0; i < 8; i++) {
            if (GET(pool.open) != number) return;
            PAUSE;
        }
    } while (nanoseconds() < end);
    ADD_TO(pool.sleepers, 1);
    while (GET(pool.open) == number) futex(FUTEX_WAIT, (uint32_t)number);
    ADD_TO(pool.sleepers, -1);
}

/* Ask for time slices of half a millisecond, so that a thread that wakes gets its core from a busy process at once. Linux takes
 * this from version 6.12 on and ignores it before. The struct is sched_attr of the kernel. */
static void take_short_slices(void) {
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } at;
    if (syscall(SYS_sched_getattr, 0, &at, sizeof at, 0) || at.policy != SCHED_OTHER) return;
    at.runtime = 500000;
    syscall(SYS_sched_setattr, 0, &at, 0);
}

static void *worker(void *id) {
    take_short_slices();
    for (;;) {
        const uint64_t number = GET(pool.open);
        work((int)(intptr_t)id, number);
        wait_past(number);
    }
    return NULL;
}

static void after_fork(void) { /* in the child, which has none of the other threads */
    pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.workers = pool.sleepers = 0;
    open_stage(NULL, 0);
}

/* Start the threads that are missing. Returns how many members the team has, at most `threads`. */
static int gather(int threads) {
    static int registered;
    sigset_t all, before;
    if (!registered) registered = !pthread_atfork(NULL, NULL, after_fork);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (pool.workers + 1 < threads) {
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
        for (pthread_t t; pool.workers + 1 < threads; pool.workers++) {
            if (pthread_create(&t, NULL, worker, (void *)(intptr_t)(pool.workers + 1))) break;
            pthread_setname_np(t, "forerun");
            pthread_detach(t);
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return pool.workers + 1 < threads ? pool.workers + 1 : threads;
}

/* Compute a job with a team of at most this many threads. */
static void run_job(const Job *job, int threads) {
    if (threads <= 1) {
        for (int64_t i = 0; i < job->count; i++)
            for (int64_t c = 0; c < job->stages[i].chunks; c++) job->stages[i].run(job->stages + i, c, c == 0);
        return;
    }
    if (!job->count) return;
    pthread_mutex_lock(&pool.lock);
    const uint64_t end = pool.open + 1 + job->count; /* the number of the empty stage behind the job */
    const int members = gather(threads);
    pool.end = job->stages + job->count;
    open_stage(job->stages, members);
    for (uint64_t number; (number = GET(pool.open)) != end; wait_past(number)) work(0, number);
    pthread_mutex_unlock(&pool.lock);
}
