// Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
//
// Blocks of keys or values as packed codes, and packed codes at fewer bits. To the bit what hf_kvq.codecs makes; zeros may
// have another sign, and numbers below 2^-126 another last bit.
#include <stdlib.h>

#include "numbers.h"

enum { AS_IT_IS, QUADS_OF_CHANNELS, QUADS_OF_ROWS };

typedef struct {
    const uint8_t *x;  // [rows, blocks, heads, tokens, dim]; strides in bytes
    uint8_t *out;      // [rows, blocks, bytes]
    int64_t rows, blocks, heads, tokens, dim, dtype;
    int64_t x_row, x_block, x_head, x_token, out_row, out_block;
    int64_t bits, per_channel, group, order, centered, threads;
    // Of keys in tiers (0 UINT2, 1 UINT4, 2 BF16), [rows, blocks, heads, dim]; or NULL.
    const uint8_t *tiers;
    uint8_t *low, *low_channel, *exact, *exact_channel;
    const int16_t *counts;  // UINT4 and BF16 channels, [rows, blocks, heads, 2]
} Quantize;

typedef struct {
    uint8_t *data;  // [rows, bytes]
    int64_t rows, row_stride, pages, from_bits, to_bits, heads, tokens, dtype, threads;
    int64_t key_dim, key_per_channel, key_group, key_order, centered_keys, value_dim, value_group, value_order;
} Shrink;

// The extremes of numbers beyond this size saturate, so that their difference stays a float.
static const float LARGEST = 0x1p126f;

INLINE float saturated(float x, int64_t dtype) {
    if (dtype == FP16 || x != x || x == INFINITY || x == -INFINITY) return x;
    return x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x;
}

// Half the bits, `bits` each, to the nearest code (PM-KVQ's equivalent right shift).
INLINE uint32_t shifted(uint32_t code, const int bits) {
    return (code + (1u << (bits - 1))) * ((1u << 2 * bits) - (1u << bits) + 1) >> 3 * bits & ((1u << bits) - 1);
}

// Bring codes from one width to another, in place.
INLINE void narrow_codes(uint8_t *restrict codes, int64_t n, int64_t from, int64_t to) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t code = codes[i];
        if (from > 4 && to <= 4) code = shifted(code, 4);
        if (from > 2 && to <= 2) code = shifted(code, 2);
        codes[i] = (uint8_t)code;
    }
}

INLINE uint8_t code_of(float x, float low, float scale, int64_t bits) {
    float y = (x - low) / scale;
    y = y > 0 ? y : 0;  // NaN becomes 0 as well
    y = y < 65535 ? y : 65535;
    uint32_t code = shifted((uint32_t)(int32_t)__builtin_rintf(y), 8);
    if (bits <= 4) code = shifted(code, 4);
    if (bits <= 2) code = shifted(code, 2);
    return (uint8_t)code;
}

// Codes, minima and maxima of groups of lines of x [lines, dim], one group per column.
static void quantize_columns(const float *restrict x, int64_t lines, int64_t dim, int64_t dtype, int64_t bits,
                             float *restrict low, float *restrict high, float *restrict scale, uint8_t *restrict codes) {
    for (int64_t d = 0; d < dim; d++) low[d] = high[d] = x[d];
    for (int64_t t = 1; t < lines; t++)
        for (int64_t d = 0; d < dim; d++) {
            const float y = x[t * dim + d];
            // NaN wins, and stays.
            low[d] = y < low[d] || y != y ? y : low[d];
            high[d] = y > high[d] || y != y ? y : high[d];
        }
    for (int64_t d = 0; d < dim; d++) {
        low[d] = saturated(low[d], dtype);
        high[d] = saturated(high[d], dtype);
        scale[d] = (high[d] - low[d]) / 65535;
    }
    for (int64_t t = 0; t < lines; t++)
        for (int64_t d = 0; d < dim; d++) codes[t * dim + d] = code_of(x[t * dim + d], low[d], scale[d], bits);
}

