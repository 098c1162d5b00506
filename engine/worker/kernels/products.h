// Products of a few rows with a weight as oneDNN lays it out for itself: the weight is read once for all rows.
//
// oneDNN interleaves a block of outputs (rows of the weight): the first pair of bf16 of each, then the next pair, and
// so on. UNIT outputs are computed together, by the instruction that multiplies pairs of bf16 or, where the CPU
// has them and the system lets us, by tiles (AMX). What a row becomes depends neither on the other rows nor on the
// threads.

#pragma once

#include "tiles.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

extern "C" {

struct Weight {
    const void* words;  // [num_outputs / block, num_words, block] pairs of bf16
    const void* bias;   // [num_outputs] or null
    std::int64_t num_outputs, num_words, block;  // block: a multiple of HALF_UNIT
};

}  // extern "C"

namespace {

constexpr int HALF_UNIT = 32;
constexpr int UNIT = 2 * HALF_UNIT;
constexpr int MAX_STEP_ROWS = 64;  // of a product; a multiple of 2 * TILE_ROWS
constexpr int WORDS_AHEAD = 64;
constexpr int REGISTER_ROWS = 6;   // rows whose sums stay in registers

// The words of UNIT outputs, by halves: `stride` words from those of one pair to those of the next.
struct UnitWords {
    const std::uint32_t* halves[2];
    std::int64_t stride, num_words;
};

inline const std::uint32_t* words_of(const Weight& weight, std::int64_t output) {
    return static_cast<const std::uint32_t*>(weight.words) + output / weight.block * weight.block * weight.num_words +
           output % weight.block;
}

// The last unit may have but one half: what the other one is then is not looked at.
inline UnitWords unit_of(const Weight& weight, std::int64_t unit) {
    const std::int64_t first = unit * UNIT, second = first + HALF_UNIT;
    return {{words_of(weight, first), words_of(weight, second < weight.num_outputs ? second : first)},
            weight.block, weight.num_words};
}

// What comes WORDS_AHEAD words later, into the core's own cache: the CPU alone foresees less than memory could give.
inline void fetch_ahead(const std::uint32_t* words, std::int64_t stride) {
    __builtin_prefetch(words + WORDS_AHEAD * stride, 0, 2);
    __builtin_prefetch(words + WORDS_AHEAD * stride + 16, 0, 2);
}

// out[row * UNIT + i] = x[row] . output i
template <int ROWS>
void unit_in_registers(const std::uint32_t* x, std::int64_t x_stride, const UnitWords& unit, float* out) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sums[row][v] = _mm512_setzero_ps();
    const std::uint32_t *first = unit.halves[0], *second = unit.halves[1];
    for (std::int64_t word = 0; word < unit.num_words; ++word, first += unit.stride, second += unit.stride) {
        fetch_ahead(first, unit.stride);
        fetch_ahead(second, unit.stride);
        const __m512bh outputs[] = {load<__m512bh>(first), load<__m512bh>(first + 16), load<__m512bh>(second),
                                    load<__m512bh>(second + 16)};
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            const auto both = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[row * x_stride + word])));
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], both, outputs[v]);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + row * UNIT + v * 16, sums[row][v]);
}

template <int ROWS>
void unit_in_registers_of(
    int num_rows, const std::uint32_t* x, std::int64_t x_stride, const UnitWords& unit, float* out) {
    if (num_rows == ROWS)
        unit_in_registers<ROWS>(x, x_stride, unit, out);
    else if constexpr (ROWS > 1)
        unit_in_registers_of<ROWS - 1>(num_rows, x, x_stride, unit, out);
}

#if defined(__AMX_BF16__)

// As unit_in_registers, for half a unit and 16 rows or, with BOTH, 32; num_words is a multiple of 16.
template <bool BOTH>
void unit_in_tiles(
    const std::uint32_t* x, std::int64_t x_stride, const std::uint32_t* words, std::int64_t stride,
    std::int64_t num_words, float* out) {
    zero_sums<BOTH>();
    for (std::int64_t word = 0; word < num_words; word += 16, words += 16 * stride) {
        for (int i = 0; i < 16; ++i) fetch_ahead(words + i * stride, stride);
        add_products<BOTH>(x + word, x_stride, words, stride);
    }
    store_sums<BOTH>(out, UNIT);
}

#endif

// x [num_rows, width] with room for whole tiles of rows; out [MAX_STEP_ROWS, UNIT]. Between begin_tiles and end_tiles.
inline void multiply_unit(const Bf16* x, std::int64_t width, int num_rows, const UnitWords& unit, float* out) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(x);
    const std::int64_t stride = width / 2;
#if defined(__AMX_BF16__)
    if (may_use_tiles()) {
        for (int row = 0; row < num_rows; row += 2 * TILE_ROWS) {
            const auto multiply = num_rows - row > TILE_ROWS ? unit_in_tiles<true> : unit_in_tiles<false>;
            for (int half = 0; half < 2; ++half)
                multiply(words + row * stride, stride, unit.halves[half], unit.stride, unit.num_words,
                         out + row * UNIT + half * HALF_UNIT);
        }
        return;
    }
#endif
    const int num_parts = (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
    for (int part = 0; part < num_parts; ++part) {
        const int first = num_rows * part / num_parts, end = num_rows * (part + 1) / num_parts;
        unit_in_registers_of<REGISTER_ROWS>(end - first, words + first * stride, stride, unit, out + first * UNIT);
    }
}

// The HALF_UNIT results of a row, in fp32.
struct HalfRow {
    __m512 low, high;
};

inline __m512 as_floats(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

inline HalfRow load_half(const Bf16* from) { return {as_floats(load<__m256i>(from)), as_floats(load<__m256i>(from + 16))}; }

inline void store_half(Bf16* to, const HalfRow& row) { store(to, _mm512_cvtne2ps_pbh(row.high, row.low)); }

// What a row of bf16 is: what is computed in several steps is rounded after each, as the plain path does it.
inline HalfRow rounded(const HalfRow& row) {
    Bf16 kept[HALF_UNIT];
    store_half(kept, row);
    return load_half(kept);
}

// The results `out` that begin with `output`, and the bias.
inline HalfRow with_bias(const Weight& weight, std::int64_t output, const float* out) {
    const HalfRow row{_mm512_loadu_ps(out), _mm512_loadu_ps(out + 16)};
    if (weight.bias == nullptr) return row;
    const HalfRow bias = load_half(static_cast<const Bf16*>(weight.bias) + output);
    return {_mm512_add_ps(row.low, bias.low), _mm512_add_ps(row.high, bias.high)};
}

}  // namespace

#endif
