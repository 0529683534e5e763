/* Norms and linear layers. A weight is read from memory once for each SLAB of tokens.
 *
 * Every output is summed in the same order for any number of tokens: one accumulator of LANES lanes over k, then the tree of
 * sum4. The number of outputs computed together only changes which of them share a load. bfloat16 is taken STEP elements at a
 * time: as pairs with DOT_BF16, else first the even elements and then the odd ones, which a shift and a mask separate.
 */
#pragma once
#include "cpu_amx.h"
#include "cpu_blocks.h"

enum { SLAB = 64 };     /* tokens that use a block of weights while it is in the cache */
enum { CHUNK_BYTES = 32768 }; /* a chunk of a product reads about so many bytes of weights */
enum { FEW_PREPARED = 16 };   /* from this many tokens on, the team splits the preparation of x, below each thread does all */
enum { PREPARED = 4 };        /* tokens of a chunk of this preparation */
enum { STEP = 2 * LANES };
enum { BF16_LINES = 4 * STEP * sizeof(bf16) / 64 }; /* cache lines of one step of 4 rows */
#if REGISTERS == 32
enum { FEW = 6 };       /* tokens multiplied with 4 rows of w at once: the registers hold the sums of no more */
enum { PAIRED = 10 };   /* the same with 2 rows of w */
#else
enum { FEW = 3 };
enum { PAIRED = 6 };
#endif

/* y = norm * round(x / rms(x)), rounded; x and y may be the same. wide: float32 instead of bfloat16 */
INLINE void norm_row(const int wide, const void *x, const void *norm, float eps, int64_t n, void *y) {
    vf square = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = get(wide, x, i, n - i < LANES ? (int)(n - i) : LANES);
        square = fma_(v, v, square);
    }
    float scale = 1.0f / __builtin_sqrtf(sum1(square) / (float)n + eps);
    for (int64_t i = 0; i < n; i += LANES) {
        int m = n - i < LANES ? (int)(n - i) : LANES;
        vf v = get(wide, x, i, m) * scale;
        put(wide, y, i, get(wide, norm, i, m) * (wide ? v : widen(narrow(v))), m);
    }
}

enum { PLAIN, ADD, GATE_UP, LOGITS };

typedef struct {
    int kind;
    const void *x, *norm;
    const Matrix *w;
    const void *bias, *residual; /* norm, bias: may be NULL */
    float eps;
    int64_t tokens, k, outs;
    void *y;        /* float32 for LOGITS */
    void *prepared; /* room_for bytes, which several products of a job may share */
} Linear;

/* The form of the operands. PAIRS: w and x are pairs of bfloat16, as stored. In the other forms x is float32 and w is bfloat16
 * (BF16, FILL), float32 (FLOAT), or a TILE of float32 that an earlier pass over the same rows of bfloat16 left (FILL). */
enum { PAIRS, BF16, FLOAT, FILL, TILE };

#define X_SIZE(form) ((form) == PAIRS ? (int64_t)sizeof(bf16) : (int64_t)sizeof(float))
#define W_SIZE(form) ((form) == FLOAT ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16))

/* The rows of w that are multiplied at once. Meanwhile memory is prefetched from `next` on, `advance` bytes further at each
 * step. tile: [steps][4 rows][STEP] */
typedef struct { const char *row[4]; float *tile; const char *next; int64_t advance; } Rows;

/* the even (half 0) or odd (half 1) elements of STEP bfloat16, as float32. tight: no register is left for the mask */
INLINE vf half_of(const int tight, const bf16 *from, int half) {
    vu words = load_words(from);
#if AVX2
    if (tight && half) {
        static const vu mask = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
        __asm__("vpand %1, %0, %0" : "+x"(words) : "m"(mask));
        return (vf)words;
    }
#endif
    return (vf)(half ? words & 0xffff0000u : words << 16);
}

