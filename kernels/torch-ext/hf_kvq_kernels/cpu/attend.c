// Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
//
// Attention of a few queries over exact tokens and pages of packed codes: one softmax, nothing is dequantized.
//
//     q . (low + code * step) = (q * step) . code + q . low            keys per channel
//     sum_t p_t (low_t + code_t * step_t) = sum_t (p_t * step_t) code_t + sum_t p_t low_t
//
// What codes are multiplied with is rounded to 16 bits of its largest magnitude, as a high and a low byte, so that an
// inner product is two passes of 8-bit multiplication with exact sums. ROWS_AT_ONCE queries of a KV head share the
// unpacking of its codes.
#include <math.h>
#include <stdlib.h>

#include "numbers.h"

enum { NO_MASK, BOOL_MASK, ADDITIVE_MASK };

typedef struct {
    const void *data;
    int64_t kind, row, head, query, token;  // strides in elements
} Mask;

typedef struct {
    const uint8_t *keys, *values;
    int64_t tokens, dtype;
    int64_t key_row, key_head, key_token, value_row, value_head, value_token;  // strides in elements
    Mask mask;
} Segment;

// Channels of keys with more bits than 2, of one row; sorted by page, head and channel.
typedef struct {
    const uint8_t *low, *low_channel, *exact, *exact_channel;
    const int16_t *counts;  // [pages, heads, 2]
} Tiers;

typedef struct {
    const uint8_t *query;  // [rows, heads, queries of a KV head, key_dim]
    float *out, *lse;      // [rows, heads, queries of a KV head, value_dim] and without value_dim
    int64_t rows, heads, group, queries, key_dim, value_dim, query_dtype;
    double scaling, softcap;
    int64_t threads;
    // Pages.
    const uint8_t *pages;
    int64_t n_pages, row_stride, page_stride;
    const int32_t *starts;  // [n_pages + 1], or NULL if all pages are full
    int64_t tokens, key_bits, value_bits, key_per_channel, key_group, value_group, dtype;
    Mask mask;
    int64_t n_tiers, n_segments;
    // Followed by `n_tiers` Tiers and `n_segments` Segments.
} Problem;

// Exact tokens are taken so many at a time, and their channels in PAIRs of vectors.
enum { EXACT_TOKENS = 32, PAIR = 2 * LANES };

INLINE int64_t padded(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

// --- numbers ---------------------------------------------------------------------------------------------------------

// exp(x) for x <= 0, to about 1e-7; exactly 0 below -87, and NaN for NaN.
INLINE floats exp_negative(floats x) {
    const ints small = x < -87.0f;
    const floats clamped = (floats)(((ints)x & ~small) | ((ints)((floats){0} - 87.0f) & small));
    const floats rounded = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: its lowest bits are the integer
    const floats n = rounded - 12582912.0f;
    const floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    floats y = r * 0.00139f + 0.00833345205f;
    y = y * r + 0.0416664854f;
    y = y * r + 0.166666672f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    y *= (floats)(((ints)rounded - 0x4b400000 + 127) << 23);
    return (floats)((ints)y & ~small);
}

INLINE float exp_of(float x) { return exp_negative((floats){0} + x)[0]; }

// x = scale * (256 * high + low), to 16 bits of the largest |x|; returns scale. `to` becomes [quads, high and low, 4],
// up to a whole number of LANES; `n` is a multiple of 4. NaN and inf go into *broken.
INLINE float split(const float *restrict x, int64_t n, int8_t *restrict to, float *broken) {
    floats most = {0}, probe = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const floats y = load_floats(x + i);
        most = larger(most, (floats)((ints)y & 0x7fffffff));
        probe += y * 0.0f;
    }
    float largest = largest_of(most), rest = sum_of(probe);
    for (int64_t k = i; k < n; k++) {
        largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        rest += x[k] * 0.0f;
    }
    *broken += rest;
    // Of numbers this small nothing is lost by taking them for zero.
    const float inverse = largest > 1e-30f && largest < 3e38f ? 32512.0f / largest : 0.0f;
    for (i = 0; i < n; i += LANES) {
        floats y = {0};
        if (n - i >= LANES)
            y = load_floats(x + i);
        else
            memcpy(&y, x + i, 4 * (size_t)(n - i));
        store_quads(to + 2 * i, (ints)(y * inverse + 12582912.0f) - 0x4b400000);
    }
    return largest / 32512.0f;
}

// product = x * factor; returns x . other.
INLINE float multiply(const float *restrict x, const float *restrict factor, const float *restrict other, int64_t n,
                      float *restrict product) {
    floats sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const floats y = load_floats(x + i);
        store_floats(product + i, y * load_floats(factor + i));
        sum += y * load_floats(other + i);
    }
    float total = sum_of(sum);
    for (; i < n; i++) {
        product[i] = x[i] * factor[i];
        total += x[i] * other[i];
    }
    return total;
}

// Minimum and step of `n` groups.
INLINE void ranges(const uint8_t *low, const uint8_t *high, int64_t dtype, int64_t n, int64_t bits, float *restrict minimum,
                   float *restrict step) {
    const float levels = (float)((1 << bits) - 1);
    to_floats(low, dtype, minimum, n);
    to_floats(high, dtype, step, n);
    for (int64_t i = 0; i < n; i++) step[i] = (step[i] - minimum[i]) / levels;
}

