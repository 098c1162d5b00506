// Attention of several new tokens per sequence, straight from the pages, by products of pairs of bf16.
//
// A block of keys and values is laid out once for all rows that see it; the softmax goes along with the blocks
// (FlashAttention-2: Dao 2023, arXiv:2307.08691). A row is a query head of a token. Blocks begin at multiples of
// BLOCK, and rows know nothing of each other, so a result does not depend on the threads or on the batch.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "tiles.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int BLOCK = 256;      // keys and values laid out at a time: together they fit in a core's own cache
constexpr int PANEL = 64;       // keys whose products with some rows stay in registers
#if defined(__AMX_BF16__)
constexpr int TILE = 2 * TILE_ROWS;  // rows that are computed together
constexpr int MAX_ROWS = 192;        // rows that share a block, a multiple of TILE
#else
constexpr int TILE = 6;
constexpr int MAX_ROWS = 384;
#endif
constexpr int MIN_ROWS = 48;
constexpr float MASKED = -1e30f;

// c[row] = scale[row] * c[row] + a[row] . b, for ROWS rows and 16 * VECTORS columns; a's and b's words are pairs of
// bf16. a: [ROWS, num_words] at a_stride; b: [num_words, 16 * VECTORS]; c: [ROWS, 16 * VECTORS] at c_stride
template <int ROWS, int VECTORS>
inline void multiply_in_registers(
    const std::uint32_t* a, int a_stride, const std::uint32_t* b, int num_words, const float* scale, float* c,
    int c_stride) {
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            sums[row][v] = scale == nullptr ? _mm512_setzero_ps()
                                            : _mm512_mul_ps(_mm512_loadu_ps(c + row * c_stride + v * 16),
                                                            _mm512_set1_ps(scale[row]));
    for (int word = 0; word < num_words; ++word, b += 16 * VECTORS) {
        __m512bh columns[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) columns[v] = load<__m512bh>(b + v * 16);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const auto both = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[row * a_stride + word])));
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], both, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(c + row * c_stride + v * 16, sums[row][v]);
}

#if defined(__AMX_BF16__)

template <int ROWS, int VECTORS>
inline void scale_rows(const float* scale, float* c, int c_stride) {
    if (std::all_of(scale, scale + ROWS, [](float factor) { return factor == 1.0f; })) return;  // no new maximum
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < VECTORS; ++v) {
            float* sums = c + row * c_stride + v * 16;
            _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(scale[row])));
        }
}

// The same for TILE_ROWS rows, or twice as many, which share what is read of b; num_words is a multiple of 16.
template <bool BOTH, int VECTORS>
inline void multiply_in_tiles(
    const std::uint32_t* a, int a_stride, const std::uint32_t* b, int num_words, const float* scale, float* c,
    int c_stride) {
    if (scale != nullptr) scale_rows<BOTH ? 2 * TILE_ROWS : TILE_ROWS, VECTORS>(scale, c, c_stride);
    for (int column = 0; column < 16 * VECTORS; column += 32) {
        if (scale == nullptr)
            zero_sums<BOTH>();
        else
            load_sums<BOTH>(c + column, c_stride);
        for (int word = 0; word < num_words; word += 16)
            add_products<BOTH>(a + word, a + TILE_ROWS * a_stride + word, a_stride, b + word * 16 * VECTORS + column, 16 * VECTORS);
        store_sums<BOTH>(c + column, c_stride);
    }
}

#endif

// The same for TILE rows, of which only the first num_rows are looked at.
template <int VECTORS>
inline void multiply(
    const std::uint32_t* a, int a_stride, int num_rows, const std::uint32_t* b, int num_words, const float* scale,
    float* c, int c_stride) {
#if defined(__AMX_BF16__)
    if (may_use_tiles()) {
        const auto in_tiles = num_rows > TILE_ROWS ? multiply_in_tiles<true, VECTORS> : multiply_in_tiles<false, VECTORS>;
        return in_tiles(a, a_stride, b, num_words, scale, c, c_stride);
    }
#endif
    constexpr int ROWS = TILE % 6 == 0 ? 6 : 4;
    for (int row = 0; row < num_rows; row += ROWS)
        multiply_in_registers<ROWS, VECTORS>(
            a + row * a_stride, a_stride, b, num_words, scale == nullptr ? nullptr : scale + row, c + row * c_stride,
            c_stride);
}

