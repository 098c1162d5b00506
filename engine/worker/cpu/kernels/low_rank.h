// Low-rank adapters (LoRA): what an adapter adds to the outputs of a GEMM, row by row, as each row of a step may
// have an adapter of its own. The result for a row depends neither on the other rows nor on the threads.

#pragma once

#include <array>
#include <vector>

#include "elementwise.h"

#if defined(__AVX512BF16__)

extern "C" {

// What an adapter adds to some outputs of a weight: up * (down * x) * scale, of a rank that is a multiple of
// RANK_UNIT; what is missing is zero.
struct LowRankPiece {
    const void* down;  // bf16 [rank / RANK_UNIT, inputs / HALF_UNIT, RANK_UNIT, HALF_UNIT]
    const void* up;    // pairs of bf16 [num_outputs / HALF_UNIT, rank / 2, HALF_UNIT]
    std::int64_t first_output, num_outputs, rank;
    double scale;
};

// All that an adapter adds to a weight.
struct LowRank {
    const LowRankPiece* pieces;
    std::int64_t num_pieces;
};

// The adapters of a step, each of WEIGHTS_OF_LAYER low ranks for each layer: qkv, output, gate_up, down.
struct Adapters {
    const LowRank* const* each;
    const std::int64_t* of_row;  // [num_tokens] a number of one, or -1; null: no row has any
    std::int64_t max_rank;       // the most that the ranks of a weight's pieces add up to
};

}  // extern "C"

namespace {

constexpr int RANK_UNIT = 8;  // dot products of a row that are summed at once
constexpr std::int64_t WEIGHTS_OF_LAYER = 4;
constexpr std::int64_t CHUNKS_AHEAD = 6;  // inputs whose words are prefetched
constexpr std::int64_t ROWS_AHEAD = 2;    // rows whose outputs' words are prefetched: each has an adapter of its own

// Two rows of one adapter; the second is -1 where there is only one.
using RowPair = std::array<std::int64_t, 2>;

// The rows of a GEMM, with the numbers of their adapters.
struct AdaptedRows {
    std::vector<std::int64_t> of_row;  // -1: none
    std::vector<RowPair> pairs;        // of the rows that have one

    void add(std::int64_t adapter) {
        of_row.push_back(adapter);
        if (adapter < 0) return;
        const auto row = static_cast<std::int64_t>(of_row.size()) - 1;
        if (static_cast<std::size_t>(adapter) >= open_.size()) open_.resize(adapter + 1, -1);
        std::int64_t& open = open_[adapter];  // its pair that has room for a row
        if (open < 0) {
            open = static_cast<std::int64_t>(pairs.size());
            pairs.push_back({row, -1});
        } else {
            pairs[open][1] = row;
            open = -1;
        }
    }

  private:
    std::vector<std::int64_t> open_;
};

// The additions to one GEMM of these rows.
class LowRankGemm {
  public:
    LowRankGemm(const Adapters& adapters, const AdaptedRows& rows, std::int64_t weight, Bf16* products)
        : each_(adapters.each), rows_(&rows), weight_(weight), max_rank_(adapters.max_rank), products_(products) {}

    bool has_any() const { return !rows_->pairs.empty(); }

    // Computes down * x of each row. Run by all threads of a team; ends with a barrier.
    void project(const Rows& x) const {
        if (!has_any()) return;
        const auto num_pairs = static_cast<std::int64_t>(rows_->pairs.size());
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < num_pairs; ++i) {
            const RowPair& pair = rows_->pairs[i];
            const LowRank& added = *of(pair[0]);
            if (pair[1] < 0)
                project_rows<1>(added, x, pair);
            else
                project_rows<2>(added, x, pair);
        }
    }

    // The result of a row's HALF_UNIT outputs, with what its adapter adds.
    HalfRow add(std::int64_t row, std::int64_t output, const HalfRow& result) const {
        if (!has_any()) return result;
        fetch(row + ROWS_AHEAD, output);
        const LowRank* const added = of(row);
        if (added == nullptr) return result;
        const Bf16* products = products_ + row * max_rank_;
        for (std::int64_t i = 0; i < added->num_pieces; products += added->pieces[i++].rank) {
            const LowRankPiece& piece = added->pieces[i];
            const std::int64_t own = output - piece.first_output;
            if (own >= 0 && own < piece.num_outputs) return add_piece(piece, own, products, result);
        }
        return result;
    }

