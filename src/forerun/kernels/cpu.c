/* The kernels of kernels/__init__.py in C, for bfloat16 (and, but for the linear layers, float32) on the CPU. cpu.py
 * compiles and calls this; reference.py says what each computes. Nothing here allocates tensors or checks arguments.
 *
 * Every function `x_team` is run by all threads of a team, which split the work; the exported functions at the end open
 * the team. Weights are read row-major as stored, once for each SLAB of tokens.
 *
 * Batch invariance: an output element is computed by the same sequence of floating-point operations whatever the other
 * tokens of the batch and the number of threads. Of a linear layer: one accumulator of 16 lanes over k, then a fixed
 * tree. Of attention: softmax over CHUNK positions (absolute, so the same for every token), chunks merged in order;
 * positions that a token may not see add exact zeros.
 *
 * The 16-lane vectors are the compiler's vector extension, so this compiles for any CPU; with AVX512-BF16 the products
 * are dpbf16, elsewhere bfloat16 is widened by a shift.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NATIVE_BF16 1
#endif

#define INLINE static inline __attribute__((always_inline))
#define NEG_INF (-__builtin_inff())

typedef uint16_t bf16;
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

enum { SLAB = 64 };    /* tokens for which a block of weights is used while it is in the cache */
enum { CHUNK = 128 };  /* positions of one softmax */
enum { TILE = 48 };    /* query rows (tokens x heads of a group) of one attention task, about */
enum { LEAD = 8192 };  /* how many bytes before their use weights are fetched, at least */
enum { LANES = 16 };
/* rows of x that are multiplied at once: as many as there are registers for the sums */
#ifdef __AVX512F__
#define ABREAST 6
#else
#define ABREAST 2
#endif

/* ------------------------------------------------------------------------------------------------ vectors */

INLINE v16 load(const float *p) { v16 v; memcpy(&v, p, 64); return v; }
INLINE void store(float *p, v16 v) { memcpy(p, &v, 64); }
INLINE u16 load_words(const void *p) { u16 v; memcpy(&v, p, 64); return v; }
INLINE v16 splat(float x) { return x - (v16){0}; }

INLINE v16 fma16(v16 a, v16 b, v16 c) {
#ifdef __AVX512F__
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE v16 max16(v16 a, v16 b) {
    i16 m = a > b;
    return (v16)(((i16)a & m) | ((i16)b & ~m));
}

INLINE float sum16(v16 v) { /* always by the same tree */
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float t[16];
    store(t, v);
    for (int w = 8; w; w >>= 1)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}

INLINE float peak16(v16 v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float t[16];
    store(t, v);
    float m = t[0];
    for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
    return m;
}

INLINE v16 widen(h16 h) { return (v16)(__builtin_convertvector(h, u16) << 16); }

INLINE h16 narrow(v16 v) { /* to the nearest bfloat16, ties to even; NaN stays NaN */
#ifdef NATIVE_BF16
    return (h16)_mm512_cvtneps_pbh((__m512)v);
#endif
    u16 u = (u16)v, nan = (u16)(v != v);
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return __builtin_convertvector((u & ~nan) | (0x7fc0 & nan), h16);
}

INLINE v16 load_bf16(const bf16 *p) { h16 h; memcpy(&h, p, 32); return widen(h); }
INLINE void store_bf16(bf16 *p, v16 v) { h16 h = narrow(v); memcpy(p, &h, 32); }
INLINE float bf16_round(float x) { return ((v16)widen(narrow(splat(x))))[0]; }

/* acc + the products of the 16 pairs of bfloat16 in a and b */
INLINE v16 dot2(v16 acc, u16 a, u16 b) {
#ifdef NATIVE_BF16
    return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma16((v16)(a << 16), (v16)(b << 16), acc);
    return fma16((v16)(a & 0xffff0000u), (v16)(b & 0xffff0000u), acc);
#endif
}

INLINE u16 load_tail(const bf16 *p, int n) { /* n < 32 bfloat16, zeros behind them */
#ifdef NATIVE_BF16
    return (u16)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
#else
    bf16 t[32] = {0};
    memcpy(t, p, n * sizeof(bf16));
    return load_words(t);
#endif
}

/* the sums over the lanes of four vectors, by one tree */
INLINE void sum4(float *to, v16 a, v16 b, v16 c, v16 d) {
#ifdef __AVX512F__
    __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
    __m512 xy = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    __m512 zw = _mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w));
    __m512d lo = _mm512_unpacklo_pd((__m512d)xy, (__m512d)zw), hi = _mm512_unpackhi_pd((__m512d)xy, (__m512d)zw);
    __m512 s = _mm512_add_ps((__m512)lo, (__m512)hi);
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), (__m256)_mm512_extractf64x4_pd((__m512d)s, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
#else
    to[0] = sum16(a), to[1] = sum16(b), to[2] = sum16(c), to[3] = sum16(d);
#endif
}

