// Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
//
// Vectors of VB bytes by the compilers' own extension, and the one instruction that each processor spells differently:
// four unsigned codes times four signed coefficients, summed into a 32-bit lane.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define VB 64
#define ROWS_AT_ONCE 4
#elif defined(__AVX2__)
#include <immintrin.h>
#define VB 32
#define ROWS_AT_ONCE 2
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define VB 16
#define ROWS_AT_ONCE 4
#else
#define VB 16
#define ROWS_AT_ONCE 2
#endif
#define LANES (VB / 4)
#define INLINE static inline __attribute__((always_inline))

typedef int32_t ints __attribute__((vector_size(VB)));
typedef float floats __attribute__((vector_size(VB)));
typedef uint32_t words __attribute__((vector_size(VB)));

INLINE floats load_floats(const float *from) {
    floats x;
    memcpy(&x, from, VB);
    return x;
}

INLINE void store_floats(float *to, floats x) { memcpy(to, &x, VB); }

INLINE floats larger(floats a, floats b) {
#if VB == 64
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif VB == 32
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const ints is = a > b;
    return (floats)(((ints)a & is) | ((ints)b & ~is));
#endif
}

INLINE float sum_of(floats x) {
#if VB == 64
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

INLINE float largest_of(floats x) {
#if VB == 64
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// code = 256 * high + low with signed bytes, of 16 bits at most: four of the one and four of the other in turn.
INLINE void store_quads(int8_t *to, ints code) {
#if VB == 64
    // Plus 128 the upper byte is `high`, and the lower one differs from `low` in its sign.
    const __m512i bytes = (__m512i)((code + 128) ^ 128);
    const __m128i order = _mm_set_epi64x(0, 0x0c0804000d090501);
    const __m512i quads = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
    const __m512i packed = _mm512_permutexvar_epi64(_mm512_set_epi64(0, 0, 0, 0, 6, 4, 2, 0), quads);
    _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(packed));
#else
    const ints high = (code + 128) >> 8, low = code - high * 256;
    for (int i = 0; i < LANES; i++) {
        to[i / 4 * 8 + i % 4] = (int8_t)high[i];
        to[i / 4 * 8 + 4 + i % 4] = (int8_t)low[i];
    }
#endif
}

// LANES bytes as integers.
INLINE ints widen(const uint8_t *bytes) {
#if VB == 64
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#elif VB == 32
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#else
    return (ints){bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

INLINE words load_words(const uint8_t *from) {
    words x;
    memcpy(&x, from, VB);
    return x;
}

// The first `count` lanes; the others are zero and their memory is not touched.
INLINE words load_some_words(const uint8_t *from, int count) {
#if VB == 64
    return (words)_mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), from);
#else
    words x = {0};
    memcpy(&x, from, 4 * (size_t)count);
    return x;
#endif
}

INLINE ints broadcast(const int8_t *four) {
    int32_t x;
    memcpy(&x, four, 4);
    return (ints){0} + x;
}

// sum + codes . coefficients in each lane. Codes of 8 bits need `wide` on processors whose products are signed or
// saturate at 16 bits.
INLINE ints dot4(ints sum, words codes, ints coefficients, int wide) {
#if VB == 64
    (void)wide;
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)coefficients);
#elif VB == 32
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs = _mm256_maddubs_epi16((__m256i)(wide ? codes & 0x7f7f7f7f : codes), (__m256i)coefficients);
    sum += (ints)_mm256_madd_epi16(pairs, ones);
    if (wide) {
        pairs = _mm256_maddubs_epi16((__m256i)((codes >> 7) & 0x01010101), (__m256i)coefficients);
        sum += (ints)_mm256_madd_epi16(pairs, ones) << 7;
    }
    return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t low = (int8x16_t)(wide ? codes & 0x7f7f7f7f : codes);
    sum = (ints)vdotq_s32((int32x4_t)sum, low, (int8x16_t)coefficients);
    if (wide)
        sum += (ints)vdotq_s32((int32x4_t){0}, (int8x16_t)((codes >> 7) & 0x01010101), (int8x16_t)coefficients) << 7;
    return sum;
#else
    (void)wide;
    for (int byte = 0; byte < 4; byte++)
        sum += (ints)((codes >> (8 * byte)) & 0xff) * ((coefficients << (24 - 8 * byte)) >> 24);
    return sum;
#endif
}
