// Prefill attention: several new tokens per sequence, reading KV blocks in place.
//
// Everything is computed transposed, with a lane for each row, which is a query head of a token: so keys need
// no packing, and the softmax runs down the lanes along with the blocks of keys (FlashAttention-2: Dao 2023,
// arXiv:2307.08691). Blocks begin at multiples of BLOCK, and rows are independent, so a result does not
// depend on the threads or on the batch.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "panels.h"
#include "pool.h"
#include "amx.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int BLOCK = 256;  // keys and values at a time: they fit in L2
#if defined(__AMX_BF16__)
constexpr int KEYS_EACH = 2 * TILE_ROWS;  // keys are processed in multiples of it
constexpr int MAX_ROWS = 192;             // rows that share a block
#else
constexpr int KEYS_EACH = 2;
constexpr int MAX_ROWS = 384;
#endif
constexpr int MIN_ROWS = 48;
constexpr double LOG2_E = 1.4426950408889634;

// A work item: some query tokens of one sequence, with the query heads of one KV head.
struct QueryBlock {
    std::int32_t seq, kv_head, first_query, num_queries;
};

// Some query tokens of one sequence.
struct QueryRange {
    std::int32_t seq, first, end;
};

// The tokens [first, end) of the sequence that a row attends to.
struct Seen {
    std::int64_t first, end;
};

// Pointers to the tokens of a block, followed by pointers to zeros.
struct TokenRows {
    static constexpr int SPARE = KEYS_EACH + TOGETHER;
    const Bf16 *keys[BLOCK + SPARE], *values[BLOCK + SPARE];
    int num_tokens = 0;
};

// Prefetches the tokens of the next block little by little between the GEMMs: many at once would slow down
// the GEMMs' own reads, and one by one within them would cost registers.
template <int HEAD_DIM, bool LATENT>
class TokenPrefetcher {
  public:
    TokenPrefetcher(const TokenRows& rows, int num_calls) : rows_(rows), share_((rows.num_tokens + num_calls - 1) / num_calls) {}

    void operator()() {
        for (const int last = std::min(next_ + share_, rows_.num_tokens); next_ < last; ++next_) {
            prefetch_row<Bf16, HEAD_DIM>(rows_.keys[next_]);
            if (!LATENT) prefetch_row<Bf16, HEAD_DIM>(rows_.values[next_]);
        }
    }

  private:
    const TokenRows& rows_;
    const int share_;
    int next_ = 0;
};

// A thread's buffers for one item; kept between items.
struct PrefillScratch {
    Lines<std::uint32_t> queries;  // [panel, word, row]
    Lines<std::uint32_t> copied;   // [key, word]: keys that are not laid out for tile loads
    Lines<std::uint32_t> values;   // a word for each pair of keys and each column
    Lines<std::uint32_t> weights;  // [pair of keys, row]
    Lines<float> scores;           // [key, row]
    Lines<float> output;           // [panel, column, row]
    Lines<float> maxima, sums;     // [row]
    TokenRows tokens[2];

    // Resets the buffers for num_rows rows, a multiple of PANEL.
    void begin(int num_rows, int head_dim) {
        grow(queries, num_rows * head_dim / 2);
        grow(copied, KEYS_EACH * head_dim / 2);
        grow(values, BLOCK * head_dim / 2);
        grow(weights, BLOCK / 2 * PANEL);
        grow(scores, (BLOCK + TOGETHER) * PANEL);
        output.assign(num_rows * head_dim, 0.0f);
        maxima.assign(num_rows, MASKED);
        sums.assign(num_rows, 0.0f);
    }
};

// LATENT: the first numbers of keys are the values; see latent.h.
template <int HEAD_DIM, bool LATENT = false>
class PrefillAttention {
  public:
    PrefillAttention(const Pool& pool, const Sequences& prefills, std::int64_t slot, const Heads& heads)
        : pool_(pool),
          prefills_(prefills),
          heads_(heads),
          pages_(pool, prefills, slot),
          group_(static_cast<int>(heads.num_heads / pool.num_kv_heads)) {
        first_tokens_.push_back(0);
        for (std::int64_t seq = 0; seq < prefills.num_seqs; ++seq)
            first_tokens_.push_back(first_tokens_.back() + prefills.query_lens[seq]);
    }

    void run(int num_threads) const {
        const std::vector<QueryBlock> items = plan(all_queries(), num_threads);
#pragma omp parallel num_threads(num_threads)
        {
            begin_amx();
            work(items);
            end_amx();
        }
    }

