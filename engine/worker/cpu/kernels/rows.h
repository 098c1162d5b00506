// GEMMs with whole weights: for the few rows of a small step, and blocked for any number.

#pragma once

#include <algorithm>
#include <cstring>

#include "quantized.h"

#if defined(__AVX512BF16__)

namespace {

// UNIT outputs of a weight are computed together: HALF_UNIT outputs from each of two. The last unit may have
// only one half; the other one is then ignored.
struct Halves {
    std::int64_t first, second;
};

inline std::int64_t num_units_of(const Weight& weight) { return (weight.num_outputs + UNIT - 1) / UNIT; }

inline Halves halves_of(const Weight& weight, std::int64_t unit) {
    const std::int64_t first = unit * UNIT, second = first + HALF_UNIT;
    return {first, second < weight.num_outputs ? second : first};
}

inline Rows plain_rows(const Weight& weight, const Bf16* x) { return {x, Layout::plain(2 * weight.num_words)}; }

// sums = x times a unit of a weight; see multiply_halves
inline void multiply_unit(const Weight& weight, std::int64_t unit, const Rows& x, int num_rows, float* sums) {
    const Halves outputs = halves_of(weight, unit);
    with_unit(weight, outputs.first, outputs.second, [&](const auto& words) {
        multiply_halves(words.halves, weight.num_words, x, num_rows, nullptr, sums);
    });
}

// Calls finish(row, output, the HALF_UNIT results from that output on) for both halves of a unit with these
// sums.
template <typename Finish>
inline void finish_row(const Weight& weight, std::int64_t unit, std::int64_t row, const float* sums, Finish finish) {
    const std::int64_t end = std::min<std::int64_t>((unit + 1) * UNIT, weight.num_outputs);
    for (std::int64_t output = unit * UNIT; output < end; output += HALF_UNIT)
        finish(row, output, result_of(weight, output, sums + output % UNIT));
}

constexpr std::int64_t SLICE_WORDS = 128;  // of each output of a unit: they stay in L1 for all rows of a group
constexpr std::int64_t GROUP_ROWS = 256;   // rows of a group: they stay in L2 for all outputs
constexpr std::int64_t BLOCK_ROWS = 2 * TILE_ROWS;  // rows that are multiplied at a time

// A slice of a unit's words, expanded to bf16.
struct Slice {
    alignas(64) std::uint32_t buffer[2][SLICE_WORDS * HALF_UNIT];

    template <typename Words>
    Unit<PackedWeights> of(const Unit<Words>& unit, std::int64_t begin, std::int64_t num_words) {
        for (int half = 0; half < 2; ++half)
            for (std::int64_t word = 0; word < num_words; word += CHUNK_WORDS)
                unit.halves[half].chunk(begin + word, *reinterpret_cast<Chunk*>(buffer[half] + word * HALF_UNIT));
        return {{buffer[0]}, {buffer[1]}};
    }

    Unit<PackedWeights> of(const Unit<StreamedWeights>& unit, std::int64_t begin, std::int64_t) {
        const auto from = [&](const StreamedWeights& half) { return PackedWeights{half.words + begin * HALF_UNIT}; };
        return {from(unit.halves[0]), from(unit.halves[1])};
    }
};

// Prefetches the next words of a weight into the core's cache little by little.
template <typename Words>
struct Prefetcher {
    Prefetcher(const Unit<Words>&, std::int64_t, std::int64_t) {}  // quantized weights prefetch on their own
    void operator()() {}
};

template <>
struct Prefetcher<StreamedWeights> {
    // Prefetches SLICE_WORDS of a unit from `begin` on, in `num_calls` calls.
    Prefetcher(const Unit<StreamedWeights>& unit, std::int64_t begin, std::int64_t num_calls)
        : unit_(unit), next_(begin), end_(begin + SLICE_WORDS), share_((SLICE_WORDS + num_calls - 1) / num_calls) {}

    void operator()() {
        for (const std::int64_t last = std::min(next_ + share_, end_); next_ < last; ++next_)
            for (const StreamedWeights& half : unit_.halves) half.fetch(next_);
    }

  private:
    const Unit<StreamedWeights> unit_;
    std::int64_t next_;
    const std::int64_t end_, share_;
};

// A GEMM blocked for caches; rows are padded to a multiple of TILE_ROWS.
class BlockedGemm {
  public:
    BlockedGemm(const Weight& weight, const Rows& x, std::int64_t num_rows) : weight_(weight), x_(x), num_rows_(num_rows) {}