// to[i * to_stride + row] = rows[row][i], for 16 words of 16 rows
inline void transpose_words(const std::uint32_t* const* rows, std::uint32_t* to, int to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // each a now has word 4 * lane + i of four rows
        const __m512i even_upper = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        const __m512i even_lower = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const __m512i odd_upper = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        const __m512i odd_lower = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(even_upper, even_lower, 0x88));
        _mm512_storeu_si512(to + (4 + i) * to_stride, _mm512_shuffle_i32x4(odd_upper, odd_lower, 0x88));
        _mm512_storeu_si512(to + (8 + i) * to_stride, _mm512_shuffle_i32x4(even_upper, even_lower, 0xdd));
        _mm512_storeu_si512(to + (12 + i) * to_stride, _mm512_shuffle_i32x4(odd_upper, odd_lower, 0xdd));
    }
}

// 2^x for x <= 0, to 3.5e-6 of it: what becomes bf16 needs no more. x is whole + f, 0 <= f < 1, and 2^f a polynomial
// that is exact at both ends (least relative error by Lawson's reweighting).
inline __m512 exp2_negative(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(1.355574723e-2f), _mm512_set1_ps(5.203236901e-2f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(2.413797629e-1f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(6.930321208e-1f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);  // takes the whole part itself
}

// Some query tokens of one sequence, with the query heads of one KV head: an item of work.
struct QueryBlock {
    std::int32_t seq, kv_head, first_query, num_queries;
};

// The tokens [first, end) of the sequence that a row sees.
struct Seen {
    std::int64_t first, end;
};

// What a thread needs for one item at a time; kept between items.
struct PromptScratch {
    Lines<std::uint32_t> queries;  // [row, word]
    Lines<std::uint32_t> keys;     // [panel, word, key]
    Lines<std::uint32_t> values;   // [columns, pair of keys, column]
    Lines<std::uint32_t> weights;  // [row, pair of keys]
    Lines<float> scores;           // [row, key]
    Lines<float> output;           // [row, column]
    Lines<float> maxima, sums;     // [row]
    std::vector<const Bf16*> key_rows, value_rows;

    void resize(int num_rows, int head_dim) {
        queries.resize(num_rows * head_dim / 2);
        keys.resize(BLOCK * head_dim / 2);
        values.resize(BLOCK * head_dim / 2);
        weights.resize(TILE * BLOCK / 2);
        scores.resize(TILE * BLOCK);
        output.resize(num_rows * head_dim);
        maxima.resize(num_rows);
        sums.resize(num_rows);
        key_rows.resize(BLOCK);
        value_rows.resize(BLOCK);
    }
};

template <int HEAD_DIM>
class Prompter {
  public:
    Prompter(const Pool& pool, const Sequences& prompts, std::int64_t layer, const Heads& heads)
        : pool_(pool),
          prompts_(prompts),
          heads_(heads),
          pages_(pool, prompts, layer),
          group_(static_cast<int>(heads.num_heads / pool.num_kv_heads)) {
        first_tokens_.push_back(0);
        for (std::int64_t seq = 0; seq < prompts.num_seqs; ++seq)
            first_tokens_.push_back(first_tokens_.back() + prompts.query_lens[seq]);
    }

    void run(int num_threads) const {
        const std::vector<QueryBlock> items = plan(num_threads);
#pragma omp parallel num_threads(num_threads)
        {
            begin_tiles();
            work(items);
            end_tiles();
        }
    }

    std::vector<QueryBlock> plan(int num_threads) const {
        std::int64_t num_rows = MAX_ROWS;
        std::vector<QueryBlock> items;
        for (;; num_rows /= 2) {
            items.clear();
            const auto queries_each = static_cast<std::int32_t>(std::max<std::int64_t>(1, num_rows / group_));
            for (std::int32_t seq = 0; seq < prompts_.num_seqs; ++seq) {
                const auto num_queries = static_cast<std::int32_t>(prompts_.query_lens[seq]);
                for (std::int32_t head = 0; head < pool_.num_kv_heads; ++head)
                    for (std::int32_t first = 0; first < num_queries; first += queries_each)
                        items.push_back({seq, head, first, std::min(queries_each, num_queries - first)});
            }
            if (static_cast<int>(items.size()) >= 2 * num_threads || num_rows / 2 < MIN_ROWS) return items;
        }
    }

    // By all threads of a team.
    void work(const std::vector<QueryBlock>& items) const {
        const auto num_items = static_cast<std::int64_t>(items.size());
        for (std::int64_t seq = 0; seq < prompts_.num_seqs; ++seq) {
#pragma omp for schedule(static) nowait
            for (std::int64_t i = 0; i < prompts_.query_lens[seq]; ++i)
                pages_.keep(seq, context_of(seq) + i, first_tokens_[seq] + i, heads_);
        }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < num_items; ++i) attend(items[i]);
    }

  private:
    static constexpr int WORDS = HEAD_DIM / 2;
    static constexpr int COLUMN_VECTORS = HEAD_DIM % 64 == 0 ? 4 : 2;
    static constexpr int COLUMNS = 16 * COLUMN_VECTORS;

    std::int64_t context_of(std::int64_t seq) const { return prompts_.seq_lens[seq] - prompts_.query_lens[seq]; }

    Seen seen_by(const QueryBlock& item, int row) const {
        const std::int64_t end = context_of(item.seq) + item.first_query + row / group_ + 1;
        return {heads_.window > 0 ? std::max<std::int64_t>(0, end - heads_.window) : 0, end};
    }

    void attend(const QueryBlock& item) const {
        static thread_local PromptScratch scratch;
        const int num_rows = item.num_queries * group_;
        const int room = (num_rows + TILE - 1) / TILE * TILE;
        scratch.resize(std::max(MAX_ROWS, room), HEAD_DIM);
        take_queries(item, num_rows, scratch);
        std::fill_n(scratch.output.begin(), room * HEAD_DIM, 0.0f);
        std::fill_n(scratch.maxima.begin(), room, MASKED);
        std::fill_n(scratch.sums.begin(), room, 0.0f);
        const std::int64_t end = seen_by(item, num_rows - 1).end;
        for (std::int64_t start = seen_by(item, 0).first / BLOCK * BLOCK; start < end; start += BLOCK) {
            lay_out(item, start, static_cast<int>(std::min<std::int64_t>(BLOCK, end - start)), scratch);
            for (int row = 0; row < num_rows; row += TILE)
                attend_tile(item, start, row, std::min(row + TILE, num_rows) - 1, scratch);
        }
        for (int row = 0; row < num_rows; ++row) put_row(item, row, scratch);
    }

    // Rows past the last one of a tile are zeros.
    void take_queries(const QueryBlock& item, int num_rows, PromptScratch& scratch) const {
        const std::int64_t first = first_tokens_[item.seq] + item.first_query;
        for (int row = 0; row < num_rows; ++row) {
            const Bf16* query = static_cast<const Bf16*>(heads_.query) +
                                (first + row / group_) * heads_.query_stride +
                                (item.kv_head * group_ + row % group_) * HEAD_DIM;
            std::memcpy(scratch.queries.data() + row * WORDS, query, HEAD_DIM * sizeof(Bf16));
        }
        for (int row = num_rows; row % TILE != 0; ++row)
            std::fill_n(scratch.queries.begin() + row * WORDS, WORDS, 0u);
    }

    // Reads a row from memory, before it is laid out: so more reads are under way at once. Fetching rows ahead, while those
    // before them are attended, gains nothing on any CPU on which it was measured.
    static void touch(const Bf16* row) {
        constexpr int LINE = 64 / sizeof(Bf16);
        for (int i = 0; i < HEAD_DIM; i += LINE) static_cast<void>(*static_cast<const volatile Bf16*>(row + i));
    }

    // Tokens that are not there, up to a whole panel, are zeros: they get a weight of 0, and 0 * NaN would not vanish.
    void lay_out(const QueryBlock& item, std::int64_t start, int num_tokens, PromptScratch& scratch) const {
        alignas(64) static const Bf16 zeros[HEAD_DIM] = {};
        const int padded = (num_tokens + PANEL - 1) / PANEL * PANEL;
        for (int i = 0; i < padded; ++i) {
            const std::int64_t offset =
                i < num_tokens ? pages_.offset_of(item.seq, start + i) + item.kv_head * HEAD_DIM : 0;
            scratch.key_rows[i] = i < num_tokens ? pages_.keys + offset : zeros;
            scratch.value_rows[i] = i < num_tokens ? pages_.values + offset : zeros;
        }
        for (int i = 0; i < padded; ++i) touch(scratch.key_rows[i]), touch(scratch.value_rows[i]);
        for (int i = 0; i < padded; i += 16) lay_out_keys(i, scratch);
        for (int i = 0; i < padded; i += 2) lay_out_values(i, scratch);
    }

    void lay_out_keys(int first, PromptScratch& scratch) const {
        std::uint32_t* panel = scratch.keys.data() + first / PANEL * PANEL * WORDS + first % PANEL;
        for (int word = 0; word < WORDS; word += 16) {
            const std::uint32_t* rows[16];
            for (int i = 0; i < 16; ++i)
                rows[i] = reinterpret_cast<const std::uint32_t*>(scratch.key_rows[first + i]) + word;
            transpose_words(rows, panel + word * PANEL, PANEL);
        }
    }

    void lay_out_values(int first, PromptScratch& scratch) const {
        const Bf16 *even = scratch.value_rows[first], *odd = scratch.value_rows[first + 1];
        for (int column = 0; column < HEAD_DIM; column += 16) {
            const __m512i low = _mm512_cvtepu16_epi32(load<__m256i>(even + column));
            const __m512i high = _mm512_cvtepu16_epi32(load<__m256i>(odd + column));
            std::uint32_t* to = scratch.values.data() + column / COLUMNS * COLUMNS * (BLOCK / 2) +
                                first / 2 * COLUMNS + column % COLUMNS;
            _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }

    // The rows first_row to last_row, TILE at most, over the block that begins at `start`.
    void attend_tile(const QueryBlock& item, std::int64_t start, int first_row, int last_row, PromptScratch& scratch) const {
        const std::int64_t first_seen = std::max<std::int64_t>(0, seen_by(item, first_row).first - start);
        const std::int64_t end_seen = std::min<std::int64_t>(BLOCK, seen_by(item, last_row).end - start);
        if (first_seen >= end_seen) return;
        const int first = static_cast<int>(first_seen / PANEL * PANEL), num_rows = last_row - first_row + 1;
        const int end = static_cast<int>((end_seen + PANEL - 1) / PANEL * PANEL);
        for (int key = first; key < end; key += PANEL)
            multiply<PANEL / 16>(scratch.queries.data() + first_row * WORDS, WORDS, num_rows,
                                 scratch.keys.data() + key * WORDS, WORDS, nullptr, scratch.scores.data() + key, BLOCK);
        float corrections[TILE];
        std::fill_n(corrections, TILE, 1.0f);
        for (int i = 0; i < num_rows; ++i) {
            const Seen seen = seen_by(item, first_row + i);
            corrections[i] = weigh_row({seen.first - start, seen.end - start}, first_row + i, first, end, scratch);
        }
        for (int column = 0; column < HEAD_DIM; column += COLUMNS)
            multiply<COLUMN_VECTORS>(scratch.weights.data() + first / 2, BLOCK / 2, num_rows,
                                     scratch.values.data() + column * (BLOCK / 2) + first / 2 * COLUMNS,
                                     (end - first) / 2, corrections,
                                     scratch.output.data() + first_row * HEAD_DIM + column, HEAD_DIM);
    }

    // 16 scores from the i-th on, MASKED where the row does not see.
    static __m512 seen_scores(const Seen& seen, const float* scores, std::int64_t i) {
        if (seen.first <= i && i + 16 <= seen.end) return _mm512_loadu_ps(scores + i);
        const auto lanes = [i](std::int64_t end) { return (1u << std::clamp<std::int64_t>(end - i, 0, 16)) - 1; };
        const auto mask = static_cast<__mmask16>(lanes(seen.end) & ~lanes(seen.first));
        return _mm512_mask_loadu_ps(_mm512_set1_ps(MASKED), mask, scores + i);
    }

    // The scores [first, end) of a row become weights; returns by how much what was summed before shrinks.
    float weigh_row(Seen seen, int row, int first, int end, PromptScratch& scratch) const {
        const float* scores = scratch.scores.data() + row % TILE * BLOCK;
        std::uint32_t* weights = scratch.weights.data() + row % TILE * (BLOCK / 2);
        // All in powers of two: one product scales a score and turns the base.
        const float factor = static_cast<float>(heads_.scale * 1.4426950408889634);
        // Behind its own key a row sees nothing, of a block or of a whole short prompt.
        const int end_seen = static_cast<int>(std::clamp<std::int64_t>((seen.end + 15) / 16 * 16, first, end));
        __m512 even = _mm512_set1_ps(MASKED), odd = even;
        for (int i = first; i < end_seen; i += 32) {
            even = _mm512_max_ps(even, seen_scores(seen, scores, i));
            odd = _mm512_max_ps(odd, seen_scores(seen, scores, i + 16));
        }
        const float before = scratch.maxima[row];
        const float maximum = std::max(before, _mm512_reduce_max_ps(_mm512_max_ps(even, odd)) * factor);
        const __m512 factors = _mm512_set1_ps(factor), most = _mm512_set1_ps(-maximum);
        __m512 sums = _mm512_setzero_ps();
        for (int i = first; i < end_seen; i += 16) {
            // Above 0 is only what was rounded, of a score that is all masked by far.
            const __m512 x = _mm512_fmadd_ps(seen_scores(seen, scores, i), factors, most);
            const __m512 weight = exp2_negative(_mm512_min_ps(x, _mm512_setzero_ps()));
            sums = _mm512_add_ps(sums, weight);
            store(weights + i / 2, _mm512_cvtneps_pbh(weight));
        }
        std::fill(weights + end_seen / 2, weights + end / 2, 0u);
        const float correction = std::exp2(before - maximum);
        scratch.maxima[row] = maximum;
        scratch.sums[row] = scratch.sums[row] * correction + _mm512_reduce_add_ps(sums);
        return correction;
    }

    void put_row(const QueryBlock& item, int row, const PromptScratch& scratch) const {
        const std::int64_t token = first_tokens_[item.seq] + item.first_query + row / group_;
        Bf16* to = static_cast<Bf16*>(heads_.output) + token * heads_.output_stride +
                   (item.kv_head * group_ + row % group_) * HEAD_DIM;
        const __m512 factor = _mm512_set1_ps(1.0f / scratch.sums[row]);
        for (int column = 0; column < HEAD_DIM; column += 16) {
            const __m512 x = _mm512_loadu_ps(scratch.output.data() + row * HEAD_DIM + column);
            store(to + column, _mm512_cvtneps_pbh(_mm512_mul_ps(x, factor)));
        }
    }

    const Pool& pool_;
    const Sequences& prompts_;
    const Heads& heads_;
    const Pages<Bf16, HEAD_DIM> pages_;
    const int group_;
    std::vector<std::int64_t> first_tokens_;  // of each sequence, and behind them the number of all
};

}  // namespace

#endif