// The same for one group of `n` neighbours.
static void quantize_line(const float *restrict x, int64_t n, int64_t dtype, int64_t bits, float *low, float *high,
                          uint8_t *restrict codes) {
    floats least_of = {0}, most_of = {0};
    least_of += INFINITY;
    most_of -= INFINITY;
    ints broken = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const floats y = load_floats(x + i);
        least_of = larger(-y, -least_of);
        least_of = -least_of;
        most_of = larger(y, most_of);
        broken |= y != y;
    }
    float smallest = -largest_of(-least_of), largest = largest_of(most_of);
    int nan = sum_of(__builtin_convertvector(broken, floats)) != 0;
    for (; i < n; i++) {
        smallest = x[i] < smallest ? x[i] : smallest;
        largest = x[i] > largest ? x[i] : largest;
        nan |= x[i] != x[i];
    }
    *low = nan ? NAN : saturated(smallest, dtype);
    *high = nan ? NAN : saturated(largest, dtype);
    const float minimum = *low, scale = (*high - *low) / 65535;
    for (i = 0; i < n; i++) codes[i] = code_of(x[i], minimum, scale, bits);
}

// Codes [tokens, dim] -> packed bytes in their order; `line` has room for [4, dim].
static void pack(const uint8_t *restrict codes, int64_t tokens, int64_t dim, int64_t bits, int64_t order,
                 uint8_t *restrict line, uint8_t *restrict out) {
    const int64_t rows = tokens * bits / 8, planes = 8 / bits;
    for (int64_t i = 0; i < rows; i++) {
        uint8_t *restrict to = line + (order == QUADS_OF_ROWS ? i % 4 * dim : 0);
        memcpy(to, codes + i * dim, (size_t)dim);
        for (int64_t k = 1; k < planes; k++)
            for (int64_t d = 0; d < dim; d++) to[d] |= (uint8_t)(codes[(i + k * rows) * dim + d] << (k * bits));
        if (order == AS_IT_IS)
            memcpy(out + i * dim, to, (size_t)dim);
        else if (order == QUADS_OF_CHANNELS)
            for (int64_t d = 0; d < dim; d += 4) memcpy(out + d * rows + 4 * i, to + d, 4);
        else if (i % 4 == 3)
            for (int64_t d = 0; d < dim; d++)
                for (int64_t k = 0; k < 4; k++) out[(i / 4 * dim + d) * 4 + k] = line[k * dim + d];
    }
}

// Inverse of `pack`.
static void unpack(const uint8_t *restrict packed, int64_t tokens, int64_t dim, int64_t bits, int64_t order,
                   uint8_t *restrict line, uint8_t *restrict codes) {
    const int64_t rows = tokens * bits / 8, planes = 8 / bits;
    for (int64_t i = 0; i < rows; i++) {
        if (order == AS_IT_IS)
            memcpy(line, packed + i * dim, (size_t)dim);
        else if (order == QUADS_OF_CHANNELS)
            for (int64_t d = 0; d < dim; d += 4) memcpy(line + d, packed + d * rows + 4 * i, 4);
        else
            for (int64_t d = 0; d < dim; d++) line[d] = packed[(i / 4 * dim + d) * 4 + i % 4];
        for (int64_t k = 0; k < planes; k++)
            for (int64_t d = 0; d < dim; d++)
                codes[(i + k * rows) * dim + d] = (uint8_t)(line[d] >> (k * bits) & ((1 << bits) - 1));
    }
}

// Work space for one head of a block.
typedef struct {
    float *x, *low, *high, *scale;
    uint8_t *codes, *line;
} Space;

static int64_t space_bytes(int64_t tokens, int64_t dim) {
    return (4 * (3 * tokens * dim + dim) + (tokens + 4) * dim + 63) / 64 * 64;
}

static Space space_at(char *at, int64_t tokens, int64_t dim) {
    Space s;
    s.x = (float *)at;
    s.low = s.x + tokens * dim;
    s.high = s.low + tokens * dim;
    s.scale = s.high + tokens * dim;
    s.codes = (uint8_t *)(s.scale + dim);
    s.line = s.codes + tokens * dim;
    return s;
}