// --- one step of a softmax over all tokens -----------------------------------------------------------------------------

// Work space of one thread, and the running result of its queries.
typedef struct {
    int64_t count;                      // queries, at most ROWS_AT_ONCE
    int64_t first;                      // the first of them among those of the KV head
    float *query;                       // [count, key_dim], scaled
    float *scores;                      // [count, tokens]
    float *query_flat, *query_pairs;    // the same, padded, for exact tokens; see load_pair
    float *out;                         // [count, value_dim], what packed values come to
    float *out_flat, *out_pairs;        // padded, what exact values come to
    float *lines;                       // [EXACT_TOKENS, padded dim]
    float *scratch;                     // [max(key_dim, ROWS_AT_ONCE * tokens)]
    float *minimum, *step;              // per group
    float *line;                        // [2, tokens]
    int64_t stride;                     // bytes of the coefficients of a query
    int8_t *coefficients;               // [count, stride]
    float peak[ROWS_AT_ONCE], weight[ROWS_AT_ONCE];
    // Coefficients that do not change with the page: queries by groups of channels.
    float *query_scale, *query_sum;     // [count, groups]
    int8_t *query_coefficients;         // [count, stride]
} State;

static void apply_mask(const Problem *p, const Mask *mask, int64_t row, int64_t head, int64_t token, int64_t n, State *s,
                       int64_t stride) {
    for (int64_t r = 0; r < s->count; r++) {
        float *scores = s->scores + r * stride;
        if (p->softcap > 0)
            for (int64_t t = 0; t < n; t++) scores[t] = (float)p->softcap * tanhf(scores[t] / (float)p->softcap);
        if (mask->kind == NO_MASK) continue;
        int64_t query_head = head * p->group + (s->first + r) / p->queries, query = (s->first + r) % p->queries;
        int64_t start = row * mask->row + query_head * mask->head + query * mask->query + token * mask->token;
        if (mask->kind == BOOL_MASK)
            for (int64_t t = 0; t < n; t++)
                scores[t] = ((const uint8_t *)mask->data)[start + t * mask->token] ? scores[t] : -INFINITY;
        else
            for (int64_t t = 0; t < n; t++) scores[t] += ((const float *)mask->data)[start + t * mask->token];
    }
}

