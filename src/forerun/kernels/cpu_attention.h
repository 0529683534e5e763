/* Paged attention. A softmax is taken over each chunk of CHUNK positions; chunks begin at fixed positions, and their results
 * are merged in order. A position that a token may not attend to adds an exact zero. So a token's result does not depend on the
 * batch.
 *
 * Keys and values are packed into 32-bit words before they are multiplied. A word is a float32, or with DOT_BF16 a pair of
 * bfloat16.
 */
#pragma once
#include "cpu_linear.h"

enum { CHUNK = 128 };  /* positions of one softmax */
enum { PLACED = 32 };   /* heads of a chunk that writes q, k and v where they belong */
enum { MERGED = 8 };    /* heads of a chunk that merges the results of chunks of positions */
enum { QUERIES = 48 };  /* about how many query rows (tokens x query heads of a key head) one task has */
#if REGISTERS == 32
enum { WIDE = 4 };     /* vectors that are summed at once, for each of 4 rows */
#else
enum { WIDE = 2 };
#endif

typedef struct {
    const void *qkv, *q_norm, *k_norm; /* norms: may be NULL */
    void *key_pages, *value_pages, *y;
    const float *cos, *sin;
    const int64_t *positions;
    const int32_t *row_start, *block_table;
    int64_t tokens, rows, table_width, block_size;
    int64_t heads, kv_heads, dim;
    int64_t interleaved; /* neighbours are rotated together, not halves */
    int64_t both;        /* the tokens of a row attend to each other in both directions */
    int64_t window, stride; /* stride: elements from a token of qkv to the next */
    float eps;
    float *partial;   /* the results of chunks, if each chunk is a task of its own; NULL: a task does all chunks of its tile */
    int64_t chunks;   /* how many chunks of each query row partial holds */
} Attend;

/* shape: tokens, rows, table_width, block_size, heads, kv_heads, dim, interleaved, both */
INLINE Attend attention_of(const int64_t *shape, float eps, const float *cos, const float *sin, const int64_t *positions,
                           const int32_t *row_start, const int32_t *block_table) {
    return (Attend){.cos = cos, .sin = sin, .positions = positions, .row_start = row_start, .block_table = block_table,
                    .tokens = shape[0], .rows = shape[1], .table_width = shape[2], .block_size = shape[3], .heads = shape[4],
                    .kv_heads = shape[5], .dim = shape[6], .interleaved = shape[7], .both = shape[8],
                    .stride = (shape[4] + 2 * shape[5]) * shape[6], .eps = eps};
}

