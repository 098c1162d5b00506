// Decode attention: one new token per sequence, reading KV blocks in place.
//
// A long sequence is split into parts of PART tokens, which are merged afterwards (Flash-Decoding: Dao,
// Haziza, Massa, Sizov 2023; the running maximum and sum of a softmax: Milakov, Gimelshein 2018,
// arXiv:1805.02867). Parts begin at multiples of PART, so a result depends neither on the threads nor on the
// rest of the batch.

#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int PART = 256;          // tokens of one sequence per part
constexpr int ROWS = 4;            // keys whose dot products with a query are summed together
constexpr int SCORES = PART + 16;  // buffer for a query's scores: the last ones are written, not read
constexpr int MAX_QUERIES = 4;     // query heads that share one read of a key or value
constexpr int ITEMS_PER_THREAD = 4;
constexpr int RUN = 4;                     // tokens processed head by head: they are adjacent in memory
constexpr std::size_t BYTES_AHEAD = 8192;  // of runs that are prefetched; L1 holds more

template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};

// scores[q * SCORES + t] = query q . key t, for the ROWS keys at `rows`. Queries are in the order of load_pair.
template <typename T, int HEAD_DIM, int QUERIES>
inline void score_rows(const T* const (&rows)[ROWS], const float* queries, float* scores) {
    constexpr int LANES = lanes_for(HEAD_DIM);
    Floats<LANES> sums[QUERIES][ROWS] = {};
#pragma GCC unroll 16
    for (int at = 0; at < HEAD_DIM; at += 2 * LANES) {
        Pair<LANES> keys[ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row) keys[row] = load_pair<LANES>(rows[row] + at);
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; ++q) {
            const auto query = load_pair<LANES>(queries + q * HEAD_DIM + at);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
                sums[q][row] += keys[row].first * query.first + keys[row].second * query.second;
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < QUERIES; ++q) sum_lanes<LANES>(sums[q], scores + q * SCORES);
}

#if defined(__AVX512BF16__)
// The same by AVX512_BF16, which multiplies pairs of bf16 and accumulates in fp32.
template <int HEAD_DIM, int QUERIES>
inline void score_rows_bf16(const Bf16* const (&rows)[ROWS], const Bf16* queries, float* scores) {
    Floats<16> sums[QUERIES][ROWS] = {};
#pragma GCC unroll 16
    for (int at = 0; at < HEAD_DIM; at += 32) {
        __m512bh keys[ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row) keys[row] = load<__m512bh>(rows[row] + at);
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; ++q) {
            const auto query = load<__m512bh>(queries + q * HEAD_DIM + at);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
                sums[q][row] = _mm512_dpbf16_ps(sums[q][row], keys[row], query);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < QUERIES; ++q) sum_lanes<16>(sums[q], scores + q * SCORES);
}
#endif

// At most RUN tokens of one KV head in one block, and the rows to prefetch meanwhile.
template <typename T>
struct Run {
    const T* rows;
    const T* next_rows;
    std::int64_t stride;
    int num_tokens;
};

// scores: [QUERIES, SCORES], of which num_tokens, rounded up to ROWS, are written
template <typename T, int HEAD_DIM, int QUERIES>
void score_run(const Run<T>& run, const float* queries, const T* raw_queries, float* scores) {
    for (int token = 0; token < run.num_tokens; token += ROWS) {
        const T* rows[ROWS];
        for (int row = 0; row < ROWS; ++row) {
            const std::int64_t offset = std::min(token + row, run.num_tokens - 1) * run.stride;
            rows[row] = run.rows + offset;
            prefetch_row<T, HEAD_DIM>(run.next_rows + offset);
        }
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == sizeof(Bf16) && HEAD_DIM % 32 == 0) {
            score_rows_bf16<HEAD_DIM, QUERIES>(rows, raw_queries, scores + token);
            continue;
        }
#endif
        score_rows<T, HEAD_DIM, QUERIES>(rows, queries, scores + token);
    }
}

