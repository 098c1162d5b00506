// Products of rows with weights in bf16, here, or rounded to 8 or 4 bits (quantized.h).
//
// HALF_UNIT outputs (rows of a weight) lie between each other: the first pair of bf16 of each, then the next pair, and so
// on. UNIT outputs are computed together, by the instruction that multiplies pairs of bf16 or, where the CPU
// has them and the system lets us, by tiles (AMX). What a row becomes depends neither on the other rows nor on the
// threads.

#pragma once

#include <type_traits>

#include "amx.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

extern "C" {

// 16 bits: words [num_outputs / HALF_UNIT, num_words, HALF_UNIT] are pairs of bf16; else as quantized.h has them
struct Weight {
    const void* words;
    const void* scales;  // of rounded numbers
    const void* bias;    // [num_outputs] or null
    std::int64_t num_outputs, num_words, bits;  // bits: 16, 8 or 4
};

}  // extern "C"

namespace {

constexpr int HALF_UNIT = 32;
constexpr int UNIT = 2 * HALF_UNIT;
constexpr int MAX_PRODUCT_ROWS = 64;  // that a unit is multiplied with at once; a multiple of 2 * TILE_ROWS
constexpr int LINE_BYTES = 64;
constexpr int CHUNK_WORDS = 16;    // what a tile takes; num_words is a multiple
constexpr int WORDS_AHEAD = 64;
constexpr int REGISTER_ROWS = 6;   // rows whose sums of a unit stay in registers; of half a unit those of twice as many

// The words of HALF_UNIT outputs, of which `num_outputs` there are, out of rows [num_outputs, num_words] of pairs of bf16.
inline void interleave(const std::uint32_t* rows, std::int64_t num_outputs, std::int64_t num_words, std::uint32_t* words) {
    for (std::int64_t begin = 0; begin < num_words; begin += CHUNK_WORDS)  // a line of each row
        for (std::int64_t word = begin; word < begin + CHUNK_WORDS; ++word)
            for (std::int64_t output = 0; output < HALF_UNIT; ++output)
                words[word * HALF_UNIT + output] = output < num_outputs ? rows[output * num_words + word] : 0;
}

// Room for CHUNK_WORDS pairs of bf16 of HALF_UNIT outputs.
struct Chunk {
    alignas(64) std::uint32_t words[CHUNK_WORDS * HALF_UNIT];
};

// Fetches so many lines of memory into the core's nearest cache, for the CPU alone foresees less than memory could give:
// every fourth, then those behind them, and so on. One after another they come by a seventh slower, on the CPU with tiles
// on which it was measured; what is fetched has to begin with a line of a number that is a multiple of STRIDE.
template <int LINES>
inline void fetch_lines(const void* memory) {
    constexpr int STRIDE = 4;
#pragma GCC unroll 4
    for (int first = 0; first < STRIDE; ++first)
#pragma GCC unroll 8
        for (int line = first; line < LINES; line += STRIDE)
            __builtin_prefetch(static_cast<const char*>(memory) + line * LINE_BYTES, 0, 3);
}

// What a thread multiplies with is one of the classes named *Words: the words of HALF_UNIT outputs, whose `chunk` gives
// CHUNK_WORDS of them, one pair's after the other's, in `room` if they lie nowhere else. `fetch_chunk` and `fetch` ask
// memory for as many words, or for one, from a word on: tiles take a chunk at a time, registers a word, and what is fetched
// little by little comes faster.

// Words as they lie.
struct PackedWeights {
    const std::uint32_t* words;

    const std::uint32_t* chunk(std::int64_t word, Chunk&) const { return words + word * HALF_UNIT; }
    void fetch_chunk(std::int64_t) const {}  // they are near
    void fetch(std::int64_t) const {}
};

// The same, from memory.
struct StreamedWeights : PackedWeights {
    StreamedWeights(const Weight& weight, std::int64_t output)
        : PackedWeights{static_cast<const std::uint32_t*>(weight.words) + output * weight.num_words} {}

    void fetch_chunk(std::int64_t word) const { fetch_lines<2 * CHUNK_WORDS>(words + word * HALF_UNIT); }

