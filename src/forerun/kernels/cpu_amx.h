/* Products of bfloat16 with the tile instructions of AMX. A tile of 16 rows of weights by 32 columns, as they lie in memory, is
 * multiplied by 32 columns of 16 tokens. One token takes as long as 16.
 *
 * The order of additions depends on the columns alone, so a token's result is the same in every batch. It differs from that of
 * other instruction sets.
 */
#pragma once
#include "cpu_vectors.h"

#if AMX
enum { TILE_ROWS = 16 };    /* of weights, and tokens; LANES is the same number */
enum { TILE_COLUMNS = 32 }; /* of weights and of x */
enum { AHEAD = 4 * TILE_COLUMNS }; /* how far ahead weights are prefetched: 8 KB of 32 rows */

/* The tiles 0 .. 7 have 16 rows of 64 bytes. A thread calls this before tiles, and amx_end after them. */
INLINE void amx_begin(void) {
    static const struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16},
    };
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
}
INLINE void amx_end(void) { __asm__ volatile("tilerelease"); }

INLINE int amx_fits(int64_t k) { return k % TILE_COLUMNS == 0; }

/* Put 16 tokens, rows [16][k], where amx_multiply looks for them: pairs of columns, [k/32][16 pairs][16 tokens]. */
INLINE void amx_pack(const bf16 *rows, int64_t k, void *to) {
    for (int64_t i = 0; i < k; i += TILE_COLUMNS) {
        vu words[TILE_ROWS];
        for (int t = 0; t < TILE_ROWS; t++) words[t] = load_words(rows + t * k + i);
        transpose(words, (uint32_t *)to + i / TILE_COLUMNS * TILE_ROWS * TILE_ROWS);
    }
}

/* sums [n][16] from a tile of sums, [16 rows][16 tokens] */
INLINE void amx_turn(const float (*tile)[TILE_ROWS], int n, float *sums) {
    if (n <= 4) {
        for (int t = 0; t < n; t++)
            for (int row = 0; row < TILE_ROWS; row++) sums[t * TILE_ROWS + row] = tile[row][t];
        return;
    }
    vu rows[TILE_ROWS];
    uint32_t all[TILE_ROWS * TILE_ROWS];
    for (int row = 0; row < TILE_ROWS; row++) rows[row] = load_words(tile[row]);
    transpose(rows, all);
    memcpy(sums, all, n * TILE_ROWS * sizeof(float));
}

/* first, second [n][16] = 16 rows at w and 16 rows at v, of k columns, times n tokens. Products of tiles take long to finish,
 * so two to four run at once. x: as amx_pack gives it, 16 tokens after the other; next, then: the rows that follow, which are
 * prefetched when these end */
static void amx_multiply(const bf16 *w, const bf16 *v, int64_t k, const void *x, int64_t n, float *first, float *second,
                         const bf16 *next, const bf16 *then) {
    const int64_t stride = k * sizeof(bf16);
    float tile[TILE_ROWS][TILE_ROWS];
    for (int64_t t = 0; t < n; t += 2 * TILE_ROWS) {
        const char *at = (const char *)x + t * stride, *more = at + TILE_ROWS * stride;
        const int pair = n - t > TILE_ROWS, one = n - t < TILE_ROWS ? (int)(n - t) : TILE_ROWS;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < k; i += TILE_COLUMNS, at += 1024, more += 1024) {
            const bf16 *left = i + AHEAD < k ? w + i + AHEAD : next + i + AHEAD - k;
            const bf16 *right = i + AHEAD < k ? v + i + AHEAD : then + i + AHEAD - k;
            for (int row = 0; t == 0 && row < TILE_ROWS; row++) fetch(left + row * k), fetch(right + row * k);
            _tile_loadd(4, w + i, stride);
            _tile_loadd(5, v + i, stride);
            _tile_loadd(6, at, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (pair) {
                _tile_loadd(7, more, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, tile, sizeof *tile);
        amx_turn(tile, one, first + t * TILE_ROWS);
        _tile_stored(1, tile, sizeof *tile);
        amx_turn(tile, one, second + t * TILE_ROWS);
        if (!pair) continue;
        const int64_t after = t + TILE_ROWS;
        const int rest = n - after < TILE_ROWS ? (int)(n - after) : TILE_ROWS;
        _tile_stored(2, tile, sizeof *tile);
        amx_turn(tile, rest, first + after * TILE_ROWS);
        _tile_stored(3, tile, sizeof *tile);
        amx_turn(tile, rest, second + after * TILE_ROWS);
    }
}
#endif