    std::vector<QueryRange> all_queries() const {
        std::vector<QueryRange> ranges;
        for (std::int32_t seq = 0; seq < prefills_.num_seqs; ++seq)
            ranges.push_back({seq, 0, static_cast<std::int32_t>(prefills_.query_lens[seq])});
        return ranges;
    }

    std::vector<QueryBlock> plan(const std::vector<QueryRange>& asked, int num_threads) const {
        std::int64_t num_rows = MAX_ROWS;
        std::vector<QueryBlock> items;
        for (;; num_rows /= 2) {
            items.clear();
            const auto queries_each = static_cast<std::int32_t>(std::max<std::int64_t>(1, num_rows / group_));
            for (const QueryRange& range : asked)
                for (std::int32_t head = 0; head < pool_.num_kv_heads; ++head)
                    for (std::int32_t first = range.first; first < range.end; first += queries_each)
                        items.push_back({range.seq, head, first, std::min(queries_each, range.end - first)});
            if (static_cast<int>(items.size()) >= 2 * num_threads || num_rows / 2 < MIN_ROWS) return items;
        }
    }

    // Run by all threads of a team. Writes the keys and values of all tokens, whichever queries are
    // requested.
    void work(const std::vector<QueryBlock>& items) const {
        const auto num_items = static_cast<std::int64_t>(items.size());
        write_tokens();
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < num_items; ++i) attend(items[i]);
    }

  protected:
    // Run by all threads of a team, which wait for each other.
    void write_tokens() const {
        for (std::int64_t seq = 0; seq < prefills_.num_seqs; ++seq) {
#pragma omp for schedule(static) nowait
            for (std::int64_t i = 0; i < prefills_.query_lens[seq]; ++i)
                pages_.write(seq, context_of(seq) + i, first_tokens_[seq] + i, heads_);
        }
#pragma omp barrier
    }

    static constexpr int WORDS = HEAD_DIM / 2;
    // Strides of the packed values, in words: to the next pair of keys, and to the next column.
#if defined(__AMX_BF16__)
    static constexpr int NEXT_PAIR = 1, NEXT_COLUMN = BLOCK / 2;
#else
    static constexpr int NEXT_PAIR = HEAD_DIM, NEXT_COLUMN = 1;
