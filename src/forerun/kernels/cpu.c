/* The kernels of kernels/__init__.py in C, for bfloat16 and float32 on the CPU. cpu.py compiles this file, allocates the
 * tensors, checks the arguments and calls the functions below, each of which opens a team of threads. reference.py shows what
 * they compute.
 *
 * Batch invariance: the sequence of floating-point operations of an output element does not depend on the other tokens of the
 * batch or on the number of threads. It does depend on the instruction set.
 */
#include "cpu_attention.h"
#include "cpu_linear.h"

/* the instruction set that this file was compiled for */
const char *fr_isa(void) { return ISA; }

/* One linear layer. wide, here and below: float32 instead of bfloat16. */
void fr_linear(int wide, int kind, const void *x, int64_t tokens, int64_t k, const void *norm, float eps, const Matrix *w,
               const void *bias, int64_t outs, const void *residual, void *y, int threads) {
    Linear a = {kind, x, norm, w, bias, residual, eps, tokens, k, outs, y};
    void *room = scratch(2, room_for(tokens, k));
#pragma omp parallel num_threads(threads)
    linear_team(wide, team(), &a, room);
}

/* The rows of these ids of a part in blocks, as numbers: an embedding. */
void fr_embed(int wide, const Part *part, int64_t k, const int64_t *ids, int64_t count, void *y) {
    if (wide) expand_rows(1, part, k, ids, count, y);
    else expand_rows(0, part, k, ids, count, y);
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

/* Attention. shape: tokens, rows, table_width, block_size, heads, kv_heads, head_dim, interleaved, window */
void fr_attend(int wide, const void *qkv, const int64_t *shape, float eps, const float *cos, const float *sin, const void *q_norm,
               const void *k_norm, void *key_pages, void *value_pages, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, void *y, int threads) {
    int64_t next = 0;
    Attend a = {qkv, q_norm, k_norm, key_pages, value_pages, y, cos, sin, positions, row_start, block_table,
                shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8], eps, NULL, 0, &next};
    plan_attend(&a, threads);
#pragma omp parallel num_threads(threads)
    attend_team(wide, team(), &a);
}

typedef struct {
    Matrix qkv, out, gate_up, down;
    const void *attention_norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *mlp_norm;
    void *key_pages, *value_pages;
    int64_t window;
} Layer;

/* Consecutive decoder layers, all in one team. x [tokens][hidden] is overwritten by the result. shape: as in fr_attend without
 * the window, which each layer has. */
void fr_layers(int wide, const Layer *layers, int64_t count, void *x, int64_t hidden, int64_t inner, const int64_t *shape,
               float eps, float head_eps, const float *cos, const float *sin, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, int threads) {
    const int64_t tokens = shape[0], width = shape[4] * shape[6], stacked = width + 2 * shape[5] * shape[6];
    const int64_t size = wide ? 4 : 2, most = hidden > inner ? hidden : inner;
    const size_t prepared = room_for(tokens, most > width ? most : width);
    char *room = scratch(2, prepared + tokens * (stacked + width + inner) * size + count * sizeof(int64_t) + 192);
    char *qkv = room + prepared, *mixed = qkv + tokens * stacked * size, *act = mixed + tokens * width * size;
    int64_t *next = (int64_t *)(((uintptr_t)(act + tokens * inner * size) + 63) & ~(uintptr_t)63);
    memset(next, 0, count * sizeof(int64_t));
    Attend plan = {qkv, NULL, NULL, NULL, NULL, mixed, cos, sin, positions, row_start, block_table,
                   tokens, shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], 0, head_eps, NULL, 0, NULL};
    plan_attend(&plan, threads);
#pragma omp parallel num_threads(threads)
    {
        const Team me = team();
        for (int64_t i = 0; i < count; i++) {
            const Layer *l = layers + i;
            Attend a = plan;
            a.q_norm = l->q_norm, a.k_norm = l->k_norm, a.key_pages = l->key_pages, a.value_pages = l->value_pages;
            a.window = l->window, a.next = next + i;
            linear_team(wide, me,
                        &(Linear){PLAIN, x, l->attention_norm, &l->qkv, l->qkv_bias, NULL, eps, tokens, hidden, stacked, qkv}, room);
            BARRIER
            attend_team(wide, me, &a);
            BARRIER
            linear_team(wide, me, &(Linear){ADD, mixed, NULL, &l->out, l->out_bias, x, 0, tokens, width, hidden, x}, room);
            BARRIER
            linear_team(wide, me, &(Linear){GATE_UP, x, l->mlp_norm, &l->gate_up, NULL, NULL, eps, tokens, hidden, inner, act},
                        room);
            BARRIER
            linear_team(wide, me, &(Linear){ADD, act, NULL, &l->down, NULL, x, 0, tokens, inner, hidden, x}, room);
            BARRIER
        }
    }
}