/* two of them, by the same tree */
INLINE void sum2(float *to, v16 a, v16 b) {
    float all[4];
    sum4(all, a, b, a, b);
    to[0] = all[0], to[1] = all[1];
}

INLINE v16 exp16(v16 x) { /* within 2 ulp; exactly 0 below -87 */
    const v16 magic = splat(12582912.0f);
    i16 keep = x > splat(-87.0f);
    x = (v16)(((i16)x & keep));
    v16 shifted = fma16(x, splat(1.44269504f), magic);
    v16 n = shifted - magic;
    v16 r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    v16 p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r) + 1.0f;
    i16 scaled = (i16)p + (((i16)shifted - (i16)magic) << 23);
    return (v16)(scaled & keep);
}

INLINE float exp1(float x) { return exp16(splat(x))[0]; }

/* ------------------------------------------------------------------------------------------------ scratch */

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

/* ------------------------------------------------------------------------------------------------ norms */

/* y = norm * round(x / rms(x)), rounded; x and y may be the same. wide: float32 instead of bfloat16 */
INLINE void norm_row(const int wide, const void *x, const void *norm, float eps, int64_t n, void *y) {
    const bf16 *xh = x, *nh = norm;
    const float *xf = x, *nf = norm;
    bf16 *yh = y;
    float *yf = y;
    v16 square = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        v16 v = wide ? load(xf + i) : load_bf16(xh + i);
        square = fma16(v, v, square);
    }
    if (i < n) {
        v16 v = {0};
        for (int64_t j = i; j < n; j++) v[j - i] = wide ? xf[j] : widen((h16){0} + xh[j])[0];
        square = fma16(v, v, square);
    }
    float scale = 1.0f / __builtin_sqrtf(sum16(square) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) {
        if (wide) store(yf + i, load(nf + i) * (load(xf + i) * scale));
        else store_bf16(yh + i, load_bf16(nh + i) * widen(narrow(load_bf16(xh + i) * scale)));
    }
    for (; i < n; i++) {
        if (wide) yf[i] = nf[i] * (xf[i] * scale);
        else yh[i] = narrow(widen((h16){0} + nh[i]) * widen(narrow(widen((h16){0} + xh[i]) * scale)))[0];
    }
}

/* ------------------------------------------------------------------------------------------------ linear layers */

enum { PLAIN, ADD, GATE_UP, LOGITS };

typedef struct {
    int kind;
    const bf16 *x, *norm, *w, *bias, *residual; /* norm, bias: or NULL */
    float eps;
    int64_t tokens, k, outs;
    void *y; /* bfloat16, for LOGITS float */
} Linear;

/* Into the second level: the first has too few lines under way for the memory's latency. */
INLINE void fetch(const void *p) { __builtin_prefetch(p, 0, 2); }

/* sums[n][16] = 4 rows of w (rows past `valid` repeat the last) times n rows of x. Fetches `lines` cache lines a round of
 * what comes next in the weights, so that the memory stays busy while the cores multiply. */