/* LANES weights of row r, of the STEP from k = i on */
INLINE vf weights(const int form, const int tight, const char *const *w, float *tile, int r, int64_t i, int half) {
    float *kept = tile + 4 * i + r * STEP + half * LANES;
    if (form == TILE) return load(kept);
    if (form == FLOAT) return load((const float *)w[r] + i + half * LANES);
    vf v = half_of(tight, (const bf16 *)w[r] + i, half);
    if (form == FILL) store(kept, v);
    return v;
}

/* Add the products of STEP elements from i on, of `rows` rows of w with n rows of x, to acc. */
INLINE void multiply(const int form, const int rows, const int n, const char *const *w, float *tile, const char *const *x,
                     int64_t i, vf acc[4][PAIRED]) {
#if DOT_BF16
    if (form == PAIRS) {
        vu left[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) left[r] = load_words((const bf16 *)w[r] + i);
#pragma GCC unroll 10
        for (int j = 0; j < n; j++) {
            vu right = load_words((const bf16 *)x[j] + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r][j] = dot2(acc[r][j], left[r], right);
        }
        return;
    }
#endif
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vf kept[4]; /* of w or of x, whichever has fewer rows: registers are scarce */
        if (rows <= n) {
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) kept[r] = weights(form, rows * n == 4 * FEW, w, tile, r, i, half);
#pragma GCC unroll 10
            for (int j = 0; j < n; j++) {
                vf right = load((const float *)x[j] + i + half * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) acc[r][j] = fma_(kept[r], right, acc[r][j]);
            }
        } else {
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) kept[j] = load((const float *)x[j] + i + half * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vf left = weights(form, rows * n == 4 * FEW, w, tile, r, i, half);
#pragma GCC unroll 4
                for (int j = 0; j < n; j++) acc[r][j] = fma_(left, kept[j], acc[r][j]);
            }
        }
    }
}

/* sums[n][LANES] = `rows` (2 or 4) rows of w times n rows of x. x has zeros from k up to a multiple of STEP. lines: how many
 * cache lines are prefetched at each step */
INLINE void products(const int form, const int lines, const int rows, const int n, const Rows *w, int64_t k, const char *x,
                     int64_t stride, float *sums) {
    vf acc[4][PAIRED];
    const char *left[4], *right[PAIRED], *next = w->next;
    float *tile = w->tile;
    const int64_t advance = w->advance;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) left[r] = w->row[r];
#pragma GCC unroll 10
    for (int j = 0; j < n; j++) right[j] = x + j * stride * X_SIZE(form);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 10
        for (int j = 0; j < n; j++) acc[r][j] = (vf){0};
    if (form == TILE) k = stride; /* the tile holds the zeros behind k */
    int64_t i = 0;
    for (; i + STEP <= k; i += STEP) {
#pragma GCC unroll 8
        for (int line = 0; line < lines; line++) fetch(next + 64 * line);
        next += advance;
        multiply(form, rows, n, left, tile, right, i, acc);
    }
    if (i < k) {
        float tail[4][STEP] = {{0}};
        for (int r = 0; r < rows; r++) {
            memcpy(tail[r], left[r] + i * W_SIZE(form), (k - i) * W_SIZE(form));
            left[r] = (const char *)tail[r];
        }
        for (int j = 0; j < n; j++) right[j] += i * X_SIZE(form);
        multiply(form, rows, n, left, tile + 4 * i, right, 0, acc);
    }
#pragma GCC unroll 10
    for (int j = 0; j < n; j++) {
        if (rows == 4) sum4(sums + j * LANES, acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
        else sum2(sums + j * LANES, acc[0][j], acc[1][j]);
    }
}

