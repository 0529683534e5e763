/* Vectors of LANES float32, as many as one instruction takes, and their conversion from and to bfloat16. The instruction set is
 * chosen here, by the flags that cpu.py gives the compiler.
 *
 * The vectors are the compiler's vector extension, so this compiles for any little-endian CPU. Intrinsics are used only where
 * the compiler does not generate good code.
 */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define AVX512 1
#define LANES 16
#ifdef __AMX_BF16__
#define AMX 1 /* tiles of bfloat16 are multiplied by one instruction */
#define ISA "amx"
#define DOT_BF16 1
#elif defined(__AVX512BF16__)
#define ISA "avx512bf16"
#define DOT_BF16 1 /* pairs of bfloat16 are multiplied directly; without it bfloat16 is converted to float32 first */
#elif defined(__AVX512VNNI__)
#define ISA "avx512vnni"
#else
#define ISA "avx512"
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#define AVX2 1
#define LANES 8
#ifdef __AVXVNNI__
#define ISA "avxvnni"
#else
#define ISA "avx2"
#endif
#else
#define LANES 4
#ifdef __ARM_FEATURE_DOTPROD
#define NEON 1
#define ISA "neon"
#else
#define ISA "portable"
#endif
#endif
#define REGISTERS (AVX512 || NEON ? 32 : 16) /* of vectors */
#ifndef DOT_BF16
#define DOT_BF16 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define NEG_INF (-__builtin_inff())

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef uint64_t vl __attribute__((vector_size(LANES * 8)));

#if LANES == 16
#define FIRST_LANES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define FIRST_LANES {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define FIRST_LANES {0, 1, 2, 3}
#endif

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu load_words(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_words(void *p, vu v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf fma_(vf a, vf b, vf c) { /* a b + c */
#if AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif AVX2
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif NEON
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf max_(vf a, vf b) {
    vi m = a > b;
    return (vf)(((vi)a & m) | ((vi)b & ~m));
}

/* the sums over the lanes of four vectors, each by the same tree of additions */
INLINE void sum4(float *to, vf a, vf b, vf c, vf d) {
#if AVX512
    __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
    __m512 xy = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    __m512 zw = _mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w));
    __m512d lo = _mm512_unpacklo_pd((__m512d)xy, (__m512d)zw), hi = _mm512_unpackhi_pd((__m512d)xy, (__m512d)zw);
    __m512 s = _mm512_add_ps((__m512)lo, (__m512)hi);
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), (__m256)_mm512_extractf64x4_pd((__m512d)s, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
#elif AVX2
    __m256 x = (__m256)a, y = (__m256)b, z = (__m256)c, w = (__m256)d;
    __m256 xy = _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
    __m256 zw = _mm256_add_ps(_mm256_unpacklo_ps(z, w), _mm256_unpackhi_ps(z, w));
    __m256d lo = _mm256_unpacklo_pd((__m256d)xy, (__m256d)zw), hi = _mm256_unpackhi_pd((__m256d)xy, (__m256d)zw);
    __m256 s = _mm256_add_ps((__m256)lo, (__m256)hi);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#elif NEON
    float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b), cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    vst1q_f32(to, vpaddq_f32(ab, cd));
#else
    to[0] = (a[0] + a[2]) + (a[1] + a[3]), to[1] = (b[0] + b[2]) + (b[1] + b[3]);
    to[2] = (c[0] + c[2]) + (c[1] + c[3]), to[3] = (d[0] + d[2]) + (d[1] + d[3]);
#endif
}

/* the sums over the lanes of two vectors, by the tree of sum4 */
INLINE void sum2(float *to, vf a, vf b) {
    float all[4];
    sum4(all, a, b, a, b);
    to[0] = all[0], to[1] = all[1];
}

INLINE float sum1(vf v) { /* the sum over the lanes, always by the same tree, which may differ from that of sum4 */
#if AVX512
    return _mm512_reduce_add_ps((__m512)v);
#else
    float t[LANES];
    store(t, v);
    for (int w = LANES / 2; w; w >>= 1)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
#endif
}

INLINE float peak(vf v) { /* the largest lane */
#if AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float t[LANES], m;
    store(t, v);
    m = t[0];
    for (int i = 1; i < LANES; i++) m = t[i] > m ? t[i] : m;
    return m;
#endif
}

