/* The kernels of kernels/__init__.py in C, for bfloat16 and float32 on the CPU. cpu.py compiles this file, allocates the
 * tensors, checks the arguments and calls the functions below, each of which is a job for a team of threads. reference.py shows
 * what they compute.
 *
 * Batch invariance: the sequence of floating-point operations of an output element does not depend on the other tokens of the
 * batch or on the number of threads. It does depend on the instruction set.
 */
#define _GNU_SOURCE
#include "cpu_attention.h"
#include "cpu_linear.h"

/* the instruction set that this file was compiled for */
const char *fr_isa(void) { return ISA; }

/* A job for at most this many stages. more: bytes of memory behind it. */
static Job new_job(int64_t stages, size_t more) { return (Job){scratch(3, stages * sizeof(Stage) + more), 0}; }

/* One linear layer. wide, here and below: float32 instead of bfloat16. */
void fr_linear(int wide, int kind, const void *x, int64_t tokens, int64_t k, const void *norm, float eps, const Matrix *w,
               const void *bias, int64_t outs, const void *residual, void *y, int threads) {
    Linear a = {kind, x, norm, w, bias, residual, eps, tokens, k, outs, y, scratch(2, room_for(tokens, k))};
    Job job = new_job(linear_stages(tokens), 0);
    add_linear(&job, wide, &a);
    run_job(&job, threads);
}

typedef struct { const void *x, *norm; float eps; int wide; int64_t tokens, k; void *y; } Norm;
enum { NORMED = 8 }; /* tokens of a chunk */

static void norm_chunk(const Stage *stage, int64_t chunk, int first) {
    const Norm *a = stage->given;
    for (int64_t t = chunk * NORMED; t < (chunk + 1) * NORMED && t < a->tokens; t++) {
        const int64_t at = t * a->k * (a->wide ? 4 : 2);
        if (a->wide) norm_row(1, (const char *)a->x + at, a->norm, a->eps, a->k, (char *)a->y + at);
        else norm_row(0, (const char *)a->x + at, a->norm, a->eps, a->k, (char *)a->y + at);
    }
}

typedef struct { const Part *part; const int64_t *ids; int64_t k, count; int wide; void *y; } Embed;
enum { EMBEDDED = 32 }; /* rows of a chunk */

static void embed_chunk(const Stage *stage, int64_t chunk, int first) {
    const Embed *a = stage->given;
    const int64_t begin = chunk * EMBEDDED, rows = a->count - begin < EMBEDDED ? a->count - begin : EMBEDDED;
    char *y = (char *)a->y + begin * a->k * (a->wide ? 4 : 2);
    if (a->wide) expand_rows(1, a->part, a->k, a->ids + begin, rows, y);
    else expand_rows(0, a->part, a->k, a->ids + begin, rows, y);
}

/* The rows of these ids of a part in blocks, as numbers: an embedding. */
void fr_embed(int wide, const Part *part, int64_t k, const int64_t *ids, int64_t count, void *y, int threads) {
    Embed a = {part, ids, k, count, wide, y};
    Job job = new_job(1, 0);
    add_stage(&job, embed_chunk, &a, 0, parts_of(count, EMBEDDED));
    run_job(&job, threads);
}

void fr_rms_norm(int wide, const void *x, int64_t tokens, int64_t k, const void *norm, float eps, void *y, int threads) {
    Norm a = {x, norm, eps, wide, tokens, k, y};
    Job job = new_job(1, 0);
    add_stage(&job, norm_chunk, &a, 0, parts_of(tokens, NORMED));
    run_job(&job, tokens * k < 65536 ? 1 : threads);
}

/* Attention. shape: tokens, rows, table_width, block_size, heads, kv_heads, head_dim, interleaved, window */
void fr_attend(int wide, const void *qkv, const int64_t *shape, float eps, const float *cos, const float *sin, const void *q_norm,
               const void *k_norm, void *key_pages, void *value_pages, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, void *y, int threads) {
    Attend a = {qkv, q_norm, k_norm, key_pages, value_pages, y, cos, sin, positions, row_start, block_table,
                shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8], eps, NULL, 0};
    Job job = new_job(ATTEND_STAGES, 0);
    plan_attend(&a, threads);
    add_attend(&job, wide, &a);
    run_job(&job, threads);
}

typedef struct {
    Matrix qkv, out, gate_up, down;
    const void *attention_norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *mlp_norm;
    void *key_pages, *value_pages;
    int64_t window;
} Layer;

/* Consecutive decoder layers in one job. x [tokens][hidden] is overwritten by the result. shape: as in fr_attend without the
 * window, which each layer has. */
void fr_layers(int wide, const Layer *layers, int64_t count, void *x, int64_t hidden, int64_t inner, const int64_t *shape,
               float eps, float head_eps, const float *cos, const float *sin, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, int threads) {
    const int64_t tokens = shape[0], width = shape[4] * shape[6], stacked = width + 2 * shape[5] * shape[6];
    const int64_t size = wide ? 4 : 2, most = hidden > inner ? hidden : inner;
    const size_t prepared = room_for(tokens, most > width ? most : width);
    char *room = scratch(2, prepared + tokens * (stacked + width + inner) * size);
    char *qkv = room + prepared, *mixed = qkv + tokens * stacked * size, *act = mixed + tokens * width * size;
    Attend plan = {qkv, NULL, NULL, NULL, NULL, mixed, cos, sin, positions, row_start, block_table,
                   tokens, shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], 0, head_eps, NULL, 0};
    plan_attend(&plan, threads);

    struct { Linear qkv, out, gate_up, down; Attend attend; } *given; /* of each layer */
    const int64_t stages = count * (4 * linear_stages(tokens) + ATTEND_STAGES);
    Job job = new_job(stages, count * sizeof *given);
    given = (void *)(job.stages + stages);
    for (const Layer *l = layers; l < layers + count; l++, given++) {
        given->qkv = (Linear){PLAIN, x, l->attention_norm, &l->qkv, l->qkv_bias, NULL, eps, tokens, hidden, stacked, qkv, room};
        given->attend = plan;
        given->attend.q_norm = l->q_norm, given->attend.k_norm = l->k_norm, given->attend.window = l->window;
        given->attend.key_pages = l->key_pages, given->attend.value_pages = l->value_pages;
        given->out = (Linear){ADD, mixed, NULL, &l->out, l->out_bias, x, 0, tokens, width, hidden, x, room};
        given->gate_up = (Linear){GATE_UP, x, l->mlp_norm, &l->gate_up, NULL, NULL, eps, tokens, hidden, inner, act, room};
        given->down = (Linear){ADD, act, NULL, &l->down, NULL, x, 0, tokens, inner, hidden, x, room};
        add_linear(&job, wide, &given->qkv);
        add_attend(&job, wide, &given->attend);
        add_linear(&job, wide, &given->out);
        add_linear(&job, wide, &given->gate_up);
        add_linear(&job, wide, &given->down);
    }
    run_job(&job, threads);
}