/* 4 rows of w times n <= FEW rows of x */
INLINE void few(const int form, const int lines, int n, const Rows *w, int64_t k, const char *x, int64_t stride, float *sums) {
    switch (n) {
    case 1: products(form, lines, 4, 1, w, k, x, stride, sums); break;
    case 2: products(form, lines, 4, 2, w, k, x, stride, sums); break;
#if REGISTERS == 32
    case 3: products(form, lines, 4, 3, w, k, x, stride, sums); break;
    case 4: products(form, lines, 4, 4, w, k, x, stride, sums); break;
    case 5: products(form, lines, 4, 5, w, k, x, stride, sums); break;
#endif
    default: products(form, lines, 4, FEW, w, k, x, stride, sums); break;
    }
}

/* 2 rows of w times FEW < n <= PAIRED rows of x. Each weight is loaded once; two passes of `few` would load it twice. */
INLINE void paired(const int form, const int lines, int n, const Rows *w, int64_t k, const char *x, int64_t stride, float *sums) {
    switch (n) {
    case FEW + 1: products(form, lines, 2, FEW + 1, w, k, x, stride, sums); break;
    case FEW + 2: products(form, lines, 2, FEW + 2, w, k, x, stride, sums); break;
#if REGISTERS == 32
    case FEW + 3: products(form, lines, 2, FEW + 3, w, k, x, stride, sums); break;
#endif
    default: products(form, lines, 2, PAIRED, w, k, x, stride, sums); break;
    }
}

/* Not inlined, since the compiler then allocates registers well. Lines prefetched at each step: all that the step uses, or one
 * where several passes over the same rows share the prefetching. */
#define PRODUCTS(name, template, form, lines)                                                                             \
    static __attribute__((noinline)) void name(int n, const Rows *w, int64_t k, const char *x, int64_t stride, float *sums) { \
        template(form, lines, n, w, k, x, stride, sums);                                                                  \
    }
#if DOT_BF16
PRODUCTS(few_bf16, few, PAIRS, BF16_LINES)
PRODUCTS(paired_bf16, paired, PAIRS, BF16_LINES / 2)
PRODUCTS(first_bf16, few, PAIRS, 1)
#define then_bf16 first_bf16
#else
PRODUCTS(few_bf16, few, BF16, BF16_LINES)
PRODUCTS(paired_bf16, paired, BF16, (BF16_LINES + 1) / 2)
PRODUCTS(first_bf16, few, FILL, 1)
PRODUCTS(then_bf16, few, TILE, 1)
#endif
PRODUCTS(few_float, few, FLOAT, 2 * BF16_LINES)
PRODUCTS(paired_float, paired, FLOAT, BF16_LINES)
PRODUCTS(many_float, few, FLOAT, 1)

/* sums[n][LANES] = 4 rows of w, of which the first `valid` exist, times n rows of x. Meanwhile as many bytes as these rows have
 * are prefetched from `next` on, evenly over the steps, so that memory and cores are both busy. tile: space for 4 rows */
INLINE void block(const int wide, int n, const char *w, int valid, int64_t k, const char *x, int64_t stride, float *sums,
                  const char *next, float *tile) {
    const int form = wide ? FLOAT : DOT_BF16 ? PAIRS : BF16;
    const int64_t size = W_SIZE(form), step = 4 * STEP * size;
    Rows rows = {.tile = tile, .next = next};
    for (int r = 0; r < 4; r++) rows.row[r] = w + (r < valid ? r : valid - 1) * k * size;
    if (n <= FEW) {
        rows.advance = step;
        (wide ? few_float : few_bf16)(n, &rows, k, x, stride, sums);
        return;
    }
    if (n <= PAIRED) {
        rows.advance = step / 2;
        (wide ? paired_float : paired_bf16)(n, &rows, k, x, stride, sums);
        rows.next += k / STEP * rows.advance, rows.row[0] = rows.row[2], rows.row[1] = rows.row[3];
        (wide ? paired_float : paired_bf16)(n, &rows, k, x, stride, sums + 2);
        return;
    }
    const int passes = (n + FEW - 1) / FEW;
    rows.advance = step / passes < 64 ? step / passes : 64;
    for (int p = 0; p < passes; p++) {
        const int64_t low = n * p / passes, high = n * (p + 1) / passes;
        void (*run)(int, const Rows *, int64_t, const char *, int64_t, float *) =
            wide ? many_float : p == 0 ? first_bf16 : then_bf16;
        run((int)(high - low), &rows, k, x + low * stride * X_SIZE(form), stride, sums + low * LANES);
        rows.next += k / STEP * rows.advance;
    }
}

