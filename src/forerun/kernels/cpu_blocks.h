/* Products with weights in the block formats of GGUF files, as they are stored
 * (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A weight is an integer times the scale of its block of 32, in
 * some formats plus a number, `low`. Larger blocks are taken as several blocks of 32.
 *
 * Activations are quantised for each token, 32 values at a time, to integers of 8 bits. Products of integers are exact. So
 *
 *     y[row] = sum over blocks: scale * d * (sum of w * x) + low * (d * sum of x)      (low only where the format has one)
 *
 * is rounded in one order, block after block, for any number of tokens, threads and lanes, on every instruction set.
 *
 * A vector holds LANES rows: lane r has 4 weights of row r, which are multiplied by the same 4 activations. So no sum goes
 * across lanes. A tile has the weights of LANES rows by 256 columns in this order.
 */
#pragma once
#include "cpu_team.h"
#include "cpu_vectors.h"

enum { DENSE, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K }; /* the formats, as in models/blocks.py */

/* rows of a matrix in one format */
typedef struct { int64_t format, rows; const char *data; } Part;
typedef struct { int64_t parts; Part part[3]; } Matrix;

enum { SEGMENT = 8 };      /* blocks of a tile */
enum { CHUNK_TOKENS = 8 }; /* tokens that are multiplied with a tile at once */
enum { BLOCK_SLAB = 128 }; /* tokens that use a tile while it is in the cache */
enum { LEAD = 8192 };      /* weights are prefetched at least this many bytes before their use */

/* bytes of a stored block, and how many blocks of 32 it holds */
INLINE int64_t block_bytes(int64_t format) {
    static const int64_t bytes[] = {0, 18, 20, 22, 24, 34, 144, 176, 210};
    return bytes[format];
}
INLINE int64_t block_count(int64_t format) { return format >= Q4_K ? 8 : 1; }
INLINE int64_t row_bytes(int64_t format, int64_t k) { return k / 32 / block_count(format) * block_bytes(format); }

/* q[b][j]: weights 4j .. 4j + 3 of block b; scale: of the first and the second half of a block; low: see above */
typedef struct {
    vu q[SEGMENT][8];
    vf scale[SEGMENT][2], low[SEGMENT];
} Tile;

/* Quantised activations of `tokens` tokens, by block and token: q[32], d, ds = d * (their sum), and the sums of both halves. */
typedef struct { int8_t *q; float *d, *ds; int32_t *sums; int64_t tokens; } Quants;

/* how weights are multiplied: the largest number, what is subtracted from each, and whether `low` and two scales are there */
typedef struct { int most, offset, low, halves; } Form;

INLINE int32_t four(const int8_t *x) { int32_t v; memcpy(&v, x, 4); return v; }

/* dot4: acc + the products of 4 weights in each lane with the same 4 activations */
#if defined(__AVX512VNNI__) && AVX512
#define DOT_BYTES 1
INLINE vi dot4(vi acc, vu w, const int8_t *x) { /* the compiler would load and repeat x by another instruction */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t *)x));
    return acc;
}
#elif defined(__AVXVNNI__) && AVX2
#define DOT_BYTES 1
INLINE vi dot4(vi acc, vu w, const int8_t *x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(four(x)));
}
#elif AVX512
typedef __m512i Bytes;
#define BYTES(op) _mm512_##op
INLINE Bytes with_sign(Bytes x, Bytes w) { return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x); }
#elif AVX2
typedef __m256i Bytes;
#define BYTES(op) _mm256_##op
INLINE Bytes with_sign(Bytes x, Bytes w) { return _mm256_sign_epi8(x, w); }
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT_BYTES 1
INLINE vi dot4(vi acc, vu w, const int8_t *x) {
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(four(x))));
}
#else
#define DOT_BYTES 1
INLINE vi dot4(vi acc, vu w, const int8_t *x) {
    for (int i = 0; i < 4; i++) acc += ((vi)(w << (24 - 8 * i)) >> 24) * (int32_t)x[i];
    return acc;
}
#endif
#ifndef DOT_BYTES
#define DOT_BYTES 0
#endif
#if DOT_BYTES && (AVX512 || AVX2)
enum { BYTE_OFFSET = 128 }; /* the instruction takes weights without a sign */
#else
enum { BYTE_OFFSET = 0 };
#endif

