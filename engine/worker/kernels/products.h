// Products of a few rows with a weight that is read once for all rows: in bf16 as oneDNN lays it out for itself, or
// rounded to 8 or 4 bits (rounded.h).
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
    const void* words;   // 16 bits: [num_outputs / block, num_words, block] pairs of bf16; else as rounded.h has them
    const void* scales;  // of rounded numbers
    const void* bias;    // [num_outputs] or null
    std::int64_t num_outputs, num_words, block, bits;  // block: a multiple of HALF_UNIT; bits: 16, 8 or 4
};

}  // extern "C"

namespace {

constexpr int HALF_UNIT = 32;
constexpr int UNIT = 2 * HALF_UNIT;
constexpr int MAX_PRODUCT_ROWS = 64;  // of a product; a multiple of 2 * TILE_ROWS
constexpr int CHUNK_WORDS = 16;    // what a tile takes; num_words is a multiple
constexpr int WORDS_AHEAD = 64;
constexpr int REGISTER_ROWS = 6;   // rows whose sums stay in registers

// Room for CHUNK_WORDS pairs of bf16 of HALF_UNIT outputs.
struct Chunk {
    alignas(64) std::uint32_t words[CHUNK_WORDS * HALF_UNIT];
};

// What a thread multiplies with is one of the classes named *Words: the words of HALF_UNIT outputs, whose `chunk` gives
// CHUNK_WORDS of them, `stride` words from those of one pair to those of the next, in `room` if they lie nowhere else.

// Words as they lie.
struct PlainWords {
    const std::uint32_t* words;
    std::int64_t stride;

    PlainWords(const std::uint32_t* words, std::int64_t stride) : words(words), stride(stride) {}

    PlainWords(const Weight& weight, std::int64_t output)
        : words(static_cast<const std::uint32_t*>(weight.words) + output / weight.block * weight.block * weight.num_words +
                output % weight.block),
          stride(weight.block) {}

    PlainWords from(std::int64_t word) const { return {words + word * stride, stride}; }

    // And fetches what comes WORDS_AHEAD words later into the core's own cache: the CPU alone foresees less than memory
    // could give.
    const std::uint32_t* chunk(std::int64_t word, Chunk&) const {
        const std::uint32_t* begin = words + word * stride;
        for (int i = 0; i < CHUNK_WORDS; ++i) {
            __builtin_prefetch(begin + (WORDS_AHEAD + i) * stride, 0, 2);
            __builtin_prefetch(begin + (WORDS_AHEAD + i) * stride + 16, 0, 2);
        }
        return begin;
    }
};

// Words of some rows: `stride` words from those of one to those of the next.
struct Rows {
    const std::uint32_t* words;
    std::int64_t stride;

    Rows from(std::int64_t row) const { return {words + row * stride, stride}; }
};

// out[row * UNIT + i] = x[row] . output i, or the sum of both where they are to be added
template <int ROWS, typename Words>
void unit_in_registers(const Rows& x, const Words (&halves)[2], std::int64_t num_words, bool add, float* out) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            sums[row][v] = add ? _mm512_loadu_ps(out + row * UNIT + v * 16) : _mm512_setzero_ps();
    Chunk room[2];
    for (std::int64_t begin = 0; begin < num_words; begin += CHUNK_WORDS) {
        const std::uint32_t *first = halves[0].chunk(begin, room[0]), *second = halves[1].chunk(begin, room[1]);
        for (int word = 0; word < CHUNK_WORDS; ++word, first += halves[0].stride, second += halves[1].stride) {
            const __m512bh outputs[] = {load<__m512bh>(first), load<__m512bh>(first + 16), load<__m512bh>(second),
                                        load<__m512bh>(second + 16)};
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const std::uint32_t pair = x.words[row * x.stride + begin + word];
                const auto both = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair)));
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], both, outputs[v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + row * UNIT + v * 16, sums[row][v]);
}

template <int ROWS, typename Words>
void unit_in_registers_of(
    int num_rows, const Rows& x, const Words (&halves)[2], std::int64_t num_words, bool add, float* out) {
    if (num_rows == ROWS)
        unit_in_registers<ROWS>(x, halves, num_words, add, out);
    else if constexpr (ROWS > 1)
        unit_in_registers_of<ROWS - 1>(num_rows, x, halves, num_words, add, out);
}

#if defined(__AMX_BF16__)

// As unit_in_registers, for half a unit and 16 rows or, with BOTH, 32.
template <bool BOTH, typename Words>
void half_unit_in_tiles(const Rows& x, const Words& half, std::int64_t num_words, bool add, float* out) {
    if (add)
        load_sums<BOTH>(out, UNIT);
    else
        zero_sums<BOTH>();
    Chunk room[2];  // the next words are on their way into one while tiles are read from the other
    const std::uint32_t* next = half.chunk(0, room[0]);
    for (std::int64_t word = 0; word < num_words; word += CHUNK_WORDS) {
        const std::uint32_t* words = next;
        if (word + CHUNK_WORDS < num_words) next = half.chunk(word + CHUNK_WORDS, room[(word / CHUNK_WORDS + 1) % 2]);
        add_products<BOTH>(x.words + word, x.stride, words, half.stride);
    }
    store_sums<BOTH>(out, UNIT);
}

#endif

// The unit-th UNIT outputs of a weight. The last unit may have but one half: what the other one is then is not looked at.
template <typename Words>
struct Unit {
    Words halves[2];

    Unit(const Words& first, const Words& second) : halves{first, second} {}

    Unit(const Weight& weight, std::int64_t unit)
        : halves{{weight, unit * UNIT},
                 {weight, unit * UNIT + (unit * UNIT + HALF_UNIT < weight.num_outputs ? HALF_UNIT : 0)}} {}
};

// out [MAX_PRODUCT_ROWS, UNIT] = x [num_rows, num_words], with room for whole tiles of rows, times a unit, or the sum of
// both. Between begin_tiles and end_tiles.
template <typename Words>
void multiply_halves(
    const Words (&halves)[2], std::int64_t num_words, const Rows& x, int num_rows, bool add, float* out) {
#if defined(__AMX_BF16__)
    if (may_use_tiles()) {
        for (int row = 0; row < num_rows; row += 2 * TILE_ROWS) {
            const bool both = num_rows - row > TILE_ROWS;
            const auto multiply = both ? half_unit_in_tiles<true, Words> : half_unit_in_tiles<false, Words>;
            for (int half = 0; half < 2; ++half)
                multiply(x.from(row), halves[half], num_words, add, out + row * UNIT + half * HALF_UNIT);
        }
        return;
    }
#endif
    const int num_parts = (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
    for (int part = 0; part < num_parts; ++part) {
        const int begin = num_rows * part / num_parts, end = num_rows * (part + 1) / num_parts;
        unit_in_registers_of<REGISTER_ROWS>(end - begin, x.from(begin), halves, num_words, add, out + begin * UNIT);
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

}  // namespace

#endif
