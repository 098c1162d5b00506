// Attention over latents: one vector of a token is the key of all heads, and its first numbers are the value
// (DeepSeek-V2, arXiv:2405.04434, section 2.1, with absorbed maps).
//
// A single new token is attended as a prompt is: its heads are the rows that share a latent, which is read
// once for all of them. What a single token sees is split into parts of LATENT_PART tokens, which are merged
// afterwards as in decode.h; so a result depends neither on the threads nor on the rest of the batch.

#pragma once

#include <algorithm>
#include <vector>

#include "prefill.h"

#if defined(__AVX512BF16__)

namespace {

constexpr std::int64_t LATENT_PART = 4 * BLOCK;
constexpr std::int64_t LATENT_ROWS = 256;  // rows that share a block: more would push packed values out of L2

// A work item: query tokens of one sequence, and the tokens [first, end) of what they see.
struct LatentItem {
    QueryBlock queries;
    std::int64_t first, end;
    std::int64_t partial;  // index of its partial result until it is merged; -1
};

struct LatentMerge {
    QueryBlock queries;
    std::int64_t first_partial, num_parts;
};

struct LatentPlan {
    std::vector<LatentItem> items;
    std::vector<LatentMerge> merges;
    std::int64_t num_partials = 0;
};

template <int HEAD_DIM>
class LatentAttention : PrefillAttention<HEAD_DIM, true> {
    using Base = PrefillAttention<HEAD_DIM, true>;

  public:
    using Base::Base;

    void run(int num_threads) const {
        const LatentPlan plan = plan_latents(num_threads);
        static thread_local Lines<float> kept;  // kept between calls: fresh memory is expensive
        grow(kept, plan.num_partials * partial_size());
        float* const partials = kept.data();
#pragma omp parallel num_threads(num_threads)
        {
            begin_amx();
            work(plan, partials);
            end_amx();
        }
    }

  private:
    int rows_of(const QueryBlock& queries) const { return queries.num_queries * this->group_; }

    // Rows of a partial result: those of one token, in whole vectors.
    std::int64_t partial_rows() const { return (this->group_ + 15) / 16 * 16; }

    // Floats of a partial result: [value, row], then the maximum and the sum of each row.
    std::int64_t partial_size() const { return (this->value_dim() + 2) * partial_rows(); }

    LatentPlan plan_latents(int num_threads) const {
        LatentPlan plan;
        for (std::int64_t num_rows = LATENT_ROWS;; num_rows /= 2) {
            plan = LatentPlan();
            const auto each = static_cast<std::int32_t>(std::max<std::int64_t>(1, num_rows / this->group_));
            for (std::int32_t seq = 0; seq < this->prefills_.num_seqs; ++seq) add_items(seq, each, plan);
            if (static_cast<int>(plan.items.size()) >= 2 * num_threads || num_rows / 2 < MIN_ROWS) break;
        }
        // Items that begin in the same block read the same latents: in sequence, they come from memory once.
        std::stable_sort(plan.items.begin(), plan.items.end(), [&](const LatentItem& left, const LatentItem& right) {
            return offset_of_first(left) < offset_of_first(right);
        });
        return plan;
    }

    std::int64_t offset_of_first(const LatentItem& item) const {
        return this->pages_.offset_of(item.queries.seq, item.first);
    }

    void add_items(std::int32_t seq, std::int32_t queries_each, LatentPlan& plan) const {
        const auto num_queries = static_cast<std::int32_t>(this->prefills_.query_lens[seq]);
        const std::int64_t length = this->prefills_.seq_lens[seq];
        const std::int64_t num_parts = num_queries > 1 ? 1 : (length + LATENT_PART - 1) / LATENT_PART;
        if (num_parts == 1) {
            for (std::int32_t first = 0; first < num_queries; first += queries_each)
                plan.items.push_back({{seq, 0, first, std::min(queries_each, num_queries - first)}, 0, length, -1});
            return;
        }
        const QueryBlock queries{seq, 0, 0, 1};
        plan.merges.push_back({queries, plan.num_partials, num_parts});
        for (std::int64_t first = 0; first < length; first += LATENT_PART)
            plan.items.push_back({queries, first, std::min(first + LATENT_PART, length), plan.num_partials++});
    }

    // Run by all threads of a team.
    void work(const LatentPlan& plan, float* partials) const {
        static thread_local PrefillScratch scratch;
        const auto num_items = static_cast<std::int64_t>(plan.items.size());
        const auto num_merges = static_cast<std::int64_t>(plan.merges.size());
        this->write_tokens();
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < num_items; ++i) {
            const LatentItem& item = plan.items[i];
            const std::int64_t end = this->seen_by(item.queries, rows_of(item.queries) - 1).end;
            this->accumulate(item.queries, item.first, std::min(end, item.end), scratch);
            if (item.partial < 0)
                this->store_rows(item.queries, scratch);
            else
                keep(partials + item.partial * partial_size(), scratch);
        }
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < num_merges; ++i) merge(plan.merges[i], partials, scratch);
    }

    // The sums of 16 rows, for each value PANEL floats apart.
    static float* sums_of(int row, PrefillScratch& scratch) {
        return scratch.output.data() + row / PANEL * PANEL * HEAD_DIM + row % PANEL;
    }

    void keep(float* partial, PrefillScratch& scratch) const {
        const std::int64_t num_rows = partial_rows();
        float* const maxima = partial + this->value_dim() * num_rows;
        for (int row = 0; row < num_rows; row += 16) {
            const float* sums = sums_of(row, scratch);
            for (int value = 0; value < this->value_dim(); ++value)
                store(partial + value * num_rows + row, load<__m512>(sums + value * PANEL));
            store(maxima + row, load<__m512>(scratch.maxima.data() + row));
            store(maxima + num_rows + row, load<__m512>(scratch.sums.data() + row));
        }
    }

    void merge(const LatentMerge& merge, const float* partials, PrefillScratch& scratch) const {
        const std::int64_t num_rows = partial_rows(), size = partial_size();
        scratch.begin(static_cast<int>(num_rows + PANEL - 1) / PANEL * PANEL, HEAD_DIM);
        for (int row = 0; row < num_rows; row += 16)
            merge_rows(partials + merge.first_partial * size + row, merge.num_parts, row, scratch);
        this->store_rows(merge.queries, scratch);
    }

    // partials: of the first part, from the row on; maxima are to base 2
    void merge_rows(const float* partials, std::int64_t num_parts, int row, PrefillScratch& scratch) const {
        const std::int64_t num_rows = partial_rows(), size = partial_size();
        const float* const maxima = partials + this->value_dim() * num_rows;
        __m512 maximum = load<__m512>(maxima), sum = _mm512_setzero_ps();
        for (std::int64_t part = 1; part < num_parts; ++part)
            maximum = _mm512_max_ps(maximum, load<__m512>(maxima + part * size));
        float* const sums = sums_of(row, scratch);
        for (std::int64_t part = 0; part < num_parts; ++part) {
            const __m512 weight = exp2_negative(_mm512_sub_ps(load<__m512>(maxima + part * size), maximum));
            sum = _mm512_fmadd_ps(load<__m512>(maxima + part * size + num_rows), weight, sum);
            for (int value = 0; value < this->value_dim(); ++value) {
                float* const to = sums + value * PANEL;
                store(to, _mm512_fmadd_ps(load<__m512>(partials + part * size + value * num_rows), weight, load<__m512>(to)));
            }
        }
        store(scratch.sums.data() + row, sum);
    }
};

}  // namespace

#endif