INLINE void block(const int n, const bf16 *w, int valid, int64_t k, const bf16 *x, int64_t stride, float *sums,
                  const char *next, int lines) {
    const bf16 *w0 = w, *w1 = w + (valid > 1 ? k : 0), *w2 = w + (valid > 2 ? 2 : valid - 1) * k, *w3 = w + (valid - 1) * k;
    v16 acc[4][ABREAST];
#pragma GCC unroll 6
    for (int j = 0; j < n; j++) acc[0][j] = acc[1][j] = acc[2][j] = acc[3][j] = (v16){0};
    int64_t i = 0;
    for (; i + 32 <= k; i += 32) {
        fetch(next);
        if (lines > 1) {
            fetch(next + 64);
            if (lines > 2) fetch(next + 128), fetch(next + 192);
        }
        next += 64 * lines;
        u16 a = load_words(w0 + i), b = load_words(w1 + i), c = load_words(w2 + i), d = load_words(w3 + i);
#pragma GCC unroll 6
        for (int j = 0; j < n; j++) {
            u16 v = load_words(x + j * stride + i);
            acc[0][j] = dot2(acc[0][j], a, v);
            acc[1][j] = dot2(acc[1][j], b, v);
            acc[2][j] = dot2(acc[2][j], c, v);
            acc[3][j] = dot2(acc[3][j], d, v);
        }
    }
    if (i < k) {
        int left = (int)(k - i);
        u16 a = load_tail(w0 + i, left), b = load_tail(w1 + i, left), c = load_tail(w2 + i, left), d = load_tail(w3 + i, left);
#pragma GCC unroll 6
        for (int j = 0; j < n; j++) {
            u16 v = load_words(x + j * stride + i);
            acc[0][j] = dot2(acc[0][j], a, v);
            acc[1][j] = dot2(acc[1][j], b, v);
            acc[2][j] = dot2(acc[2][j], c, v);
            acc[3][j] = dot2(acc[3][j], d, v);
        }
    }
#pragma GCC unroll 6
    for (int j = 0; j < n; j++) sum4(sums + j * LANES, acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
}

#if ABREAST > 2
/* The same for 2 rows of w and up to 10 of x: each weight is loaded once, where two passes of `block` would load it twice. */
INLINE void pair(const int n, const bf16 *w0, const bf16 *w1, int64_t k, const bf16 *x, int64_t stride, float *sums,
                 const char *next) {
    v16 acc[2][10];
#pragma GCC unroll 10
    for (int j = 0; j < n; j++) acc[0][j] = acc[1][j] = (v16){0};
    int64_t i = 0;
    for (; i + 32 <= k; i += 32) {
        fetch(next), fetch(next + 64);
        next += 128;
        u16 a = load_words(w0 + i), b = load_words(w1 + i);
#pragma GCC unroll 10
        for (int j = 0; j < n; j++) {
            u16 v = load_words(x + j * stride + i);
            acc[0][j] = dot2(acc[0][j], a, v);
            acc[1][j] = dot2(acc[1][j], b, v);
        }
    }
    if (i < k) {
        int left = (int)(k - i);
        u16 a = load_tail(w0 + i, left), b = load_tail(w1 + i, left);
#pragma GCC unroll 10
        for (int j = 0; j < n; j++) {
            u16 v = load_words(x + j * stride + i);
            acc[0][j] = dot2(acc[0][j], a, v);
            acc[1][j] = dot2(acc[1][j], b, v);
        }
    }
#pragma GCC unroll 10
    for (int j = 0; j < n; j++) sum2(sums + j * LANES, acc[0][j], acc[1][j]);
}

static void pairs(int n, const bf16 *w, int valid, int64_t k, const bf16 *x, int64_t stride, float *sums, const char *next) {
    for (int p = 0; p < 4; p += 2) {
        const bf16 *w0 = w + (p < valid ? p : valid - 1) * k, *w1 = w + (p + 1 < valid ? p + 1 : valid - 1) * k;
        switch (n) {
        case 7: pair(7, w0, w1, k, x, stride, sums + p, next); break;
        case 8: pair(8, w0, w1, k, x, stride, sums + p, next); break;
        case 9: pair(9, w0, w1, k, x, stride, sums + p, next); break;
        default: pair(10, w0, w1, k, x, stride, sums + p, next); break;
        }
        next += k / 32 * 128;
    }
}
#endif

static void blocks(int n, const bf16 *w, int valid, int64_t k, const bf16 *x, int64_t stride, float *sums, const char *next) {
#if ABREAST > 2
    if (n > ABREAST && n <= 10) {
        pairs(n, w, valid, k, x, stride, sums, next);
        return;
    }
#endif
    int passes = (n + ABREAST - 1) / ABREAST;
    for (int p = 0; p < passes; p++) {
        int low = n * p / passes, high = n * (p + 1) / passes;
        int lines = passes == 1 ? 4 : passes == 2 ? 2 : passes == 3 ? 1 + !p : p < 4; /* 4 in all passes together */
        const bf16 *xp = x + low * stride;
        float *to = sums + low * LANES;
        switch (high - low) {
        case 1: block(1, w, valid, k, xp, stride, to, next, lines); break;
#if ABREAST > 2
        case 2: block(2, w, valid, k, xp, stride, to, next, lines); break;
        case 3: block(3, w, valid, k, xp, stride, to, next, lines); break;
        case 4: block(4, w, valid, k, xp, stride, to, next, lines); break;
        case 5: block(5, w, valid, k, xp, stride, to, next, lines); break;
#endif
        default: block(ABREAST, w, valid, k, xp, stride, to, next, lines); break;
        }
        next += k / 32 * 64 * lines;
    }
}

INLINE void put(void *y, int wide, int64_t at, v16 v, int count) {
    if (count == LANES) {
        if (wide) store((float *)y + at, v);
        else store_bf16((bf16 *)y + at, v);
    } else {
        h16 h = narrow(v);
        if (wide) memcpy((float *)y + at, &v, count * sizeof(float));
        else memcpy((bf16 *)y + at, &h, count * sizeof(bf16));
    }
}

INLINE v16 get(const bf16 *p, int count) {
    if (count == LANES) return load_bf16(p);
    h16 h = {0};
    memcpy(&h, p, count * sizeof(bf16));
    return widen(h);
}

/* From so many tokens on the team shares out the norms, into room [tokens][k], where each thread else does them all. */
enum { SHARED_NORMS = 16 };

static void linear_team(Team me, const Linear *a, bf16 *room) {
    if (a->norm && a->tokens >= SHARED_NORMS) {
        int64_t from, to;
        share(me, a->tokens, &from, &to);
        for (int64_t t = from; t < to; t++) norm_row(0, a->x + t * a->k, a->norm, a->eps, a->k, room + t * a->k);
        Linear normed = *a;
        normed.x = room, normed.norm = NULL;
        BARRIER
        linear_team(me, &normed, NULL);
        return;
    }
    const int64_t k = a->k, outs = a->outs;
    const int parts = a->kind == GATE_UP ? 2 : 1;
    int64_t units, low, high;
    units = (outs + 3) / 4;
    share(me, units, &low, &high);
    low *= 4, high = high * 4 < outs ? high * 4 : outs;
    if (low >= high) return;
    for (int i = 0; i < 128; i++) fetch((const char *)(a->w + low * k) + 64 * i); /* while the norms are computed */

    const int lead = 1 + (int)(LEAD / 8 / k); /* blocks */
    const int direct = !a->norm && k % 32 == 0;
    const int64_t stride = direct ? k : (k + 31) & ~(int64_t)31;
    bf16 *own = direct ? NULL : scratch(0, (size_t)stride * SLAB * sizeof(bf16));
    float sums[2][SLAB * LANES] __attribute__((aligned(64)));

    for (int64_t slab = 0; slab < a->tokens; slab += SLAB) {
        const int n = (int)(a->tokens - slab < SLAB ? a->tokens - slab : SLAB);
        const bf16 *x = a->x + slab * k;
        if (!direct) {
            for (int j = 0; j < n; j++) {
                if (a->norm) norm_row(0, x + j * k, a->norm, a->eps, k, own + j * stride);
                else memcpy(own + j * stride, x + j * k, k * sizeof(bf16));
                memset(own + j * stride + k, 0, (stride - k) * sizeof(bf16));
            }
            x = own;
        }
        for (int64_t o = low; o < high; o += LANES) {
            const int m = (int)(high - o < LANES ? high - o : LANES);
            for (int part = 0; part < parts; part++)
                for (int b = 0; b < m; b += 4) {
                    const bf16 *w = a->w + (part * outs + o + b) * k;
                    int64_t later = part * 4 + b / 4 + lead, after = later / 4;
                    const bf16 *next = a->w + (after % parts * outs + o + after / parts * LANES + later % 4 * 4) * k;
                    blocks(n, w, m - b < 4 ? m - b : 4, k, x, stride, sums[part] + b, (const char *)next);
                }
            v16 bias = a->bias ? get(a->bias + o, m) : (v16){0};
            for (int j = 0; j < n; j++) {
                int64_t at = (slab + j) * outs + o;
                v16 v = load(sums[0] + j * LANES);
                if (a->kind == GATE_UP) v = v / (exp16(-v) + 1.0f) * load(sums[1] + j * LANES);
                if (a->bias) v += bias;
                if (a->kind == ADD) v += get(a->residual + at, m);
                put(a->y, a->kind == LOGITS, at, v, m);
            }
        }
    }
}

/* ------------------------------------------------------------------------------------------------ attention */

typedef struct {
    const void *qkv, *q_norm, *k_norm; /* norms: or NULL */
    void *key_pages, *value_pages, *y;
    const float *cos, *sin;
    const int64_t *positions;
    const int32_t *row_start, *block_table;
    int64_t tokens, rows, table_width, block_size;
    int64_t heads, kv_heads, dim, window;
    float eps;
    float *partial;   /* results of single chunks, or NULL: a task does all chunks of its tile */
    int64_t chunks;   /* room for so many chunks of each query row in partial */
    int64_t *next;    /* the next task to take, shared by the team, 0 at first */
} Attend;

INLINE int64_t first_seen(const Attend *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* one head of q or k: norm, rotate */
INLINE void rotate(const int wide, const Attend *a, const void *x, const void *norm, int64_t position, void *y) {
    const int64_t half = a->dim / 2;
    const float *c = a->cos + position * half, *s = a->sin + position * half;
    if (norm) {
        norm_row(wide, x, norm, a->eps, a->dim, y);
        x = y;
    }
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        v16 p = wide ? load((const float *)x + i) : load_bf16((const bf16 *)x + i);
        v16 q = wide ? load((const float *)x + half + i) : load_bf16((const bf16 *)x + half + i);
        v16 u = p * load(c + i) - q * load(s + i), v = q * load(c + i) + p * load(s + i);
        if (wide) store((float *)y + i, u), store((float *)y + half + i, v);
        else store_bf16((bf16 *)y + i, u), store_bf16((bf16 *)y + half + i, v);
    }
    for (; i < half; i++) {
        if (wide) {
            float p = ((const float *)x)[i], q = ((const float *)x)[half + i];
            ((float *)y)[i] = p * c[i] - q * s[i], ((float *)y)[half + i] = q * c[i] + p * s[i];
        } else {
            v16 p = widen((h16){0} + ((const bf16 *)x)[i]), q = widen((h16){0} + ((const bf16 *)x)[half + i]);
            ((bf16 *)y)[i] = narrow(p * c[i] - q * s[i])[0], ((bf16 *)y)[half + i] = narrow(q * c[i] + p * s[i])[0];
        }
    }
}

INLINE int64_t page_at(const Attend *a, int64_t row, int64_t kv_head, int64_t position) { /* in elements */
    int64_t page = a->block_table[row * a->table_width + position / a->block_size];
    return ((page * a->kv_heads + kv_head) * a->block_size + position % a->block_size) * a->dim;
}

/* q, rotated, goes to y, which the output takes later; k and v to the pages. Padding, which is in no row, keeps its q */
INLINE void place_team(const int wide, Team me, const Attend *a) {
    const int64_t all = a->heads + 2 * a->kv_heads, size = wide ? 4 : 2, bytes = a->dim * size;
    int64_t low, high, row = 0;
    share(me, a->tokens * all, &low, &high);
    for (int64_t i = low; i < high; i++) {
        int64_t t = i / all, head = i % all, position = a->positions[t];
        while (row < a->rows && a->row_start[row + 1] <= t) row++;
        if (row == a->rows && head >= a->heads) continue;
        const char *x = (const char *)a->qkv + (t * all + head) * bytes;
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

/* Packs 16 keys as 32-bit words (a float or a pair of bfloat16), word by word: to[d][key]. keys[i] NULL: zeros. */
static void pack_keys(const char *const *keys, int64_t words, uint32_t *to) {
    int64_t d = 0;
    int any = 0;
    for (int i = 0; i < 16; i++) any |= keys[i] != NULL;
    if (!any) {
        memset(to, 0, words * 64);
        return;
    }
#ifdef __AVX512F__
    for (; d + 16 <= words; d += 16) {
        __m512i r[16], t[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = keys[i] ? _mm512_loadu_si512(keys[i] + 4 * d) : _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2)
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        } /* r[4g + c], 128-bit lane l: word 4l + c of keys 4g .. 4g + 3 */
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512i ab0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44), ab1 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
            __m512i cd0 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
            __m512i cd1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
            uint32_t *at = to + (d + c) * 16;
            _mm512_storeu_si512(at, _mm512_shuffle_i32x4(ab0, cd0, 0x88));
            _mm512_storeu_si512(at + 64, _mm512_shuffle_i32x4(ab0, cd0, 0xdd));
            _mm512_storeu_si512(at + 128, _mm512_shuffle_i32x4(ab1, cd1, 0x88));
            _mm512_storeu_si512(at + 192, _mm512_shuffle_i32x4(ab1, cd1, 0xdd));
        }
    }
#endif
    for (int i = 0; i < 16; i++)
        for (int64_t e = d; e < words; e++) {
            uint32_t v = 0;
            if (keys[i]) memcpy(&v, keys[i] + 4 * e, 4);
            to[e * 16 + i] = v;
        }
}

