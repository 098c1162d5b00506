// GEMMs of activations with packed weights: bf16 here, int8 or int4 in quantized.h.
//
// A word is a 32-bit lane: a pair of bf16 inputs of one output. HALF_UNIT outputs (rows of a weight) are
// interleaved in memory: the first word of each, then the next word, and so on. UNIT outputs are computed
// together, by AVX512_BF16 or, where the CPU has it and the system permits it, by AMX. The result for a row
// depends neither on the other rows nor on the threads.

#pragma once

#include <type_traits>

#include "amx.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

extern "C" {

// A packed weight. bf16: words [num_outputs / HALF_UNIT, num_words, HALF_UNIT] are pairs of bf16; for int8
// and int4 see quantized.h.
struct Weight {
    const void* words;
    const void* scales;  // of a quantized weight
    const void* bias;    // [num_outputs] or null
    std::int64_t num_outputs, num_words, bits;  // bits: 16, 8 or 4
    std::int64_t is_float;                      // of 4 bits: whether numbers are e2m1
};

}  // extern "C"

namespace {

constexpr int HALF_UNIT = 32;
constexpr int UNIT = 2 * HALF_UNIT;
constexpr int MAX_GEMM_ROWS = 64;  // rows multiplied with a unit at once; a multiple of
constexpr int LINE_BYTES = 64;
constexpr int CHUNK_WORDS = 16;    // width of an AMX tile; num_words is a multiple
constexpr int WORDS_AHEAD = 64;
constexpr int REGISTER_ROWS = 6;   // rows whose sums of a unit fit in registers; twice as many for half a unit

// Packs HALF_UNIT outputs, of which `num_outputs` exist, from rows [num_outputs, num_words] of pairs of bf16.
inline void interleave(const std::uint32_t* rows, std::int64_t num_outputs, std::int64_t num_words, std::uint32_t* words) {
    for (std::int64_t begin = 0; begin < num_words; begin += CHUNK_WORDS)  // a line of each row
        for (std::int64_t word = begin; word < begin + CHUNK_WORDS; ++word)
            for (std::int64_t output = 0; output < HALF_UNIT; ++output)
                words[word * HALF_UNIT + output] = output < num_outputs ? rows[output * num_words + word] : 0;
}

// A buffer for CHUNK_WORDS pairs of bf16 of HALF_UNIT outputs.
struct Chunk {
    alignas(64) std::uint32_t words[CHUNK_WORDS * HALF_UNIT];
};

// Prefetches LINES cache lines into L1, because the hardware prefetcher alone does not saturate memory: every
// fourth line, then the ones after those, and so on. In plain order it is a seventh slower on the AMX CPU
// where it was measured; what is prefetched must begin at a line whose number is a multiple of STRIDE.
template <int LINES>
inline void fetch_lines(const void* memory) {
    constexpr int STRIDE = 4;
#pragma GCC unroll 4
    for (int first = 0; first < STRIDE; ++first)
#pragma GCC unroll 8
        for (int line = first; line < LINES; line += STRIDE)
            __builtin_prefetch(static_cast<const char*>(memory) + line * LINE_BYTES, 0, 3);
}

// A thread multiplies with one of the classes named *Weights: the words of HALF_UNIT outputs. `chunk` returns
// CHUNK_WORDS of them, made in `buffer` if they are not in memory in this form. `fetch_chunk` and `fetch`
// prefetch a chunk, or one word, from a word on: AMX takes a chunk at a time, AVX-512 a word, and prefetching
// little by little is faster.

// bf16 words in a near cache.
struct PackedWeights {
    const std::uint32_t* words;

    const std::uint32_t* chunk(std::int64_t word, Chunk&) const { return words + word * HALF_UNIT; }
    void fetch_chunk(std::int64_t) const {}  // they are cached
    void fetch(std::int64_t) const {}
};

// bf16 words in memory.
struct StreamedWeights : PackedWeights {
    StreamedWeights(const Weight& weight, std::int64_t output)
        : PackedWeights{static_cast<const std::uint32_t*>(weight.words) + output * weight.num_words} {}

    void fetch_chunk(std::int64_t word) const { fetch_lines<2 * CHUNK_WORDS>(words + word * HALF_UNIT); }