// Pairs of vectors whose sums fit in registers for this number of queries; divides HEAD_DIM / (2 * LANES).
constexpr int pairs_at_once(int num_pairs, int num_queries) {
    int pairs = num_pairs;
    while (num_pairs % pairs != 0 || (pairs > 1 && pairs * num_queries * 2 > NUM_VECTOR_REGISTERS * 3 / 4)) --pairs;
    return pairs;
}

// sums[q] += the values of a run, weighted. weights: [QUERIES, SCORES]; sums: [QUERIES, HEAD_DIM]
template <typename T, int HEAD_DIM, int QUERIES>
void add_values(const Run<T>& run, const float* weights, float* sums) {
    constexpr int LANES = lanes_for(HEAD_DIM);
    constexpr int PAIRS = pairs_at_once(HEAD_DIM / (2 * LANES), QUERIES);
    for (int at = 0; at < HEAD_DIM; at += PAIRS * 2 * LANES) {
        Pair<LANES> tile[QUERIES][PAIRS];
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 16
            for (int pair = 0; pair < PAIRS; ++pair)
                tile[q][pair] = load_pair<LANES>(sums + q * HEAD_DIM + at + pair * 2 * LANES);
        for (int token = 0; token < run.num_tokens; ++token) {
            const T* row = run.rows + token * run.stride + at;
            if (at == 0) prefetch_row<T, HEAD_DIM>(run.next_rows + token * run.stride);
#pragma GCC unroll 16
            for (int pair = 0; pair < PAIRS; ++pair) {
                const auto value = load_pair<LANES>(row + pair * 2 * LANES);
#pragma GCC unroll 4
                for (int q = 0; q < QUERIES; ++q) {
                    tile[q][pair].first += value.first * weights[q * SCORES + token];
                    tile[q][pair].second += value.second * weights[q * SCORES + token];
                }
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 16
            for (int pair = 0; pair < PAIRS; ++pair) {
                store(sums + q * HEAD_DIM + at + pair * 2 * LANES, tile[q][pair].first);
                store(sums + q * HEAD_DIM + at + pair * 2 * LANES + LANES, tile[q][pair].second);
            }
    }
}

struct Softmax {
    float maximum, sum;
};

// Scales and caps the scores of at most PART tokens.
void cap_scores(float* scores, int num_tokens, float scale, float cap) {
    constexpr int LANES = lanes_for(32);
    for (int i = 0; i < num_tokens; i += LANES)
        store(scores + i, soft_capped<LANES>(load<Floats<LANES>>(scores + i) * scale, cap));
}

// Turns the scores of at most PART tokens into weights, not yet divided by their sum.
Softmax weigh(float* scores, int num_tokens, float scale) {
    constexpr int LANES = lanes_for(32);
    using F = Floats<LANES>;
    for (int i = num_tokens; i % LANES != 0; ++i) scores[i] = -INFINITY;
    F largest = F{} - INFINITY;
    for (int i = 0; i < num_tokens; i += LANES) {
        const F x = load<F>(scores + i) * scale;
        store(scores + i, x);
        largest = x > largest ? x : largest;
    }
    float maximum = largest[0];
    for (int lane = 1; lane < LANES; ++lane) maximum = std::max(maximum, largest[lane]);
    F sums = {};
    for (int i = 0; i < num_tokens; i += LANES) {
        const F weight = exp_negative<LANES>(load<F>(scores + i) - maximum);
        store(scores + i, weight);
        sums += weight;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    return {maximum, sum};
}

// A work item: a part of a sequence, and some of its KV heads.
struct Item {
    std::int32_t seq, part, first_head, num_heads;
    std::int32_t partial;  // index of its partial result until it is merged; -1
};

struct Merge {
    std::int32_t seq, first_partial, num_parts;
};

struct Plan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    std::int32_t num_partials = 0;
};

Plan plan_decodes(const Pool& pool, const Sequences& decodes, Reach reach, int num_threads) {
    Plan plan;
    std::vector<Item> parts;
    for (std::int64_t seq = 0; seq < decodes.num_seqs; ++seq) {
        const std::int64_t length = decodes.seq_lens[seq];
        const std::int64_t first = first_seen(length - 1, reach);
        const auto first_part = static_cast<std::int32_t>(first / PART);
        const auto num_parts = static_cast<std::int32_t>((length - 1) / PART) - first_part + 1;
        const bool whole = num_parts == 1;
        if (!whole) plan.merges.push_back({static_cast<std::int32_t>(seq), plan.num_partials, num_parts});
        for (std::int32_t i = 0; i < num_parts; ++i)
            parts.push_back({static_cast<std::int32_t>(seq), first_part + i, 0, 0, whole ? -1 : plan.num_partials++});
    }
    // Parts that begin in the same block are the same tokens, of a prefix that sequences share. Processed in
    // sequence, they are read from memory once.
    const auto page_of = [&](const Item& part) {
        return decodes.block_tables[part.seq * decodes.max_blocks + part.part * PART / pool.block_size];
    };
    std::stable_sort(parts.begin(), parts.end(),
                     [&](const Item& left, const Item& right) { return page_of(left) < page_of(right); });
    // Heads are independent: how they are distributed changes no result.
    const auto num_kv_heads = static_cast<std::int32_t>(pool.num_kv_heads);
    std::int32_t shares = 1;
    while (shares < num_kv_heads && num_threads > 1 &&
           static_cast<std::int64_t>(parts.size()) * shares < ITEMS_PER_THREAD * num_threads)
        shares = std::min(2 * shares, num_kv_heads);
    for (const Item& part : parts)
        for (std::int32_t share = 0; share < shares; ++share) {
            Item item = part;
            item.first_head = num_kv_heads * share / shares;
            item.num_heads = num_kv_heads * (share + 1) / shares - item.first_head;
            plan.items.push_back(item);
        }
    return plan;
}

// A thread's buffers for one item; kept between items.
template <typename T>
struct Scratch {
    Lines<float> queries, scores, sums;
    std::vector<Run<T>> runs;  // of the item's first head: keys, then values
    std::vector<Softmax> softmax;
};

template <typename T, int HEAD_DIM>
class DecodeAttention {
  public:
    DecodeAttention(const Pool& pool, const Sequences& decodes, std::int64_t slot, const Heads& heads)
        : pool_(pool),
          decodes_(decodes),
          heads_(heads),
          pages_(pool, decodes, slot),
          group_(static_cast<int>(heads.num_heads / pool.num_kv_heads)) {}

    void run(int num_threads) const {
        const Plan plan = plan_decodes(pool_, decodes_, heads_.reach, num_threads);
        static thread_local Lines<float> kept;  // kept between calls: fresh memory is expensive
        kept.resize(num_partial_floats(plan, heads_.num_heads));
        float* const partials = kept.data();
#pragma omp parallel num_threads(num_threads)
        work(plan, partials);
    }

    static std::size_t num_partial_floats(const Plan& plan, std::int64_t num_heads) {
        return static_cast<std::size_t>(plan.num_partials) * num_heads * PARTIAL;
    }

    // Run by all threads of a team.
    void work(const Plan& plan, float* partials) const {
        const auto num_items = static_cast<std::int64_t>(plan.items.size());
        const auto num_merges = static_cast<std::int64_t>(plan.merges.size()) * heads_.num_heads;
#pragma omp for schedule(static)
        for (std::int64_t seq = 0; seq < decodes_.num_seqs; ++seq)
            pages_.write(seq, decodes_.seq_lens[seq] - 1, seq, heads_);
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < num_items; ++i) attend(plan.items[i], partials);
        if (num_merges == 0) return;
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < num_merges; ++i)
            merge(plan.merges[i / heads_.num_heads], i % heads_.num_heads, partials);
    }

  private:
    static constexpr int LANES = lanes_for(HEAD_DIM);
    static constexpr int PARTIAL = HEAD_DIM + 2;  // weighted sum of values, maximum, sum

    const T* query_of(std::int64_t seq, std::int64_t head) const {
        return static_cast<const T*>(heads_.query) + seq * heads_.query_stride + head * HEAD_DIM;
    }

    T* output_of(std::int64_t seq, std::int64_t head) const {
        return static_cast<T*>(heads_.output) + seq * heads_.output_stride + head * HEAD_DIM;
    }

    void attend(const Item& item, float* partials) const {
        static thread_local Scratch<T> scratch;
        const int num_queries = item.num_heads * group_;
        const std::int64_t first_query = static_cast<std::int64_t>(item.first_head) * group_;
        const int num_tokens = find_runs(item, scratch.runs);
        unzip_queries(item.seq, first_query, num_queries, scratch.queries);
        scratch.scores.resize(static_cast<std::size_t>(num_queries) * SCORES);
        scratch.sums.assign(static_cast<std::size_t>(num_queries) * HEAD_DIM, 0.0f);
        scratch.softmax.resize(num_queries);

        const std::size_t num_runs = scratch.runs.size() / 2;
        const Run<T>* keys = scratch.runs.data();
        const Run<T>* values = keys + num_runs;
        float* scores = scratch.scores.data();
        for (std::size_t i = 0; i < num_runs; scores += keys[i++].num_tokens)
            for (int head = 0; head < item.num_heads; ++head) score_head(item, keys[i], head, scratch, scores);
        scores = scratch.scores.data();
        for (int q = 0; q < num_queries; ++q) scratch.softmax[q] = weigh_query(scores + q * SCORES, num_tokens);
        for (std::size_t i = 0; i < num_runs; scores += values[i++].num_tokens)
            for (int head = 0; head < item.num_heads; ++head) add_head(values[i], head, scores, scratch.sums.data());
        for (int q = 0; q < num_queries; ++q) {
            const float* sums = scratch.sums.data() + q * HEAD_DIM;
            if (item.partial < 0) {
                store_row<LANES, HEAD_DIM>(
                    output_of(item.seq, first_query + q), sums, factor_of(first_query + q, scratch.softmax[q]));
            } else {
                float* partial = partials + (item.partial * heads_.num_heads + first_query + q) * PARTIAL;
                std::copy(sums, sums + HEAD_DIM, partial);
                partial[HEAD_DIM] = scratch.softmax[q].maximum;
                partial[HEAD_DIM + 1] = scratch.softmax[q].sum;
            }
        }
    }

    Softmax weigh_query(float* scores, int num_tokens) const {
        const auto scale = static_cast<float>(heads_.scale), cap = static_cast<float>(heads_.soft_cap);
        if (cap > 0) cap_scores(scores, num_tokens, scale, cap);
        return weigh(scores, num_tokens, cap > 0 ? 1.0f : scale);
    }

    // The factor that turns a head's weighted sum of values into its output.
    float factor_of(std::int64_t head, const Softmax& softmax) const {
        const float sink = heads_.sinks == nullptr ? 0.0f : std::exp(heads_.sinks[head] - softmax.maximum);
        return 1.0f / (softmax.sum + sink);
    }

    // Finds the runs of the item's tokens; returns the number of tokens.
    int find_runs(const Item& item, std::vector<Run<T>>& runs) const {
        const std::int64_t length = decodes_.seq_lens[item.seq];
        const std::int64_t seen = first_seen(length - 1, heads_.reach);
        const std::int64_t first = std::max<std::int64_t>(seen, static_cast<std::int64_t>(item.part) * PART);
        const std::int64_t end = std::min<std::int64_t>(length, static_cast<std::int64_t>(item.part + 1) * PART);
        runs.clear();
        const std::int64_t head = static_cast<std::int64_t>(item.first_head) * HEAD_DIM;
        for (T* const cache : {pages_.keys, pages_.values})
            for (std::int64_t at = first, next; at < end; at = next) {
                next = std::min({end, (at / pool_.block_size + 1) * pool_.block_size, (at / RUN + 1) * RUN});
                const T* rows = cache + pages_.offset_of(item.seq, at) + head;
                runs.push_back({rows, rows, pool_.token_stride, static_cast<int>(next - at)});
            }
        const std::size_t run_bytes = RUN * item.num_heads * HEAD_DIM * sizeof(T);
        const std::size_t ahead = std::max<std::size_t>(1, BYTES_AHEAD / run_bytes);
        for (std::size_t i = 0; i + ahead < runs.size(); ++i) runs[i].next_rows = runs[i + ahead].rows;
        return static_cast<int>(end - first);
    }

    void unzip_queries(std::int64_t seq, std::int64_t first, int num_queries, Lines<float>& queries) const {
        queries.resize(static_cast<std::size_t>(num_queries) * HEAD_DIM);
        for (int at = 0; at < num_queries * HEAD_DIM; at += 2 * LANES) {
            const auto pair = load_pair<LANES>(query_of(seq, first) + at);
            store(queries.data() + at, pair.first);
            store(queries.data() + at + LANES, pair.second);
        }
    }

    // Calls visit(constant, query) for the query heads of a KV head, as many at once as share one read.
    template <typename Visit>
    void for_each_tile(int head, Visit visit) const {
        int query = head * group_;
        const int end = query + group_;
        for (; query + MAX_QUERIES <= end; query += MAX_QUERIES) visit(Constant<MAX_QUERIES>{}, query);
        for (; query + 2 <= end; query += 2) visit(Constant<2>{}, query);
        if (query < end) visit(Constant<1>{}, query);
    }

    void score_head(const Item& item, Run<T> run, int head, const Scratch<T>& scratch, float* scores) const {
        run.rows += head * HEAD_DIM;
        run.next_rows += head * HEAD_DIM;
        for_each_tile(head, [&](auto tile, int query) {
            score_run<T, HEAD_DIM, decltype(tile)::value>(
                run, scratch.queries.data() + query * HEAD_DIM,
                query_of(item.seq, item.first_head * group_ + query), scores + query * SCORES);
        });
    }

    void add_head(Run<T> run, int head, const float* weights, float* sums) const {
        run.rows += head * HEAD_DIM;
        run.next_rows += head * HEAD_DIM;
        for_each_tile(head, [&](auto tile, int query) {
            add_values<T, HEAD_DIM, decltype(tile)::value>(run, weights + query * SCORES, sums + query * HEAD_DIM);
        });
    }

    // Merges a sequence's parts: each is weighted by the distance of its maximum from the overall one.
    void merge(const Merge& merge, std::int64_t head, const float* partials) const {
        const auto part = [&](std::int32_t i) {
            return partials + ((merge.first_partial + i) * heads_.num_heads + head) * PARTIAL;
        };
        float maximum = part(0)[HEAD_DIM];
        for (std::int32_t i = 1; i < merge.num_parts; ++i) maximum = std::max(maximum, part(i)[HEAD_DIM]);
        float sums[HEAD_DIM] = {};
        float sum = 0;
        for (std::int32_t i = 0; i < merge.num_parts; ++i) {
            const float weight = std::exp(part(i)[HEAD_DIM] - maximum);
            for (int d = 0; d < HEAD_DIM; ++d) sums[d] += weight * part(i)[d];
            sum += weight * part(i)[HEAD_DIM + 1];
        }
        store_row<LANES, HEAD_DIM>(output_of(merge.seq, head), sums, factor_of(head, {maximum, sum}));
    }

    const Pool& pool_;
    const Sequences& decodes_;
    const Heads& heads_;
    const Pages<T, HEAD_DIM> pages_;
    int group_;
};

}  // namespace