/* the first position that a token at this position attends to */
INLINE int64_t first_seen(const Attend *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* the last position that a token of a row attends to */
INLINE int64_t last_seen(const Attend *a, int64_t row, int64_t token) {
    return a->positions[a->both ? a->row_start[row + 1] - 1 : token];
}

/* The first and the second numbers of `count` <= LANES pairs, from pair `at` on */
INLINE void get_pairs(const int wide, const void *from, int64_t at, int count, vf *p, vf *q) {
    if (wide) {
        vl pairs = {0};
        memcpy(&pairs, (const float *)from + 2 * at, count * 2 * sizeof(float));
        *p = (vf)__builtin_convertvector(pairs, vu), *q = (vf)__builtin_convertvector(pairs >> 32, vu);
    } else {
        vu pairs = {0};
        memcpy(&pairs, (const bf16 *)from + 2 * at, count * 2 * sizeof(bf16));
        *p = (vf)(pairs << 16), *q = (vf)(pairs & 0xffff0000);
    }
}

INLINE void put_pairs(const int wide, void *to, int64_t at, vf p, vf q, int count) {
    if (wide) {
        vl pairs = __builtin_convertvector((vu)p, vl) | __builtin_convertvector((vu)q, vl) << 32;
        memcpy((float *)to + 2 * at, &pairs, count * 2 * sizeof(float));
    } else {
        vu pairs = __builtin_convertvector(narrow(p), vu) | __builtin_convertvector(narrow(q), vu) << 16;
        memcpy((bf16 *)to + 2 * at, &pairs, count * 2 * sizeof(bf16));
    }
}

/* norm and rotate one head of q or k */
INLINE void rotate(const int wide, const Attend *a, const void *x, const void *norm, int64_t position, void *y) {
    const int64_t half = a->dim / 2;
    const float *c = a->cos + position * half, *s = a->sin + position * half;
    if (norm) {
        norm_row(wide, x, norm, a->eps, a->dim, y);
        x = y;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int m = half - i < LANES ? (int)(half - i) : LANES;
        vf p, q, cos = get(1, c, i, m), sin = get(1, s, i, m);
        if (a->interleaved) get_pairs(wide, x, i, m, &p, &q);
        else p = get(wide, x, i, m), q = get(wide, x, half + i, m);
        vf first = p * cos - q * sin, second = q * cos + p * sin;
        if (a->interleaved) put_pairs(wide, y, i, first, second, m);
        else put(wide, y, i, first, m), put(wide, y, half + i, second, m);
    }
}

/* where in the pages a head's key (and value) at a position begins, in elements */
INLINE int64_t page_at(const Attend *a, int64_t row, int64_t kv_head, int64_t position) {
    int64_t page = a->block_table[row * a->table_width + position / a->block_size];
    return ((page * a->kv_heads + kv_head) * a->block_size + position % a->block_size) * a->dim;
}

/* Write q, normed and rotated, to y, which the output overwrites later, and k and v to the pages. Padding tokens, which are in
 * no row, write to no page; their q stays in y. */
INLINE void place(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Attend *a = stage->given;
    const int64_t all = a->heads + 2 * a->kv_heads, size = wide ? 4 : 2, bytes = a->dim * size;
    int64_t row = 0;
    for (int64_t i = chunk * PLACED; i < (chunk + 1) * PLACED && i < a->tokens * all; i++) {
        int64_t t = i / all, head = i % all, position = a->positions[t];
        while (row < a->rows && a->row_start[row + 1] <= t) row++;
        if (row == a->rows && head >= a->heads) continue;
        const char *x = (const char *)a->qkv + t * a->stride * size + head * bytes;
        if (head < a->heads) {
            rotate(wide, a, x, a->q_norm, position, (char *)a->y + (t * a->heads + head) * bytes);
        } else if (head < a->heads + a->kv_heads) {
            rotate(wide, a, x, a->k_norm, position, (char *)a->key_pages + page_at(a, row, head - a->heads, position) * size);
        } else {
            int64_t at = page_at(a, row, head - a->heads - a->kv_heads, position);
            memcpy((char *)a->value_pages + at * size, x, bytes);
        }
    }
}

/* whether a word is a pair of bfloat16 */
#define IN_PAIRS(wide) (DOT_BF16 && !(wide))

/* LANES words of a key or value from word d on. p NULL: zeros */
INLINE vu words_at(const int wide, const char *p, int64_t d) {
    if (!p) return (vu){0};
    return wide || IN_PAIRS(wide) ? load_words(p + 4 * d) : (vu)load_bf16((const bf16 *)p + d);
}

INLINE uint32_t word_at(const int wide, const char *p, int64_t d) {
    uint32_t word = 0;
    bf16 half;
    if (!p) return 0;
    if (wide || IN_PAIRS(wide)) {
        memcpy(&word, p + 4 * d, 4);
        return word;
    }
    memcpy(&half, p + 2 * d, 2);
    return (uint32_t)half << 16;
}

/* Pack LANES keys, word by word: to[d][key]. keys[i] NULL: zeros */
INLINE void pack_keys(const int wide, const char *const *keys, int64_t words, uint32_t *to) {
    int64_t d = 0;
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= keys[i] != NULL;
    if (!any) {
        memset(to, 0, words * LANES * 4);
        return;
    }
    for (; d + LANES <= words; d += LANES) {
        vu rows[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = words_at(wide, keys[i], d);
        transpose(rows, to + d * LANES);
    }
    for (; d < words; d++)
        for (int i = 0; i < LANES; i++) to[d * LANES + i] = word_at(wide, keys[i], d);
}

/* Pack two values, one in each half of a word: to[d] = a[d] | b[d] << 16. NULL: zeros */
INLINE void pack_pair(const bf16 *a, const bf16 *b, int64_t dim, uint32_t *to) {
    static const bf16 none[LANES];
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vh p, q;
        memcpy(&p, a ? a + d : none, sizeof p), memcpy(&q, b ? b + d : none, sizeof q);
        store_words(to + d, __builtin_convertvector(p, vu) | (__builtin_convertvector(q, vu) << 16));
    }
    for (; d < dim; d++) to[d] = (a ? a[d] : 0) | ((uint32_t)(b ? b[d] : 0) << 16);
}

/* Pack a value as float32 words. NULL: zeros */
INLINE void pack_value(const int wide, const char *value, int64_t dim, uint32_t *to) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store_words(to + d, words_at(wide, value, d));
    for (; d < dim; d++) to[d] = word_at(wide, value, d);
}