    void fetch(std::int64_t word) const {
        __builtin_prefetch(words + word * HALF_UNIT, 0, FETCH_FOR_LATER);
        __builtin_prefetch(words + word * HALF_UNIT + 16, 0, FETCH_FOR_LATER);
    }
};

// The memory layout of rows: row-major or, for multiples of TILE_ROWS rows, tiled for AMX loads: blocks of
// TILE_ROWS by HALF_UNIT elements.
struct Layout {
    std::int64_t width, row_stride, chunk_stride;

    static Layout plain(std::int64_t width) { return {width, width, HALF_UNIT}; }
    static Layout tiled(std::int64_t width) { return {width, HALF_UNIT, TILE_ROWS * HALF_UNIT}; }

    // The offset of an element. HALF_UNIT elements of a row, from a multiple of it on, are contiguous.
    std::int64_t of(std::int64_t row, std::int64_t number) const {
        return row / TILE_ROWS * TILE_ROWS * width + row % TILE_ROWS * row_stride + number / HALF_UNIT * chunk_stride +
               number % HALF_UNIT;
    }
};

// A view of rows of pairs of bf16, from a row and a chunk on.
struct Rows {
    const Bf16* numbers;
    Layout layout;
    std::int64_t first_row = 0, first_word = 0;

    Rows from(std::int64_t row, std::int64_t word) const { return {numbers, layout, first_row + row, first_word + word}; }

    const std::uint32_t* chunk(std::int64_t row, std::int64_t word) const {
        return reinterpret_cast<const std::uint32_t*>(numbers + layout.of(first_row + row, 2 * (first_word + word)));
    }
};

// A callback between the chunks of a GEMM that does nothing.
struct NoOp {
    void operator()() const {}
};

// out[row * UNIT + i] = x[row] . output i, plus `before` unless it is null; for NUM_HALVES halves of a unit
template <int ROWS, int NUM_HALVES, typename Words, typename Meanwhile>
void halves_avx512(
    const Rows& x, const Words* halves, std::int64_t num_words, const float* before, float* out, Meanwhile& meanwhile) {
    constexpr int VECTORS = 2 * NUM_HALVES;
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            sums[row][v] = before == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(before + row * UNIT + v * 16);
    Chunk buffer[NUM_HALVES];
    const std::uint32_t* pairs[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) pairs[row] = x.chunk(row, 0);
    for (std::int64_t begin = 0; begin < num_words; begin += CHUNK_WORDS) {
        const std::uint32_t* words[NUM_HALVES];
        for (int half = 0; half < NUM_HALVES; ++half) words[half] = halves[half].chunk(begin, buffer[half]);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) __builtin_prefetch(pairs[row] + x.layout.chunk_stride / 2);  // its next pairs
        for (int word = 0; word < CHUNK_WORDS; ++word) {
#pragma GCC unroll 2
            for (int half = 0; half < NUM_HALVES; ++half) halves[half].fetch(begin + word + WORDS_AHEAD);
            __m512bh outputs[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) outputs[v] = load<__m512bh>(words[v / 2] + word * HALF_UNIT + v % 2 * 16);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const auto both = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(pairs[row][word])));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], both, outputs[v]);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) pairs[row] += x.layout.chunk_stride / 2;
        meanwhile();
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(out + row * UNIT + v * 16, sums[row][v]);
}

// A unit, for at most ROWS rows, so that all sums stay in registers: one half after the other or, if its
// words are cached, both halves as far as registers suffice. Reading words from memory in storage order is
// faster, except for a single row.
template <int ROWS, typename Words, typename Meanwhile>
void unit_avx512(
    int num_rows, const Rows& x, const Words (&halves)[2], std::int64_t num_words, const float* before, float* out,
    Meanwhile& meanwhile) {
    if (num_rows < ROWS) {
        if constexpr (ROWS > 1)
            unit_avx512<ROWS - 1>(num_rows, x, halves, num_words, before, out, meanwhile);
    } else if constexpr (ROWS == 1 || (ROWS <= REGISTER_ROWS && std::is_same_v<Words, PackedWeights>)) {
        halves_avx512<ROWS, 2>(x, halves, num_words, before, out, meanwhile);
    } else {
        halves_avx512<ROWS, 1>(x, halves, num_words, before, out, meanwhile);
        halves_avx512<ROWS, 1>(
            x, halves + 1, num_words, before == nullptr ? nullptr : before + HALF_UNIT, out + HALF_UNIT, meanwhile);
    }
}

#if defined(__AMX_BF16__)