INLINE Form form_of(int64_t format) {
    switch (format) {
    case Q4_0: return (Form){15, 8, 0, 0};
    case Q4_1: case Q4_K: return (Form){15, 0, 1, 0};
    case Q5_0: return (Form){31, 16, 0, 0};
    case Q5_1: case Q5_K: return (Form){31, 0, 1, 0};
    case Q6_K: return (Form){63, 32, 0, 1};
    default: return (Form){128, BYTE_OFFSET, 0, 0};
    }
}

/* start + the products of 4 * count weights of each row with the same number of activations. most: as in Form */
INLINE vi dot(const int most, const int count, const vu *w, const int8_t *x, int32_t start) {
    vi sum = (vi){0} + start;
#if DOT_BYTES
    vi other = {0}; /* two chains, since each addition waits for the one before */
#pragma GCC unroll 8
    for (int j = 0; j < count; j += 2) {
        sum = dot4(sum, w[j], x + 4 * j);
        other = dot4(other, w[j + 1], x + 4 * j + 4);
    }
    return sum + other;
#else
    /* sums of pairs have 16 bits, in which as many products are added as they hold */
    const int held = most > 127 ? 1 : 32767 / (2 * 127 * most);
    const Bytes ones = BYTES(set1_epi16)(1);
    Bytes pairs = BYTES(set1_epi16)(0);
#pragma GCC unroll 8
    for (int j = 0; j < count; j++) {
        Bytes left = (Bytes)w[j], right = BYTES(set1_epi32)(four(x + 4 * j));
        if (most > 127) right = with_sign(right, left), left = BYTES(abs_epi8)(left);
        pairs = BYTES(add_epi16)(pairs, BYTES(maddubs_epi16)(left, right));
        if (j % held == held - 1 || j == count - 1) {
            sum += (vi)BYTES(madd_epi16)(pairs, ones);
            pairs = BYTES(set1_epi16)(0);
        }
    }
    return sum;
#endif
}

/* Add the products of `blocks` blocks of the tile with n tokens to sums [n][LANES]. at: the first block and token in x, as an
 * index by block and token */