// Codes and ranges of one head into `s`; returns the number of its groups.
static int64_t quantize_head(Space *s, const uint8_t *x, int64_t stride, int64_t tokens, int64_t dim, int64_t dtype,
                             int64_t bits, int64_t per_channel, int64_t group) {
    for (int64_t t = 0; t < tokens; t++) to_floats(x + t * stride, dtype, s->x + t * dim, dim);
    if (per_channel) {
        const int64_t groups = groups_of(tokens, group);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = g * group;
            quantize_columns(s->x + first * dim, least(group, tokens - first), dim, dtype, bits, s->low + g * dim,
                             s->high + g * dim, s->scale, s->codes + first * dim);
        }
        return groups * dim;
    }
    const int64_t groups = groups_of(dim, group);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = t * dim + g * group;
            quantize_line(s->x + at, least(group, dim - g * group), dtype, bits, s->low + t * groups + g,
                          s->high + t * groups + g, s->codes + at);
        }
    return tokens * groups;
}

// 4-bit codes to 2 bits that stand for the centers of the quarters of their groups' ranges.
static void center(Space *s, int64_t codes, int64_t groups) {
    for (int64_t i = 0; i < codes; i++) s->codes[i] >>= 2;
    for (int64_t i = 0; i < groups; i++) {
        const float eighth = (s->high[i] - s->low[i]) / 8;
        s->low[i] += eighth;
        s->high[i] -= eighth;
    }
}

// Take channels out of the regular part: the lower two bits of UINT4 channels, all of BF16 channels.
static void set_apart(const Quantize *q, Space *s, int64_t item) {
    const int64_t dim = q->dim, plane = q->tokens / 4, size = size_of(q->dtype), groups = groups_of(q->tokens, q->group);
    int64_t low = 0, exact = 0;
    for (int64_t i = 0; i < item; i++) {
        low += q->counts[2 * i];
        exact += q->counts[2 * i + 1];
    }
    for (int64_t d = 0; d < dim; d++) {
        const uint8_t tier = q->tiers[item * dim + d];
        if (tier == 1) {
            uint8_t *to = q->low + low * plane;
            memset(to, 0, (size_t)plane);
            for (int64_t t = 0; t < q->tokens; t++) to[t % plane] |= (uint8_t)((s->codes[t * dim + d] & 3) << (t / plane * 2));
            q->low_channel[low++] = (uint8_t)d;
            for (int64_t t = 0; t < q->tokens; t++) s->codes[t * dim + d] >>= 2;
        } else if (tier == 2) {
            for (int64_t t = 0; t < q->tokens; t++)
                from_floats(s->x + t * dim + d, q->dtype, q->exact + (exact * q->tokens + t) * size, 1);
            q->exact_channel[exact++] = (uint8_t)d;
            for (int64_t t = 0; t < q->tokens; t++) s->codes[t * dim + d] = 0;
            for (int64_t g = 0; g < groups; g++) s->low[g * dim + d] = s->high[g * dim + d] = 0;
        } else
            for (int64_t t = 0; t < q->tokens; t++) s->codes[t * dim + d] = (uint8_t)shifted(s->codes[t * dim + d], 2);
    }
}

// Both return 0, or 1 if there is no memory.
int kvq_quantize(const void *problem) {
    const Quantize *q = (const Quantize *)problem;
    const int64_t size = size_of(q->dtype), code_bytes = q->tokens * q->bits / 8 * q->dim;
    const int64_t items = q->rows * q->blocks * q->heads;
    const int64_t space = space_bytes(q->tokens, q->dim);
    char *memory = malloc((size_t)(space * q->threads));
    if (!memory) return 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)q->threads) if (q->threads > 1)
    for (int64_t item = 0; item < items; item++) {
        const int64_t head = item % q->heads, block = item / q->heads % q->blocks, row = item / q->heads / q->blocks;
        Space s = space_at(memory + this_thread() * space, q->tokens, q->dim);
        const uint8_t *x = q->x + row * q->x_row + block * q->x_block + head * q->x_head;
        uint8_t *out = q->out + row * q->out_row + block * q->out_block;
        const int64_t bits = q->tiers || q->centered ? 4 : q->bits;
        const int64_t groups = quantize_head(&s, x, q->x_token, q->tokens, q->dim, q->dtype, bits, q->per_channel, q->group);
        if (q->tiers) set_apart(q, &s, item);
        if (q->centered) center(&s, q->tokens * q->dim, groups);
        pack(s.codes, q->tokens, q->dim, q->bits, q->order, s.line, out + head * code_bytes);
        uint8_t *ranges = out + q->heads * code_bytes + head * groups * size;
        from_floats(s.low, q->dtype, ranges, groups);
        from_floats(s.high, q->dtype, ranges + q->heads * groups * size, groups);
    }
    free(memory);
    return 0;
}