/* Convert a row of bfloat16 to float32, in the order in which `weights` gives elements, with zeros up to a multiple of STEP. */
INLINE void spread(const bf16 *from, int64_t k, float *to) {
    for (int64_t i = 0; i < k; i += STEP) {
        bf16 tail[STEP] = {0};
        if (i + STEP > k) memcpy(tail, from + i, (k - i) * sizeof(bf16));
        const bf16 *at = i + STEP > k ? tail : from + i;
        store(to + i, half_of(0, at, 0)), store(to + i + LANES, half_of(0, at, 1));
    }
}

/* Prepare a row of x for `products`: normed, in the layout of the form, with zeros up to the stride. own: space for a row */
INLINE void prepare(const int form, const Linear *a, int64_t token, int64_t stride, void *to, bf16 *own) {
    const int wide = form == FLOAT;
    const int64_t size = X_SIZE(form);
    const char *x = (const char *)a->x + token * a->k * (wide ? 4 : 2);
    if (form == BF16) {
        if (a->norm) norm_row(0, x, a->norm, a->eps, a->k, own);
        spread(a->norm ? own : (const bf16 *)x, a->k, to);
    } else {
        if (a->norm) norm_row(wide, x, a->norm, a->eps, a->k, to);
        else memcpy(to, x, a->k * size);
        memset((char *)to + a->k * size, 0, (stride - a->k) * size);
    }
}

INLINE int64_t stride_of(int64_t k) { return (k + STEP - 1) / STEP * STEP; }

/* Store outputs o .. o + m - 1 of n tokens from token `first` on. sums [n][LANES]; up: the same of the other half of GATE_UP */
INLINE void finish_rows(const int wide, const Linear *a, int64_t first, int64_t n, int64_t o, int m, const float *sums,
                        const float *up) {
    const vf bias = a->bias ? get(wide, a->bias, o, m) : (vf){0};
    for (int64_t t = 0; t < n; t++) {
        const int64_t at = (first + t) * a->outs + o;
        vf v = load(sums + t * LANES);
        if (a->kind == GATE_UP) v = silu(v) * load(up + t * LANES);
        if (a->bias) v += bias;
        if (a->kind == ADD) v += get(wide, a->residual, at, m);
        put(wide || a->kind == LOGITS, a->y, at, v, m);
    }
}

INLINE int in_blocks(const Linear *a) { return a->w->part[0].format != DENSE; }

/* whether a product with dense weights goes through tiles of AMX */
INLINE int in_tiles(const int wide, const Linear *a) {
#if AMX
    return !wide && !in_blocks(a) && amx_fits(a->k);
#else
    return 0;
#endif
}

INLINE int dense_form(const int wide) { return wide ? FLOAT : DOT_BF16 ? PAIRS : BF16; }

/* How x gets to the products. DIRECT: as it is. SHARED: a stage of its own prepares a slab in memory that the team shares.
 * OWN: each thread that multiplies prepares all of it, which takes less time than one more stage. */
enum { DIRECT, SHARED, OWN };

INLINE int way_of(const int wide, const Linear *a) {
    if (!in_blocks(a) && !in_tiles(wide, a) && !a->norm && a->k == stride_of(a->k) && dense_form(wide) != BF16) return DIRECT;
    return a->tokens >= FEW_PREPARED + in_tiles(wide, a) ? SHARED : OWN; /* 16 tokens are one tile */
}

/* the bytes of memory that a product needs as `prepared`, for this many tokens and inputs */
INLINE size_t room_for(int64_t tokens, int64_t k) {
    return tokens < FEW_PREPARED ? 0 : (size_t)((tokens < SLAB ? tokens : SLAB) * stride_of(k)) * sizeof(float);
}