  private:
    const LowRank* of(std::int64_t row) const {
        const std::int64_t adapter = rows_->of_row[row];
        return adapter < 0 ? nullptr : each_[adapter] + weight_;
    }

    // Two rows of one adapter at once: its words come from memory, and are read once for both.
    template <int NUM_ROWS>
    void project_rows(const LowRank& added, const Rows& x, const RowPair& rows) const {
        Bf16* to[NUM_ROWS];
        for (int row = 0; row < NUM_ROWS; ++row) to[row] = products_ + rows[row] * max_rank_;
        for (std::int64_t i = 0; i < added.num_pieces; ++i) {
            const LowRankPiece& piece = added.pieces[i];
            for (std::int64_t first = 0; first < piece.rank; first += RANK_UNIT) project_unit<NUM_ROWS>(piece, first, x, rows, to);
            for (Bf16*& row : to) row += piece.rank;
        }
    }

    template <int NUM_ROWS>
    static void project_unit(
        const LowRankPiece& piece, std::int64_t first, const Rows& x, const RowPair& rows, Bf16* const (&to)[NUM_ROWS]) {
        const std::int64_t num_chunks = x.layout.width / HALF_UNIT;
        const Bf16* down = static_cast<const Bf16*>(piece.down) + first * x.layout.width;
        __m512 sums[NUM_ROWS][RANK_UNIT];
        for (auto& of_row : sums)
#pragma GCC unroll 8
            for (__m512& sum : of_row) sum = _mm512_setzero_ps();
        for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk, down += RANK_UNIT * HALF_UNIT) {
            __m512bh inputs[NUM_ROWS];
            for (int row = 0; row < NUM_ROWS; ++row) inputs[row] = load<__m512bh>(x.chunk(rows[row], chunk * HALF_UNIT / 2));
#pragma GCC unroll 8
            for (int i = 0; i < RANK_UNIT; ++i) {
                __builtin_prefetch(down + (CHUNKS_AHEAD * RANK_UNIT + i) * HALF_UNIT);
                const auto weights = load<__m512bh>(down + i * HALF_UNIT);
#pragma GCC unroll 2
                for (int row = 0; row < NUM_ROWS; ++row) sums[row][i] = _mm512_dpbf16_ps(sums[row][i], inputs[row], weights);
            }
        }
        for (int row = 0; row < NUM_ROWS; ++row)
            for (int i = 0; i < RANK_UNIT; ++i)
                to[row][first + i] = round_to_bf16(_mm512_reduce_add_ps(sums[row][i]) * static_cast<float>(piece.scale));
    }

    // What `add` reads of a row from an output on.
    void fetch(std::int64_t row, std::int64_t output) const {
        const LowRank* const added = row < static_cast<std::int64_t>(rows_->of_row.size()) ? of(row) : nullptr;
        for (std::int64_t i = 0; added != nullptr && i < added->num_pieces; ++i) {
            const LowRankPiece& piece = added->pieces[i];
            const std::int64_t own = output - piece.first_output;
            if (own < 0 || own >= piece.num_outputs) continue;
            const auto* words = static_cast<const std::uint32_t*>(piece.up) + own * (piece.rank / 2);
            for (std::int64_t word = 0; word < piece.rank / 2; ++word) {
                __builtin_prefetch(words + word * HALF_UNIT);
                __builtin_prefetch(words + word * HALF_UNIT + HALF_UNIT / 2);
            }
        }
    }

    static HalfRow add_piece(const LowRankPiece& piece, std::int64_t output, const Bf16* products, HalfRow sum) {
        const std::int64_t num_words = piece.rank / 2;
        const auto* words = static_cast<const std::uint32_t*>(piece.up) + output * num_words;
        const auto* pairs = reinterpret_cast<const std::uint32_t*>(products);
        for (std::int64_t word = 0; word < num_words; ++word, words += HALF_UNIT) {
            const auto both = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(pairs[word])));
            sum.low = _mm512_dpbf16_ps(sum.low, both, load<__m512bh>(words));
            sum.high = _mm512_dpbf16_ps(sum.high, both, load<__m512bh>(words + HALF_UNIT / 2));
        }
        return sum;
    }

    const LowRank* const* const each_;
    const AdaptedRows* const rows_;
    const std::int64_t weight_, max_rank_;
    Bf16* const products_;
};

}  // namespace

#endif