    void fetch(std::int64_t word) const {
        __builtin_prefetch(words + word * HALF_UNIT, 0, FETCH_FOR_LATER);
        __builtin_prefetch(words + word * HALF_UNIT + 16, 0, FETCH_FOR_LATER);
    }
};

// Where the numbers of rows lie: a row after the other or, for whole tiles of rows, as tiles are loaded: TILE_ROWS by
// HALF_UNIT of them after each other.
struct Place {
    std::int64_t width, row_stride, chunk_stride;

    static Place plain(std::int64_t width) { return {width, width, HALF_UNIT}; }
    static Place tiled(std::int64_t width) { return {width, HALF_UNIT, TILE_ROWS * HALF_UNIT}; }

    // HALF_UNIT numbers of a row lie together, from a multiple of it on.
    std::int64_t of(std::int64_t row, std::int64_t number) const {
        return row / TILE_ROWS * TILE_ROWS * width + row % TILE_ROWS * row_stride + number / HALF_UNIT * chunk_stride +
               number % HALF_UNIT;
    }
};

// Rows of pairs of bf16, from one of them and from a chunk on.
struct Rows {
    const Bf16* numbers;
    Place place;
    std::int64_t first_row = 0, first_word = 0;

    Rows from(std::int64_t row, std::int64_t word) const { return {numbers, place, first_row + row, first_word + word}; }

    const std::uint32_t* chunk(std::int64_t row, std::int64_t word) const {
        return reinterpret_cast<const std::uint32_t*>(numbers + place.of(first_row + row, 2 * (first_word + word)));
    }
};

// What is done between the chunks of a product.
struct Nothing {
    void operator()() const {}
};

// out[row * UNIT + i] = x[row] . output i, and what `before` has there unless it is null; of NUM_HALVES halves of a unit
template <int ROWS, int NUM_HALVES, typename Words, typename Meanwhile>
void halves_in_registers(
    const Rows& x, const Words* halves, std::int64_t num_words, const float* before, float* out, Meanwhile& meanwhile) {
    constexpr int VECTORS = 2 * NUM_HALVES;
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            sums[row][v] = before == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(before + row * UNIT + v * 16);
    Chunk room[NUM_HALVES];
    const std::uint32_t* pairs[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) pairs[row] = x.chunk(row, 0);
    for (std::int64_t begin = 0; begin < num_words; begin += CHUNK_WORDS) {
        const std::uint32_t* words[NUM_HALVES];
        for (int half = 0; half < NUM_HALVES; ++half) words[half] = halves[half].chunk(begin, room[half]);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) __builtin_prefetch(pairs[row] + x.place.chunk_stride / 2);  // its next pairs
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
        for (int row = 0; row < ROWS; ++row) pairs[row] += x.place.chunk_stride / 2;
        meanwhile();
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(out + row * UNIT + v * 16, sums[row][v]);
}

// A unit, of so many rows that all sums stay in registers: those of one half after the other or, where its words are near,
// of both, as far as there are registers. Words from memory come faster in the order in which they lie; for one row they do
// not.
template <int ROWS, typename Words, typename Meanwhile>
void unit_in_registers_of(
    int num_rows, const Rows& x, const Words (&halves)[2], std::int64_t num_words, const float* before, float* out,
    Meanwhile& meanwhile) {
    if (num_rows < ROWS) {
        if constexpr (ROWS > 1)
            unit_in_registers_of<ROWS - 1>(num_rows, x, halves, num_words, before, out, meanwhile);
    } else if constexpr (ROWS == 1 || (ROWS <= REGISTER_ROWS && std::is_same_v<Words, PackedWeights>)) {
        halves_in_registers<ROWS, 2>(x, halves, num_words, before, out, meanwhile);
    } else {
        halves_in_registers<ROWS, 1>(x, halves, num_words, before, out, meanwhile);
        halves_in_registers<ROWS, 1>(
            x, halves + 1, num_words, before == nullptr ? nullptr : before + HALF_UNIT, out + HALF_UNIT, meanwhile);
    }
}

#if defined(__AMX_BF16__)

// As unit_in_registers, for half a unit and 16 rows or, with BOTH, 32.
template <bool BOTH, typename Words, typename Meanwhile>
void half_unit_in_tiles(
    const Rows& x, const Words& half, std::int64_t num_words, const float* before, float* out, Meanwhile& meanwhile) {
    if (before != nullptr)
        load_sums<BOTH>(before, UNIT);
    else
        zero_sums<BOTH>();
    Chunk room[2];  // the next words are on their way into one while tiles are read from the other
    const auto chunk = [&](std::int64_t word) {
        half.fetch_chunk(word + WORDS_AHEAD);
        return half.chunk(word, room[word / CHUNK_WORDS % 2]);
    };
    const std::uint32_t* next = chunk(0);
    for (std::int64_t word = 0; word < num_words; word += CHUNK_WORDS) {
        const std::uint32_t* words = next;
        if (word + CHUNK_WORDS < num_words) next = chunk(word + CHUNK_WORDS);
        add_products<BOTH>(x.chunk(0, word), x.chunk(TILE_ROWS, word), x.place.row_stride / 2, words, HALF_UNIT);
        meanwhile();
    }
    store_sums<BOTH>(out, UNIT);
}

#endif

// UNIT outputs of a weight: those that begin with two of them, which may be the same where there are no more.
template <typename Words>
struct Unit {
    Words halves[2];