INLINE vf product(const int pairs, vf acc, vu a, vu b) {
#if DOT_BF16
    if (pairs) return dot2(acc, a, b);
#endif
    return fma_((vf)a, (vf)b, acc);
}

/* to[r][v] = the sum over i < count of a[r][i] * b[i * step + v * vector_step], for v < vectors <= WIDE: products of words */
INLINE void outer(const int pairs, const int rows, int vectors, int64_t count, const uint32_t *const *a, const uint32_t *b,
                  int64_t vector_step, int64_t step, float *const *to) {
    vf acc[4][WIDE];
    if (vectors == WIDE) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) acc[r][v] = (vf){0};
        for (int64_t i = 0; i < count; i++) {
            vu right[WIDE];
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) right[v] = load_words(b + i * step + v * vector_step);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vu left = a[r][i] + (vu){0};
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) acc[r][v] = product(pairs, acc[r][v], left, right[v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++) store(to[r] + v * LANES, acc[r][v]);
        return;
    }
    for (int v = 0; v < vectors; v++) {
        for (int r = 0; r < rows; r++) acc[r][0] = (vf){0};
        for (int64_t i = 0; i < count; i++) {
            vu right = load_words(b + i * step + v * vector_step);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r][0] = product(pairs, acc[r][0], a[r][i] + (vu){0}, right);
        }
        for (int r = 0; r < rows; r++) store(to[r] + v * LANES, acc[r][0]);
    }
}

INLINE void outer_rows(const int pairs, int rows, int vectors, int64_t count, const uint32_t *const *a, const uint32_t *b,
                       int64_t vector_step, int64_t step, float *const *to) {
    switch (rows) {
    case 1: outer(pairs, 1, vectors, count, a, b, vector_step, step, to); break;
    case 2: outer(pairs, 2, vectors, count, a, b, vector_step, step, to); break;
    case 3: outer(pairs, 3, vectors, count, a, b, vector_step, step, to); break;
    default: outer(pairs, 4, vectors, count, a, b, vector_step, step, to); break;
    }
}

/* A piece is the softmax of one chunk or several: the peak of the scores, the sum of exp(score - peak), and the sum of
 * exp(score - peak) * value. In floats: peak, sum, LANES - 2 unused, values. */
INLINE int64_t piece_size(int64_t dim) { return LANES + ((dim + 15) & ~(int64_t)15); }