INLINE void multiply_tile(const Form form, const int n, const Tile *tile, int blocks, const Quants *x, int64_t at,
                          float *sums) {
    vf acc[CHUNK_TOKENS];
#pragma GCC unroll 8
    for (int t = 0; t < n; t++) acc[t] = load(sums + t * LANES);
    for (int b = 0; b < blocks; b++, at += x->tokens) {
        const vu *w = tile->q[b];
        const vf scale = tile->scale[b][0], second = tile->scale[b][1], low = tile->low[b];
#pragma GCC unroll 8
        for (int t = 0; t < n; t++) {
            const int8_t *q = x->q + (at + t) * 32;
            const int32_t *s = x->sums + (at + t) * 2;
            const float d = x->d[at + t];
            if (form.halves) {
                vi first = dot(form.most, 4, w, q, -form.offset * s[0]);
                vi then = dot(form.most, 4, w + 4, q + 16, -form.offset * s[1]);
                acc[t] = fma_(__builtin_convertvector(first, vf), scale * d, acc[t]);
                acc[t] = fma_(__builtin_convertvector(then, vf), second * d, acc[t]);
            } else {
                vi all = dot(form.most, 8, w, q, form.offset ? -form.offset * (s[0] + s[1]) : 0);
                acc[t] = fma_(__builtin_convertvector(all, vf), scale * d, acc[t]);
                if (form.low) acc[t] = fma_(low, splat(x->ds[at + t]), acc[t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < n; t++) store(sums + t * LANES, acc[t]);
}

INLINE void multiply_some(const Form form, int n, const Tile *tile, int blocks, const Quants *x, int64_t at, float *sums) {
    switch (n) {
    case 1: multiply_tile(form, 1, tile, blocks, x, at, sums); break;
    case 2: multiply_tile(form, 2, tile, blocks, x, at, sums); break;
    case 3: multiply_tile(form, 3, tile, blocks, x, at, sums); break;
    case 4: multiply_tile(form, 4, tile, blocks, x, at, sums); break;
    case 5: multiply_tile(form, 5, tile, blocks, x, at, sums); break;
    case 6: multiply_tile(form, 6, tile, blocks, x, at, sums); break;
    case 7: multiply_tile(form, 7, tile, blocks, x, at, sums); break;
    default: multiply_tile(form, 8, tile, blocks, x, at, sums); break;
    }
}

typedef void Multiply(int n, const Tile *tile, int blocks, const Quants *x, int64_t at, float *sums);
#define MULTIPLY(name, format)                                                                                      \
    static void name(int n, const Tile *tile, int blocks, const Quants *x, int64_t at, float *sums) {               \
        multiply_some(form_of(format), n, tile, blocks, x, at, sums);                                              \
    }
MULTIPLY(multiply_q4_0, Q4_0)
MULTIPLY(multiply_q4_1, Q4_1)
MULTIPLY(multiply_q5_0, Q5_0)
MULTIPLY(multiply_q6_k, Q6_K)
MULTIPLY(multiply_q8_0, Q8_0)
#if DOT_BYTES
#define multiply_q5_1 multiply_q4_1 /* the largest number does not matter */
#else
MULTIPLY(multiply_q5_1, Q5_1)
#endif

/* LANES rows of blocks. row: every fourth row; those between are once, twice and three times the stride further. So the
 * addresses of all rows fit into the registers. next: what is prefetched meanwhile, as many bytes as are read */
typedef struct { const char *row[LANES / 4]; int64_t stride, three; const char *next; } Grid;

INLINE Grid grid_of(const char *at, int64_t stride, const char *next) {
    Grid grid = {.stride = stride, .three = 3 * stride, .next = next};
    for (int i = 0; i < LANES / 4; i++) grid.row[i] = at + 4 * i * stride;
    return grid;
}

INLINE const char *row_of(const Grid *rows, int r) {
    return rows->row[r / 4] + (r % 4 == 3 ? rows->three : r % 4 * rows->stride);
}

/* to[c], lane r: word c of the 16 bytes from byte `skip` of row r on */
INLINE void words_of(const Grid *rows, int64_t skip, vu *to) {
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) fetch(rows->next + skip * LANES + 64 * i);
#if AVX512
#define FROM(r) _mm_loadu_si128((const __m128i *)(row_of(rows, r) + skip))
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(FROM(i)), FROM(4 + i), 1);
        x[i] = _mm512_inserti32x4(_mm512_inserti32x4(v, FROM(8 + i), 2), FROM(12 + i), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
    __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    to[0] = (vu)_mm512_unpacklo_epi64(a, b), to[1] = (vu)_mm512_unpackhi_epi64(a, b);
    to[2] = (vu)_mm512_unpacklo_epi64(c, d), to[3] = (vu)_mm512_unpackhi_epi64(c, d);
#undef FROM
#elif AVX2
#define FROM(r) _mm_loadu_si128((const __m128i *)(row_of(rows, r) + skip))
    __m256i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(FROM(i)), FROM(4 + i), 1);
    __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
    __m256i c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    to[0] = (vu)_mm256_unpacklo_epi64(a, b), to[1] = (vu)_mm256_unpackhi_epi64(a, b);
    to[2] = (vu)_mm256_unpacklo_epi64(c, d), to[3] = (vu)_mm256_unpackhi_epi64(c, d);
#undef FROM
#else
    vu x[4];
    for (int r = 0; r < 4; r++) x[r] = load_words(row_of(rows, r) + skip);
    for (int c = 0; c < 4; c++) to[c] = (vu){x[0][c], x[1][c], x[2][c], x[3][c]};
#endif
}

/* the float16 in the lower half of each word, as float32 */
INLINE vf halves(vu words) {
#if AVX512
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif AVX2
    words &= 0xffff;
    __m128i low = _mm256_castsi256_si128((__m256i)words), high = _mm256_extracti128_si256((__m256i)words, 1);
    return (vf)_mm256_cvtph_ps(_mm_packus_epi32(low, high));
#else /* for finite numbers */
    vf value = (vf)((words & 0x7fff) << 13) * splat(0x1p112f);
    return (vf)((vu)value | (words & 0x8000) << 16);
#endif
}

#define NIBBLES 0x0f0f0f0fu

/* the 4 bits of each word from bit `at` on, as 16 in each of its 4 bytes */
INLINE vu sixteens(vu words, int at) { return ((words >> at & 15) * 0x02040810u) & 0x10101010u; }

/* Blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. A block is the scale (float16), low (float16, if the format has one),
 * the fifth bits (where it has them), and the rest: 4 bits of weights i and i + 16 in byte i, or 8 bits of weight i. */
INLINE void unpack_small(const int format, const Grid *rows, int blocks, Tile *to) {
    const int low = format == Q4_1 || format == Q5_1, five = format == Q5_0 || format == Q5_1, eight = format == Q8_0;
    const int64_t size = block_bytes(format), header = size - (eight ? 32 : 16);
    /* blocks that are read together: their bytes, headers included, are pieces of 16 */
    const int group = format == Q4_1 ? 4 : format == Q5_1 ? 2 : 1;
    uint32_t first[SEGMENT][LANES], fifths[SEGMENT][LANES];
    for (int b = 0; b < blocks; b++)
        for (int r = 0; group == 1 && r < LANES; r++) {
            const char *at = row_of(rows, r) + b * size;
            uint32_t word;
            memcpy(&word, at, 4);
            *(volatile uint32_t *)&first[b][r] = word; /* without it the compiler collects words in vectors, which is slower */
            if (!five) continue;
            memcpy(&word, at + 2, 4);
            *(volatile uint32_t *)&fifths[b][r] = word;
        }
    for (int b = 0; b < blocks; b += group) {
        vu w[20];
        if (group == 1) {
            w[0] = load_words(first[b]);
            if (five) w[1] = load_words(fifths[b]);
            words_of(rows, b * size + header, w + 1 + five);
            if (eight) words_of(rows, b * size + header + 16, w + 5);
        } else if (b + group <= blocks) {
            for (int i = 0; i < group * size / 16; i++) words_of(rows, b * size + 16 * i, w + 4 * i);
        } else {
            for (int i = 0; i < blocks - b; i++) {
                words_of(rows, (b + i) * size, w + i * size / 4);
                words_of(rows, (b + i) * size + header, w + (i * size + header) / 4);
            }
        }
        for (int i = 0; i < group; i++) {
            const vu *from = w + i * size / 4, *rest = from + (group == 1 ? 1 + five : header / 4);
            vu *q = to->q[b + i];
            to->scale[b + i][0] = halves(from[0]);
            if (low) to->low[b + i] = halves(from[0] >> 16);
            for (int j = 0; j < 4; j++) {
                q[j] = eight ? rest[j] : rest[j] & NIBBLES;
                q[4 + j] = eight ? rest[4 + j] : rest[j] >> 4 & NIBBLES;
            }
            for (int j = 0; j < 8; j++) {
                if (five) q[j] |= sixteens(from[1], 4 * j);
                if (eight && BYTE_OFFSET) q[j] ^= 0x80808080u;
            }
        }
    }
}

/* Q4_K and Q5_K: 256 weights. The scale and low (float16), 6 bits of scale and low for each block, the fifth bits (of block b
 * in bit b of 32 bytes), and 4 bits of two blocks in each 32 bytes */
INLINE void unpack_large(const int five, const Grid *rows, Tile *to) {
    vu head[4], fifths[8];
    words_of(rows, 0, head);
    const vf scale = halves(head[0]), low = -halves(head[0] >> 16);
    if (five) words_of(rows, 16, fifths), words_of(rows, 32, fifths + 4);
    for (int b = 0; b < 8; b++) {
        const int at = 8 * (b % 4);
        vu s = head[1] >> at & 63, m = head[2] >> at & 63;
        if (b >= 4) {
            s = (head[3] >> at & 15) | (head[1] >> (at + 6) & 3) << 4;
            m = (head[3] >> (at + 4) & 15) | (head[2] >> (at + 6) & 3) << 4;
        }
        to->scale[b][0] = scale * __builtin_convertvector((vi)s, vf);
        to->low[b] = low * __builtin_convertvector((vi)m, vf);
    }
    for (int b = 0; b < 8; b += 2) {
        vu w[8];
        words_of(rows, (five ? 48 : 16) + 16 * b, w), words_of(rows, (five ? 48 : 16) + 16 * b + 16, w + 4);
        for (int j = 0; j < 8; j++) {
            to->q[b][j] = w[j] & NIBBLES, to->q[b + 1][j] = w[j] >> 4 & NIBBLES;
            if (five) {
                to->q[b][j] |= (fifths[j] >> b & 0x01010101u) << 4;
                to->q[b + 1][j] |= (fifths[j] >> (b + 1) & 0x01010101u) << 4;
            }
        }
    }
}

/* Q6_K: 256 weights. 4 bits (128 bytes), 2 bits (64 bytes), scales of 16 weights each (int8), the scale of all (float16) */
INLINE void unpack_q6_k(const Grid *rows, Tile *to) {
    vu tail[4], fine[4];
    words_of(rows, 194, tail); /* its last 2 bytes are the scale */
    words_of(rows, 192, fine);
    const vf scale = halves(tail[3] >> 16);
    for (int i = 0; i < 16; i++) /* the sign comes with the shifts */
        to->scale[i / 2][i % 2] = scale * __builtin_convertvector((vi)(fine[i / 4] << (24 - 8 * (i % 4))) >> 24, vf);
    for (int half = 0; half < 2; half++) {
        vu w[16], two[8];
        for (int i = 0; i < 4; i++) words_of(rows, 64 * half + 16 * i, w + 4 * i);
        for (int i = 0; i < 2; i++) words_of(rows, 128 + 32 * half + 16 * i, two + 4 * i);
        for (int b = 0; b < 4; b++)
            for (int j = 0; j < 8; j++)
                to->q[4 * half + b][j] = (w[8 * (b % 2) + j] >> (4 * (b / 2)) & NIBBLES) | (two[j] >> 2 * b & 0x03030303u) << 4;
    }
}

typedef void Unpack(const Grid *rows, int blocks, Tile *to);
#define UNPACK(name, call) \
    static void name(const Grid *rows, int blocks, Tile *to) { call; }
UNPACK(unpack_q4_0, unpack_small(Q4_0, rows, blocks, to))
UNPACK(unpack_q4_1, unpack_small(Q4_1, rows, blocks, to))
UNPACK(unpack_q5_0, unpack_small(Q5_0, rows, blocks, to))
UNPACK(unpack_q5_1, unpack_small(Q5_1, rows, blocks, to))
UNPACK(unpack_q8_0, unpack_small(Q8_0, rows, blocks, to))
UNPACK(unpack_q4_k, unpack_large(0, rows, to))
UNPACK(unpack_q5_k, unpack_large(1, rows, to))
UNPACK(unpack_six, unpack_q6_k(rows, to))

/* by format */
static Unpack *const unpack_as[] = {
    NULL, unpack_q4_0, unpack_q4_1, unpack_q5_0, unpack_q5_1, unpack_q8_0, unpack_q4_k, unpack_q5_k, unpack_six,
};
static Multiply *const multiply_as[] = {
    NULL, multiply_q4_0, multiply_q4_1, multiply_q5_0, multiply_q5_1, multiply_q8_0,
    multiply_q4_1, multiply_q5_1, multiply_q6_k,
};

/* where the quantised activations of so many tokens are, in memory of quants_room bytes */
INLINE Quants quants_in(char *room, int64_t tokens, int64_t k) {
    const int64_t count = tokens * k / 32;
    float *d = (float *)(room + 32 * count);
    return (Quants){(int8_t *)room, d, d + count, (int32_t *)(d + 2 * count), tokens};
}
INLINE int64_t quants_room(int64_t tokens, int64_t k) { return tokens * k / 32 * 48; }

/* Quantise a token's row x [k], normed if norm is not NULL. The largest of 32 values becomes 127. Ties are rounded to even. */
INLINE void quantise(const int wide, const void *x, const void *norm, float eps, int64_t k, const Quants *to, int64_t token) {
    const vf magic = splat(12582912.0f);
    float factor = 1.0f;
    if (norm) {
        vf square = {0};
        for (int64_t i = 0; i < k; i += LANES) {
            vf v = get(wide, x, i, LANES);
            square = fma_(v, v, square);
        }
        factor = 1.0f / __builtin_sqrtf(sum1(square) / (float)k + eps);
    }
    for (int64_t i = 0; i < k; i += 32) {
        vf v[32 / LANES];
        vi top = {0}; /* the largest magnitude; compared as integers, NaN is larger than any number */
        for (int j = 0; j < 32 / LANES; j++) {
            v[j] = get(wide, x, i + j * LANES, LANES);
            if (norm) v[j] = v[j] * factor * get(wide, norm, i + j * LANES, LANES);
            vi size = (vi)v[j] & 0x7fffffff, more = size > top;
            top = (size & more) | (top & ~more);
        }
        const int32_t largest = peak_whole(top);
        float most;
        memcpy(&most, &largest, sizeof most);
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        const int64_t at = i / 32 * to->tokens + token;
        int8_t *q = to->q + at * 32;
        vi sums[2] = {{0}}; /* of the first and the second half */
        for (int j = 0; j < 32 / LANES; j++) {
            const vi whole = (vi)fma_(v[j], splat(inverse), magic) - (vi)magic;
            store_bytes(q + j * LANES, whole);
            sums[j * LANES / 16] += whole;
        }
        const int32_t first = sum_whole(sums[0]), second = sum_whole(sums[1]);
        to->d[at] = most / 127.0f, to->ds[at] = to->d[at] * (float)(first + second);
        to->sums[2 * at] = first, to->sums[2 * at + 1] = second;
    }
}

enum { EDGE = 8 * 34 }; /* bytes of a row's segment at most */

/* sums [x->tokens][LANES] = rows first .. first + LANES - 1 of the part times x. Rows past the end give any numbers. Meanwhile
 * later rows are prefetched. */
static void multiply_rows(const Part *part, int64_t first, int64_t k, const Quants *x, float *sums) {
    const int64_t bytes = row_bytes(part->format, k), blocks = k / 32, rows = part->rows - first;
    const int64_t step = SEGMENT / block_count(part->format) * block_bytes(part->format);
    Unpack *unpack = unpack_as[part->format];
    Multiply *multiply = multiply_as[part->format];
    const char *at = part->data + first * bytes, *next = at + LANES * (1 + LEAD / (LANES * bytes)) * bytes;
    Tile tile;
    char edge[LANES * EDGE];
    memset(sums, 0, x->tokens * LANES * sizeof(float));
    for (int64_t b = 0; b < blocks; b += SEGMENT, at += step, next += step * LANES) {
        const int n = (int)(blocks - b < SEGMENT ? blocks - b : SEGMENT);
        Grid grid = grid_of(at, bytes, next);
        if (rows < LANES) {
            for (int64_t r = 0; r < rows; r++) memcpy(edge + r * EDGE, at + r * bytes, step * n / SEGMENT);
            grid = grid_of(edge, EDGE, next);
        }
        unpack(&grid, n, &tile);
        for (int64_t t = 0; t < x->tokens; t += CHUNK_TOKENS) {
            const int64_t left = x->tokens - t;
            multiply((int)(left < CHUNK_TOKENS ? left : CHUNK_TOKENS), &tile, n, x, b * x->tokens + t, sums + t * LANES);
        }
    }
}

/* the numbers that weight i of block b stands for, of all rows */
INLINE vf weights_of(const Form form, const int sign, const Tile *tile, int b, int i) {
    const vi q = sign ? (vi)(tile->q[b][i / 4] << (24 - 8 * (i % 4))) >> 24
                      : (vi)(tile->q[b][i / 4] >> 8 * (i % 4) & 255) - form.offset;
    const vf value = __builtin_convertvector(q, vf) * tile->scale[b][form.halves ? i / 16 : 0];
    return form.low ? value + tile->low[b] : value;
}

/* y [count][k] = rows ids[0 .. count - 1] of the part, as numbers */
INLINE void expand_rows(const int wide, const Part *part, int64_t k, const int64_t *ids, int64_t count, void *y) {
    const int64_t bytes = row_bytes(part->format, k), blocks = k / 32;
    const int64_t step = SEGMENT / block_count(part->format) * block_bytes(part->format);
    const Form form = form_of(part->format);
    const int sign = part->format == Q8_0 && !BYTE_OFFSET; /* bytes have a sign */
    Tile tile;
    char edge[LANES * EDGE];
    for (int64_t first = 0; first < count; first += LANES) {
        const int rows = count - first < LANES ? (int)(count - first) : LANES;
        const char *at = part->data;
        for (int64_t b = 0; b < blocks; b += SEGMENT, at += step) {
            const int n = (int)(blocks - b < SEGMENT ? blocks - b : SEGMENT);
            for (int r = 0; r < rows; r++) memcpy(edge + r * EDGE, at + ids[first + r] * bytes, step * n / SEGMENT);
            const Grid grid = grid_of(edge, EDGE, edge);
            unpack_as[part->format](&grid, n, &tile);
            for (int i = 0; i < 32 * n; i += LANES) {
                vu by_weight[LANES];
                float by_row[LANES][LANES];
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) by_weight[j] = (vu)weights_of(form, sign, &tile, i / 32, i % 32 + j);
                transpose(by_weight, (uint32_t *)by_row);
                for (int r = 0; r < rows; r++) put(wide, y, (first + r) * k + b * 32 + i, load(by_row[r]), LANES);
            }
        }
    }
}
