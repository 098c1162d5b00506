// Elementwise ops over HALF_UNIT elements of bf16 rows at a time.

#pragma once

#include <cmath>
#include <limits>

#include "gemm.h"

#if defined(__AVX512BF16__)

extern "C" {

// `center` is added to the weights of norms: 0, or 1 where they are factors less 1.
struct NormKind {
    double eps, center;
};

}  // extern "C"

namespace {

// RMS norm: to = from / its root mean square * weight; width: a multiple of HALF_UNIT. `to` has `stride`
// elements between one HALF_UNIT and the next.
inline void normalize(
    const Bf16* from, const void* weight, std::int64_t width, NormKind kind, Bf16* to, std::int64_t stride = HALF_UNIT) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < width; i += HALF_UNIT) {
        const HalfRow x = load_half(from + i);
        low = _mm512_fmadd_ps(x.low, x.low, low);
        high = _mm512_fmadd_ps(x.high, x.high, high);
    }
    const float mean = _mm512_reduce_add_ps(_mm512_add_ps(low, high)) / static_cast<float>(width);
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + static_cast<float>(kind.eps)));
    const __m512 center = _mm512_set1_ps(static_cast<float>(kind.center));
    for (std::int64_t i = 0; i < width; i += HALF_UNIT) {
        const HalfRow x = load_half(from + i), w = load_half(static_cast<const Bf16*>(weight) + i);
        store_half(to + i / HALF_UNIT * stride, {_mm512_mul_ps(_mm512_mul_ps(x.low, factor), _mm512_add_ps(w.low, center)),
                                                _mm512_mul_ps(_mm512_mul_ps(x.high, factor), _mm512_add_ps(w.high, center))});
    }
}

// to += added
inline void add_half(Bf16* to, const HalfRow& added) {
    const HalfRow before = load_half(to);
    store_half(to, {_mm512_add_ps(before.low, added.low), _mm512_add_ps(before.high, added.high)});
}

inline __m512 sigmoid(__m512 x) {
    const __m512 positive = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
    const __m512 e = bits_as<__m512>(exp_negative<16>(bits_as<Floats<16>>(_mm512_sub_ps(_mm512_setzero_ps(), positive))));
    const __m512 share = _mm512_div_ps(one, _mm512_add_ps(one, e));  // sigmoid(|x|)
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_mul_ps(share, negative, share, e);
}

inline __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }

// The tanh form of GELU: (1 + tanh(y)) / 2 is sigmoid(2 * y).
inline __m512 gelu(__m512 x) {
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(inner, _mm512_set1_ps(1.5957691216f))));  // 2 * sqrt(2 / pi)
}

inline HalfRow soft_capped(const HalfRow& x, float cap) {
    const auto half = [&](__m512 numbers) { return bits_as<__m512>(soft_capped<16>(bits_as<Floats<16>>(numbers), cap)); };
    return {half(x.low), half(x.high)};
}

// silu(gate) * up, or with GELU, which are rounded first
inline HalfRow gated(const HalfRow& gate, const HalfRow& up, bool by_gelu = false) {
    const HalfRow opened =
        by_gelu ? rounded({gelu(gate.low), gelu(gate.high)}) : rounded({silu(gate.low), silu(gate.high)});
    return {_mm512_mul_ps(opened.low, up.low), _mm512_mul_ps(opened.high, up.high)};
}

inline HalfRow product(const HalfRow& a, const HalfRow& b) {
    return {_mm512_mul_ps(a.low, b.low), _mm512_mul_ps(a.high, b.high)};
}

inline HalfRow clamped(const HalfRow& x, float lowest, float highest) {
    const __m512 low = _mm512_set1_ps(lowest), high = _mm512_set1_ps(highest);
    return {_mm512_min_ps(_mm512_max_ps(x.low, low), high), _mm512_min_ps(_mm512_max_ps(x.high, low), high)};
}

// (up + 1) * gate * sigmoid(alpha * gate): up is at most `limit` in size, gate at most `limit`
inline HalfRow gated_clamped(const HalfRow& gate, const HalfRow& up, float alpha, float limit) {
    const __m512 one = _mm512_set1_ps(1.0f), factor = _mm512_set1_ps(alpha);
    const HalfRow gates = rounded(clamped(gate, -std::numeric_limits<float>::infinity(), limit));
    const HalfRow ups = rounded(clamped(up, -limit, limit));
    const HalfRow scaled = rounded(product(gates, {factor, factor}));
    const HalfRow opened = rounded(product(gates, rounded({sigmoid(scaled.low), sigmoid(scaled.high)})));
    return product(rounded({_mm512_add_ps(ups.low, one), _mm512_add_ps(ups.high, one)}), opened);
}

}  // namespace

#endif