/* merge a piece into another (Milakov and Gimelshein 1805.02867) */
static void merge(float *into, const float *piece, int64_t dim) {
    if (piece[0] == NEG_INF) return;
    if (into[0] == NEG_INF) {
        memcpy(into, piece, piece_size(dim) * sizeof(float));
        return;
    }
    float peak = into[0] > piece[0] ? into[0] : piece[0];
    float a = exp1(into[0] - peak), b = exp1(piece[0] - peak);
    into[0] = peak;
    into[1] = into[1] * a + piece[1] * b;
    for (int64_t d = 0; d < dim; d += LANES)
        store(into + LANES + d, fma_(load(into + LANES + d), splat(a), load(piece + LANES + d) * b));
}

INLINE void finish(const int wide, const float *piece, int64_t dim, void *y) {
    for (int64_t d = 0; d < dim; d += LANES)
        put(wide, y, d, load(piece + LANES + d) / piece[1], (int)(dim - d < LANES ? dim - d : LANES));
}

typedef struct { int64_t row, begin, end, kv_head, low, high; } Task; /* tokens begin .. end - 1, chunks low .. high - 1 */

INLINE int64_t padded_dim(int64_t dim) { return (dim + 15) & ~(int64_t)15; }

/* the bytes of scratch memory that `chunk` needs for this many query rows */
INLINE int64_t chunk_room(int64_t dim, int64_t rows) { return (dim + padded_dim(dim) + rows) * CHUNK * 4 + rows * dim * 4; }

/* the softmax over chunk c, of each query row r of the task: pieces[r] */
INLINE void chunk(const int wide, const Attend *a, const Task *task, int64_t c, float *const *pieces, char *room) {
    const int pairs = IN_PAIRS(wide);
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, size = wide ? 4 : 2;
    const int64_t rows = (task->end - task->begin) * group, words = pairs ? dim / 2 : dim, padded = padded_dim(dim);
    const int64_t from = first_seen(a, a->positions[task->begin]), to = last_seen(a, task->row, task->end - 1) + 1;
    const int64_t start = c * CHUNK, stop = start + CHUNK < to ? start + CHUNK : to;
    const int vectors = (int)((stop - start + WIDE * LANES - 1) / (WIDE * LANES)) * WIDE;
    const int units = pairs ? vectors * LANES / 2 : vectors * LANES;

    uint32_t *keys = (uint32_t *)room;                    /* [vector][words][LANES] */
    uint32_t *values = keys + dim * CHUNK;                /* [unit][padded] */
    float *scores = (float *)(values + padded * CHUNK);   /* [rows][CHUNK], then the weights as words */
    float *queries = scores + rows * CHUNK;               /* [rows][dim], where y must be converted to words */

    int64_t page = start / a->block_size, at = start % a->block_size, base = -1;
    const char *key_at[CHUNK], *value_at[CHUNK]; /* NULL: no query of the task attends to it */
    for (int i = 0; i < vectors * LANES; i++) {
        key_at[i] = value_at[i] = NULL;
        if (start + i >= from && start + i < stop) {
            if (base < 0) base = page_at(a, task->row, task->kv_head, page * a->block_size) * size;
            key_at[i] = (const char *)a->key_pages + base + at * dim * size;
            value_at[i] = (const char *)a->value_pages + base + at * dim * size;
            for (int64_t line = 0; line < dim * size; line += 64) fetch(key_at[i] + line), fetch(value_at[i] + line);
        }
        if (++at == a->block_size) page++, at = 0, base = -1;
    }
    for (int v = 0; v < vectors; v++) pack_keys(wide, key_at + LANES * v, words, keys + v * words * LANES);
    for (int u = 0; u < units; u++) {
        if (pairs) pack_pair((const bf16 *)value_at[2 * u], (const bf16 *)value_at[2 * u + 1], dim, values + u * padded);
        else pack_value(wide, value_at[u], dim, values + u * padded);
    }

    const float scale = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t r0 = 0; r0 < rows; r0 += 4) {
        const int n = (int)(rows - r0 < 4 ? rows - r0 : 4);
        const uint32_t *left[4];
        float *right[4];
        for (int r = 0; r < n; r++) {
            int64_t t = task->begin + (r0 + r) / group, head = task->kv_head * group + (r0 + r) % group;
            left[r] = (const uint32_t *)((const char *)a->y + (t * a->heads + head) * dim * size);
            if (!wide && !pairs) {
                uint32_t *query = (uint32_t *)queries + (r0 + r) * dim;
                pack_value(0, (const char *)left[r], dim, query);
                left[r] = query;
            }
        }
        for (int v = 0; v < vectors; v += WIDE) {
            for (int r = 0; r < n; r++) right[r] = scores + (r0 + r) * CHUNK + v * LANES;
            outer_rows(pairs, n, WIDE, words, left, keys + v * words * LANES, words * LANES, LANES, right);
        }
        for (int r = 0; r < n; r++) {
            float *s = scores + (r0 + r) * CHUNK, *piece = pieces[r0 + r];
            const int64_t token = task->begin + (r0 + r) / group, last = last_seen(a, task->row, token);
            const int64_t seen = first_seen(a, a->positions[token]);
            const vi lane = FIRST_LANES;
            vf top = splat(NEG_INF), sum = {0};
            for (int v = 0; v < vectors; v++) {
                vf x = load(s + LANES * v) * scale;
                int64_t first = start + LANES * v;
                if (first + LANES - 1 > last || first < seen) {
                    int32_t most = (int32_t)(last - first), least = (int32_t)(seen - first); /* lanes least .. most count */
                    vi ok = (lane <= most) & (lane >= least);
                    x = (vf)(((vi)x & ok) | ((vi)splat(NEG_INF) & ~ok));
                }
                store(s + LANES * v, x);
                top = max_(top, x);
            }
            piece[0] = peak(top);
            for (int v = 0; v < vectors; v++) {
                /* the weights are rounded before they are summed, so that they add up to one */
                vf p = piece[0] == NEG_INF ? (vf){0} : exp_(load(s + LANES * v) - piece[0]);
                if (wide) {
                    store(s + LANES * v, p);
                } else {
                    vh h = narrow(p);
                    p = widen(h);
                    if (pairs) memcpy((bf16 *)s + LANES * v, &h, sizeof h);
                    else store(s + LANES * v, p);
                }
                sum += p;
            }
            piece[1] = sum1(sum);
            left[r] = (const uint32_t *)s;
        }
        for (int64_t d = 0; d < padded; d += WIDE * LANES) {
            const int64_t rest = (padded - d) / LANES;
            for (int r = 0; r < n; r++) right[r] = pieces[r0 + r] + LANES + d;
            outer_rows(pairs, n, (int)(rest < WIDE ? rest : WIDE), units, left, values + d, LANES, padded, right);
        }
    }
}