/* two values, side by side in each word: to[d] = a[d] | b[d] << 16; NULL: zeros */
static void pack_values(const bf16 *a, const bf16 *b, int64_t dim, uint32_t *to) {
    static const bf16 none[16];
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        h16 p, q;
        memcpy(&p, a ? a + d : none, 32), memcpy(&q, b ? b + d : none, 32);
        u16 v = __builtin_convertvector(p, u16) | (__builtin_convertvector(q, u16) << 16);
        memcpy(to + d, &v, 64);
    }
    for (; d < dim; d++) to[d] = (a ? a[d] : 0) | ((uint32_t)(b ? b[d] : 0) << 16);
}

INLINE v16 product(const int wide, v16 acc, u16 a, u16 b) { return wide ? fma16((v16)a, (v16)b, acc) : dot2(acc, a, b); }

INLINE u16 word(const uint32_t *p) { return *p + (u16){0}; }

/* to[r][v] (v of `vectors` <= 4) = sum over i < count of a[r][i] * b[i * step + 16 v]; the products of words */
INLINE void outer(const int wide, const int rows, int vectors, int64_t count, const uint32_t *const *a, const uint32_t *b,
                  int64_t vector_step, int64_t step, float *const *to) {
    v16 acc[4][4];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = (v16){0};
    if (vectors == 4) {
        for (int64_t i = 0; i < count; i++) {
            const uint32_t *at = b + i * step;
            u16 p = load_words(at), q = load_words(at + vector_step);
            u16 s = load_words(at + 2 * vector_step), t = load_words(at + 3 * vector_step);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                u16 x = word(a[r] + i);
                acc[r][0] = product(wide, acc[r][0], x, p), acc[r][1] = product(wide, acc[r][1], x, q);
                acc[r][2] = product(wide, acc[r][2], x, s), acc[r][3] = product(wide, acc[r][3], x, t);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 4; v++) store(to[r] + v * LANES, acc[r][v]);
        return;
    }
    for (int v = 0; v < vectors; v++) {
        for (int r = 0; r < rows; r++) acc[r][0] = (v16){0};
        for (int64_t i = 0; i < count; i++) {
            u16 p = load_words(b + i * step + v * vector_step);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r][0] = product(wide, acc[r][0], word(a[r] + i), p);
        }
        for (int r = 0; r < rows; r++) store(to[r] + v * LANES, acc[r][0]);
    }
}