#endif
    static constexpr int GEMMS = BLOCK / TOGETHER + HEAD_DIM / TOGETHER;  // per panel and block, approximately

    using Prefetcher = TokenPrefetcher<HEAD_DIM, LATENT>;

    int value_dim() const { return LATENT ? static_cast<int>(heads_.value_size) : HEAD_DIM; }

    // A panel, and the keys [first, end) of the block from `start` on that it attends to.
    struct View {
        std::int64_t start;
        int first_row, first, end;
        bool is_whole;  // each of its rows attends to all of them
    };

    std::int64_t context_of(std::int64_t seq) const { return prefills_.seq_lens[seq] - prefills_.query_lens[seq]; }

    Seen seen_by(const QueryBlock& item, int row) const {
        const std::int64_t position = context_of(item.seq) + item.first_query + row / group_;
        return {first_seen(position, heads_.reach), position + 1};
    }

    View view_of(const QueryBlock& item, std::int64_t start, int first_row, int last_row) const {
        const Seen upper = seen_by(item, first_row), lower = seen_by(item, last_row);
        const std::int64_t first = std::max<std::int64_t>(0, upper.first - start) / KEYS_EACH * KEYS_EACH;
        const std::int64_t end = (std::min<std::int64_t>(BLOCK, lower.end - start) + KEYS_EACH - 1) / KEYS_EACH * KEYS_EACH;
        const bool is_whole = lower.first <= start + first && start + end <= upper.end;
        return {start, first_row, static_cast<int>(first), static_cast<int>(end), is_whole};
    }

    void attend(const QueryBlock& item) const {
        static thread_local PrefillScratch scratch;
        const int num_rows = item.num_queries * group_;
        accumulate(item, 0, seen_by(item, num_rows - 1).end, scratch);
        store_rows(item, scratch);
    }

    // The sums of the item's rows over the tokens [first, end) that they attend to; `first` is a multiple of
    // BLOCK.
    void accumulate(const QueryBlock& item, std::int64_t first, std::int64_t end, PrefillScratch& scratch) const {
        const int num_rows = item.num_queries * group_;
        const int num_panels = (num_rows + PANEL - 1) / PANEL;
        scratch.begin(num_panels * PANEL, HEAD_DIM);
        load_queries(item, num_rows, scratch);
        TokenRows *now = &scratch.tokens[0], *next = &scratch.tokens[1];
        std::int64_t start = std::max(first, seen_by(item, 0).first / BLOCK * BLOCK);
        for (find_tokens(item, start, end, *next); start < end; start += BLOCK) {
            std::swap(now, next);
            find_tokens(item, start + BLOCK, end, *next);
            pack_values(*now, scratch);
            Prefetcher ahead(*next, num_panels * GEMMS);
            for (int row = 0; row < num_rows; row += PANEL)
                attend_panel(item, start, row, std::min(row + PANEL, num_rows) - 1, *now, scratch, ahead);
        }
    }

    void store_rows(const QueryBlock& item, PrefillScratch& scratch) const {
        const int num_rows = item.num_queries * group_;
        for (int row = 0; row < num_rows; row += 16) store_queries(item, row, std::min(16, num_rows - row), scratch);
    }

    static const Bf16* zeros() {
        alignas(64) static const Bf16 numbers[HEAD_DIM] = {};
        return numbers;
    }

    // The offset of a row's token and head in the queries or in the output, whose heads have `size` numbers.
    std::int64_t offset_of(const QueryBlock& item, int row, std::int64_t stride, int size) const {
        const std::int64_t token = first_tokens_[item.seq] + item.first_query + row / group_;
        return token * stride + (item.kv_head * group_ + row % group_) * size;
    }

    // Loads and transposes the queries; rows after the last one, up to 16, are zeros.
    void load_queries(const QueryBlock& item, int num_rows, PrefillScratch& scratch) const {
        const auto* queries = static_cast<const Bf16*>(heads_.query);
        for (int first = 0; first < num_rows; first += 16) {
            const std::uint32_t* rows[16];
            for (int i = 0; i < 16; ++i) {
                const bool exists = first + i < num_rows;
                const Bf16* query = exists ? queries + offset_of(item, first + i, heads_.query_stride, HEAD_DIM) : zeros();
                rows[i] = reinterpret_cast<const std::uint32_t*>(query);
            }
            std::uint32_t* panel = scratch.queries.data() + first / PANEL * PANEL * WORDS + first % PANEL;
            for (int word = 0; word < WORDS; word += 16) {
                transpose_words(rows, panel + word * PANEL, PANEL);
                for (auto& row : rows) row += 16;
            }
        }
    }

    // Finds the tokens of the block from `start` on. Those after the last are zeros, and so are the values of
    // those that no row sees: they get a weight of 0, and 0 * NaN would not vanish.
    void find_tokens(const QueryBlock& item, std::int64_t start, std::int64_t end, TokenRows& rows) const {
        rows.num_tokens = static_cast<int>(std::clamp<std::int64_t>(end - start, 0, BLOCK));
        for (int i = 0; i < rows.num_tokens; ++i) {
            const std::int64_t offset = pages_.offset_of(item.seq, start + i) + item.kv_head * HEAD_DIM;
            rows.keys[i] = pages_.keys + offset;
            rows.values[i] = pages_.values + offset;
        }
        const std::int64_t hidden = std::clamp<std::int64_t>(seen_by(item, 0).first - start, 0, rows.num_tokens);
        std::fill_n(rows.values, hidden, zeros());
        std::fill_n(rows.keys + rows.num_tokens, TokenRows::SPARE, zeros());
        std::fill_n(rows.values + rows.num_tokens, TokenRows::SPARE, zeros());
    }

    // Reads a row before it is needed, so that more reads are in flight at once.
    static void touch(const Bf16* row) {
        constexpr int LINE = 64 / sizeof(Bf16);
        for (int i = 0; i < HEAD_DIM; i += LINE) static_cast<void>(*static_cast<const volatile Bf16*>(row + i));
    }

    void pack_values(const TokenRows& rows, PrefillScratch& scratch) const {
        for (int i = 0; i < rows.num_tokens; ++i) {
            touch(rows.keys[i]);
            if (!LATENT) touch(rows.values[i]);
        }
        for (int key = 0; key < rows.num_tokens; key += KEYS_EACH)
            for (int column = 0; column < value_dim(); column += 16)
                pack_columns(rows.values + key, column, scratch.values.data() + key / 2 * NEXT_PAIR + column * NEXT_COLUMN);
    }

    // 16 columns of KEYS_EACH values
    static void pack_columns(const Bf16* const* rows, int column, std::uint32_t* to) {
        const auto pairs = [&](int key) {
            return pairs_of(load<__m256i>(rows[key] + column), load<__m256i>(rows[key + 1] + column));
        };
#if defined(__AMX_BF16__)
        alignas(64) std::uint32_t words[16][16];
        const std::uint32_t* all[16];
        for (int i = 0; i < 16; ++i) store(words[i], pairs(2 * i)), all[i] = words[i];
        transpose_words(all, to, NEXT_COLUMN);
#else
        store(to, pairs(0));
#endif
    }

    void attend_panel(
        const QueryBlock& item, std::int64_t start, int first_row, int last_row, const TokenRows& rows, PrefillScratch& scratch,
        Prefetcher& ahead) const {
        const View view = view_of(item, start, first_row, last_row);
        if (view.first >= view.end) return;
        switch ((last_row - first_row) / 16) {
            case 0: return attend_vectors<1>(item, view, rows, scratch, ahead);
            case 1: return attend_vectors<2>(item, view, rows, scratch, ahead);
            case 2: return attend_vectors<3>(item, view, rows, scratch, ahead);
            default: return attend_vectors<4>(item, view, rows, scratch, ahead);
        }
    }

    template <int VECTORS>
    void attend_vectors(
        const QueryBlock& item, const View& view, const TokenRows& rows, PrefillScratch& scratch, Prefetcher& ahead) const {
        alignas(64) float corrections[PANEL];
        score<VECTORS>(view, rows, scratch, ahead);
        for (int row = 0; row < 16 * VECTORS; row += 16) weigh(item, view, row, scratch, corrections + row);
        add_values<VECTORS>(view, corrections, scratch, ahead);
    }

    template <int VECTORS>
    void score(const View& view, const TokenRows& rows, PrefillScratch& scratch, Prefetcher& ahead) const {
        const std::uint32_t* queries = scratch.queries.data() + view.first_row * WORDS;
        const auto words = [&](int key) { return reinterpret_cast<const std::uint32_t*>(rows.keys[key]); };
#if defined(__AMX_BF16__)
        if (has_amx()) {
            for (int key = view.first; key < view.end; key += KEYS_EACH, ahead()) {
                const bool as_tiles = pool_.block_size % TILE_ROWS == 0 && key + KEYS_EACH <= rows.num_tokens;
                const std::uint32_t* keys = as_tiles ? words(key) : copy_keys(rows, key, scratch);
                const std::uint32_t* lower = as_tiles ? words(key + TILE_ROWS) : keys + TILE_ROWS * WORDS;
                multiply_amx<VECTORS>(keys, lower, as_tiles ? pool_.token_stride / 2 : WORDS, queries, WORDS, nullptr,
                                           scratch.scores.data() + key * PANEL);
            }
            return;
        }
#endif
        constexpr int COUNT = together(VECTORS);
        for (int key = view.first; key < view.end; key += COUNT, ahead()) {
            const std::uint32_t* keys[COUNT];
            for (int i = 0; i < COUNT; ++i) keys[i] = words(key + i);
            multiply_avx512<COUNT, VECTORS, 1>(keys, queries, WORDS, nullptr, scratch.scores.data() + key * PANEL);
        }
    }

    // Copies keys to a contiguous buffer, if blocks do not hold whole tiles, or the last keys are followed by
    // zeros.
    static const std::uint32_t* copy_keys(const TokenRows& rows, int first, PrefillScratch& scratch) {
        for (int i = 0; i < KEYS_EACH; ++i)
            std::memcpy(scratch.copied.data() + i * WORDS, rows.keys[first + i], HEAD_DIM * sizeof(Bf16));
        return scratch.copied.data();
    }

    // The softmax of 16 rows of a panel, from its `row` on.
    void weigh(const QueryBlock& item, const View& view, int row, PrefillScratch& scratch, float* corrections) const {
        const int first_row = view.first_row + row;
        const RunningSoftmax softmax{scratch.maxima.data() + first_row, scratch.sums.data() + first_row};
        float* scores = scratch.scores.data() + row;
        if (heads_.soft_cap > 0) cap_scores(view, scores);
        const auto factor = static_cast<float>(heads_.soft_cap > 0 ? LOG2_E : heads_.scale * LOG2_E);
        std::uint32_t* weights = scratch.weights.data() + row;
        const auto score = [&](int key) { return _mm512_loadu_ps(scores + key * PANEL); };
        if (view.is_whole) return softmax.add(score, view.first, view.end, factor, weights, corrections);
        alignas(64) std::int32_t firsts[16], ends[16];
        for (int i = 0; i < 16; ++i) {
            const Seen seen = seen_by(item, first_row + i);
            firsts[i] = static_cast<std::int32_t>(std::max<std::int64_t>(seen.first - view.start, 0));
            ends[i] = static_cast<std::int32_t>(seen.end - view.start);
        }
        const __m512i first = _mm512_load_si512(firsts), end = _mm512_load_si512(ends);
        const auto seen_score = [&](int key) {
            const __m512i keys = _mm512_set1_epi32(key);
            const __mmask16 seen = _mm512_cmple_epi32_mask(first, keys) & _mm512_cmplt_epi32_mask(keys, end);
            return _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), seen, score(key));
        };
        softmax.add(seen_score, view.first, view.end, factor, weights, corrections);
    }

    // Scales and caps the scores of 16 rows.
    void cap_scores(const View& view, float* scores) const {
        const auto scale = static_cast<float>(heads_.scale), cap = static_cast<float>(heads_.soft_cap);
        for (int key = view.first; key < view.end; ++key) {
            float* const at = scores + key * PANEL;
            store(at, soft_capped<16>(load<Floats<16>>(at) * scale, cap));
        }
    }

    template <int VECTORS>
    void add_values(const View& view, const float* corrections, PrefillScratch& scratch, Prefetcher& ahead) const {
        const std::uint32_t* values = scratch.values.data() + view.first / 2 * NEXT_PAIR;
        const std::uint32_t* weights = scratch.weights.data() + view.first / 2 * PANEL;
        float* output = scratch.output.data() + view.first_row * HEAD_DIM;
        const int num_pairs = (view.end - view.first) / 2;
#if defined(__AMX_BF16__)
        if (has_amx()) {
            for (int column = 0; column < value_dim(); column += 2 * TILE_ROWS, ahead())
                multiply_amx<VECTORS>(values + column * NEXT_COLUMN, values + (column + TILE_ROWS) * NEXT_COLUMN,
                                           NEXT_COLUMN, weights, num_pairs, corrections, output + column * PANEL);
            return;
        }
#endif
        constexpr int COUNT = together(VECTORS);
        const std::uint32_t* columns[COUNT];
        const auto add = [&](int column, auto count) {
            for (int i = 0; i < count; ++i) columns[i] = values + (column + i) * NEXT_COLUMN;
            multiply_avx512<count, VECTORS, NEXT_PAIR>(columns, weights, num_pairs, corrections, output + column * PANEL);
            ahead();
            return column + count;
        };
        int column = 0;
        while ((value_dim() - column) % COUNT != 0) column = add(column, std::integral_constant<int, COUNT - 1>());
        while (column < value_dim()) column = add(column, std::integral_constant<int, COUNT>());
    }

    // Adds the weights of the sinks to the sums of rows; maxima are to base 2.
    void add_sinks(const QueryBlock& item, int first_row, int num_rows, PrefillScratch& scratch) const {
        for (int row = first_row; row < first_row + num_rows; ++row) {
            const float sink = heads_.sinks[item.kv_head * group_ + row % group_];
            scratch.sums[row] += std::exp2(sink * static_cast<float>(LOG2_E) - scratch.maxima[row]);
        }
    }

    // Normalizes and stores 16 rows, of which the first num_rows exist.
    void store_queries(const QueryBlock& item, int first_row, int num_rows, PrefillScratch& scratch) const {
        const float* output = scratch.output.data() + first_row / PANEL * PANEL * HEAD_DIM + first_row % PANEL;
        if (heads_.sinks != nullptr) add_sinks(item, first_row, num_rows, scratch);
        const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(scratch.sums.data() + first_row));
        for (int column = 0; column < value_dim(); column += 16) {
            alignas(64) std::uint32_t scaled[16][16], rows[16][16];
            const std::uint32_t* columns[16];
            for (int i = 0; i < 16; ++i) {
                store(scaled[i], _mm512_mul_ps(_mm512_loadu_ps(output + (column + i) * PANEL), factor));
                columns[i] = scaled[i];
            }
            transpose_words(columns, rows[0], 16);
            for (int i = 0; i < num_rows; ++i) {
                Bf16* to = static_cast<Bf16*>(heads_.output) + offset_of(item, first_row + i, heads_.output_stride, value_dim());
                store(to + column, _mm512_cvtneps_pbh(load<__m512>(rows[i])));
            }
        }
    }

    const Pool& pool_;
    const Sequences& prefills_;
    const Heads& heads_;
    const Pages<Bf16, HEAD_DIM> pages_;
    const int group_;
    std::vector<std::int64_t> first_tokens_;  // of each sequence, then the number of all tokens
};

}  // namespace

#endif
