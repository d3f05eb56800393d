/* Causal linear attention on a CPU: one pass forward, two passes backward, no tensor beyond the results.
 *
 * A thread takes some key heads of one segment of a sequence and walks them together in chunks of C tokens (together,
 * for in memory they lie side by side). All that a chunk needs stays in the thread's cache: features Q and K [C, F], values V [C, E], weights A [C, C], the state mu [F, E] and
 * nu [F]. For each chunk
 *
 *     A = tril(Q K^T),   den = rowsum(A) + Q nu,   out = (A V + Q mu) / den,   mu += K^T V,   nu += colsum(K)
 *
 * and in the backward, with dn = dout / den, dd = -(dout . out) / den and dA = tril(dn V^T + dd),
 *
 *     forward over the chunks     dQ = dA K + dn mu^T + dd nu^T
 *     backward over the chunks    dK = dA^T Q + V R^T + r,   dV = A^T dn + K R,   R += Q^T dn,   r += dd^T Q
 *
 * Inputs are float32 or bfloat16; features, states, sums and products are float32. The products are written out in
 * vectors of the machine's width (`tile`); the half of A above the diagonal is never computed.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define C 64    /* tokens of a chunk */
#define ROWS 6  /* rows of a tile: ROWS x 2 accumulators and 2 vectors of B fit the 16 registers of AVX2 */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define COLUMNS (2 * LANES)  /* columns of a tile */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t order __attribute__((vector_size(16)));
typedef int64_t Int;

#if defined(__clang__)
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif

enum { IDENTITY, ELU1, RELU, SQUARED_RELU, EXP, SOFTMAX };  /* as MAPS in __init__.py */
enum { FLOAT32, BFLOAT16 };

/* As `Tensor` in __init__.py: strides in elements; the last dimension is contiguous. */
typedef struct {
    void *data;
    Int batch, token, head;
    Int dtype;
} Tensor;

/* As `Call` in __init__.py. */
typedef struct {
    Tensor q, k, v, out, below;             /* below [B, T, Hq, 1]: den, infinite where it is 0; data may be NULL */
    Tensor grad_out, grad_q, grad_k, grad_v;
    Tensor mask;                            /* bytes [B, S]; data may be NULL */
    float *initial_mu, *initial_nu;         /* [N, Hk, F, E], [N, Hk, F]; may be NULL */
    float *final_mu, *final_nu;             /* may be NULL; in the backward their gradients */
    float *grad_initial_mu, *grad_initial_nu; /* may be NULL */
    const Int *segments;                  /* [count][4]: batch row, first token, tokens, state */
    float *between;                         /* [count, Hk, F E + F]: states between segments; NULL if none share one */
    Int batch, tokens, count, heads, group, features, values, map, normalize, threads;
    Int side_by_side;                       /* key heads that a thread takes at once */
} Call;

/* What a thread works in. Rows are padded with zeros to F' and E', whole tiles wide. */
typedef struct {
    Int F, E;  /* F', E' */
    float *q, *k, *v, *k_columns, *v_columns, *weights, *grad_weights;
    float *sums, *grad_q, *grad_k, *grad_v;
    float *mu, *mu_columns, *nu;  /* of `side_by_side` heads, one after the other */
    float *grad_below, *row;
    float *memory;
} Scratch;

static Int padded(Int size) { return (size + COLUMNS - 1) / COLUMNS * COLUMNS; }
static Int least(Int a, Int b) { return a < b ? a : b; }

/* -- products ------------------------------------------------------------------------------------------------------ */

/* Rows [0, R) and COLUMNS columns of C (+)= A B, over p in [first, last); A(i, p) is a[i row + p column]. The sum over
 * p is added to C as a whole: a long running sum is rounded once a chunk and not once a token. */