INLINE void outer_rows(const int wide, int rows, int vectors, int64_t count, const uint32_t *const *a, const uint32_t *b,
                       int64_t vector_step, int64_t step, float *const *to) {
    switch (rows) {
    case 1: outer(wide, 1, vectors, count, a, b, vector_step, step, to); break;
    case 2: outer(wide, 2, vectors, count, a, b, vector_step, step, to); break;
    case 3: outer(wide, 3, vectors, count, a, b, vector_step, step, to); break;
    default: outer(wide, 4, vectors, count, a, b, vector_step, step, to); break;
    }
}

/* A softmax in pieces: peak of the scores, sum of exp(score - peak), sum of exp(score - peak) * value. */
INLINE int64_t piece_size(int64_t dim) { return LANES + ((dim + 15) & ~(int64_t)15); } /* floats: peak, sum, ..., values */

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
        store(into + LANES + d, fma16(load(into + LANES + d), splat(a), load(piece + LANES + d) * b));
}

INLINE void finish(const int wide, const float *piece, int64_t dim, void *y) {
    for (int64_t d = 0; d < dim; d += LANES)
        put(y, wide, d, load(piece + LANES + d) / piece[1], (int)(dim - d < LANES ? dim - d : LANES));
}

typedef struct { int64_t row, begin, end, kv_head, low, high; } Task; /* tokens begin .. end, chunks low .. high */

