// Elements, SIMD vectors as wide as the CPU's, and the few functions that compilers do not vectorize well.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int NUM_VECTOR_REGISTERS =
#if defined(__AVX512F__) || defined(__aarch64__)
    32;
#else
    16;
#endif

// The cache level for single prefetches: of the CPUs that were measured, the one without AMX gains from L1
// only.
#if defined(__AMX_BF16__)
constexpr int FETCH_FOR_LATER = 2;
#else
constexpr int FETCH_FOR_LATER = 3;
#endif

struct Bf16 {
    std::uint16_t bits;
};

// Memory aligned to cache lines: vector and tile loads never cross two.
template <typename T>
struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <typename Other>
    LineAllocator(const LineAllocator<Other>&) {}
    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
    void deallocate(T* memory, std::size_t) { ::operator delete(memory, LINE); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
    static constexpr std::align_val_t LINE{64};
};
template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

// Grows `lines` to at least `count` elements.
template <typename T>
inline void grow(Lines<T>& lines, std::size_t count) {
    if (lines.size() < count) lines.resize(count);
}

template <int LANES>
struct Vector {
    typedef float Floats __attribute__((vector_size(LANES * 4)));
    typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
    typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));
};
template <int LANES>
using Floats = typename Vector<LANES>::Floats;

template <typename To, typename From>
inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

template <typename V, typename T>
inline V load(const T* from) {
    V vector;
    std::memcpy(&vector, from, sizeof(V));
    return vector;
}

template <typename V, typename T>
inline void store(T* to, const V& vector) {
    std::memcpy(to, &vector, sizeof(V));
}

// The widest vectors such that two of them divide HEAD_DIM.
constexpr int lanes_for(int head_dim) {
#if defined(__AVX512F__)
    if (head_dim % 32 == 0) return 16;
#endif
#if defined(__AVX__)
    if (head_dim % 16 == 0) return 8;
#endif
    return 4;
}

// 2 * LANES elements of a row. bf16 elements are deinterleaved into even and odd ones, two cheap
// instructions; queries and sums are kept in the same order, so only a final result has to be interleaved
// again.
template <int LANES>
struct Pair {
    Floats<LANES> first, second;
};

template <int LANES>
inline Pair<LANES> load_pair(const float* from) {
    return {load<Floats<LANES>>(from), load<Floats<LANES>>(from + LANES)};
}

template <int LANES>
inline Pair<LANES> load_pair(const Bf16* from) {
    using Words = typename Vector<LANES>::Words;
    const Words words = load<Words>(from);
    return {bits_as<Floats<LANES>>(words << 16), bits_as<Floats<LANES>>(words & 0xffff0000u)};
}

inline float as_float(Bf16 x) { return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline Bf16 round_to_bf16(float x) {
    const auto bits = bits_as<std::uint32_t>(x);
    if (x != x) return {0x7fc0};
    return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Stores HEAD_DIM sums, in the order of load_pair, times factor, as a row of the output.
template <int LANES, int HEAD_DIM>
inline void store_row(float* to, const float* sums, float factor) {
    for (int i = 0; i < HEAD_DIM; ++i) to[i] = sums[i] * factor;
}

template <int LANES, int HEAD_DIM>
inline void store_row(Bf16* to, const float* sums, float factor) {
    for (int pair = 0; pair < HEAD_DIM / (2 * LANES); ++pair) {
        const float* first = sums + pair * 2 * LANES;
        for (int i = 0; i < LANES; ++i) {
            to[pair * 2 * LANES + 2 * i] = round_to_bf16(first[i] * factor);
            to[pair * 2 * LANES + 2 * i + 1] = round_to_bf16(first[LANES + i] * factor);
        }
    }
}

// to[i] = the sum of all lanes of v[i]
template <int LANES>
inline void sum_lanes(const Floats<LANES> (&v)[4], float* to) {
#if defined(__AVX512F__)
    if constexpr (LANES == 16) {
        const __m512 a = bits_as<__m512>(v[0]), b = bits_as<__m512>(v[1]), c = bits_as<__m512>(v[2]),
                     d = bits_as<__m512>(v[3]);
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        const __m256 halves = _mm256_add_ps(
            _mm512_castps512_ps256(quarters),
            _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quarters), 1)));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
        return;
    }
#endif
#if defined(__AVX__)
    if constexpr (LANES == 8) {
        const __m256 ab = _mm256_hadd_ps(bits_as<__m256>(v[0]), bits_as<__m256>(v[1]));
        const __m256 cd = _mm256_hadd_ps(bits_as<__m256>(v[2]), bits_as<__m256>(v[3]));
        const __m256 halves = _mm256_hadd_ps(ab, cd);
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
        return;
    }
#endif
    for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int lane = 0; lane < LANES; ++lane) sum += v[i][lane];
        to[i] = sum;
    }
}

// exp(x) for x <= 0, within a few units in the last place; results below exp(-87) become about 1e-38.
template <int LANES>
inline Floats<LANES> exp_negative(Floats<LANES> x) {
#if defined(__AVX512F__)
    if constexpr (LANES == 16) {
        // 2^(n + f): n an integer, |f| <= 1/2, and a polynomial in f (least squares of the relative error)
        // for 2^f.
        const __m512 v = _mm512_max_ps(bits_as<__m512>(x), _mm512_set1_ps(-87.0f));  // also handles -inf
        const __m512 log2_e = _mm512_set1_ps(1.442695022f);
        const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, log2_e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512 f = _mm512_fmadd_ps(v, _mm512_set1_ps(1.925963033e-8f), _mm512_fmsub_ps(v, log2_e, n));
        __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(1.327636535e-3f), _mm512_set1_ps(9.675541893e-3f));
        p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(5.550713465e-2f));
        p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(2.402212024e-1f));
        p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(6.931469440e-1f));
        p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
        return bits_as<Floats<16>>(_mm512_scalef_ps(p, n));
    }
#endif
    using Ints = typename Vector<LANES>::Ints;
    const Floats<LANES> lowest = Floats<LANES>{} - 87.0f;
    x = x > lowest ? x : lowest;
    const float to_nearest = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats<LANES> n = (x * 1.44269504f + to_nearest) - to_nearest;
    const Floats<LANES> r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats<LANES> p = r * 1.98756915e-4f + 1.39819995e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 5.0e-1f;
    p = p * r * r + r + 1.0f;
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * bits_as<Floats<LANES>>(exponent);
}

// cap * tanh(x / cap): (1 - e^-2y) / (1 + e^-2y) of y = |x| / cap, with the sign of x.
template <int LANES>
inline Floats<LANES> soft_capped(Floats<LANES> x, float cap) {
    const Floats<LANES> zero = {}, size = x < zero ? -x : x;
    const Floats<LANES> e = exp_negative<LANES>(size * (-2.0f / cap));
    const Floats<LANES> capped = (1.0f - e) / (1.0f + e) * cap;
    return x < zero ? -capped : capped;
}

}  // namespace