    // Calls finish(unit, row, the sums of its UNIT outputs) for all rows and units. Run by all threads of a
    // team; ends with a barrier.
    template <typename OutputsOf, typename Finish>
    void multiply(std::int64_t num_units, OutputsOf outputs_of, Finish finish) const {
        for (std::int64_t begin = 0; begin < num_rows_; begin += GROUP_ROWS) {
            const std::int64_t end = std::min(begin + GROUP_ROWS, num_rows_);
#pragma omp for schedule(static) nowait
            for (std::int64_t unit = 0; unit < num_units; ++unit) {
                const Halves outputs = outputs_of(unit), following = outputs_of(std::min(unit + 1, num_units - 1));
                with_unit(weight_, outputs.first, outputs.second, [&](const auto& words) {
                    const std::decay_t<decltype(words)> next(weight_, following.first, following.second);
                    multiply_unit(words, next, begin, end, [&](std::int64_t row, const float* sums) { finish(unit, row, sums); });
                });
            }
        }
#pragma omp barrier
    }

    // The same for one unit, by the calling thread alone.
    template <typename Finish>
    void multiply_unit(std::int64_t unit, Finish finish) const {
        const Halves outputs = halves_of(weight_, unit), following = halves_of(weight_, std::min(unit + 1, num_units_of(weight_) - 1));
        with_unit(weight_, outputs.first, outputs.second, [&](const auto& words) {
            const std::decay_t<decltype(words)> next(weight_, following.first, following.second);
            for (std::int64_t begin = 0; begin < num_rows_; begin += GROUP_ROWS)
                multiply_unit(words, next, begin, std::min(begin + GROUP_ROWS, num_rows_), finish);
        });
    }

  private:
    template <typename Words, typename Finish>
    void multiply_unit(
        const Unit<Words>& unit, const Unit<Words>& following, std::int64_t begin, std::int64_t end, Finish finish) const {
        static thread_local Lines<float> kept(GROUP_ROWS * UNIT);
        const std::int64_t num_words = weight_.num_words;
        const int last_rows = static_cast<int>((end - begin) % BLOCK_ROWS);
        const std::int64_t calls_a_chunk = (end - begin) / BLOCK_ROWS * calls_per_chunk(BLOCK_ROWS) + calls_per_chunk(last_rows);
        Slice slice;
        alignas(64) float last[BLOCK_ROWS * UNIT];
        for (std::int64_t word = 0; word < num_words; word += SLICE_WORDS) {
            const std::int64_t next = std::min(word + SLICE_WORDS, num_words);
            const Unit<PackedWeights> plain = slice.of(unit, word, next - word);
            const bool is_last = next == num_words;
            Prefetcher<Words> ahead(is_last ? following : unit, is_last ? 0 : next, calls_a_chunk * (next - word) / CHUNK_WORDS);
            for (std::int64_t row = begin; row < end; row += BLOCK_ROWS) {
                const int count = static_cast<int>(std::min(BLOCK_ROWS, end - row));
                float* const sums = kept.data() + (row - begin) * UNIT;
                const float* before = word > 0 ? sums : nullptr;
                if (!is_last) {
                    multiply_halves(plain.halves, next - word, x_.from(row, word), count, before, sums, ahead);
                } else {
                    multiply_halves(plain.halves, next - word, x_.from(row, word), count, before, last, ahead);
                    for (int i = 0; i < count; ++i) finish(row + i, last + i * UNIT);
                }
            }
        }
    }

    const Weight& weight_;
    const Rows x_;
    const std::int64_t num_rows_;
};

// Calls finish, as finish_row does, for all outputs of a weight and all rows of x, which is padded to a
// multiple of TILE_ROWS. Run by all threads of a team; ends with a barrier.
template <typename Finish>
void multiply_rows(const Weight& weight, const Rows& x, std::int64_t num_rows, Finish finish) {
    const std::int64_t num_units = num_units_of(weight);
    if (!fits_one_block(num_rows)) {
        const auto outputs_of = [&](std::int64_t unit) { return halves_of(weight, unit); };
        const auto keep = [&](std::int64_t unit, std::int64_t row, const float* sums) {
            finish_row(weight, unit, row, sums, finish);
        };
        return BlockedGemm(weight, x, num_rows).multiply(num_units, outputs_of, keep);
    }
#pragma omp for schedule(static)
    for (std::int64_t unit = 0; unit < num_units; ++unit) {
        alignas(64) float sums[MAX_GEMM_ROWS * UNIT];
        multiply_unit(weight, unit, x, static_cast<int>(num_rows), sums);
        for (std::int64_t row = 0; row < num_rows; ++row) finish_row(weight, unit, row, sums + row * UNIT, finish);
    }
}

// A `finish` for multiply_rows that stores the results to `to` [num_rows, num_outputs].
inline auto store_rows(const Weight& weight, Bf16* to) {
    return [&weight, to](std::int64_t row, std::int64_t output, const HalfRow& results) {
        store_results(weight, output, results, to + row * weight.num_outputs + output);
    };
}

}  // namespace

#endif