/* the pieces of `count` query rows over one chunk: pieces[r] */
INLINE void chunk(const int wide, const Attend *a, const Task *task, int64_t c, float *const *pieces, char *room) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, size = wide ? 4 : 2;
    const int64_t rows = (task->end - task->begin) * group, words = dim * size / 4, padded = (dim + 15) & ~(int64_t)15;
    const int64_t from = first_seen(a, a->positions[task->begin]), to = a->positions[task->end - 1] + 1;
    const int64_t start = c * CHUNK, stop = start + CHUNK < to ? start + CHUNK : to;
    const int vectors = (int)((stop - start + 63) / 64) * 4, units = wide ? vectors * 16 : vectors * 8;

    uint32_t *keys = (uint32_t *)room;                    /* [vector][words][16] */
    uint32_t *values = keys + words * CHUNK;              /* [unit][padded] */
    float *scores = (float *)(values + padded * CHUNK);   /* [rows][CHUNK], then the weights in the dtype */

    int64_t page = start / a->block_size, at = start % a->block_size, base = -1;
    const char *key_at[CHUNK], *value_at[CHUNK]; /* NULL: not seen */
    for (int i = 0; i < vectors * 16; i++) {
        key_at[i] = value_at[i] = NULL;
        if (start + i >= from && start + i < stop) {
            if (base < 0) base = page_at(a, task->row, task->kv_head, page * a->block_size) * size;
            key_at[i] = (const char *)a->key_pages + base + at * dim * size;
            value_at[i] = (const char *)a->value_pages + base + at * dim * size;
            for (int64_t line = 0; line < dim * size; line += 64) fetch(key_at[i] + line), fetch(value_at[i] + line);
        }
        if (++at == a->block_size) page++, at = 0, base = -1;
    }
    for (int v = 0; v < vectors; v++) {
        const char *const *key = key_at + 16 * v, *const *value = value_at + 16 * v;
        pack_keys(key, words, keys + v * words * 16);
        if (wide) {
            for (int i = 0; i < 16; i++) {
                uint32_t *to = values + (v * 16 + i) * padded;
                if (value[i]) memcpy(to, value[i], dim * 4);
                else memset(to, 0, dim * 4);
            }
        } else {
            for (int i = 0; i < 16; i += 2)
                pack_values((const bf16 *)value[i], (const bf16 *)value[i + 1], dim, values + (v * 8 + i / 2) * padded);
        }
    }

    const float scale = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t r0 = 0; r0 < rows; r0 += 4) {
        const int n = (int)(rows - r0 < 4 ? rows - r0 : 4);
        const uint32_t *left[4];
        float *right[4];
        for (int r = 0; r < n; r++) {
            int64_t t = task->begin + (r0 + r) / group, head = task->kv_head * group + (r0 + r) % group;
            left[r] = (const uint32_t *)((const char *)a->y + (t * a->heads + head) * dim * size);
        }
        for (int v = 0; v < vectors; v += 4) {
            for (int r = 0; r < n; r++) right[r] = scores + (r0 + r) * CHUNK + v * 16;
            outer_rows(wide, n, 4, words, left, keys + v * words * 16, words * 16, 16, right);
        }
        for (int r = 0; r < n; r++) {
            float *s = scores + (r0 + r) * CHUNK, *piece = pieces[r0 + r];
            const int64_t position = a->positions[task->begin + (r0 + r) / group], seen = first_seen(a, position);
            const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            v16 peak = splat(NEG_INF), sum = {0};
            for (int v = 0; v < vectors; v++) {
                v16 x = load(s + 16 * v) * scale;
                int64_t first = start + 16 * v;
                if (first + 15 > position || first < seen) {
                    int32_t most = (int32_t)(position - first), least = (int32_t)(seen - first); /* lanes least .. most are seen */
                    i16 ok = (lane <= most) & (lane >= least);
                    x = (v16)(((i16)x & ok) | ((i16)splat(NEG_INF) & ~ok));
                }
                store(s + 16 * v, x);
                peak = max16(peak, x);
            }
            piece[0] = peak16(peak);
            bf16 *half = (bf16 *)s;
            for (int v = 0; v < vectors; v++) {
                /* weights are rounded before they are summed, so that they add up to one */
                v16 p = piece[0] == NEG_INF ? (v16){0} : exp16(load(s + 16 * v) - piece[0]);
                if (wide) {
                    store(s + 16 * v, p);
                } else {
                    h16 h = narrow(p);
                    memcpy(half + 16 * v, &h, 32);
                    p = widen(h);
                }
                sum += p;
            }
            piece[1] = sum16(sum);
            left[r] = (const uint32_t *)s;
        }
        for (int64_t d = 0; d < padded; d += 64) {
            const int64_t wide_vectors = (padded - d) / 16;
            for (int r = 0; r < n; r++) right[r] = pieces[r0 + r] + LANES + d;
            outer_rows(wide, n, (int)(wide_vectors < 4 ? wide_vectors : 4), units, left, values + d, 16, padded, right);
        }
    }
}