/* the tokens of a tile; a task takes one tile of a row and one key head */
INLINE int64_t tile_tokens(const Attend *a) {
    int64_t n = QUERIES * a->kv_heads / a->heads;
    return n < 1 ? 1 : n;
}

/* Find task number `wanted`. Returns how many tasks there are, if there are fewer. */
static int64_t find_task(const Attend *a, int64_t wanted, Task *task) {
    const int64_t most = tile_tokens(a);
    int64_t before = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t end = a->row_start[row + 1];
        for (int64_t token = a->row_start[row]; token < end; token += most) {
            int64_t last = token + most < end ? token + most : end;
            int64_t low = first_seen(a, a->positions[token]) / CHUNK, high = last_seen(a, row, last - 1) / CHUNK + 1;
            int64_t pieces = a->partial ? high - low : 1, i = wanted - before, at = low + i / a->kv_heads;
            before += pieces * a->kv_heads;
            if (wanted < before) {
                *task = (Task){row, token, last, i % a->kv_heads, a->partial ? at : low, a->partial ? at + 1 : high};
                return before;
            }
        }
    }
    return before;
}

INLINE void attend(const int wide, const Stage *stage, int64_t number, int first) {
    const Attend *a = stage->given;
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, size = wide ? 4 : 2, piece = piece_size(dim);
    const int64_t rows = tile_tokens(a) * group, packed = chunk_room(dim, rows);
    char *room = scratch(0, packed + 2 * rows * (piece * 4 + 8) + 64);
    float *own = (float *)(room + packed); /* [2][rows][piece] */
    float **pieces = (float **)(own + 2 * rows * piece);
    Task task;
    find_task(a, number, &task);
    const int64_t count = (task.end - task.begin) * group;
    for (int64_t r = 0; r < count; r++) {
        int64_t at = (task.begin + r / group) * a->heads + task.kv_head * group + r % group;
        pieces[r] = a->partial ? a->partial + (at * a->chunks + task.low) * piece : own + r * piece;
        if (!a->partial) own[(rows + r) * piece] = NEG_INF;
    }
    for (int64_t c = task.low; c < task.high; c++) {
        chunk(wide, a, &task, c, pieces, room);
        if (!a->partial)
            for (int64_t r = 0; r < count; r++) merge(own + (rows + r) * piece, own + r * piece, dim);
    }
    if (a->partial) return;
    for (int64_t r = 0; r < count; r++) {
        int64_t at = (task.begin + r / group) * a->heads + task.kv_head * group + r % group;
        finish(wide, own + (rows + r) * piece, dim, (char *)a->y + at * dim * size);
    }
}