// As unit_avx512, for half a unit and 16 rows or, with BOTH, 32.
template <bool BOTH, typename Words, typename Meanwhile>
void half_unit_amx(
    const Rows& x, const Words& half, std::int64_t num_words, const float* before, float* out, Meanwhile& meanwhile) {
    if (before != nullptr)
        load_accumulators<BOTH>(before, UNIT);
    else
        zero_accumulators<BOTH>();
    Chunk buffer[2];  // double buffering: the next words are read into one while tiles are loaded from the other
    const auto chunk = [&](std::int64_t word) {
        half.fetch_chunk(word + WORDS_AHEAD);
        return half.chunk(word, buffer[word / CHUNK_WORDS % 2]);
    };
    const std::uint32_t* next = chunk(0);
    for (std::int64_t word = 0; word < num_words; word += CHUNK_WORDS) {
        const std::uint32_t* words = next;
        if (word + CHUNK_WORDS < num_words) next = chunk(word + CHUNK_WORDS);
        multiply_add<BOTH>(x.chunk(0, word), x.chunk(TILE_ROWS, word), x.layout.row_stride / 2, words, HALF_UNIT);
        meanwhile();
    }
    store_accumulators<BOTH>(out, UNIT);
}

#endif

// UNIT outputs of a weight: two halves, given by their first outputs, which are the same if there is only one
// half.
template <typename Words>
struct Unit {
    Words halves[2];

    Unit(const Words& first, const Words& second) : halves{first, second} {}
    Unit(const Weight& weight, std::int64_t first, std::int64_t second) : halves{{weight, first}, {weight, second}} {}
};

// Whether so few rows are multiplied in one block: their GEMM is bound by memory. More are multiplied in
// several.
inline bool fits_one_block(std::int64_t num_rows) {
    return num_rows <= (has_amx() ? MAX_GEMM_ROWS : 2 * REGISTER_ROWS);
}

inline int num_parts(int num_rows) { return (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS; }

// How often multiply_halves calls `meanwhile` per chunk of words.
inline int calls_per_chunk(int num_rows) {
    return has_amx() ? 2 * ((num_rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)) : num_parts(num_rows);
}

inline const float* at(const float* sums, std::int64_t offset) { return sums == nullptr ? nullptr : sums + offset; }

// out [num_rows, UNIT] = x [num_rows, num_words], both padded to a multiple of TILE_ROWS rows, times a unit,
// plus `before` unless it is null. Called between begin_amx and end_amx.
template <typename Words, typename Meanwhile = const NoOp>
void multiply_halves(
    const Words (&halves)[2], std::int64_t num_words, const Rows& x, int num_rows, const float* before, float* out,
    Meanwhile& meanwhile = NoOp{}) {
#if defined(__AMX_BF16__)
    if (has_amx()) {
        for (int row = 0; row < num_rows; row += 2 * TILE_ROWS) {
            const bool both = num_rows - row > TILE_ROWS;
            const auto multiply = both ? half_unit_amx<true, Words, Meanwhile> : half_unit_amx<false, Words, Meanwhile>;
            for (int half = 0; half < 2; ++half) {
                const int offset = row * UNIT + half * HALF_UNIT;
                multiply(x.from(row, 0), halves[half], num_words, at(before, offset), out + offset, meanwhile);
            }
        }
        return;
    }
#endif
    const int parts = num_rows <= 2 * REGISTER_ROWS ? 1 : num_parts(num_rows);
    for (int part = 0; part < parts; ++part) {
        const int begin = num_rows * part / parts, end = num_rows * (part + 1) / parts;
        unit_avx512<2 * REGISTER_ROWS>(
            end - begin, x.from(begin, 0), halves, num_words, at(before, begin * UNIT), out + begin * UNIT, meanwhile);
    }
}

// HALF_UNIT results of a row, in fp32.
struct HalfRow {
    __m512 low, high;
};

inline __m512 as_floats(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

inline HalfRow load_half(const Bf16* from) { return {as_floats(load<__m256i>(from)), as_floats(load<__m256i>(from + 16))}; }

inline void store_half(Bf16* to, const HalfRow& row) { store(to, _mm512_cvtne2ps_pbh(row.high, row.low)); }

// Rounds to bf16: intermediate results are rounded as torch rounds them.
inline HalfRow rounded(const HalfRow& row) {
    const auto as_bf16 = [](__m512 x) { return as_floats(bits_as<__m256i>(_mm512_cvtneps_pbh(x))); };
    return {as_bf16(row.low), as_bf16(row.high)};
}

}  // namespace

#endif
