// The arithmetic of prefill attention: GEMMs of bf16 with a panel, and a panel's softmax.
//
// A panel is up to PANEL rows side by side, a lane for each: [word, row] of queries, [key, row] of scores,
// [pair of keys, row] of weights, [column, row] of outputs. The other operand may have any layout, as keys in
// KV blocks do.

#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int PANEL = 64;
constexpr int TOGETHER = 8;  // max keys, or columns, whose sums with a panel's rows stay in registers
constexpr int together(int num_vectors) { return num_vectors == 4 ? 6 : TOGETHER; }
constexpr float MASKED = -1e30f;

// c[i] = scale * c[i] + a[i] . b for ROWS rows a[i], whose words are STEP apart, and 16 * VECTORS columns; a
// word is a pair of bf16. b: [num_words, PANEL]; c: [ROWS, PANEL]; scale: [columns], or nullptr for zeros
template <int ROWS, int VECTORS, int STEP>
inline void multiply_avx512(
    const std::uint32_t* const* a, const std::uint32_t* b, int num_words, const float* scale, float* c) {
    const std::uint32_t* rows[ROWS];
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
        rows[row] = a[row];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            sums[row][v] = scale == nullptr ? _mm512_setzero_ps()
                                            : _mm512_mul_ps(_mm512_loadu_ps(c + row * PANEL + v * 16),
                                                            _mm512_loadu_ps(scale + v * 16));
    }
    for (int word = 0; word < num_words; ++word, b += PANEL) {
        __m512bh columns[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) columns[v] = load<__m512bh>(b + v * 16);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const auto both = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(rows[row][word * STEP])));
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], both, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(c + row * PANEL + v * 16, sums[row][v]);
}

#if defined(__AMX_BF16__)

template <int VECTORS>
inline void scale_columns(const float* scale, float* c) {
    if (std::all_of(scale, scale + 16 * VECTORS, [](float factor) { return factor == 1.0f; })) return;  // no new maximum
    for (int row = 0; row < 2 * TILE_ROWS; ++row)
        for (int v = 0; v < VECTORS; ++v) {
            float* sums = c + row * PANEL + v * 16;
            _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_loadu_ps(scale + v * 16)));
        }
}

// The same by AMX for twice TILE_ROWS rows, a_stride words apart, the second half from `lower` on; columns in
// pairs of vectors. num_words is a multiple of 16.
template <int VECTORS>
inline void multiply_amx(
    const std::uint32_t* a, const std::uint32_t* lower, std::int64_t a_stride, const std::uint32_t* b, int num_words,
    const float* scale, float* c) {
    if (scale != nullptr) scale_columns<VECTORS>(scale, c);
    for (int column = 0; column < 16 * VECTORS; column += 32) {
        if (scale == nullptr)
            zero_accumulators<true>();
        else
            load_accumulators<true>(c + column, PANEL);
        for (int word = 0; word < num_words; word += 16)
            multiply_add<true>(a + word, lower + word, a_stride, b + word * PANEL + column, PANEL);
        store_accumulators<true>(c + column, PANEL);
    }
}

#endif

// to[i * to_stride + row] = rows[row][i], for 16 words of 16 rows
inline void transpose_words(const std::uint32_t* const* rows, std::uint32_t* to, int to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // each a now has word 4 * lane + i of four rows
        const __m512i even_upper = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        const __m512i even_lower = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const __m512i odd_upper = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        const __m512i odd_lower = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(even_upper, even_lower, 0x88));
        _mm512_storeu_si512(to + (4 + i) * to_stride, _mm512_shuffle_i32x4(odd_upper, odd_lower, 0x88));
        _mm512_storeu_si512(to + (8 + i) * to_stride, _mm512_shuffle_i32x4(even_upper, even_lower, 0xdd));
        _mm512_storeu_si512(to + (12 + i) * to_stride, _mm512_shuffle_i32x4(odd_upper, odd_lower, 0xdd));
    }
}

// 16 words, each of an even and an odd element
inline __m512i pairs_of(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// 2^x for x <= 0, with a relative error of 3.5e-6, which is enough for bf16. x is an integer + f, 0 <= f < 1,
// and 2^f a polynomial that is exact at both ends (least relative error by Lawson's reweighting).
inline __m512 exp2_negative(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(1.355574723e-2f), _mm512_set1_ps(5.203236901e-2f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(2.413797629e-1f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(6.930321208e-1f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);  // uses the integer part
}

// An online softmax of 16 rows: their maximum scores so far, and the sums of their weights.
struct RunningSoftmax {
    float *maxima, *sums;  // [16]

    // Turns score(key) of the keys [first, end) into weights, pairs of bf16 [pair of keys, PANEL].
    // corrections [16]: the factors by which earlier sums shrink. Scores are scaled by `factor`, to base 2.
    template <typename Score>
    void add(Score score, int first, int end, float factor, std::uint32_t* weights, float* corrections) const {
        const __m512 zero = _mm512_setzero_ps(), factors = _mm512_set1_ps(factor), before = _mm512_loadu_ps(maxima);
        __m512 even = _mm512_set1_ps(MASKED), odd = even;
        for (int key = first; key < end; key += 2) {
            even = _mm512_max_ps(even, score(key));
            odd = _mm512_max_ps(odd, score(key + 1));
        }
        const __m512 maximum = _mm512_max_ps(before, _mm512_mul_ps(_mm512_max_ps(even, odd), factors));
        // Clamped to 0: only rounding errors of fully masked scores are above it.
        const auto weigh = [&](__m512 x) { return exp2_negative(_mm512_min_ps(_mm512_fmsub_ps(x, factors, maximum), zero)); };
        __m512 even_sum = zero, odd_sum = zero;
        for (int key = first; key < end; key += 2) {
            const __m512 x = weigh(score(key)), y = weigh(score(key + 1));
            even_sum = _mm512_add_ps(even_sum, x);
            odd_sum = _mm512_add_ps(odd_sum, y);
            const auto low = bits_as<__m256i>(_mm512_cvtneps_pbh(x)), high = bits_as<__m256i>(_mm512_cvtneps_pbh(y));
            store(weights + key / 2 * PANEL, pairs_of(low, high));
        }
        const __m512 correction = exp2_negative(_mm512_sub_ps(before, maximum));
        _mm512_storeu_ps(maxima, maximum);
        _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), correction, _mm512_add_ps(even_sum, odd_sum)));
        _mm512_storeu_ps(corrections, correction);
    }
};

}  // namespace

#endif