INLINE void merge_pieces(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Attend *a = stage->given;
    const int64_t piece = piece_size(a->dim), heads = a->row_start[a->rows] * a->heads;
    float *into = scratch(0, piece * sizeof(float));
    int64_t row = 0;
    for (int64_t i = chunk * MERGED; i < (chunk + 1) * MERGED && i < heads; i++) {
        const int64_t token = i / a->heads;
        while (a->row_start[row + 1] <= token) row++;
        const int64_t last = last_seen(a, row, token) / CHUNK;
        into[0] = NEG_INF;
        for (int64_t c = first_seen(a, a->positions[token]) / CHUNK; c <= last; c++)
            merge(into, a->partial + (i * a->chunks + c) * piece, a->dim);
        finish(wide, into, a->dim, (char *)a->y + i * a->dim * (wide ? 4 : 2));
    }
}

STAGE(place)
STAGE(attend)
STAGE(merge_pieces)

enum { ATTEND_STAGES = 3 };

static void add_place(Job *job, int wide, const Attend *a) {
    add_stage(job, BY_DTYPE(wide, place), a, 0, parts_of(a->tokens * (a->heads + 2 * a->kv_heads), PLACED));
}

static void add_attend(Job *job, int wide, const Attend *a) {
    Task none;
    const int64_t heads = a->row_start[a->rows] * a->heads;
    add_place(job, wide, a);
    add_stage(job, BY_DTYPE(wide, attend), a, 0, find_task(a, INT64_MAX, &none));
    if (a->partial) add_stage(job, BY_DTYPE(wide, merge_pieces), a, 0, parts_of(heads, MERGED));
}

/* Few tokens with a long context make few tasks. Then every chunk is a task of its own, if the pieces fit in 16 MB. */
static void plan_attend(Attend *a, int threads) {
    int64_t tiles = 0, chunks = 0, piece = piece_size(a->dim) * (int64_t)sizeof(float);
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t n = a->row_start[r + 1] - a->row_start[r];
        if (n == 0) continue;
        int64_t last = a->positions[a->row_start[r + 1] - 1] / CHUNK + 1;
        tiles += (n + tile_tokens(a) - 1) / tile_tokens(a);
        chunks = last > chunks ? last : chunks;
    }
    int64_t need = a->tokens * a->heads * chunks * piece;
    a->chunks = chunks;
    a->partial = NULL;
    if (threads > 1 && chunks > 1 && tiles * a->kv_heads < 4 * threads && need <= (16 << 20)) a->partial = scratch(1, need);
}