/* A product is a stage for each slab of tokens, with another one in front of it if x is prepared by the team. stage->at: the
 * first token of the slab. */
INLINE int64_t slab_of(const Linear *a) { return in_blocks(a) ? BLOCK_SLAB : SLAB; }

INLINE int tokens_in_slab(const Linear *a, int64_t first) {
    return (int)(a->tokens - first < slab_of(a) ? a->tokens - first : slab_of(a));
}

/* groups of LANES outputs. Each part of a matrix in blocks begins with a new group. */
INLINE int64_t groups_of(const Linear *a) {
    int64_t groups = 0;
    if (!in_blocks(a) || a->kind == GATE_UP) return parts_of(a->outs, LANES);
    for (int p = 0; p < a->w->parts; p++) groups += parts_of(a->w->part[p].rows, LANES);
    return groups;
}

/* the groups of a chunk, which reads about CHUNK_BYTES of weights */
INLINE int64_t chunk_groups(const int wide, const Linear *a) {
    const int64_t row = in_blocks(a) ? row_bytes(a->w->part[0].format, a->k) : a->k * (wide ? 4 : 2);
    const int64_t group = LANES * row * (a->kind == GATE_UP ? 2 : 1);
    const int64_t groups = group < CHUNK_BYTES ? CHUNK_BYTES / group : 1;
    return in_tiles(wide, a) && a->kind != GATE_UP ? parts_of(groups, 2) * 2 : groups;
}

/* A thread's own memory for a product with dense weights: a tile, then a row of bfloat16, then x if the thread prepares it. */
INLINE float *dense_room(const int wide, const Linear *a) {
    const int64_t stride = stride_of(a->k), prepared = way_of(wide, a) == OWN ? stride * FEW_PREPARED * 4 : 0;
    return scratch(0, stride * (4 * sizeof(float) + sizeof(bf16)) + prepared);
}

INLINE void prepare_dense(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Linear *a = stage->given;
    const int form = dense_form(wide), n = tokens_in_slab(a, stage->at);
    const int64_t stride = stride_of(a->k), low = chunk * PREPARED;
    bf16 *row = (bf16 *)(dense_room(wide, a) + 4 * stride);
    for (int64_t j = low; j < low + PREPARED && j < n; j++)
        prepare(form, a, stage->at + j, stride, (char *)a->prepared + j * stride * X_SIZE(form), row);
}

/* Prefetch the first weights of a thread's share, while x is prepared. */
INLINE void fetch_first(const void *weights) {
    for (int line = 0; line < 128; line++) fetch((const char *)weights + 64 * line);
}

INLINE void multiply_dense(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Linear *a = stage->given;
    const int form = dense_form(wide), parts = a->kind == GATE_UP ? 2 : 1, way = way_of(wide, a);
    const int64_t k = a->k, outs = a->outs, size = wide ? 4 : 2, stride = stride_of(k), slab = stage->at;
    const int64_t width = LANES * chunk_groups(wide, a), low = chunk * width, high = low + width < outs ? low + width : outs;
    const int n = tokens_in_slab(a, slab), lead = 1 + (int)(LEAD / (4 * size) / k); /* blocks */
    const char *all = a->w->part[0].data;
    float *tile = dense_room(wide, a), sums[2][SLAB * LANES] __attribute__((aligned(64)));
    bf16 *row = (bf16 *)(tile + 4 * stride);
    char *own = (char *)(row + stride);
    const char *x = way == DIRECT ? (const char *)a->x + slab * k * size : way == SHARED ? a->prepared : own;

    if (first) fetch_first(all + low * k * size);
    for (int64_t j = 0; first && way == OWN && j < n; j++)
        prepare(form, a, slab + j, stride, own + j * stride * X_SIZE(form), row);
    for (int64_t o = low; o < high; o += LANES) {
        const int m = (int)(high - o < LANES ? high - o : LANES);
        for (int part = 0; part < parts; part++)
            for (int b = 0; b < m; b += 4) {
                const char *w = all + (part * outs + o + b) * k * size;
                int64_t later = (part * LANES + b) / 4 + lead, ahead = later / (LANES / 4); /* groups of LANES rows */
                int64_t at = ahead % parts * outs + o + ahead / parts * LANES + later % (LANES / 4) * 4;
                block(wide, n, w, m - b < 4 ? m - b : 4, k, x, stride, sums[part] + b, all + at * k * size, tile);
            }
        finish_rows(wide, a, slab, n, o, m, sums[0], sums[1]);
    }
}

