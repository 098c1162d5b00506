// Weights of 8 and 4 bits, made pairs of bf16 as they are multiplied: memory is read for 8 or 5 bits a number.
//
// HALF_UNIT outputs are interleaved in memory, those that a weight lacks being zeros:
//   8 bits: numbers [outputs / HALF_UNIT, num_words, HALF_UNIT, 2], a scale for each output [outputs], w = scale * q
//   4 bits: words   [outputs / HALF_UNIT, num_words / CHUNK_WORDS, 2, HALF_UNIT, 2], each of 8 numbers of one output and
//           either the even or the odd inputs of 16, scales and zeros [outputs / HALF_UNIT, num_words / CHUNK_WORDS,
//           HALF_UNIT, 2] for CHUNK_WORDS words each, w = scale * (q - 8) + zero

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

// What fetches, as its chunks are made, what comes later.
struct FetchingWords {
    void fetch_chunk(std::int64_t) const {}
    void fetch(std::int64_t) const {}
};

// Numbers of 8 bits, which bf16 holds as they are; the scales come into the results.
struct Int8Weights : FetchingWords {
    const std::int8_t* numbers;

    Int8Weights(const Weight& weight, std::int64_t output)
        : numbers(static_cast<const std::int8_t*>(weight.words) + output * weight.num_words * 2) {}

    const std::uint32_t* chunk(std::int64_t word, Chunk& room) const {
        const std::int8_t* from = numbers + word * 2 * HALF_UNIT;
        fetch_lines_ahead<CHUNK_WORDS>(from);
        for (int i = 0; i < CHUNK_WORDS * HALF_UNIT; i += 16) {
            const __m512 low = floats(from + 2 * i), high = floats(from + 2 * i + 16);
            store(room.words + i, _mm512_cvtne2ps_pbh(high, low));
        }
        return room.words;
    }

  private:
    static __m512 floats(const std::int8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from))); }
};

// Numbers of 4 bits; scales and zeros come into the words.
struct Int4Weights : FetchingWords {
    const std::uint32_t *numbers, *grid;

    Int4Weights(const Weight& weight, std::int64_t output)
        : numbers(static_cast<const std::uint32_t*>(weight.words) + output * weight.num_words / 4),
          grid(static_cast<const std::uint32_t*>(weight.scales) + output * weight.num_words / CHUNK_WORDS) {}

    const std::uint32_t* chunk(std::int64_t word, Chunk& room) const {
        const std::uint32_t* from = numbers + word * HALF_UNIT / 4;
        const std::uint32_t* line = grid + word / CHUNK_WORDS * HALF_UNIT;
        fetch_lines_ahead<8>(from);
        fetch_lines_ahead<2>(line);
        for (int part = 0; part < 2; ++part) {  // 16 outputs, of which a register has 8
            const Scale low(line + part * 16, 0), high(line + part * 16, 8);
            for (int eight = 0; eight < 2; ++eight) {
                const std::uint32_t* begin = from + eight * 2 * HALF_UNIT + part * 32;
                __m512i lows = load<__m512i>(begin), highs = load<__m512i>(begin + 16);
                for (int i = 0; i < 8; ++i) {
                    const __m512bh pairs = _mm512_cvtne2ps_pbh(high.of(highs), low.of(lows));
                    store(room.words + (eight * 8 + i) * HALF_UNIT + part * 16, pairs);
                    lows = _mm512_srli_epi32(lows, 4);
                    highs = _mm512_srli_epi32(highs, 4);
                }
            }
        }
        return room.words;
    }

  private:
    // Of 8 outputs, each in two lanes.
    struct Scale {
        __m512 scale, zero;

        Scale(const std::uint32_t* line, int first) {
            const __m512i twice = _mm512_add_epi32(
                _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), _mm512_set1_epi32(first));
            const __m512i both = _mm512_permutexvar_epi32(twice, load<__m512i>(line));
            scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
        }

        // The lowest number of each lane.
        __m512 of(__m512i numbers) const {
            const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
            return _mm512_fmadd_ps(_mm512_permutexvar_ps(numbers, table), scale, zero);
        }
    };
};

// use(the unit of a weight whose halves begin with two of its outputs), whatever its bits
template <typename Use>
inline void with_unit(const Weight& weight, std::int64_t first, std::int64_t second, Use use) {
    if (weight.bits == 8) return use(Unit<Int8Weights>(weight, first, second));
    if (weight.bits == 4) return use(Unit<Int4Weights>(weight, first, second));
    use(Unit<StreamedWeights>(weight, first, second));
}

// to = the inputs [2 * num_words] of one output of a weight of 16 or 8 bits
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

// What the sums `out` of the outputs that begin with `output` are with their scales and biases.
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

// Keeps those results that begin with `output`, of which the weight may not have all, in `to`.
inline void keep_results(const Weight& weight, std::int64_t output, const HalfRow& results, Bf16* to) {
    if (output + HALF_UNIT <= weight.num_outputs) return store_half(to, results);
    Bf16 all[HALF_UNIT];
    store_half(all, results);
    std::memcpy(to, all, (weight.num_outputs - output) * sizeof(Bf16));
}

}  // namespace

#endif