/* the sum over the lanes, and the largest lane */
INLINE int32_t sum_whole(vi v) {
#if AVX512
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = v[0];
    for (int i = 1; i < LANES; i++) sum += v[i];
    return sum;
#endif
}
INLINE int32_t peak_whole(vi v) {
#if AVX512
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* the lowest bytes of the lanes, as numbers with a sign */
INLINE void store_bytes(int8_t *p, vi v) {
#if AVX512
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
#endif
}

INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

INLINE vh narrow(vf v) { /* to the nearest bfloat16, ties to even; NaN stays NaN */
#if DOT_BF16
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu u = (vu)v, nan = (vu)(v != v);
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    u = (u & ~nan) | (0x7fc0 & nan);
#if AVX2
    return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
#else
    return __builtin_convertvector(u, vh);
#endif
#endif
}

INLINE vf load_bf16(const bf16 *p) { vh h; memcpy(&h, p, sizeof h); return widen(h); }
INLINE void store_bf16(bf16 *p, vf v) { vh h = narrow(v); memcpy(p, &h, sizeof h); }

/* Load (get) or store (put) `count` <= LANES values from index `at` on; get fills the other lanes with zeros. wide: float32
 * instead of bfloat16. */
INLINE vf get(const int wide, const void *from, int64_t at, int count) {
    if (count == LANES) return wide ? load((const float *)from + at) : load_bf16((const bf16 *)from + at);
    vf v = {0};
    vh h = {0};
    if (wide) memcpy(&v, (const float *)from + at, count * sizeof(float));
    else memcpy(&h, (const bf16 *)from + at, count * sizeof(bf16));
    return wide ? v : widen(h);
}

INLINE void put(const int wide, void *to, int64_t at, vf v, int count) {
    if (count == LANES) {
        if (wide) store((float *)to + at, v);
        else store_bf16((bf16 *)to + at, v);
    } else {
        vh h = narrow(v);
        if (wide) memcpy((float *)to + at, &v, count * sizeof(float));
        else memcpy((bf16 *)to + at, &h, count * sizeof(bf16));
    }
}

#if DOT_BF16
/* acc + the products of the bfloat16 pairs of a and b */
INLINE vf dot2(vf acc, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#endif

/* to[c][i] = r[i][c], LANES x LANES words; the rows of `to` are LANES words apart */
INLINE void transpose(vu *r, uint32_t *to) {
#if AVX512
    __m512i t[16], u[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    } /* u[4g + c], 128-bit lane l: word 4l + c of rows 4g .. 4g + 3 */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i ab0 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x44), ab1 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xee);
        __m512i cd0 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x44);
        __m512i cd1 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xee);
        _mm512_storeu_si512(to + 16 * c, _mm512_shuffle_i32x4(ab0, cd0, 0x88));
        _mm512_storeu_si512(to + 16 * (c + 4), _mm512_shuffle_i32x4(ab0, cd0, 0xdd));
        _mm512_storeu_si512(to + 16 * (c + 8), _mm512_shuffle_i32x4(ab1, cd1, 0x88));
        _mm512_storeu_si512(to + 16 * (c + 12), _mm512_shuffle_i32x4(ab1, cd1, 0xdd));
    }
#elif AVX2
    __m256i t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32((__m256i)r[i], (__m256i)r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32((__m256i)r[i], (__m256i)r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]), u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]), u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    } /* u[4g + c], 128-bit lane l: word 4l + c of rows 4g .. 4g + 3 */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_si256((__m256i *)(to + 8 * c), _mm256_permute2x128_si256(u[c], u[4 + c], 0x20));
        _mm256_storeu_si256((__m256i *)(to + 8 * (c + 4)), _mm256_permute2x128_si256(u[c], u[4 + c], 0x31));
    }
#elif NEON
    uint32x4x2_t ab = vtrnq_u32((uint32x4_t)r[0], (uint32x4_t)r[1]), cd = vtrnq_u32((uint32x4_t)r[2], (uint32x4_t)r[3]);
    vst1q_u32(to, vcombine_u32(vget_low_u32(ab.val[0]), vget_low_u32(cd.val[0])));
    vst1q_u32(to + 4, vcombine_u32(vget_low_u32(ab.val[1]), vget_low_u32(cd.val[1])));
    vst1q_u32(to + 8, vcombine_u32(vget_high_u32(ab.val[0]), vget_high_u32(cd.val[0])));
    vst1q_u32(to + 12, vcombine_u32(vget_high_u32(ab.val[1]), vget_high_u32(cd.val[1])));
#else
    for (int c = 0; c < LANES; c++)
        for (int i = 0; i < LANES; i++) to[c * LANES + i] = r[i][c];
#endif
}

INLINE vf exp_(vf x) { /* within 2 ulp; exactly 0 below -87 */
    const vf magic = splat(12582912.0f);
    vi keep = x > splat(-87.0f);
    x = (vf)((vi)x & keep);
    vf shifted = fma_(x, splat(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = fma_(n, splat(-0.693359375f), x);
    r = fma_(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, r * r, r) + 1.0f;
    vi scaled = (vi)p + (((vi)shifted - (vi)magic) << 23);
    return (vf)(scaled & keep);
}

INLINE float exp1(float x) { return exp_(splat(x))[0]; }

INLINE vf silu(vf v) { return v / (exp_(-v) + 1.0f); }

/* Prefetch into the L2 cache: the L1 cache allows too few outstanding lines to cover the latency of memory. */
INLINE void fetch(const void *p) { __builtin_prefetch(p, 0, 2); }