INLINE void rescale(float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

// Scores [count, stride] of `n` tokens -> weights, in place, and rescale what was summed so far; up to a whole number of
// LANES, weights of tokens that are not there are 0. False if no token is visible.
static int softmax_step(const Problem *p, State *s, int64_t n, int64_t stride) {
    int any = 0;
    for (int64_t r = 0; r < s->count; r++) {
        float *scores = s->scores + r * stride;
        for (int64_t t = n; t % LANES; t++) scores[t] = -INFINITY;
        floats most = {0};
        most -= INFINITY;
        ints broken = {0};
        for (int64_t t = 0; t < n; t += LANES) {
            const floats x = load_floats(scores + t);
            most = larger(x, most);  // NaN loses
            broken |= x != x;
        }
        float peak = largest_of(most);
        peak = peak > s->peak[r] ? peak : s->peak[r];
        floats sum = {0};
        if (peak == -INFINITY && sum_of(__builtin_convertvector(broken, floats)) == 0) {
            for (int64_t t = 0; t < n; t += LANES) store_floats(scores + t, sum);
            continue;
        }
        any = 1;
        const float shift = peak == -INFINITY ? 0 : peak;
        for (int64_t t = 0; t < n; t += LANES) {
            const floats weight = exp_negative(load_floats(scores + t) - shift);
            store_floats(scores + t, weight);
            sum += weight;
        }
        if (peak != s->peak[r]) {
            const float scale = s->peak[r] == -INFINITY ? 0 : exp_of(s->peak[r] - peak);
            const int64_t pad = padded(p->value_dim);
            s->weight[r] *= scale;
            rescale(s->out + r * p->value_dim, p->value_dim, scale);
            rescale(s->out_flat + r * pad, pad, scale);
            rescale(s->out_pairs + r * pad, pad, scale);
            s->peak[r] = peak;
        }
        s->weight[r] += sum_of(sum);
    }
    return any;
}

// --- exact tokens ----------------------------------------------------------------------------------------------------

// Ask for memory that is read soon. It comes in pieces of pages, too short for the processor to see a pattern in them.
INLINE void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

// The same for the page after this one: it need not come as near yet.
INLINE void fetch_early(const uint8_t *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Lines of memory to ask for ahead of exact tokens.
enum { AHEAD = 12 };

// A PAIR of numbers of a line of `dim`: of BF16 ("halves") the even ones and the odd ones, of floats the first and the
// second half. What lies behind a line of BF16 is not touched; floats are padded.
INLINE void load_pair(const uint8_t *line, int64_t at, int64_t dim, const int halves, floats *a, floats *b) {
    if (halves) {
        const words x = dim - at >= PAIR ? load_words(line + 2 * at) : load_some_words(line + 2 * at, (int)(dim - at) / 2);
        *a = (floats)(x << 16);
        *b = (floats)(x & 0xffff0000u);
    } else {
        *a = load_floats((const float *)line + at);
        *b = load_floats((const float *)line + at + LANES);
    }
}

// FUNCTION(..., COUNT) with a number of queries that the compiler knows.
#define FOR_COUNT(COUNT, FUNCTION, ...)                                 \
    switch (COUNT) {                                                    \
        case 1: FUNCTION(__VA_ARGS__, 1); break;                        \
        case 2: FUNCTION(__VA_ARGS__, 2); break;                        \
        case 3: FUNCTION(__VA_ARGS__, ROWS_AT_ONCE < 3 ? 1 : 3); break; \
        default: FUNCTION(__VA_ARGS__, ROWS_AT_ONCE); break;            \
    }

INLINE void exact_scores(const uint8_t *keys, int64_t key_stride, int64_t n, int64_t dim, const float *query,
                         float *scores, const int halves, const int count) {
    const int64_t pad = padded(dim);
    for (int64_t t = 0; t < n; t++) {
        fetch(keys + (t + AHEAD) * key_stride, (halves ? 2 : 4) * dim);
        floats sum[ROWS_AT_ONCE];
        for (int r = 0; r < count; r++) sum[r] = (floats){0};
        for (int64_t d = 0; d < dim; d += PAIR) {
            floats a, b;
            load_pair(keys + t * key_stride, d, dim, halves, &a, &b);
            for (int r = 0; r < count; r++)
                sum[r] += a * load_floats(query + r * pad + d) + b * load_floats(query + r * pad + d + LANES);
        }
        for (int r = 0; r < count; r++) scores[r * EXACT_TOKENS + t] = sum_of(sum[r]);
    }
}

INLINE void exact_values(const uint8_t *values, int64_t value_stride, int64_t n, int64_t dim, const float *weights,
                         float *out, const int halves, const int count) {
    const int64_t pad = padded(dim);
    for (int64_t d = 0; d < dim; d += PAIR) {
        floats sum[ROWS_AT_ONCE][2];
        for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = (floats){0};
        for (int64_t t = 0; t < n; t++) {
            floats a, b;
            load_pair(values + t * value_stride, d, dim, halves, &a, &b);
            for (int r = 0; r < count; r++) {
                sum[r][0] += a * weights[r * EXACT_TOKENS + t];
                sum[r][1] += b * weights[r * EXACT_TOKENS + t];
            }
        }
        for (int r = 0; r < count; r++)
            for (int half = 0; half < 2; half++) {
                float *to = out + r * pad + d + half * LANES;
                store_floats(to, load_floats(to) + sum[r][half]);
            }
    }
}

// Lines of numbers as floats, padded with zeros, behind each other.
static const uint8_t *as_floats(const uint8_t *lines, int64_t stride, int64_t n, int64_t dim, int64_t dtype, float *to) {
    const int64_t pad = padded(dim);
    for (int64_t t = 0; t < n; t++) {
        to_floats(lines + t * stride, dtype, to + t * pad, dim);
        memset(to + t * pad + dim, 0, 4 * (size_t)(pad - dim));
    }
    return (const uint8_t *)to;
}

INLINE void fetch_lines(const uint8_t *lines, int64_t stride, int64_t n, int64_t bytes) {
    for (int64_t t = 0; t < n; t++) fetch(lines + t * stride, bytes);
}

static void exact_tokens(const Problem *p, State *s, const Mask *mask, int64_t row, int64_t head, int64_t first,
                         const uint8_t *keys, int64_t key_stride, const uint8_t *values, int64_t value_stride,
                         int64_t tokens, int64_t dtype) {
    for (int64_t start = 0; start < tokens; start += EXACT_TOKENS) {
        const int64_t n = least(EXACT_TOKENS, tokens - start);
        const uint8_t *k = keys + start * key_stride, *v = values + start * value_stride;
        fetch_lines(v, value_stride, n, p->value_dim * size_of(dtype));
        if (dtype == BF16 && p->key_dim % 2 == 0) {
            FOR_COUNT(s->count, exact_scores, k, key_stride, n, p->key_dim, s->query_pairs, s->scores, 1)
        } else {
            k = as_floats(k, key_stride, n, p->key_dim, dtype, s->lines);
            FOR_COUNT(s->count, exact_scores, k, 4 * padded(p->key_dim), n, p->key_dim, s->query_flat, s->scores, 0)
        }
        apply_mask(p, mask, row, head, first + start, n, s, EXACT_TOKENS);
        if (!softmax_step(p, s, n, EXACT_TOKENS)) continue;
        if (dtype == BF16 && p->value_dim % 2 == 0) {
            FOR_COUNT(s->count, exact_values, v, value_stride, n, p->value_dim, s->scores, s->out_pairs, 1)
        } else {
            v = as_floats(v, value_stride, n, p->value_dim, dtype, s->lines);
            FOR_COUNT(s->count, exact_values, v, 4 * padded(p->value_dim), n, p->value_dim, s->scores, s->out_flat, 0)
        }
    }
}

// --- packed tokens ---------------------------------------------------------------------------------------------------

// STEP(A, B, TWO) for the words of a run of `N` lanes, which lie at `at`: A, and B if there are more than LANES.
#define FOR_SIZE(N, STEP)                                                  \
    if (N == 2 * LANES) {                                                  \
        STEP(load_words(at), load_words(at + VB), 1)                       \
    } else if (N == LANES) {                                               \
        STEP(load_words(at), (words){0}, 0)                                \
    } else if (N > LANES) {                                                \
        STEP(load_words(at), load_some_words(at + VB, N - LANES), 1)       \
    } else {                                                               \
        STEP(load_some_words(at, N), (words){0}, 0)                        \
    }

// Sums of up to 2 * LANES lanes, by query: with high and with low coefficients.
typedef ints Totals[ROWS_AT_ONCE][2][2];

INLINE void store_sums(Totals total, const int count, float *to) {
    for (int r = 0; r < count; r++)
        for (int t = 0; t < 2; t++) {
            const floats high = __builtin_convertvector(total[r][t][0], floats);
            store_floats(to + (2 * r + t) * LANES, 256.0f * high + __builtin_convertvector(total[r][t][1], floats));
        }
}

// Codes of up to 2 * LANES tokens of one plane times coefficients: sums[r][hl][lane]. `quads` steps of four channels.
// As many bytes as these codes take are fetched from `next`, a share with each step.
INLINE void key_sums(const uint8_t *codes, int64_t step, int64_t quads, int n, const uint8_t *next,
                     const int8_t *coefficients, int64_t stride, float *restrict sums, const int shift,
                     const uint32_t mask, const int count) {
    Totals total;
    for (int r = 0; r < count; r++) total[r][0][0] = total[r][0][1] = total[r][1][0] = total[r][1][1] = (ints){0};
    const int wide = mask == 0xffffffffu, bits = wide ? 8 : mask == 0x0f0f0f0fu ? 4 : 2, share = n * bits / 2;
#define STEP(A, B, TWO)                                                                  \
    for (int64_t e = 0; e < quads; e++) {                                                \
        const uint8_t *at = codes + e * step;                                            \
        fetch_early(next + e * share, share);                                            \
        words a = (A), b = (B);                                                          \
        a = (a >> shift) & mask;                                                         \
        b = (b >> shift) & mask;                                                         \
        for (int r = 0; r < count; r++) {                                                \
            const int8_t *c = coefficients + r * stride + 8 * e;                         \
            ints h = broadcast(c), l = broadcast(c + 4);                                 \
            total[r][0][0] = dot4(total[r][0][0], a, h, wide);                           \
            total[r][0][1] = dot4(total[r][0][1], a, l, wide);                           \
            if (TWO) {                                                                   \
                total[r][1][0] = dot4(total[r][1][0], b, h, wide);                       \
                total[r][1][1] = dot4(total[r][1][1], b, l, wide);                       \
            }                                                                            \
        }                                                                                \
    }
    FOR_SIZE(n, STEP)
#undef STEP
    store_sums(total, count, sums);
}

static void key_sums_of(const uint8_t *codes, int64_t step, int64_t quads, int n, int shift, int64_t bits,
                        const uint8_t *next, const int8_t *coefficients, int64_t stride, int64_t count, float *sums) {
#define CALL(SHIFT, MASK) \
    FOR_COUNT(count, key_sums, codes, step, quads, n, next, coefficients, stride, sums, SHIFT, MASK)
    if (bits == 8) {
        CALL(0, 0xffffffffu)
    } else if (bits == 4) {
        if (shift == 0)
            CALL(0, 0x0f0f0f0fu)
        else
            CALL(4, 0x0f0f0f0fu)
    } else if (shift == 0) {
        CALL(0, 0x03030303u)
    } else if (shift == 2) {
        CALL(2, 0x03030303u)
    } else if (shift == 4) {
        CALL(4, 0x03030303u)
    } else {
        CALL(6, 0x03030303u)
    }
#undef CALL
}

// One head's part of a block.
typedef struct {
    const uint8_t *codes, *low, *high;
} Packed;

INLINE Packed packed(const uint8_t *block, int64_t heads, int64_t head, int64_t code_bytes, int64_t range_bytes) {
    const uint8_t *low = block + heads * code_bytes + head * range_bytes;
    return (Packed){block + head * code_bytes, low, low + heads * range_bytes};
}

// Tokens from `t` on that can be taken at once: of one plane, and before `end`.
INLINE int run_of(int64_t t, int64_t end, int64_t plane) {
    return (int)least(least(2 * LANES, end - t), plane - t % plane);
}

// Keys per channel: scores of one page, while the codes at `next` are fetched. `fine` lists `n_fine` channels whose codes
// are the upper half of 4-bit ones.
static void scores_per_channel(const Problem *p, State *s, Packed keys, const uint8_t *next, const uint8_t *fine,
                               int64_t n_fine) {
    const int64_t dim = p->key_dim, plane = p->tokens * p->key_bits / 8, line = dim * size_of(p->dtype);
    float sums[ROWS_AT_ONCE * 2 * LANES], scale[ROWS_AT_ONCE], bias[ROWS_AT_ONCE];
    for (int64_t g = 0; g < groups_of(p->tokens, p->key_group); g++) {
        ranges(keys.low + g * line, keys.high + g * line, p->dtype, dim, p->key_bits, s->minimum, s->step);
        // Their step is 4 / 15 of the range, not 1 / 3.
        for (int64_t i = 0; i < n_fine; i++) s->step[fine[i]] *= 0.8f;
        for (int64_t r = 0; r < s->count; r++) {
            bias[r] = multiply(s->query + r * dim, s->step, s->minimum, dim, s->scratch);
            scale[r] = split(s->scratch, dim, s->coefficients + r * s->stride, &bias[r]);
        }
        const int64_t end = least(p->tokens, (g + 1) * p->key_group);
        for (int64_t t = g * p->key_group; t < end;) {
            int n = run_of(t, end, plane), shift = (int)(t / plane * p->key_bits);
            key_sums_of(keys.codes + t % plane * 4, plane * 4, dim / 4, n, shift, p->key_bits,
                        next + t * dim * p->key_bits / 8, s->coefficients, s->stride, s->count, sums);
            for (int64_t r = 0; r < s->count; r++)
                for (int i = 0; i < n; i++)
                    s->scores[r * p->tokens + t + i] = scale[r] * sums[2 * r * LANES + i] + bias[r];
            t += n;
        }
    }
}

// Keys per token: scores of one page, while the codes at `next` are fetched.
static void scores_per_token(const Problem *p, State *s, Packed keys, const uint8_t *next) {
    const int64_t dim = p->key_dim, plane = p->tokens * p->key_bits / 8, groups = groups_of(dim, p->key_group);
    float sums[ROWS_AT_ONCE * 2 * LANES];
    ranges(keys.low, keys.high, p->dtype, p->tokens * groups, p->key_bits, s->minimum, s->step);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * p->key_group, quads = (least(dim, from + p->key_group) - from) / 4;
        for (int64_t t = 0; t < p->tokens;) {
            int n = run_of(t, p->tokens, plane), shift = (int)(t / plane * p->key_bits);
            key_sums_of(keys.codes + from * plane + t % plane * 4, plane * 4, quads, n, shift, p->key_bits,
                        next + from * plane + t * quads * p->key_bits / 2, s->query_coefficients + 2 * from, s->stride,
                        s->count, sums);
            for (int64_t r = 0; r < s->count; r++) {
                const float scale = s->query_scale[r * groups + g], sum = s->query_sum[r * groups + g];
                float *scores = s->scores + r * p->tokens + t;
                for (int i = 0; i < n; i++) {
                    const int64_t at = (t + i) * groups + g;
                    float score = scale * sums[2 * r * LANES + i] * s->step[at] + sum * s->minimum[at];
                    scores[i] = g ? scores[i] + score : score;
                }
            }
            t += n;
        }
    }
}

// Add a channel to the scores: its numbers in s->line, times a coefficient per group of tokens and query.
INLINE void add_channel(const Problem *p, State *s, const float *coefficients, int64_t group, const int count) {
    for (int64_t first = 0; first < p->tokens; first += group, coefficients += count) {
        const int64_t end = least(p->tokens, first + group);
        int64_t t = first;
        for (; t + LANES <= end; t += LANES) {
            const floats x = load_floats(s->line + t);
            for (int r = 0; r < count; r++) {
                float *scores = s->scores + r * p->tokens + t;
                store_floats(scores, load_floats(scores) + x * coefficients[r]);
            }
        }
        for (; t < end; t++)
            for (int r = 0; r < count; r++) s->scores[r * p->tokens + t] += s->line[t] * coefficients[r];
    }
}

// The lower two bits of UINT4 channels, in planes like all codes, as numbers.
INLINE void low_codes(const uint8_t *restrict codes, int64_t plane, float *restrict line) {
    for (int k = 0; k < 4; k++, line += plane) {
        int64_t b = 0;
        for (; b + LANES <= plane; b += LANES)
            store_floats(line + b, __builtin_convertvector(widen(codes + b) >> 2 * k & 3, floats));
        for (; b < plane; b++) line[b] = (float)(codes[b] >> 2 * k & 3);
    }
}

// Channels with more bits: `n_low` with the lower two bits of UINT4 channels, and `n_exact` BF16 channels.
INLINE void scores_of_tiers(const Problem *p, State *s, Packed keys, const Tiers *tiers, int64_t low, int64_t n_low,
                            int64_t exact, int64_t n_exact, const int count) {
    const int64_t dim = p->key_dim, size = size_of(p->dtype), groups = groups_of(p->tokens, p->key_group);
    for (int64_t i = low; i < low + n_low; i++) {
        const int64_t channel = tiers->low_channel[i];
        for (int64_t g = 0; g < groups; g++) {
            float minimum, step;
            const int64_t at = (g * dim + channel) * size;
            ranges(keys.low + at, keys.high + at, p->dtype, 1, 4, &minimum, &step);
            for (int r = 0; r < count; r++) s->scratch[g * count + r] = s->query[r * dim + channel] * step;
        }
        low_codes(tiers->low + i * p->tokens / 4, p->tokens / 4, s->line);
        add_channel(p, s, s->scratch, p->key_group, count);
    }
    for (int64_t i = exact; i < exact + n_exact; i++) {
        to_floats(tiers->exact + i * p->tokens * size, p->dtype, s->line, p->tokens);
        for (int r = 0; r < count; r++) s->scratch[r] = s->query[r * dim + tiers->exact_channel[i]];
        add_channel(p, s, s->scratch, p->tokens, count);
    }
}

// Codes of up to 2 * LANES channels times the weights of all tokens; see `key_sums`.
INLINE void value_sums(const uint8_t *codes, int64_t dim, int64_t plane, int n, const uint8_t *next,
                       const int8_t *coefficients, int64_t stride, float *restrict sums, const int bits,
                       const int count) {
    const int planes = 8 / bits, wide = bits == 8;
    const uint32_t mask = bits == 8 ? 0xffffffffu : bits == 4 ? 0x0f0f0f0fu : 0x03030303u;
    Totals total;
    for (int r = 0; r < count; r++) total[r][0][0] = total[r][0][1] = total[r][1][0] = total[r][1][1] = (ints){0};
#define STEP(A, B, TWO)                                                                         \
    for (int64_t j = 0; j < plane / 4; j++) {                                                   \
        const uint8_t *at = codes + j * dim * 4;                                                \
        fetch_early(next + 4 * n * j, 4 * n);                                                   \
        words a = (A), b = (B);                                                                 \
        for (int k = 0; k < planes; k++) {                                                      \
            const int8_t *quad = coefficients + 2 * k * plane + 8 * j;                          \
            words x = (a >> (k * bits)) & mask, y = (b >> (k * bits)) & mask;                   \
            for (int r = 0; r < count; r++) {                                                   \
                ints h = broadcast(quad + r * stride), l = broadcast(quad + r * stride + 4);    \
                total[r][0][0] = dot4(total[r][0][0], x, h, wide);                              \
                total[r][0][1] = dot4(total[r][0][1], x, l, wide);                              \
                if (TWO) {                                                                      \
                    total[r][1][0] = dot4(total[r][1][0], y, h, wide);                          \
                    total[r][1][1] = dot4(total[r][1][1], y, l, wide);                          \
                }                                                                               \
            }                                                                                   \
        }                                                                                       \
    }
    FOR_SIZE(n, STEP)
#undef STEP
    store_sums(total, count, sums);
}

static void value_sums_of(const uint8_t *codes, int64_t dim, int64_t plane, int n, int64_t bits, const uint8_t *next,
                          const int8_t *coefficients, int64_t stride, int64_t count, float *sums) {
#define CALL(BITS) FOR_COUNT(count, value_sums, codes, dim, plane, n, next, coefficients, stride, sums, BITS)
    if (bits == 8) {
        CALL(8)
    } else if (bits == 4) {
        CALL(4)
    } else {
        CALL(2)
    }
#undef CALL
}

// Add the values of one page, weighted by s->scores, to the output, while the codes at `next` are fetched.
static void add_values(const Problem *p, State *s, Packed values, const uint8_t *next, int64_t held) {
    const int64_t dim = p->value_dim, plane = p->tokens * p->value_bits / 8, groups = groups_of(dim, p->value_group);
    float sums[ROWS_AT_ONCE * 2 * LANES], scale[ROWS_AT_ONCE], bias[ROWS_AT_ONCE];
    ranges(values.low, values.high, p->dtype, p->tokens * groups, p->value_bits, s->minimum, s->step);
    for (int64_t g = 0; g < groups; g++) {
        const float *minimum = s->minimum, *step = s->step;
        if (groups > 1) {
            for (int64_t t = 0; t < p->tokens; t++) {
                s->line[t] = s->minimum[t * groups + g];
                s->line[p->tokens + t] = s->step[t * groups + g];
            }
            minimum = s->line;
            step = s->line + p->tokens;
        }
        for (int64_t r = 0; r < s->count; r++) {
            bias[r] = multiply(s->scores + r * p->tokens, step, minimum, held, s->scratch);
            for (int64_t t = held; t < p->tokens; t++) s->scratch[t] = 0;
            scale[r] = split(s->scratch, p->tokens, s->coefficients + r * s->stride, &bias[r]);
        }
        const int64_t end = least(dim, (g + 1) * p->value_group);
        for (int64_t d = g * p->value_group; d < end;) {
            int n = (int)least(2 * LANES, end - d);
            value_sums_of(values.codes + d * 4, dim, plane, n, p->value_bits, next + d * plane, s->coefficients,
                          s->stride, s->count, sums);
            for (int64_t r = 0; r < s->count; r++)
                for (int i = 0; i < n; i++) s->out[r * dim + d + i] += scale[r] * sums[2 * r * LANES + i] + bias[r];
            d += n;
        }
    }
}

INLINE void fetch_ranges(Packed x, int64_t range_bytes) {
    fetch_early(x.low, range_bytes);
    fetch_early(x.high, range_bytes);
}

static void packed_page(const Problem *p, State *s, const Tiers *tiers, const int64_t *before, int64_t row, int64_t head,
                        int64_t page) {
    const uint8_t *keys = p->pages + row * p->row_stride + page * p->page_stride;
    const int64_t size = size_of(p->dtype), first = p->starts ? p->starts[page] : page * p->tokens;
    const int64_t held = p->starts ? p->starts[page + 1] - first : p->tokens;
    if (p->key_bits == 16) {
        const uint8_t *values = keys + p->heads * p->tokens * p->key_dim * size;
        exact_tokens(p, s, &p->mask, row, head, first, keys + head * p->tokens * p->key_dim * size, p->key_dim * size,
                     values + head * p->tokens * p->value_dim * size, p->value_dim * size, held, p->dtype);
        return;
    }
    const int64_t key_codes = p->tokens * p->key_bits / 8 * p->key_dim, value_codes = p->tokens * p->value_bits / 8 * p->value_dim;
    const int64_t key_ranges = size * (p->key_per_channel ? groups_of(p->tokens, p->key_group) * p->key_dim
                                                          : groups_of(p->key_dim, p->key_group) * p->tokens);
    const int64_t value_ranges = size * groups_of(p->value_dim, p->value_group) * p->tokens;
    const uint8_t *values = keys + p->heads * (key_codes + 2 * key_ranges);
    const Packed k = packed(keys, p->heads, head, key_codes, key_ranges);
    const Packed v = packed(values, p->heads, head, value_codes, value_ranges);
    // What comes next: this head's next page, or the next head's first one. It is fetched in the order of its addresses
    // and little by little, as the processor follows only so many requests at a time.
    const int last = page + 1 == p->n_pages;
    const int64_t further = last ? -page * p->page_stride : p->page_stride;
    const int64_t next_head = least(head + last, p->heads - 1);
    const Packed next_k = packed(keys + further, p->heads, next_head, key_codes, key_ranges);
    const Packed next_v = packed(values + further, p->heads, next_head, value_codes, value_ranges);
    fetch_ranges(next_k, key_ranges);
    if (!p->key_per_channel)
        scores_per_token(p, s, k, next_k.codes);
    else if (!tiers)
        scores_per_channel(p, s, k, next_k.codes, NULL, 0);
    else {
        const int64_t *at = before + 2 * (page * p->heads + head), low = at[0], exact = at[1];
        scores_per_channel(p, s, k, next_k.codes, tiers->low_channel + low, at[2] - low);
        FOR_COUNT(s->count, scores_of_tiers, p, s, k, tiers, low, at[2] - low, exact, at[3] - exact)
    }
    apply_mask(p, &p->mask, row, head, first, held, s, p->tokens);
    fetch_ranges(next_v, value_ranges);
    if (softmax_step(p, s, held, p->tokens)) add_values(p, s, v, next_v.codes, held);
}

// --- the whole problem -----------------------------------------------------------------------------------------------

static float *take(char **space, int64_t n) {
    float *taken = (float *)*space;
    *space += (4 * n + 63) / 64 * 64;
    return taken;
}

// Lay the work space out; with space == NULL only its size is found.
static int64_t lay_out(const Problem *p, State *s, char *space) {
    char *at = space;
    const int64_t n = ROWS_AT_ONCE, groups = groups_of(p->key_dim, most(1, p->key_group));
    const int64_t all = most(most(p->key_dim, p->tokens * groups), p->tokens * groups_of(p->value_dim, most(1, p->value_group)));
    s->query = take(&at, n * p->key_dim);
    s->scores = take(&at, n * most(p->tokens, EXACT_TOKENS));
    s->query_flat = take(&at, n * padded(p->key_dim));
    s->query_pairs = take(&at, n * padded(p->key_dim));
    s->out_flat = take(&at, n * padded(p->value_dim));
    s->out_pairs = take(&at, n * padded(p->value_dim));
    s->lines = take(&at, EXACT_TOKENS * padded(most(p->key_dim, p->value_dim)));
    s->scratch = take(&at, most(p->key_dim, n * p->tokens));
    s->minimum = take(&at, all);
    s->step = take(&at, all);
    s->line = take(&at, 2 * p->tokens);
    // Coefficients that start within a vector are written up to a whole vector, too.
    s->stride = 2 * (padded(most(p->key_dim, p->tokens)) + LANES);
    s->coefficients = (int8_t *)take(&at, n * s->stride / 4);
    s->query_scale = take(&at, n * groups);
    s->query_sum = take(&at, n * groups);
    s->query_coefficients = (int8_t *)take(&at, n * s->stride / 4);
    return at - space;
}

static void begin(const Problem *p, State *s, int64_t row, int64_t head, int64_t block, float *out) {
    const int64_t all = p->group * p->queries, dim = p->key_dim;
    s->first = block * ROWS_AT_ONCE;
    s->count = least(ROWS_AT_ONCE, all - s->first);
    s->out = out;
    memset(out, 0, 4 * (size_t)(s->count * p->value_dim));
    const uint8_t *query = p->query + ((row * p->heads + head) * all + s->first) * dim * size_of(p->query_dtype);
    to_floats(query, p->query_dtype, s->query, s->count * dim);
    rescale(s->query, s->count * dim, (float)p->scaling);
    const int64_t pad = padded(dim);
    for (int64_t r = 0; r < s->count; r++) {
        s->peak[r] = -INFINITY;
        s->weight[r] = 0;
        for (int64_t d = 0; d < pad; d++) {
            const int64_t pair = d / PAIR * PAIR + d % 2 * LANES + d % PAIR / 2;
            s->query_flat[r * pad + d] = s->query_pairs[r * pad + pair] = d < dim ? s->query[r * dim + d] : 0;
        }
    }
    memset(s->out_flat, 0, 4 * (size_t)(ROWS_AT_ONCE * padded(p->value_dim)));
    memset(s->out_pairs, 0, 4 * (size_t)(ROWS_AT_ONCE * padded(p->value_dim)));
    if (p->key_per_channel || p->key_bits == 16 || !p->n_pages) return;
    const int64_t groups = groups_of(dim, p->key_group);
    for (int64_t r = 0; r < s->count; r++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t from = r * dim + g * p->key_group, n = least(p->key_group, dim - g * p->key_group);
            float sum = 0;
            for (int64_t d = 0; d < n; d++) sum += s->query[from + d];
            int8_t *to = s->query_coefficients + r * s->stride + 2 * g * p->key_group;
            s->query_scale[r * groups + g] = split(s->query + from, n, to, &sum);
            s->query_sum[r * groups + g] = sum;
        }
}

// Put what exact values came to with the rest.
static void gather(const Problem *p, State *s) {
    const int64_t dim = p->value_dim, pad = padded(dim);
    for (int64_t r = 0; r < s->count; r++)
        for (int64_t d = 0; d < dim; d++) {
            const int64_t pair = d / PAIR * PAIR + d % 2 * LANES + d % PAIR / 2;
            s->out[r * dim + d] += s->out_flat[r * pad + d] + s->out_pairs[r * pad + pair];
        }
}

// Parts of one softmax, [parts, count] with `stride` floats each: out[value_dim] of all queries, peaks, weights.
static void finish(const Problem *p, const float *parts, int64_t n_parts, int64_t stride, int64_t count, float *out,
                   float *lse) {
    const int64_t dim = p->value_dim;
    for (int64_t r = 0; r < count; r++) {
        float peak = -INFINITY, weight = 0;
        for (int64_t i = 0; i < n_parts; i++) {
            const float other = parts[i * stride + ROWS_AT_ONCE * dim + r];
            peak = other > peak ? other : peak;
        }
        float *restrict sum = out + r * dim;
        memset(sum, 0, 4 * (size_t)dim);
        for (int64_t i = 0; i < n_parts; i++) {
            const float *restrict part = parts + i * stride;
            const float own = part[ROWS_AT_ONCE * dim + r];
            // A part that sees nothing has no peak; it counts for nothing, unless it is NaN.
            const float scale = own == -INFINITY ? 0 : exp_of(own - peak);
            weight += scale * part[ROWS_AT_ONCE * dim + ROWS_AT_ONCE + r];
            for (int64_t d = 0; d < dim; d++) sum[d] += scale * part[r * dim + d];
        }
        const float inverse = weight == 0 ? 0 : 1 / weight;
        for (int64_t d = 0; d < dim; d++) sum[d] *= inverse;
        lse[r] = weight == 0 ? -INFINITY : peak + logf(weight);
    }
}

// Returns 0, or 1 if there is no memory.
int kvq_attend(const void *problem) {
    const Problem *p = (const Problem *)problem;
    const Tiers *tiers = (const Tiers *)(p + 1);
    const Segment *segments = (const Segment *)(tiers + p->n_tiers);
    const int64_t all = p->group * p->queries, blocks = groups_of(all, ROWS_AT_ONCE), units = p->rows * p->heads * blocks;
    // Exact tokens are a part of their own once pages are shared out among threads. How many parts there are does not
    // depend on the batch, so that a row gives the same bits alone and among others.
    int64_t page_parts = p->threads > 1 ? least(p->n_pages, groups_of(2 * p->threads, most(1, p->heads * blocks))) : 1;
    page_parts = most(1, page_parts);
    const int64_t parts = page_parts + (page_parts > 1), stride = ROWS_AT_ONCE * (p->value_dim + 2);
    State plan;
    const int64_t space = lay_out(p, &plan, NULL), cells = p->n_pages * p->heads;
    float *results = malloc(4 * (size_t)(units * parts * stride));
    char *memory = malloc((size_t)(space * p->threads + 64));
    int64_t *before = malloc(16 * (size_t)(p->n_tiers * (cells + 1) + 1));
    const int failed = !results || !memory || !before;
    for (int64_t row = 0; row < p->n_tiers && !failed; row++) {
        int64_t *at = before + 2 * row * (cells + 1);
        at[0] = at[1] = 0;
        for (int64_t i = 0; i < 2 * cells; i++) at[i + 2] = at[i] + tiers[row].counts[i];
    }
    const int64_t items = failed ? 0 : units * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)p->threads) if (p->threads > 1)
    for (int64_t item = 0; item < items; item++) {
        State s;
        lay_out(p, &s, (char *)(((uintptr_t)memory + 63) / 64 * 64) + this_thread() * space);
        const int64_t part = item % parts, unit = item / parts, block = unit % blocks;
        const int64_t head = unit / blocks % p->heads, row = unit / blocks / p->heads;
        const int64_t end = part < page_parts ? p->n_pages * (part + 1) / page_parts : 0;
        float *result = results + item * stride;
        begin(p, &s, row, head, block, result);
        for (int64_t page = p->n_pages * part / page_parts; page < end; page++)
            packed_page(p, &s, p->n_tiers ? tiers + row : NULL, before + 2 * row * (cells + 1), row, head, page);
        for (int64_t i = 0; i < p->n_segments && part == parts - 1; i++) {
            const Segment *x = segments + i;
            const int64_t size = size_of(x->dtype);
            exact_tokens(p, &s, &x->mask, row, head, 0, x->keys + (row * x->key_row + head * x->key_head) * size,
                         x->key_token * size, x->values + (row * x->value_row + head * x->value_head) * size,
                         x->value_token * size, x->tokens, x->dtype);
        }
        gather(p, &s);
        memcpy(result + ROWS_AT_ONCE * p->value_dim, s.peak, sizeof s.peak);
        memcpy(result + ROWS_AT_ONCE * (p->value_dim + 1), s.weight, sizeof s.weight);
    }
    for (int64_t unit = 0; unit < units && !failed; unit++) {
        const int64_t first = unit / blocks * all + unit % blocks * ROWS_AT_ONCE;
        finish(p, results + unit * parts * stride, parts, stride, least(ROWS_AT_ONCE, all - unit % blocks * ROWS_AT_ONCE),
               p->out + first * p->value_dim, p->lse + first);
    }
    free(results);
    free(memory);
    free(before);
    return failed;
}