// One block from `from` to `to` bits.
static void shrink_block(const uint8_t *at, uint8_t *out, Space *s, int64_t heads, int64_t tokens, int64_t dim, int64_t dtype,
                         int64_t from, int64_t to, int64_t per_channel, int64_t group, int64_t order,
                         int64_t centered) {
    const int64_t size = size_of(dtype), old_bytes = tokens * from / 8 * dim, new_bytes = tokens * to / 8 * dim;
    const int64_t groups = per_channel ? groups_of(tokens, group) * dim : groups_of(dim, group) * tokens;
    const int64_t bits = centered ? 4 : to;
    uint8_t *ranges = out + heads * new_bytes;
    for (int64_t head = 0; head < heads; head++) {
        if (from == 16) {
            quantize_head(s, at + head * tokens * dim * size, dim * size, tokens, dim, dtype, bits, per_channel, group);
        } else {
            const uint8_t *old = at + heads * old_bytes + head * groups * size;
            unpack(at + head * old_bytes, tokens, dim, from, order, s->line, s->codes);
            narrow_codes(s->codes, tokens * dim, from, bits);
            to_floats(old, dtype, s->low, groups);
            to_floats(old + heads * groups * size, dtype, s->high, groups);
        }
        if (centered) center(s, tokens * dim, groups);
        from_floats(s->low, dtype, ranges + head * groups * size, groups);
        from_floats(s->high, dtype, ranges + (heads + head) * groups * size, groups);
        pack(s->codes, tokens, dim, to, order, s->line, out + head * new_bytes);
    }
}

static int64_t block_bytes(int64_t heads, int64_t tokens, int64_t dim, int64_t dtype, int64_t bits, int64_t groups) {
    if (bits == 16) return heads * tokens * dim * size_of(dtype);
    return heads * (tokens * bits / 8 * dim + 2 * groups * size_of(dtype));
}

int kvq_shrink(const void *problem) {
    const Shrink *p = (const Shrink *)problem;
    const int64_t key_groups = p->key_per_channel ? groups_of(p->tokens, p->key_group) * p->key_dim
                                                  : groups_of(p->key_dim, p->key_group) * p->tokens;
    const int64_t value_groups = groups_of(p->value_dim, p->value_group) * p->tokens;
    int64_t key_bytes[2], bytes[2];
    for (int i = 0; i < 2; i++) {
        const int64_t bits = i ? p->to_bits : p->from_bits;
        key_bytes[i] = block_bytes(p->heads, p->tokens, p->key_dim, p->dtype, bits, key_groups);
        bytes[i] = key_bytes[i] + block_bytes(p->heads, p->tokens, p->value_dim, p->dtype, bits, value_groups);
    }
    // All memory before the first page changes.
    const int64_t dim = most(p->key_dim, p->value_dim), space = space_bytes(p->tokens, dim), whole = (space + bytes[1] + 63) / 64 * 64;
    char *memory = malloc((size_t)(whole * p->threads));
    if (!memory) return 1;
    // First every page in its own place, then all of them next to each other.
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)p->threads) if (p->threads > 1)
    for (int64_t item = 0; item < p->rows * p->pages; item++) {
        uint8_t *page = p->data + item / p->pages * p->row_stride + item % p->pages * bytes[0];
        char *own = memory + this_thread() * whole;
        Space s = space_at(own, p->tokens, dim);
        uint8_t *out = (uint8_t *)own + space;
        shrink_block(page, out, &s, p->heads, p->tokens, p->key_dim, p->dtype, p->from_bits, p->to_bits,
                     p->key_per_channel, p->key_group, p->key_order, p->centered_keys);
        shrink_block(page + key_bytes[0], out + key_bytes[1], &s, p->heads, p->tokens, p->value_dim, p->dtype,
                     p->from_bits, p->to_bits, 0, p->value_group, p->value_order, 0);
        memcpy(page, out, (size_t)bytes[1]);
    }
    free(memory);
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t page = 1; page < p->pages; page++) {
            uint8_t *data = p->data + row * p->row_stride;
            memmove(data + page * bytes[1], data + page * bytes[0], (size_t)bytes[1]);
        }
    return 0;
}
