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

/* Some columns of the output of fr_join: rows of `width` elements, `stride` elements apart. norm: may be NULL */
typedef struct { const void *x, *norm; int64_t width, stride; } Columns;
typedef struct { const Columns *parts; int64_t count, tokens, outs; float eps; void *y; } Join;
enum { JOINED = 8 }; /* tokens of a chunk */

INLINE void join(const int wide, const Stage *stage, int64_t chunk, int first) {
    const Join *a = stage->given;
    const int64_t size = wide ? 4 : 2;
    for (int64_t t = chunk * JOINED; t < (chunk + 1) * JOINED && t < a->tokens; t++) {
        char *to = (char *)a->y + t * a->outs * size;
        for (const Columns *p = a->parts; p < a->parts + a->count; to += p->width * size, p++) {
            const char *x = (const char *)p->x + t * p->stride * size;
            if (p->norm) norm_row(wide, x, p->norm, a->eps, p->width, to);
            else memcpy(to, x, p->width * size);
        }
    }
}
STAGE(join)

/* Parts one after the other, each behind its RMS norm, if it has one. outs: the sum of their widths */
void fr_join(int wide, const Columns *parts, int64_t count, int64_t tokens, int64_t outs, float eps, void *y, int threads) {
    Join a = {parts, count, tokens, outs, eps, y};
    Job job = new_job(1, 0);
    add_stage(&job, BY_DTYPE(wide, join), &a, 0, parts_of(tokens, JOINED));
    run_job(&job, tokens * outs < 65536 ? 1 : threads);
}

enum { COMPARED = 4096 }; /* logits of a chunk */
typedef struct { float top, sum; } Piece; /* the largest logit, NaN if one is, and the sum of exp(logit - top) */
typedef struct { const float *logits; int64_t count, pieces; Piece *found; } Best; /* pieces: of a row */

static void compare(const Stage *stage, int64_t chunk, int first) {
    const Best *a = stage->given;
    const int64_t begin = chunk % a->pieces * COMPARED, left = a->count - begin, n = left < COMPARED ? left : COMPARED;
    const float *x = a->logits + chunk / a->pieces * a->count + begin;
    const vi lane = FIRST_LANES, ok = lane < (int)(n % LANES);
    const int64_t whole = n - n % LANES;
    vf rest = get(1, x, whole, n % LANES), top = (vf)(((vi)rest & ok) | ((vi)splat(NEG_INF) & ~ok));
    rest = top;
    vi broken = rest != rest;
    for (int64_t i = 0; i < whole; i += LANES) {
        const vf v = load(x + i);
        top = max_(top, v), broken |= v != v;
    }
    const float most = peak(top);
    vf sum = exp_(rest - most);
    for (int64_t i = 0; i < whole; i += LANES) sum += exp_(load(x + i) - most);
    a->found[chunk] = (Piece){peak((vf)((vi)splat(1) & broken)) > 0 ? __builtin_nanf("") : most, sum1(sum)};
}

/* The likeliest id of each row of logits [rows][count] and its probability: 0 and 0, if the largest logit is not finite. */
void fr_best(const float *logits, int64_t rows, int64_t count, int64_t *ids, float *chances, int threads) {
    const int64_t pieces = parts_of(count, COMPARED);
    Best a = {logits, count, pieces, scratch(2, rows * pieces * sizeof(Piece))};
    Job job = new_job(1, 0);
    add_stage(&job, compare, &a, 0, rows * pieces);
    run_job(&job, rows * count < 2 * COMPARED ? 1 : threads);
    for (int64_t r = 0; r < rows; r++, logits += count) {
        const Piece *found = a.found + r * pieces, *best = found;
        float sum = 0;
        int broken = 0;
        for (const Piece *p = found; p < found + pieces; p++) {
            broken |= !(p->top < -NEG_INF);
            if (p->top > best->top) best = p;
        }
        broken |= !(best->top > NEG_INF);
        ids[r] = 0, chances[r] = 0;
        if (broken) continue;
        for (const Piece *p = found; p < found + pieces; p++) sum += p->sum * exp1(p->top - best->top);
        int64_t at = (best - found) * COMPARED;
        while (logits[at] != best->top) at++;
        ids[r] = at, chances[r] = 1 / sum;
    }
}

/* Attention. shape: tokens, rows, table_width, block_size, heads, kv_heads, head_dim, interleaved, both, window */
void fr_attend(int wide, const void *qkv, const int64_t *shape, float eps, const float *cos, const float *sin, const void *q_norm,
               const void *k_norm, void *key_pages, void *value_pages, const int64_t *positions, const int32_t *row_start,
               const int32_t *block_table, void *y, int threads) {
    Attend a = attention_of(shape, eps, cos, sin, positions, row_start, block_table);
    a.qkv = qkv, a.q_norm = q_norm, a.k_norm = k_norm, a.key_pages = key_pages, a.value_pages = value_pages, a.y = y;
    a.window = shape[9];
    Job job = new_job(ATTEND_STAGES, 0);
    plan_attend(&a, threads);
    add_attend(&job, wide, &a);
    run_job(&job, threads);
}

/* Keys and values kv [tokens][2][kv_heads][head_dim], rows `stride` elements apart, go to the pages: the keys normed, if k_norm
 * is not NULL, and rotated. shape: as in fr_attend, with 0 heads. */
void fr_store(int wide, const void *kv, int64_t stride, const int64_t *shape, float eps, const float *cos, const float *sin,
              const void *k_norm, void *key_pages, void *value_pages, const int64_t *positions, const int32_t *row_start,
              const int32_t *block_table, int threads) {
    Attend a = attention_of(shape, eps, cos, sin, positions, row_start, block_table);
    a.qkv = kv, a.stride = stride, a.k_norm = k_norm, a.key_pages = key_pages, a.value_pages = value_pages;
    Job job = new_job(1, 0);
    add_place(&job, wide, &a);
    run_job(&job, a.tokens * a.kv_heads * a.dim < 32768 ? 1 : threads);
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
    Attend plan = attention_of(shape, head_eps, cos, sin, positions, row_start, block_table);
    plan.qkv = qkv, plan.y = mixed;
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