INLINE int64_t tile_tokens(const Attend *a) {
    int64_t n = TILE * a->kv_heads / a->heads;
    return n < 1 ? 1 : n;
}

/* task number i, or 0 if there are fewer; walks on from where the last search of this thread ended */
static int find_task(const Attend *a, int64_t wanted, Task *task, int64_t *row, int64_t *token, int64_t *before) {
    const int64_t most = tile_tokens(a);
    for (; *row < a->rows; ++*row, *token = -1) {
        int64_t end = a->row_start[*row + 1];
        if (*token < 0) *token = a->row_start[*row];
        for (; *token < end; *token += most) {
            int64_t last = *token + most < end ? *token + most : end;
            int64_t low = first_seen(a, a->positions[*token]) / CHUNK, high = a->positions[last - 1] / CHUNK + 1;
            int64_t pieces = a->partial ? high - low : 1, count = pieces * a->kv_heads;
            if (wanted < *before + count) {
                int64_t i = wanted - *before, at = low + i / a->kv_heads;
                *task = (Task){*row, *token, last, i % a->kv_heads, a->partial ? at : low, a->partial ? at + 1 : high};
                return 1;
            }
            *before += count;
        }
    }
    return 0;
}

INLINE void attend_team(const int wide, Team me, const Attend *a) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, size = wide ? 4 : 2, piece = piece_size(dim);
    const int64_t rows = tile_tokens(a) * group;
    place_team(wide, me, a);
    BARRIER

    const int64_t packed = (dim * size + ((dim + 15) & ~(int64_t)15) * 4 + rows * 4) * CHUNK; /* what `chunk` needs */
    char *room = scratch(0, packed + 2 * rows * (piece * 4 + 8) + 64);
    float *own = (float *)(room + packed); /* [2][rows][piece] */
    float **pieces = (float **)(own + 2 * rows * piece);
    Task task;
    int64_t row = 0, token = -1, before = 0;
    while (find_task(a, __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED), &task, &row, &token, &before)) {
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
        if (!a->partial)
            for (int64_t r = 0; r < count; r++) {
                int64_t at = (task.begin + r / group) * a->heads + task.kv_head * group + r % group;
                finish(wide, own + (rows + r) * piece, dim, (char *)a->y + at * dim * size);
            }
    }
    if (!a->partial) return;
    BARRIER
    int64_t low, high;
    share(me, a->row_start[a->rows] * a->heads, &low, &high);
    for (int64_t i = low; i < high; i++) {
        const int64_t position = a->positions[i / a->heads];
        own[0] = NEG_INF;
        for (int64_t c = first_seen(a, position) / CHUNK; c <= position / CHUNK; c++)
            merge(own, a->partial + (i * a->chunks + c) * piece, dim);
        finish(wide, own, dim, (char *)a->y + i * dim * size);
    }
}

/* Few tokens with a long past make few tasks: then every chunk is a task of its own, if its pieces fit in 16 MB. */
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

/* ------------------------------------------------------------------------------------------------ exported */

/* whether the processor multiplies bfloat16 */
int fr_native(void) {
#ifdef NATIVE_BF16
    return 1;
#else
    return 0;
#endif
}