static inline __attribute__((always_inline)) void tile(const int R, Int first, Int last, const float *a, Int row,
                                                       Int column, const float *b, Int ldb, int add, float *c,
                                                       Int ldc) {
    vec x[ROWS][2];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 2; s++) x[r][s] = (vec){0};
    for (Int p = first; p < last; p++) {
        const vec left = *(const vec *)(b + p * ldb), right = *(const vec *)(b + p * ldb + LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const float factor = a[r * row + p * column];
            x[r][0] += factor * left;
            x[r][1] += factor * right;
        }
    }
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 2; s++) {
            vec *to = (vec *)(c + r * ldc + s * LANES);
            if (add) x[r][s] += *to;
            *to = x[r][s];
        }
}

/* Which half of a C x C matrix is 0, so that it can be left out. Leaving out goes by whole tiles. */
enum { FULL, LOWER, UPPER, INTO_LOWER };

/* C [m, n] (+)= A [m, k] B [k, n]; n is a whole number of tiles.
 * LOWER, UPPER: A is triangular. INTO_LOWER: only the lower triangle of C is wanted. */
static void multiply(int shape, Int m, Int n, Int k, const float *a, Int row, Int column, const float *b,
                     Int ldb, int add, float *c, Int ldc) {
    for (Int j = 0; j < n; j += COLUMNS)
        for (Int i = 0; i < m; i += ROWS) {
            const Int rows = least(ROWS, m - i), end = i + rows;
            if (shape == INTO_LOWER && j >= end) continue;
            const Int first = shape == UPPER ? i : 0, last = shape == LOWER ? least(end, k) : k;
            const float *from = a + i * row;
            float *to = c + i * ldc + j;
            switch (rows) {
#define CASE(R) case R: tile(R, first, last, from, row, column, b + j, ldb, add, to, ldc); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
            }
        }
}

/* to [columns, to_ld] = from [rows, columns]^T, in squares of 4; `from` may be read up to a multiple of 4 both ways.
 * What lies past `rows`, up to the next whole tile, becomes 0. */
static void transpose(Int rows, Int columns, const float *from, Int ld, float *to, Int to_ld) {
    for (Int t = 0; t < rows; t += 4)
        for (Int f = 0; f < columns; f += 4) {
            const float *x = from + t * ld + f;
            float *y = to + f * to_ld + t;
            const quad a = *(const quad *)x, b = *(const quad *)(x + ld);
            const quad c = *(const quad *)(x + 2 * ld), d = *(const quad *)(x + 3 * ld);
            const quad ab = MIX(a, b, 0, 4, 1, 5), cd = MIX(c, d, 0, 4, 1, 5);
            const quad AB = MIX(a, b, 2, 6, 3, 7), CD = MIX(c, d, 2, 6, 3, 7);
            *(quad *)y = MIX(ab, cd, 0, 1, 4, 5);
            *(quad *)(y + to_ld) = MIX(ab, cd, 2, 3, 6, 7);
            *(quad *)(y + 2 * to_ld) = MIX(AB, CD, 0, 1, 4, 5);
            *(quad *)(y + 3 * to_ld) = MIX(AB, CD, 2, 3, 6, 7);
        }
    for (Int f = 0; f < columns && rows < padded(rows); f++)
        memset(to + f * to_ld + rows, 0, (padded(rows) - rows) * sizeof(float));
}

static float sum(Int n, const float *x) {  /* n is a whole number of tiles */
    vec a = {0}, b = {0};
    for (Int j = 0; j < n; j += COLUMNS) {
        a += *(const vec *)(x + j);
        b += *(const vec *)(x + j + LANES);
    }
    a += b;
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += a[lane];
    return total;
}

static float dot(Int n, const float *x, const float *y) {  /* n is a whole number of tiles */
    vec a = {0}, b = {0};
    for (Int j = 0; j < n; j += COLUMNS) {
        a += *(const vec *)(x + j) * *(const vec *)(y + j);
        b += *(const vec *)(x + j + LANES) * *(const vec *)(y + j + LANES);
    }
    a += b;
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += a[lane];
    return total;
}

/* -- feature maps -------------------------------------------------------------------------------------------------- */

