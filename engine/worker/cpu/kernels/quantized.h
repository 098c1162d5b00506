// Weights in int8 and int4, expanded to pairs of bf16 as they are multiplied: 8 or 5 bits per number are read
// from memory.
//
// HALF_UNIT outputs are interleaved in memory; missing outputs are zeros.
//
// int8: numbers [outputs / HALF_UNIT, num_words, HALF_UNIT, 2], scales [outputs], w = scale * q
//
// int4: words [outputs / HALF_UNIT, num_words / CHUNK_WORDS, 2, HALF_UNIT, 2], each with 8 numbers of one
// output, either the even or the odd inputs of 16; scales and zeros [outputs / HALF_UNIT, num_words /
// CHUNK_WORDS, HALF_UNIT, 2], one for CHUNK_WORDS words each, w = scale * (q - 8) + zero
//
// e2m1: the same, but q is a float of 4 bits (OCP Microscaling, version 1.0), w = scale * value(q) + zero

#pragma once

#include <cstring>

#include "gemm.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int LINES_AHEAD = 32;

template <int LINES>
inline void fetch_lines_ahead(const void* memory) {
    fetch_lines<LINES>(static_cast<const char*>(memory) + LINES_AHEAD * LINE_BYTES);
}

// Weights that prefetch while their chunks are made.
struct FetchingWords {
    void fetch_chunk(std::int64_t) const {}
    void fetch(std::int64_t) const {}
};

// int8 numbers, which bf16 represents exactly; the scales are applied to the results.
struct Int8Weights : FetchingWords {
    const std::int8_t* numbers;

    Int8Weights(const Weight& weight, std::int64_t output)
        : numbers(static_cast<const std::int8_t*>(weight.words) + output * weight.num_words * 2) {}

    const std::uint32_t* chunk(std::int64_t word, Chunk& buffer) const {
        const std::int8_t* from = numbers + word * 2 * HALF_UNIT;
        fetch_lines_ahead<CHUNK_WORDS>(from);
        for (int i = 0; i < CHUNK_WORDS * HALF_UNIT; i += 16) {
            const __m512 low = floats(from + 2 * i), high = floats(from + 2 * i + 16);
            store(buffer.words + i, _mm512_cvtne2ps_pbh(high, low));
        }
        return buffer.words;
    }

  private:
    static __m512 floats(const std::int8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from))); }
};

// The values of 4 bits, from that of 15 down.
struct IntegerValues {
    static __m512 table() { return _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8); }
};
struct E2m1Values {
    static __m512 table() {
        return _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
    }
};

// Numbers of 4 bits; scales and zeros are applied to the words.
template <typename Values>
struct Weights4 : FetchingWords {
    const std::uint32_t *numbers, *grid;

    Weights4(const Weight& weight, std::int64_t output)
        : numbers(static_cast<const std::uint32_t*>(weight.words) + output * weight.num_words / 4),
          grid(static_cast<const std::uint32_t*>(weight.scales) + output * weight.num_words / CHUNK_WORDS) {}

    const std::uint32_t* chunk(std::int64_t word, Chunk& buffer) const {
        const std::uint32_t* from = numbers + word * HALF_UNIT / 4;
        const std::uint32_t* line = grid + word / CHUNK_WORDS * HALF_UNIT;
        fetch_lines_ahead<8>(from);
        fetch_lines_ahead<2>(line);
        for (int part = 0; part < 2; ++part) {  // 16 outputs, 8 per register
            const Scale low(line + part * 16, 0), high(line + part * 16, 8);
            for (int eight = 0; eight < 2; ++eight) {
                const std::uint32_t* begin = from + eight * 2 * HALF_UNIT + part * 32;
                __m512i lows = load<__m512i>(begin), highs = load<__m512i>(begin + 16);
                for (int i = 0; i < 8; ++i) {
                    const __m512bh pairs = _mm512_cvtne2ps_pbh(high.of(highs), low.of(lows));
                    store(buffer.words + (eight * 8 + i) * HALF_UNIT + part * 16, pairs);
                    lows = _mm512_srli_epi32(lows, 4);
                    highs = _mm512_srli_epi32(highs, 4);
                }
            }
        }
        return buffer.words;
    }

  private:
    // The scales and zeros of 8 outputs, each in two lanes.
    struct Scale {
        __m512 scale, zero;

        Scale(const std::uint32_t* line, int first) {
            const __m512i twice = _mm512_add_epi32(
                _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), _mm512_set1_epi32(first));
            const __m512i both = _mm512_permutexvar_epi32(twice, load<__m512i>(line));
            scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
        }

        // Dequantizes the lowest number of each lane.
        __m512 of(__m512i numbers) const {
            return _mm512_fmadd_ps(_mm512_permutexvar_ps(numbers, Values::table()), scale, zero);
        }
    };
};

// Calls `use` with the unit of a weight whose halves begin with these outputs, for any number of bits.
template <typename Use>
inline void with_unit(const Weight& weight, std::int64_t first, std::int64_t second, Use use) {
    if (weight.bits == 8) return use(Unit<Int8Weights>(weight, first, second));
    if (weight.bits == 4 && weight.is_float) return use(Unit<Weights4<E2m1Values>>(weight, first, second));
    if (weight.bits == 4) return use(Unit<Weights4<IntegerValues>>(weight, first, second));
    use(Unit<StreamedWeights>(weight, first, second));
}

// to = the inputs [2 * num_words] of one output of a bf16 or int8 weight
inline void read_inputs(const Weight& weight, std::int64_t output, Bf16* to) {
    const std::int64_t first = output / HALF_UNIT * weight.num_words * HALF_UNIT + output % HALF_UNIT;
    if (weight.bits == 16) {
        const auto* words = static_cast<const std::uint32_t*>(weight.words) + first;
        for (std::int64_t i = 0; i < weight.num_words; ++i) std::memcpy(to + 2 * i, words + i * HALF_UNIT, sizeof(*words));
        return;
    }
    const float scale = as_float(static_cast<const Bf16*>(weight.scales)[output]);
    const auto* pairs = static_cast<const std::int8_t*>(weight.words) + 2 * first;
    for (std::int64_t i = 0; i < 2 * weight.num_words; ++i)
        to[i] = round_to_bf16(scale * static_cast<float>(pairs[i / 2 * 2 * HALF_UNIT + i % 2]));
}

// The results of the sums `out` for the outputs from `output` on: scales and bias applied.
inline HalfRow result_of(const Weight& weight, std::int64_t output, const float* out) {
    HalfRow row{_mm512_loadu_ps(out), _mm512_loadu_ps(out + 16)};
    if (weight.bits == 8) {
        const HalfRow scale = load_half(static_cast<const Bf16*>(weight.scales) + output);
        row = {_mm512_mul_ps(row.low, scale.low), _mm512_mul_ps(row.high, scale.high)};
    }
    if (weight.bias == nullptr) return row;
    const HalfRow bias = load_half(static_cast<const Bf16*>(weight.bias) + output);
    return {_mm512_add_ps(row.low, bias.low), _mm512_add_ps(row.high, bias.high)};
}

// Stores the results of the outputs from `output` on, as far as the weight has them, to `to`.
inline void store_results(const Weight& weight, std::int64_t output, const HalfRow& results, Bf16* to) {
    if (output + HALF_UNIT <= weight.num_outputs) return store_half(to, results);
    Bf16 all[HALF_UNIT];
    store_half(all, results);
    std::memcpy(to, all, (weight.num_outputs - output) * sizeof(Bf16));
}

}  // namespace

#endif