void fr_linear(int kind, const void *x, int64_t tokens, int64_t k, const void *norm, float eps, const void *w, const void *bias,
               int64_t outs, const void *residual, void *y, int threads) {
    Linear a = {kind, x, norm, w, bias, residual, eps, tokens, k, outs, y};
    bf16 *room = norm && tokens >= SHARED_NORMS ? scratch(2, tokens * k * sizeof(bf16)) : NULL;
#pragma omp parallel num_threads(threads)
    linear_team(team(), &a, room);
}

void fr_rms_norm(int wide, const void *x, int64_t tokens, int64_t k, const void *norm, float eps, void *y, int threads) {
    if (tokens * k < 65536) threads = 1;
    const int64_t size = wide ? 4 : 2;
#pragma omp parallel num_threads(threads)
    {
        int64_t low, high;
        share(team(), tokens, &low, &high);
        for (int64_t t = low; t < high; t++) {
            const char *from = (const char *)x + t * k * size;
            char *to = (char *)y + t * k * size;
            if (wide) norm_row(1, from, norm, eps, k, to);
            else norm_row(0, from, norm, eps, k, to);
        }
    }
}

/* y = silu(gate) * up of [tokens][2 outs], rounded once */
void fr_silu_mul(const void *gate_up, int64_t tokens, int64_t outs, void *y, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t low, high;
        share(team(), tokens, &low, &high);
        for (int64_t t = low; t < high; t++) {
            const bf16 *g = (const bf16 *)gate_up + 2 * t * outs, *u = g + outs;
            for (int64_t o = 0; o < outs; o += LANES) {
                int m = (int)(outs - o < LANES ? outs - o : LANES);
                v16 v = get(g + o, m);
                put(y, 0, t * outs + o, v / (exp16(-v) + 1.0f) * get(u + o, m), m);
            }
        }
    }
}

/* shape: tokens, rows, table_width, block_size, heads, kv_heads, head_dim, window */
void fr_attend(int wide, const void *qkv, const int64_t *shape, float eps, const float *cos, const float *sin, const void *q_norm,
               const void *k_norm, void *key_pages, void *value_pages, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, void *y, int threads) {
    int64_t next = 0;
    Attend a = {qkv, q_norm, k_norm, key_pages, value_pages, y, cos, sin, positions, row_start, block_table,
                shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], eps, NULL, 0, &next};
    plan_attend(&a, threads);
#pragma omp parallel num_threads(threads)
    {
        if (wide) attend_team(1, team(), &a);
        else attend_team(0, team(), &a);
    }
}

typedef struct {
    const bf16 *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;
    void *key_pages, *value_pages;
    int64_t window;
} Layer;

/* whole decoder layers, one after another, in one team; x [tokens][hidden] is replaced. shape as in fr_attend, without
 * its window, which is each layer's */
void fr_layers(const Layer *layers, int64_t count, void *x, int64_t hidden, int64_t inner, const int64_t *shape, float eps,
               float head_eps, const float *cos, const float *sin, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, int threads) {
    const int64_t tokens = shape[0], width = shape[4] * shape[6], stacked = width + 2 * shape[5] * shape[6];
    bf16 *qkv = scratch(2, tokens * (stacked + width + inner + hidden) * sizeof(bf16) + count * sizeof(int64_t) + 192);
    bf16 *mixed = qkv + tokens * stacked, *act = mixed + tokens * width, *normed = act + tokens * inner;
    int64_t *next = (int64_t *)(((uintptr_t)(normed + tokens * hidden) + 63) & ~(uintptr_t)63);
    memset(next, 0, count * sizeof(int64_t));
    Attend plan = {qkv, NULL, NULL, NULL, NULL, mixed, cos, sin, positions, row_start, block_table,
                   tokens, shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], 0, head_eps, NULL, 0, NULL};
    plan_attend(&plan, threads);
#pragma omp parallel num_threads(threads)
    {
        const Team me = team();
        for (int64_t i = 0; i < count; i++) {
            const Layer *l = layers + i;
            Attend a = plan;
            a.q_norm = l->q_norm, a.k_norm = l->k_norm, a.key_pages = l->key_pages, a.value_pages = l->value_pages;
            a.window = l->window, a.next = next + i;
            linear_team(me, &(Linear){PLAIN, x, l->attention_norm, l->qkv, l->qkv_bias, NULL, eps, tokens, hidden, stacked, qkv},
                        normed);
            BARRIER
            attend_team(0, me, &a);
            BARRIER
            linear_team(me, &(Linear){ADD, mixed, NULL, l->out, l->out_bias, x, 0, tokens, width, hidden, x}, normed);
            BARRIER
            linear_team(me, &(Linear){GATE_UP, x, l->mlp_norm, l->gate_up, NULL, NULL, eps, tokens, hidden, inner, act}, normed);
            BARRIER
            linear_team(me, &(Linear){ADD, act, NULL, l->down, NULL, x, 0, tokens, inner, hidden, x}, normed);
            BARRIER
        }
    }
}
