// Products of whole weights: of the few rows of a small step, and of any number.

#pragma once

#include <algorithm>
#include <cstring>

#include "rounded.h"

#if defined(__AVX512BF16__)

namespace {

inline std::int64_t num_units_of(const Weight& weight) { return (weight.num_outputs + UNIT - 1) / UNIT; }

inline Rows rows_of(const Weight& weight, const Bf16* x) {
    return {reinterpret_cast<const std::uint32_t*>(x), weight.num_words};
}

// sums as multiply_halves', of a unit of a weight
inline void multiply_unit(const Weight& weight, std::int64_t unit, const Bf16* x, int num_rows, float* sums) {
    with_unit(weight, unit, [&](const auto& words) {
        multiply_halves(words.halves, weight.num_words, rows_of(weight, x), num_rows, false, sums);
    });
}

template <typename Finish>
inline void finish_unit(const Weight& weight, std::int64_t unit, int num_rows, const float* sums, Finish finish) {
    const std::int64_t end = std::min<std::int64_t>((unit + 1) * UNIT, weight.num_outputs);
    for (int row = 0; row < num_rows; ++row)
        for (std::int64_t output = unit * UNIT; output < end; output += HALF_UNIT)
            finish(row, output, result_of(weight, output, sums + row * UNIT + output % UNIT));
}

// finish(row, output, the HALF_UNIT results from that output on) for all rows, at most MAX_PRODUCT_ROWS, and outputs. x has
// room for whole tiles of rows. This and what follows is run by all threads of a team.
template <typename Finish>
void multiply_few(const Weight& weight, const Bf16* x, int num_rows, Finish finish) {
    const std::int64_t num_units = num_units_of(weight);
#pragma omp for schedule(static)
    for (std::int64_t unit = 0; unit < num_units; ++unit) {
        alignas(64) float sums[MAX_PRODUCT_ROWS * UNIT];
        multiply_unit(weight, unit, x, num_rows, sums);
        finish_unit(weight, unit, num_rows, sums, finish);
    }
}

// Of each output of a unit, in bf16: a core's nearest cache keeps them while many rows are multiplied with them.
constexpr std::int64_t SLICE_WORDS = 128;
constexpr std::int64_t GROUP_ROWS = 256;  // so many that the next cache keeps them for all outputs; MAX_PRODUCT_ROWS times n

struct Slice {
    alignas(64) std::uint32_t room[2][SLICE_WORDS * HALF_UNIT];

    template <typename Words>
    Unit<PlainWords> of(const Unit<Words>& unit, std::int64_t begin, std::int64_t num_words) {
        for (int half = 0; half < 2; ++half)
            for (std::int64_t word = 0; word < num_words; word += CHUNK_WORDS)
                unit.halves[half].chunk(begin + word, *reinterpret_cast<Chunk*>(room[half] + word * HALF_UNIT));
        return {{room[0], HALF_UNIT}, {room[1], HALF_UNIT}};
    }

    Unit<PlainWords> of(const Unit<PlainWords>& unit, std::int64_t begin, std::int64_t) {
        return {unit.halves[0].from(begin), unit.halves[1].from(begin)};
    }
};

// Rows behind the last whole MAX_PRODUCT_ROWS, with room for as many.
inline const Bf16* with_room(const Bf16* x, std::int64_t num_rows, std::int64_t width) {
    static thread_local Lines<Bf16> kept;
    kept.resize(MAX_PRODUCT_ROWS * width);
    std::memcpy(kept.data(), x, num_rows * width * sizeof(Bf16));
    return kept.data();
}

// Any number of rows, and products of theirs with a unit.
class ManyRows {
  public:
    // x [num_rows, width]
    ManyRows(const Bf16* x, std::int64_t num_rows, std::int64_t width)
        : x_(x),
          width_(width),
          last_(num_rows / MAX_PRODUCT_ROWS * MAX_PRODUCT_ROWS),
          last_rows_(with_room(x + last_ * width, num_rows - last_, width)) {}

    // sums [end - begin, UNIT], with room for whole MAX_PRODUCT_ROWS: of the rows `begin` to `end`, GROUP_ROWS at most
    void multiply(const Weight& weight, std::int64_t unit, std::int64_t begin, std::int64_t end, float* sums) const {
        with_unit(weight, unit, [&](const auto& words) {
            Slice slice;
            for (std::int64_t word = 0; word < weight.num_words; word += SLICE_WORDS) {
                const std::int64_t num_words = std::min(SLICE_WORDS, weight.num_words - word);
                const Unit<PlainWords> plain = slice.of(words, word, num_words);
                for (std::int64_t row = begin; row < end; row += MAX_PRODUCT_ROWS) {
                    const int count = static_cast<int>(std::min<std::int64_t>(MAX_PRODUCT_ROWS, end - row));
                    const Rows rows = rows_of(weight, row < last_ ? x_ + row * width_ : last_rows_);
                    multiply_halves(plain.halves, num_words, {rows.words + word, rows.stride}, count, word > 0,
                                    sums + (row - begin) * UNIT);
                }
            }
        });
    }

  private:
    const Bf16* const x_;
    const std::int64_t width_, last_;
    const Bf16* const last_rows_;
};

// to [num_rows, num_outputs] = x [num_rows, num_words * 2] times a weight
inline void multiply_rows(const Weight& weight, const Bf16* x, std::int64_t num_rows, Bf16* to) {
    static thread_local Lines<float> sums(GROUP_ROWS * UNIT);
    const ManyRows rows(x, num_rows, weight.num_words * 2);
    const std::int64_t num_units = num_units_of(weight);
    for (std::int64_t begin = 0; begin < num_rows; begin += GROUP_ROWS) {
        const std::int64_t end = std::min(begin + GROUP_ROWS, num_rows);
#pragma omp for schedule(static) nowait
        for (std::int64_t unit = 0; unit < num_units; ++unit) {
            rows.multiply(weight, unit, begin, end, sums.data());
            finish_unit(weight, unit, static_cast<int>(end - begin), sums.data(),
                        [&](int row, std::int64_t output, const HalfRow& results) {
                            keep_results(weight, output, results, to + (begin + row) * weight.num_outputs + output);
                        });
        }
    }
}

}  // namespace

#endif
