// Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
//
// Numbers of the model's dtypes, and what else everybody needs.
#pragma once

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

enum { FP32, BF16, FP16 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    // Exponents are rebiased by a product, which gets subnormal numbers right as well.
    float x = bits_to_float(rest << 13) * 0x1p112f;
    if (rest >= 0x7c00) x = bits_to_float(0x7f800000 | (rest & 0x3ff) << 13);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits_to_float(bits | sign);
}

INLINE void to_floats(const uint8_t *restrict from, int64_t dtype, float *restrict to, int64_t n) {
    const uint16_t *halves = (const uint16_t *)from;
    if (dtype == FP32)
        memcpy(to, from, 4 * (size_t)n);
    else if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) to[i] = bits_to_float((uint32_t)halves[i] << 16);
    else
        for (int64_t i = 0; i < n; i++) to[i] = half_to_float(halves[i]);
}

// The nearest numbers of `dtype`, to even; none may lie beyond its largest.
INLINE void from_floats(const float *restrict from, int64_t dtype, uint8_t *restrict to, int64_t n) {
    uint16_t *halves = (uint16_t *)to;
    const uint32_t *bits = (const uint32_t *)from;
    if (dtype == FP32)
        memcpy(to, from, 4 * (size_t)n);
    else if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) halves[i] = (uint16_t)((bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16);
    else
        for (int64_t i = 0; i < n; i++) {
            const uint32_t size = bits[i] & 0x7fffffff;
            const float small = bits_to_float(size) * 0x1p-112f;
            uint32_t half;
            memcpy(&half, &small, 4);
            half = size >= 0x7f800000 ? 0x7c00 | (size & 0x7fffff) >> 13 : (half + 0xfff + (half >> 13 & 1)) >> 13;
            halves[i] = (uint16_t)(half | (bits[i] >> 16 & 0x8000));
        }
}

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t size_of(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

INLINE int64_t groups_of(int64_t n, int64_t group) { return (n + group - 1) / group; }

INLINE int64_t this_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}