    Unit(const Words& first, const Words& second) : halves{first, second} {}
    Unit(const Weight& weight, std::int64_t first, std::int64_t second) : halves{{weight, first}, {weight, second}} {}
};

// Whether so many rows pass a weight's words at once: their product waits for memory alone. More are multiplied in parts.
inline bool pass_at_once(std::int64_t num_rows) {
    return num_rows <= (may_use_tiles() ? MAX_PRODUCT_ROWS : 2 * REGISTER_ROWS);
}

inline int num_parts(int num_rows) { return (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS; }

// How often multiply_halves does what is to be done meanwhile, for each chunk of words.
inline int calls_per_chunk(int num_rows) {
    return may_use_tiles() ? 2 * ((num_rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)) : num_parts(num_rows);
}

inline const float* at(const float* sums, std::int64_t place) { return sums == nullptr ? nullptr : sums + place; }

// out [num_rows, UNIT] = x [num_rows, num_words], both with room for whole tiles of rows, times a unit, and what `before`
// has unless it is null. Between begin_tiles and end_tiles.
template <typename Words, typename Meanwhile = const Nothing>
void multiply_halves(
    const Words (&halves)[2], std::int64_t num_words, const Rows& x, int num_rows, const float* before, float* out,
    Meanwhile& meanwhile = Nothing{}) {
#if defined(__AMX_BF16__)
    if (may_use_tiles()) {
        for (int row = 0; row < num_rows; row += 2 * TILE_ROWS) {
            const bool both = num_rows - row > TILE_ROWS;
            const auto multiply = both ? half_unit_in_tiles<true, Words, Meanwhile> : half_unit_in_tiles<false, Words, Meanwhile>;
            for (int half = 0; half < 2; ++half) {
                const int place = row * UNIT + half * HALF_UNIT;
                multiply(x.from(row, 0), halves[half], num_words, at(before, place), out + place, meanwhile);
            }
        }
        return;
    }
#endif
    const int parts = num_rows <= 2 * REGISTER_ROWS ? 1 : num_parts(num_rows);
    for (int part = 0; part < parts; ++part) {
        const int begin = num_rows * part / parts, end = num_rows * (part + 1) / parts;
        unit_in_registers_of<2 * REGISTER_ROWS>(
            end - begin, x.from(begin, 0), halves, num_words, at(before, begin * UNIT), out + begin * UNIT, meanwhile);
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
    const auto as_bf16 = [](__m512 x) { return as_floats(bits_as<__m256i>(_mm512_cvtneps_pbh(x))); };
    return {as_bf16(row.low), as_bf16(row.high)};
}

}  // namespace

#endif