#if AMX
/* Prepare 16 tokens of a slab for products in tiles, those past the last one as zeros. rows: space for them */
INLINE void prepare_tile(const Linear *a, int64_t slab, int64_t token, bf16 *rows, void *to) {
    for (int64_t t = 0; t < TILE_ROWS; t++) {
        if (token + t < tokens_in_slab(a, slab)) prepare(PAIRS, a, slab + token + t, a->k, rows + t * a->k, NULL);
        else memset(rows + t * a->k, 0, a->k * sizeof(bf16));
    }
    amx_pack(rows, a->k, to);
}

INLINE void prepare_tiles(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Linear *a = stage->given;
    const int64_t token = chunk * TILE_ROWS;
    prepare_tile(a, stage->at, token, scratch(0, TILE_ROWS * a->k * sizeof(bf16)), (bf16 *)a->prepared + token * a->k);
}

/* Two groups of LANES rows are multiplied at once: gate and up of the same outputs, or consecutive ones. */
INLINE void multiply_tiles(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Linear *a = stage->given;
    const int own = way_of(0, a) == OWN, n = tokens_in_slab(a, stage->at), both = a->kind == GATE_UP ? 1 : 2;
    const int64_t k = a->k, outs = a->outs, width = LANES * chunk_groups(0, a), low = chunk * width;
    const int64_t high = low + width < outs ? low + width : outs, apart = a->kind == GATE_UP ? outs : LANES;
    const bf16 *all = (const bf16 *)a->w->part[0].data, *rows[2];
    float *sums = scratch(0, 2 * SLAB * LANES * sizeof(float) + 3 * TILE_ROWS * k * sizeof(bf16));
    float *second = sums + SLAB * LANES;
    bf16 *edge = (bf16 *)(second + SLAB * LANES); /* 32 rows; then x, if it is the thread's own */
    void *x = own ? edge + 2 * TILE_ROWS * k : a->prepared;
    if (first) fetch_first(all + low * k);
    if (first && own) prepare_tile(a, stage->at, 0, edge, x);
    amx_begin();
    for (int64_t o = low; o < high; o += LANES * both) {
        int m[2]; /* rows that there are; the others give any numbers */
        for (int i = 0; i < 2; i++) {
            const int64_t left = high - o - (both - 1) * i * LANES;
            m[i] = left < 0 ? 0 : left < LANES ? (int)left : LANES;
            rows[i] = all + (o + i * apart) * k;
            if (m[i] < LANES) rows[i] = memcpy(edge + i * LANES * k, m[i] ? rows[i] : all, m[i] * k * sizeof(bf16));
        }
        const bf16 *next = all + (o + LANES * both) * k;
        amx_multiply(rows[0], rows[1], k, x, n, sums, second, next, next + apart * k);
        finish_rows(0, a, stage->at, n, o, m[0], sums, second);
        if (both == 2 && m[1]) finish_rows(0, a, stage->at, n, o + LANES, m[1], second, NULL);
    }
    amx_end();
}
#else
#define prepare_tiles prepare_dense
#define multiply_tiles multiply_dense
#endif