/* exp to about 1 ulp: x = n ln 2 + r, a polynomial in r, and 2^n in two factors so that results may be subnormal. */
static inline float exponential(float x) {
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = __builtin_fmaf(n, -0.693145751953125f, x);
    r = __builtin_fmaf(n, -1.42860682030941723212e-6f, r);
    float p = 1.0f / 5040;
    p = __builtin_fmaf(p, r, 1.0f / 720);
    p = __builtin_fmaf(p, r, 1.0f / 120);
    p = __builtin_fmaf(p, r, 1.0f / 24);
    p = __builtin_fmaf(p, r, 1.0f / 6);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    const int32_t whole = (int32_t)n, half = whole >> 1;
    union { int32_t bits; float value; } low = {(half + 127) << 23}, high = {(whole - half + 127) << 23};
    return p * low.value * high.value;
}

/* phi in place, on a row of n numbers. */
static void map_row(Int map, Int n, float *x) {
    switch (map) {
    case ELU1:
        for (Int j = 0; j < n; j++) {
            const float above = x[j] < 0 ? 0 : x[j];
            x[j] = exponential(x[j] > 0 ? 0 : x[j]) + above;
        }
        break;
    case RELU:
        for (Int j = 0; j < n; j++) x[j] = x[j] < 0 ? 0 : x[j];
        break;
    case SQUARED_RELU:
        for (Int j = 0; j < n; j++) x[j] = x[j] < 0 ? 0 : x[j] * x[j];
        break;
    case EXP:
        for (Int j = 0; j < n; j++) x[j] = exponential(x[j]);
        break;
    case SOFTMAX: {
        float top = -INFINITY, sum = 0;
        for (Int j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
        for (Int j = 0; j < n; j++) x[j] = exponential(x[j] - top);
        for (Int j = 0; j < n; j++) sum += x[j];
        for (Int j = 0; j < n; j++) x[j] /= sum;
    }
    }
}

/* grad^T dphi/dx in place of grad, where phi = phi(x). */
static void pull_row(Int map, Int n, const float *phi, float *grad) {
    switch (map) {
    case ELU1:
        for (Int j = 0; j < n; j++) grad[j] *= phi[j] > 1 ? 1 : phi[j];
        break;
    case RELU:
        for (Int j = 0; j < n; j++) grad[j] = phi[j] <= 0 ? 0 : grad[j];
        break;
    case SQUARED_RELU:
        for (Int j = 0; j < n; j++) grad[j] *= 2 * __builtin_sqrtf(phi[j]);
        break;
    case EXP:
        for (Int j = 0; j < n; j++) grad[j] *= phi[j];
        break;
    case SOFTMAX: {
        float sum = 0;
        for (Int j = 0; j < n; j++) sum += grad[j] * phi[j];
        for (Int j = 0; j < n; j++) grad[j] = (grad[j] - sum) * phi[j];
    }
    }
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static inline float widen(uint16_t x) {
    union { uint32_t bits; float value; } wide = {(uint32_t)x << 16};
    return wide.value;
}

static inline uint16_t narrow(float x) {  /* to the nearest bfloat16, ties to even; NaN stays NaN */
    union { float value; uint32_t bits; } wide = {x};
    const uint16_t rounded = (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : rounded;
}

static Int offset(const Tensor *x, Int batch, Int token, Int head) {
    return batch * x->batch + token * x->token + head * x->head;
}

/* The rows of a head lie too far apart for the processor to see what comes next, so each load asks for the row that is
 * needed a chunk later (`ahead`: C, -C or 0 tokens). */
static void load(const Tensor *x, Int batch, Int token, Int head, Int n, Int ahead, float *to) {
    const Int at = offset(x, batch, token, head), bytes = x->dtype == FLOAT32 ? 4 : 2;
    const char *next = (const char *)x->data + (at + ahead * x->token) * bytes;
    for (Int line = 0; line < n * bytes; line += 64) __builtin_prefetch(next + line);
    if (x->dtype == FLOAT32) {
        memcpy(to, (const float *)x->data + at, n * sizeof(float));
        return;
    }
    const uint16_t *from = (const uint16_t *)x->data + at;
    for (Int j = 0; j < n; j++) to[j] = widen(from[j]);
}

static void store(const Tensor *x, Int batch, Int token, Int head, Int n, const float *from) {
    const Int at = offset(x, batch, token, head);
    if (x->dtype == FLOAT32) {
        memcpy((float *)x->data + at, from, n * sizeof(float));
        return;
    }
    uint16_t *to = (uint16_t *)x->data + at;
    for (Int j = 0; j < n; j++) to[j] = narrow(from[j]);
}

static float *single(const Tensor *x, Int batch, Int token, Int head) {
    return (float *)x->data + offset(x, batch, token, head);
}

static int is_hidden(const Call *call, Int batch, Int token) {
    return call->mask.data && !((const uint8_t *)call->mask.data)[offset(&call->mask, batch, token, 0)];
}

/* Ask for large pages behind a result that is about to be written: a fault for each small one takes longer than the
 * arithmetic on it. */
static void prefer_large_pages(const Tensor *x, Int batch, Int tokens) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20, size = x->dtype == FLOAT32 ? 4 : 2, start = (uintptr_t)x->data;
    const uintptr_t first = (start + page - 1) / page * page, last = (start + batch * tokens * x->token * size) / page * page;
    if (x->data && last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
}

static Scratch open_scratch(const Call *call) {
    const Int F = padded(call->features), E = padded(call->values), n = call->side_by_side;
    const Int sizes[] = {C * F, C * F, C * E, F * C, E * C, C * C, C * C, C * E, C * F, C * F, C * E,
                           n * F * E, n * E * F, n * F, C, F > E ? F : E};
    enum { PARTS = sizeof(sizes) / sizeof(*sizes) };
    Int total = 0;
    for (int i = 0; i < PARTS; i++) total += padded(sizes[i]);
    Scratch s = {.F = F, .E = E};
    s.memory = aligned_alloc(64, (total * sizeof(float) + 63) / 64 * 64);
    if (!s.memory) return s;
    memset(s.memory, 0, total * sizeof(float));
    float **parts[] = {&s.q, &s.k, &s.v, &s.k_columns, &s.v_columns, &s.weights, &s.grad_weights, &s.sums, &s.grad_q,
                       &s.grad_k, &s.grad_v, &s.mu, &s.mu_columns, &s.nu, &s.grad_below, &s.row};
    float *next = s.memory;
    for (int i = 0; i < PARTS; i++) {
        *parts[i] = next;
        next += padded(sizes[i]);
    }
    return s;
}

/* -- pieces of a chunk --------------------------------------------------------------------------------------------- */

/* A chunk of one key head: where it is in the inputs, and which state it belongs to. */
typedef struct {
    Int segment, head, batch, first, tokens, state;  /* of the segment */
    Int token, count;                                /* of the chunk */
    Int ahead;                                       /* from this chunk to the next */
} Place;

static void load_keys(const Call *call, Scratch *s, const Place *p) {
    for (Int i = 0; i < p->count; i++) {
        float *key = s->k + i * s->F, *value = s->v + i * s->E;
        if (is_hidden(call, p->batch, p->token + i)) {
            memset(key, 0, call->features * sizeof(float));
            memset(value, 0, call->values * sizeof(float));
            continue;
        }
        load(&call->k, p->batch, p->token + i, p->head, call->features, p->ahead, key);
        map_row(call->map, call->features, key);
        load(&call->v, p->batch, p->token + i, p->head, call->values, p->ahead, value);
    }
}

static void load_queries(const Call *call, Scratch *s, const Place *p, Int head) {
    for (Int i = 0; i < p->count; i++) {
        float *query = s->q + i * s->F;
        load(&call->q, p->batch, p->token + i, head, call->features, p->ahead, query);
        map_row(call->map, call->features, query);
    }
}

/* sums = dn = dout / den, grad_below = dd = -(dn . out); [dout, 0] without a denominator. */
static void load_grads(const Call *call, Scratch *s, const Place *p, Int head) {
    for (Int i = 0; i < p->count; i++) {
        float *grad = s->sums + i * s->E;
        load(&call->grad_out, p->batch, p->token + i, head, call->values, p->ahead, grad);
        s->grad_below[i] = 0;
        if (!call->normalize) continue;
        const float below = *single(&call->below, p->batch, p->token + i, head);
        for (Int j = 0; j < call->values; j++) grad[j] /= below;
        load(&call->out, p->batch, p->token + i, head, call->values, p->ahead, s->row);
        s->grad_below[i] = -dot(s->E, grad, s->row);
    }
}

/* Put 0 above the diagonal of a [count, C]. */
static void hide_later(Int count, float *a) {
    for (Int i = 0; i < count; i++) memset(a + i * C + i + 1, 0, (padded(count) - i - 1) * sizeof(float));
}

/* weights = tril(Q K^T) */
static void weigh(const Call *call, Scratch *s, Int count) {
    multiply(INTO_LOWER, count, padded(count), call->features, s->q, s->F, 1, s->k_columns, C, 0, s->weights, C);
    hide_later(count, s->weights);
}

/* grad_weights = tril(dn V^T + dd) */
static void weigh_grads(const Call *call, Scratch *s, Int count) {
    multiply(INTO_LOWER, count, padded(count), call->values, s->sums, s->E, 1, s->v_columns, C, 0, s->grad_weights, C);
    if (call->normalize)
        for (Int i = 0; i < count; i++)
            for (Int j = 0; j <= i; j++) s->grad_weights[i * C + j] += s->grad_below[i];
    hide_later(count, s->grad_weights);
}

/* nu += colsum(K), rounded once */
static void add_to_nu(const Call *call, Scratch *s, Int count) {
    memset(s->row, 0, call->features * sizeof(float));
    for (Int i = 0; i < count; i++)
        for (Int j = 0; j < call->features; j++) s->row[j] += s->k[i * s->F + j];
    for (Int j = 0; j < call->features; j++) s->nu[j] += s->row[j];
}

/* mu += K^T V, nu += colsum(K) */
static void add_keys(const Call *call, Scratch *s, Int count) {
    multiply(FULL, call->features, s->E, count, s->k, 1, s->F, s->v, s->E, 1, s->mu, s->E);
    add_to_nu(call, s, count);
}

/* R += Q^T dn, r += dd^T Q, which are kept where mu and nu are */
static void add_queries(const Call *call, Scratch *s, Int count) {
    multiply(FULL, call->features, s->E, count, s->q, 1, s->F, s->sums, s->E, 1, s->mu, s->E);
    memset(s->row, 0, call->features * sizeof(float));
    for (Int i = 0; i < count; i++)
        for (Int j = 0; j < call->features; j++) s->row[j] += s->grad_below[i] * s->q[i * s->F + j];
    for (Int j = 0; j < call->features; j++) s->nu[j] += s->row[j];
}

/* -- states -------------------------------------------------------------------------------------------------------- */

/* [F, E] and [F] as they are outside, into rows of whole tiles; zeros where there is nothing. */
static void read_state(const Call *call, const float *mu, const float *nu, Scratch *s) {
    memset(s->mu, 0, s->F * s->E * sizeof(float));
    memset(s->nu, 0, s->F * sizeof(float));
    if (!mu) return;
    for (Int f = 0; f < call->features; f++)
        memcpy(s->mu + f * s->E, mu + f * call->values, call->values * sizeof(float));
    memcpy(s->nu, nu, call->features * sizeof(float));
}

static void write_state(const Call *call, const Scratch *s, float *mu, float *nu) {
    if (!mu) return;
    for (Int f = 0; f < call->features; f++)
        memcpy(mu + f * call->values, s->mu + f * s->E, call->values * sizeof(float));
    memcpy(nu, s->nu, call->features * sizeof(float));
}

static Int state_size(const Call *call) { return call->features * (call->values + 1); }

static float *between(const Call *call, Int segment, Int head) {
    return call->between + (segment * call->heads + head) * state_size(call);
}

static int is_last(const Call *call, Int segment) {
    return segment + 1 == call->count || call->segments[4 * segment + 7] != call->segments[4 * segment + 3];
}

static int is_first(const Call *call, Int segment) {
    return segment == 0 || call->segments[4 * segment - 1] != call->segments[4 * segment + 3];
}

/* The row of a head in [N, Hk, F, E] and [N, Hk, F]; NULL if there are none. */
static float *mu_of(const Call *call, float *mu, const Place *p) {
    return mu ? mu + (p->state * call->heads + p->head) * call->features * call->values : NULL;
}

static float *nu_of(const Call *call, float *nu, const Place *p) {
    return nu ? nu + (p->state * call->heads + p->head) * call->features : NULL;
}

/* The state that enters a segment: from the one before it, or from outside. */
static void enter(const Call *call, Scratch *s, const Place *p, float *outer_mu, float *outer_nu) {
    if (call->between) {
        const float *state = between(call, p->segment, p->head);
        read_state(call, state, state + call->features * call->values, s);
    } else {
        read_state(call, mu_of(call, outer_mu, p), nu_of(call, outer_nu, p), s);
    }
}

/* Turn the sums of segments into the state that enters each: a running sum over the segments of one sequence, from the
 * front for keys, from the back for queries. */
static void scan_segments(const Call *call, Int head, int of_keys, float *outer_mu, float *outer_nu, float *carry) {
    const Int products = call->features * call->values, size = state_size(call);
    for (Int step = 0; step < call->count; step++) {
        const Int segment = of_keys ? step : call->count - 1 - step;
        if ((of_keys ? is_first : is_last)(call, segment)) {
            const Place p = {.head = head, .state = call->segments[4 * segment + 3]};
            memset(carry, 0, size * sizeof(float));
            if (outer_mu) {
                memcpy(carry, mu_of(call, outer_mu, &p), products * sizeof(float));
                memcpy(carry + products, nu_of(call, outer_nu, &p), call->features * sizeof(float));
            }
        }
        float *state = between(call, segment, head);
        for (Int j = 0; j < size; j++) {
            const float sum = carry[j] + state[j];
            state[j] = carry[j];
            carry[j] = sum;
        }
    }
}

/* -- passes -------------------------------------------------------------------------------------------------------- */

/* What is done for each head of a segment: at its start, for each chunk, at its end. */
typedef struct {
    int from_the_back;
    void (*open)(const Call *, Scratch *, const Place *);
    void (*chunk)(const Call *, Scratch *, const Place *);
    void (*close)(const Call *, Scratch *, const Place *);
} Pass;

static void start_empty(const Call *call, Scratch *s, const Place *p) {
    (void)p;
    read_state(call, NULL, NULL, s);
}

static void leave_between(const Call *call, Scratch *s, const Place *p) {
    float *state = between(call, p->segment, p->head);
    write_state(call, s, state, state + call->features * call->values);
}

static void sum_keys(const Call *call, Scratch *s, const Place *p) {
    load_keys(call, s, p);
    add_keys(call, s, p->count);
}

static void sum_queries(const Call *call, Scratch *s, const Place *p) {
    for (Int g = 0; g < call->group; g++) {
        load_queries(call, s, p, p->head * call->group + g);
        load_grads(call, s, p, p->head * call->group + g);
        add_queries(call, s, p->count);
    }
}

static void open_forward(const Call *call, Scratch *s, const Place *p) {
    enter(call, s, p, call->initial_mu, call->initial_nu);
}

static void forward(const Call *call, Scratch *s, const Place *p) {
    const Int count = p->count;
    load_keys(call, s, p);
    transpose(count, call->features, s->k, s->F, s->k_columns, C);
    for (Int g = 0; g < call->group; g++) {
        const Int head = p->head * call->group + g;
        load_queries(call, s, p, head);
        weigh(call, s, count);
        multiply(FULL, count, s->E, call->features, s->q, s->F, 1, s->mu, s->E, 0, s->sums, s->E);
        multiply(LOWER, count, s->E, count, s->weights, C, 1, s->v, s->E, 1, s->sums, s->E);
        for (Int i = 0; i < count; i++) {
            float *row = s->sums + i * s->E;
            if (call->normalize) {
                float below = dot(s->F, s->q + i * s->F, s->nu) + sum(padded(count), s->weights + i * C);
                if (below == 0) below = INFINITY;
                for (Int j = 0; j < call->values; j++) row[j] /= below;
                if (call->below.data) *single(&call->below, p->batch, p->token + i, head) = below;
            }
            store(&call->out, p->batch, p->token + i, head, call->values, row);
        }
    }
    add_keys(call, s, count);
}

static void close_forward(const Call *call, Scratch *s, const Place *p) {
    if (is_last(call, p->segment))
        write_state(call, s, mu_of(call, call->final_mu, p), nu_of(call, call->final_nu, p));
}

/* dQ needs mu transposed only, so that is what is carried on. */
static void open_queries(const Call *call, Scratch *s, const Place *p) {
    open_forward(call, s, p);
    transpose(call->features, call->values, s->mu, s->E, s->mu_columns, s->F);
}

static void backward_queries(const Call *call, Scratch *s, const Place *p) {
    const Int count = p->count;
    load_keys(call, s, p);
    transpose(count, call->values, s->v, s->E, s->v_columns, C);
    for (Int g = 0; g < call->group; g++) {
        const Int head = p->head * call->group + g;
        load_queries(call, s, p, head);
        load_grads(call, s, p, head);
        weigh_grads(call, s, count);
        multiply(FULL, count, s->F, call->values, s->sums, s->E, 1, s->mu_columns, s->F, 0, s->grad_q, s->F);
        multiply(LOWER, count, s->F, count, s->grad_weights, C, 1, s->k, s->F, 1, s->grad_q, s->F);
        for (Int i = 0; i < count; i++) {
            float *row = s->grad_q + i * s->F;
            for (Int j = 0; j < call->features; j++) row[j] += s->grad_below[i] * s->nu[j];
            pull_row(call->map, call->features, s->q + i * s->F, row);
            store(&call->grad_q, p->batch, p->token + i, head, call->features, row);
        }
    }
    multiply(FULL, call->values, s->F, count, s->v, 1, s->E, s->k, s->F, 1, s->mu_columns, s->F);
    add_to_nu(call, s, count);
}

static void close_nothing(const Call *call, Scratch *s, const Place *p) { (void)call, (void)s, (void)p; }

static void open_keys(const Call *call, Scratch *s, const Place *p) {
    enter(call, s, p, call->final_mu, call->final_nu);
}

static void backward_keys(const Call *call, Scratch *s, const Place *p) {
    const Int count = p->count;
    load_keys(call, s, p);
    transpose(count, call->features, s->k, s->F, s->k_columns, C);
    transpose(count, call->values, s->v, s->E, s->v_columns, C);
    transpose(call->features, call->values, s->mu, s->E, s->mu_columns, s->F);
    for (Int i = 0; i < count; i++) memcpy(s->grad_k + i * s->F, s->nu, s->F * sizeof(float));
    multiply(FULL, count, s->F, call->values, s->v, s->E, 1, s->mu_columns, s->F, 1, s->grad_k, s->F);
    multiply(FULL, count, s->E, call->features, s->k, s->F, 1, s->mu, s->E, 0, s->grad_v, s->E);
    for (Int g = 0; g < call->group; g++) {
        load_queries(call, s, p, p->head * call->group + g);
        load_grads(call, s, p, p->head * call->group + g);
        weigh(call, s, count);
        weigh_grads(call, s, count);
        multiply(UPPER, count, s->E, count, s->weights, 1, C, s->sums, s->E, 1, s->grad_v, s->E);
        multiply(UPPER, count, s->F, count, s->grad_weights, 1, C, s->q, s->F, 1, s->grad_k, s->F);
        add_queries(call, s, count);
    }
    for (Int i = 0; i < count; i++) {
        float *row = s->grad_k + i * s->F, *value = s->grad_v + i * s->E;
        pull_row(call->map, call->features, s->k + i * s->F, row);
        if (is_hidden(call, p->batch, p->token + i)) {
            memset(row, 0, s->F * sizeof(float));
            memset(value, 0, s->E * sizeof(float));
        }
        store(&call->grad_k, p->batch, p->token + i, p->head, call->features, row);
        store(&call->grad_v, p->batch, p->token + i, p->head, call->values, value);
    }
}

static void close_keys(const Call *call, Scratch *s, const Place *p) {
    if (is_first(call, p->segment))
        write_state(call, s, mu_of(call, call->grad_initial_mu, p), nu_of(call, call->grad_initial_nu, p));
}

static const Pass SUM_KEYS = {0, start_empty, sum_keys, leave_between},
                  SUM_QUERIES = {1, start_empty, sum_queries, leave_between},
                  FORWARDS = {0, open_forward, forward, close_forward},
                  QUERIES = {0, open_queries, backward_queries, close_nothing},
                  KEYS = {1, open_keys, backward_keys, close_keys};

/* One pass over the `side_by_side` heads that task number `task` stands for. */
static void walk(const Call *call, const Pass *pass, Int task, const Scratch *scratch) {
    const Int blocks = (call->heads + call->side_by_side - 1) / call->side_by_side;
    const Int segment = task / blocks, first = task % blocks * call->side_by_side;
    const Int last = least(first + call->side_by_side, call->heads), *row = call->segments + 4 * segment;
    const Int chunks = (row[2] + C - 1) / C;
    for (Int step = -1; step <= chunks; step++) {
        const Int chunk = pass->from_the_back ? chunks - 1 - step : step;
        for (Int head = first; head < last; head++) {
            Place p = {segment, head, row[0], row[1], row[2], row[3], .ahead = pass->from_the_back ? -C : C};
            p.token = p.first + chunk * C;
            p.count = least(C, p.tokens - chunk * C);
            Scratch s = *scratch;
            s.mu += (head - first) * s.F * s.E;
            s.mu_columns += (head - first) * s.E * s.F;
            s.nu += (head - first) * s.F;
            (step < 0 ? pass->open : step < chunks ? pass->chunk : pass->close)(call, &s, &p);
        }
    }
}

/* -- what Python calls --------------------------------------------------------------------------------------------- */

enum { FORWARD, BACKWARD };

/* Everything of one call; 1 if memory ran out. */
int hf_linattn_run(const Call *call, int direction) {
    const Int tasks = call->count * ((call->heads + call->side_by_side - 1) / call->side_by_side);
    const Int passes = direction == FORWARD ? 1 : 2;
    const Tensor *results[] = {&call->out, &call->grad_q, &call->grad_k, &call->grad_v};
    for (int i = direction; i < (direction == FORWARD ? 1 : 4); i++)
        prefer_large_pages(results[i], call->batch, call->tokens);
    /* of[0] goes over keys from the front, of[1] over queries from the back; each has its own states between segments */
    Call of[] = {*call, *call};
    if (call->between) of[1].between += call->count * call->heads * state_size(call);
    int failed = 0;
#pragma omp parallel num_threads(call->threads)
    {
        Scratch s = open_scratch(call);
        float *carry = malloc(state_size(call) * sizeof(float));
        if (!s.memory || !carry)
#pragma omp atomic write
            failed = 1;
#pragma omp barrier
        if (!failed && call->between) {
#pragma omp for schedule(dynamic, 1)
            for (Int task = 0; task < tasks * passes; task++)
                walk(&of[task / tasks], task < tasks ? &SUM_KEYS : &SUM_QUERIES, task % tasks, &s);
#pragma omp for schedule(dynamic, 1)
            for (Int task = 0; task < call->heads * passes; task++) {
                const int of_keys = task < call->heads;
                scan_segments(&of[!of_keys], task % call->heads, of_keys, of_keys ? call->initial_mu : call->final_mu,
                              of_keys ? call->initial_nu : call->final_nu, carry);
            }
        }
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (Int task = 0; task < tasks * passes; task++)
                walk(&of[task / tasks], direction == FORWARD ? &FORWARDS : task < tasks ? &QUERIES : &KEYS,
                     task % tasks, &s);
        }
        free(carry);
        free(s.memory);
    }
    return failed;
}