INLINE void prepare_blocks(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Linear *a = stage->given;
    const int64_t low = chunk * PREPARED, n = tokens_in_slab(a, stage->at), row = a->k * (wide ? 4 : 2);
    const Quants to = quants_in(a->prepared, n, a->k);
    for (int64_t t = low; t < low + PREPARED && t < n; t++)
        quantise(wide, (const char *)a->x + (stage->at + t) * row, a->norm, a->eps, a->k, &to, t);
}

/* GATE_UP: the matrix has two parts, gate and up */
INLINE void multiply_blocks(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Linear *a = stage->given;
    const int own = way_of(wide, a) == OWN;
    const int64_t k = a->k, slab = stage->at, n = tokens_in_slab(a, slab), width = chunk_groups(wide, a);
    const int64_t low = chunk * width, groups = groups_of(a), high = low + width < groups ? low + width : groups;
    float *sums = scratch(0, 2 * BLOCK_SLAB * LANES * sizeof(float) + (own ? quants_room(a->tokens, k) : 0));
    float *second = sums + BLOCK_SLAB * LANES;
    const Quants x = quants_in(own ? (char *)(second + BLOCK_SLAB * LANES) : a->prepared, n, k);
    const Part *part = a->w->part;
    int64_t row = low * LANES, before = 0; /* row: in the part; before: rows of the parts before it */
    while (row >= part->rows) row -= parts_of(part->rows, LANES) * LANES, before += part->rows, part++;
    if (first) fetch_first(part->data + row * row_bytes(part->format, k));
    for (int64_t t = 0; first && own && t < n; t++)
        quantise(wide, (const char *)a->x + t * k * (wide ? 4 : 2), a->norm, a->eps, k, &x, t);
    for (int64_t g = low; g < high; g++, row += LANES) {
        while (row >= part->rows) row -= parts_of(part->rows, LANES) * LANES, before += part->rows, part++;
        multiply_rows(part, row, k, &x, sums);
        if (a->kind == GATE_UP) multiply_rows(part + 1, row, k, &x, second);
        finish_rows(wide, a, slab, n, before + row, part->rows - row < LANES ? (int)(part->rows - row) : LANES, sums, second);
    }
}

/* the functions of stages: name_bf16 and name_float */
#define STAGE(name)                                                                                              \
    static void name##_bf16(const Stage *stage, int64_t chunk, int first) { name(0, stage, chunk, first); }      \
    static void name##_float(const Stage *stage, int64_t chunk, int first) { name(1, stage, chunk, first); }
STAGE(prepare_dense)
STAGE(multiply_dense)
STAGE(prepare_blocks)
STAGE(multiply_blocks)
STAGE(prepare_tiles)
STAGE(multiply_tiles)
#define BY_DTYPE(wide, name) ((wide) ? name##_float : name##_bf16)

/* how many stages a product of this many tokens has at most */
INLINE int64_t linear_stages(int64_t tokens) { return 2 * parts_of(tokens, SLAB); }

typedef void Run(const Stage *stage, int64_t chunk, int first);

static void add_linear(Job *job, int wide, const Linear *a) {
    const int64_t chunks = parts_of(groups_of(a), chunk_groups(wide, a));
    Run *prepare = BY_DTYPE(wide, prepare_dense), *multiply = BY_DTYPE(wide, multiply_dense);
    if (in_blocks(a)) prepare = BY_DTYPE(wide, prepare_blocks), multiply = BY_DTYPE(wide, multiply_blocks);
    else if (in_tiles(wide, a)) prepare = BY_DTYPE(wide, prepare_tiles), multiply = BY_DTYPE(wide, multiply_tiles);
    const int64_t prepared = in_tiles(wide, a) ? 16 : PREPARED; /* tokens of a chunk */
    for (int64_t slab = 0; slab < a->tokens; slab += slab_of(a)) {
        if (way_of(wide, a) == SHARED) add_stage(job, prepare, a, slab, parts_of(tokens_in_slab(a, slab), prepared));
        add_stage(job, multiply, a, slab, chunks);
    }
}
