// Runs all layers of a decoder over the tokens of a step with one team of threads: a small step is bound by
// calls and by waking threads, not by arithmetic, and a large one by elementwise ops over rows. Results are
// rounded to bf16 where torch rounds them.

#pragma once

#include <cmath>
#include <deque>
#include <vector>

#include "decode.h"
#include "elementwise.h"
#include "experts.h"
#include "low_rank.h"
#include "prefill.h"
#include "rows.h"

#if defined(__AVX512BF16__)

#include "cores.h"

extern "C" {

struct Sparse {
    Router router;
    Experts experts;
};

// gate_up and down are a dense layer's MLP, or the shared expert of a sparse one, without words if it has none.
struct Layer {
    Weight qkv, output, gate_up, down;
    const void *input_norm, *post_attention_norm;         // [hidden_size]
    const void *attention_output_norm, *mlp_output_norm;  // [hidden_size] or null
    const void *q_norm, *k_norm;                          // [head_dim] or null
    const float* sinks;                                   // [num_heads] or null
    Reach reach;
    std::int64_t group, slot;  // its KV cache group, and its part of each block
    std::int64_t rope;         // its number
    std::int64_t by_gelu;      // whether gates of a dense MLP go through GELU; else through SiLU
    const Sparse* sparse;      // null: a dense layer
};

struct Rope {
    const float* frequencies;  // [rotary_dim / 2]
    double scaling;
};

struct Model {
    const Layer* layers;
    Weight head;
    const void* embedding;     // [vocab_size, hidden_size], or null: the head's weight
    const void* final_norm;    // [hidden_size]
    const Rope* ropes;
    std::int64_t num_layers, hidden_size, num_heads, rotary_dim, num_ropes;
    NormKind norm;
    double embedding_scale, attention_scale;
    double attention_cap, logit_cap;  // soft caps; 0: none
    std::int64_t is_headless;  // the step ends with the final norm, whose rows are in place of logits
};

// The tokens of a step, those of `decodes` first.
struct Step {
    std::int64_t num_tokens, num_samples;
    const std::int64_t* token_ids;   // [num_tokens]
    const std::int64_t* positions;   // [num_tokens]
    const std::int64_t* sample_rows; // [num_samples], ascending
    void* logits;                    // [num_samples, vocab_size]
    Adapters adapters;
};

}  // extern "C"

namespace {

// Maximum rows that run through a layer together, so that activations take little memory. A weight is read
// again for each GROUP_ROWS of them anyway.
constexpr std::int64_t MAX_ROW_BLOCK = 2 * GROUP_ROWS;

// Maximum rows whose experts are computed together: an expert gets few of them, and its weights are read again
// for each of these blocks.
constexpr std::int64_t MAX_EXPERT_ROWS = 4 * MAX_ROW_BLOCK;

// A block of a step's rows: all its decodes and the first tokens of its prefills, or tokens that follow.
struct RowBlock {
    std::int64_t first_row = 0, num_rows = 0;
    Sequences decodes{}, prefills{};
    std::vector<std::int64_t> query_lens, seq_lens;  // of the prefills
    std::int64_t first_sample = 0, num_samples = 0;  // the samples among its rows
    AdaptedRows adapted, adapted_samples;
    std::vector<QueryBlock> plan, last_plan;         // of the prefills: all their tokens, and only the sampled ones
};

const AdaptedRows NO_ADAPTED_ROWS;

// How the decodes of a step are attended in the layers of one KV cache group and reach.
struct DecodePlan {
    std::int64_t group;
    Reach reach;
    Plan plan;
};

// Splits prefills into row blocks.
class PrefillSplitter {
  public:
    explicit PrefillSplitter(const Sequences& prefills) : prefills_(prefills) {}

    // Adds the next tokens of the prefills, until the block has MAX_ROW_BLOCK rows.
    void fill(RowBlock& row_block) {
        row_block.prefills = prefills_;
        row_block.prefills.block_tables += seq_ * prefills_.max_blocks;
        while (seq_ < prefills_.num_seqs && row_block.num_rows < MAX_ROW_BLOCK) {
            const std::int64_t left = prefills_.query_lens[seq_] - done_;
            const std::int64_t count = std::min(left, MAX_ROW_BLOCK - row_block.num_rows);
            row_block.query_lens.push_back(count);
            row_block.seq_lens.push_back(prefills_.seq_lens[seq_] - left + count);
            row_block.num_rows += count;
            done_ += count;
            if (count == left) ++seq_, done_ = 0;
        }
        row_block.prefills.num_seqs = static_cast<std::int64_t>(row_block.query_lens.size());
        row_block.prefills.query_lens = row_block.query_lens.data();
        row_block.prefills.seq_lens = row_block.seq_lens.data();
    }

  private:
    const Sequences& prefills_;
    std::int64_t seq_ = 0, done_ = 0;  // tokens of that sequence that are done
};

// Activations shared by a step's threads; kept from step to step.
struct StepBuffers {
    Lines<Bf16> x;                               // rows of the step: the residual stream
    Lines<Bf16> sampled;                         // the rows that are sampled
    // Rows of a block, padded to a multiple of TILE_ROWS. Each buffer is used several times, read before it
    // is overwritten: the first for norms, attention outputs, norms again; the second for heads, attention
    // outputs of the sampled rows, and the MLP's intermediate activations.
    Lines<Bf16> normed_or_attended, heads_or_inner;
    Lines<Bf16> outputs;  // of attention or MLP, where they are normalized
    Lines<float> cosines, sines, partials;  // cosines and sines of one rope after the other
    Lines<Bf16> products;                   // of rows with the low-rank inputs of their adapters
    ExpertBuffers experts;
};

inline float rounded(float x) { return as_float(round_to_bf16(x)); }

// Rotates the pairs (i, i + half) of a head in place; half: a multiple of 16.
inline void rotate(Bf16* head, const float* cosines, const float* sines, std::int64_t half) {
    for (std::int64_t i = 0; i < half; i += 16) {
        const HalfRow x{as_floats(load<__m256i>(head + i)), as_floats(load<__m256i>(head + half + i))};
        const __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(sines + i);
        const HalfRow straight = rounded({_mm512_mul_ps(x.low, cosine), _mm512_mul_ps(x.high, cosine)});
        const HalfRow crossed = rounded({_mm512_mul_ps(x.high, sine), _mm512_mul_ps(x.low, sine)});
        store(head + i, _mm512_cvtneps_pbh(_mm512_sub_ps(straight.low, crossed.low)));
        store(head + half + i, _mm512_cvtneps_pbh(_mm512_add_ps(straight.high, crossed.high)));
    }
}

// The elementwise ops before and between GEMMs, row by row. The functions named *_rows are run by all threads
// of a team and end with a barrier.

// to *= factor, rounded; width: a multiple of HALF_UNIT
inline void scale_row(Bf16* to, std::int64_t width, float factor) {
    const HalfRow factors{_mm512_set1_ps(factor), _mm512_set1_ps(factor)};
    for (std::int64_t i = 0; i < width; i += HALF_UNIT) store_half(to + i, product(load_half(to + i), factors));
}

// to = the embeddings of the tokens
inline void look_up_rows(const Model& model, const std::int64_t* token_ids, std::int64_t num_rows, Bf16* to) {
    const std::int64_t width = model.hidden_size;
    const auto* embedding = static_cast<const Bf16*>(model.embedding);
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        if (embedding != nullptr)
            std::memcpy(to + row * width, embedding + token_ids[row] * width, width * sizeof(Bf16));
        else
            read_inputs(model.head, token_ids[row], to + row * width);
        if (model.embedding_scale != 1) scale_row(to + row * width, width, static_cast<float>(model.embedding_scale));
    }
}

// to = the RMS norm of x
inline void normalize_rows(
    const Bf16* x, const void* weight, std::int64_t num_rows, NormKind kind, Bf16* to, const Layout& layout) {
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row)
        normalize(x + row * layout.width, weight, layout.width, kind, to + layout.of(row, 0), layout.chunk_stride);
}

// The rotary angles at each position: [num_rows, half]
inline void compute_angle_rows(
    const Rope& rope, const std::int64_t* positions, std::int64_t num_rows, std::int64_t half, float* cosines, float* sines) {
    const auto scaling = static_cast<float>(rope.scaling);
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row)
        for (std::int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(positions[row]) * rope.frequencies[i];
            cosines[row * half + i] = rounded(std::cos(angle) * scaling);
            sines[row * half + i] = rounded(std::sin(angle) * scaling);
        }
}

// Rotates queries and keys, normalized first if the model does that. heads: [num_rows, num_heads + 2 *
// num_kv_heads, HEAD_DIM]
template <int HEAD_DIM>
void rotate_rows(
    const Model& model, const Layer& layer, std::int64_t num_kv_heads, std::int64_t num_rows, const float* cosines,
    const float* sines, Bf16* heads) {
    const std::int64_t num_rotated = model.num_heads + num_kv_heads, row_heads = num_rotated + num_kv_heads;
    const std::int64_t half = model.rotary_dim / 2;
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < num_rows * num_rotated; ++i) {
        const std::int64_t row = i / num_rotated, number = i % num_rotated;
        Bf16* head = heads + (row * row_heads + number) * HEAD_DIM;
        const void* norm = number < model.num_heads ? layer.q_norm : layer.k_norm;
        if (norm != nullptr) normalize(head, norm, HEAD_DIM, model.norm, head);
        rotate(head, cosines + row * half, sines + row * half, half);
    }
}

template <int HEAD_DIM>
class DecoderStep {
  public:
    // decodes, prefills: those of each KV cache group.
    DecoderStep(const Model& model, const Pool& pool, const Sequences* decodes, const Sequences* prefills, const Step& step)
        : model_(model),
          pool_(pool),
          decodes_(decodes),
          prefills_(prefills),
          step_(step),
          hidden_(model.hidden_size),
          query_size_(model.num_heads * HEAD_DIM),
          heads_size_(query_size_ + 2 * pool.num_kv_heads * HEAD_DIM),
          half_(model.rotary_dim / 2) {
        static thread_local StepBuffers kept;
        buffers_ = &kept;
        split(*decodes, *prefills);
    }

    void run(const Cores& cores, int num_threads) {
        plan(num_threads);
        resize_buffers();
        const PinnedThreads kept(cores, num_threads);
#pragma omp parallel num_threads(num_threads)
        {
            kept.stay();
            begin_amx();
            look_up_rows(model_, step_.token_ids, step_.num_tokens, x());
            for (std::int64_t rope = 0; rope < model_.num_ropes; ++rope)
                compute_angle_rows(
                    model_.ropes[rope], step_.positions, step_.num_tokens, half_,
                    buffers_->cosines.data() + angles_from(rope, 0), buffers_->sines.data() + angles_from(rope, 0));
            for (std::int64_t layer = 0; layer + 1 < model_.num_layers; ++layer) run_layer(model_.layers[layer]);
            run_last_layer(model_.layers[model_.num_layers - 1]);
            compute_logits();
            end_amx();
        }
    }

  private:
    void split(const Sequences& decodes, const Sequences& prefills) {
        PrefillSplitter splitter(prefills);
        for (std::int64_t row = 0; row < step_.num_tokens; row += row_blocks_.back().num_rows) {
            RowBlock& row_block = row_blocks_.emplace_back();
            row_block.first_row = row;
            if (row == 0) row_block.decodes = decodes, row_block.num_rows = decodes.num_seqs;
            splitter.fill(row_block);
            const std::int64_t* end = step_.sample_rows + step_.num_samples;
            const std::int64_t* first = std::lower_bound(step_.sample_rows, end, row);
            row_block.first_sample = first - step_.sample_rows;
            row_block.num_samples = std::lower_bound(first, end, row + row_block.num_rows) - first;
            note_adapters(row_block);
        }
    }

    void plan(int num_threads) {
        for (std::int64_t layer = 0; layer < model_.num_layers && !row_blocks_.empty(); ++layer) {
            const Layer& of = model_.layers[layer];
            if (plan_for(of) == nullptr)
                plans_.push_back({of.group, of.reach, plan_decodes(pool_, decodes_[of.group], of.reach, num_threads)});
        }
        for (RowBlock& row_block : row_blocks_)
            if (row_block.prefills.num_seqs > 0) {
                const PrefillAttention<HEAD_DIM> prompter(pool_, row_block.prefills, 0, heads_of(Layer{}, 0));
                row_block.plan = prompter.plan(prompter.all_queries(), num_threads);
                row_block.last_plan = prompter.plan(sampled_queries(row_block), num_threads);
            }
    }

    // The sampled queries of a block's prefills.
    std::vector<QueryRange> sampled_queries(const RowBlock& row_block) const {
        std::vector<QueryRange> ranges;
        const std::int64_t *sample = step_.sample_rows + row_block.first_sample, *end = sample + row_block.num_samples;
        std::int64_t row = row_block.first_row + row_block.decodes.num_seqs;
        sample = std::lower_bound(sample, end, row);
        for (std::int32_t seq = 0; seq < row_block.prefills.num_seqs; row += row_block.query_lens[seq++])
            for (; sample != end && *sample < row + row_block.query_lens[seq]; ++sample) {
                const auto query = static_cast<std::int32_t>(*sample - row);
                const bool follows = !ranges.empty() && ranges.back().seq == seq && ranges.back().end == query;
                if (follows)
                    ++ranges.back().end;
                else
                    ranges.push_back({seq, query, query + 1});
            }
        return ranges;
    }

    const Plan* plan_for(const Layer& layer) const {
        for (const DecodePlan& known : plans_)
            if (known.group == layer.group && known.reach == layer.reach) return &known.plan;
        return nullptr;
    }

    void resize_buffers() {
        std::int64_t most = step_.num_samples;
        for (const RowBlock& row_block : row_blocks_) most = std::max(most, row_block.num_rows);
        const std::int64_t most_of_experts = std::max(most, std::min(step_.num_tokens, MAX_EXPERT_ROWS));
        grow(buffers_->x, step_.num_tokens * hidden_);
        grow(buffers_->sampled, step_.num_samples * hidden_);
        grow(buffers_->normed_or_attended, padded(most) * std::max(hidden_, query_size_));
        grow(buffers_->heads_or_inner, padded(most) * heads_size_);
        for (std::int64_t index = 0; index < model_.num_layers; ++index) {
            const Layer& layer = model_.layers[index];
            if (layer.attention_output_norm != nullptr) grow(buffers_->outputs, most * hidden_);
            const std::int64_t rows = layer.sparse == nullptr ? most : most_of_experts;
            grow(buffers_->heads_or_inner, padded(rows) * inner_size_of(layer.gate_up));
            if (layer.sparse == nullptr) continue;
            grow(buffers_->normed_or_attended, padded(rows) * hidden_);
            RouterStep(layer.sparse->router, buffers_->experts).resize(rows);
            ExpertStep(layer.sparse->experts, buffers_->experts).resize(rows);
            grow(buffers_->experts.mixed, rows * hidden_);
        }
        if (step_.adapters.of_row != nullptr) grow(buffers_->products, most * step_.adapters.max_rank);
        grow(buffers_->cosines, angles_from(model_.num_ropes, 0));
        grow(buffers_->sines, angles_from(model_.num_ropes, 0));
        std::size_t num_partials = 0;
        for (const DecodePlan& known : plans_)
            num_partials =
                std::max(num_partials, DecodeAttention<Bf16, HEAD_DIM>::num_partial_floats(known.plan, model_.num_heads));
        grow(buffers_->partials, num_partials);
    }

    // Notes which rows of a block have adapters; of other blocks nothing is noted.
    void note_adapters(RowBlock& row_block) const {
        const std::int64_t* const of_row = step_.adapters.of_row;
        if (of_row == nullptr) return;
        for (std::int64_t row = 0; row < row_block.num_rows; ++row) row_block.adapted.add(of_row[row_block.first_row + row]);
        for (std::int64_t i = 0; i < row_block.num_samples; ++i)
            row_block.adapted_samples.add(of_row[step_.sample_rows[row_block.first_sample + i]]);
    }

    static std::size_t padded(std::int64_t num_rows) { return (num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

    // The functions below are run by all threads of the team.

    void run_layer(const Layer& layer) const {
        for (const RowBlock& row_block : row_blocks_) {
            compute_qkv(layer, row_block);
            attend(layer, row_block, row_block.plan);
            Bf16* const residual = residual_of(row_block);
            multiply_into_residual(layer.output, attended_rows(), layer.attention_output_norm, residual,
                                   row_block.num_rows, low_rank(layer, OUTPUT, row_block.adapted));
            if (layer.sparse == nullptr) add_mlp(layer, residual, row_block.num_rows, row_block.adapted);
        }
        if (layer.sparse != nullptr) add_experts(layer, x(), step_.num_tokens);
    }

    // In the last layer the keys and values of all tokens are written; the rest is computed for sampled
    // tokens only.
    void run_last_layer(const Layer& layer) const {
        for (const RowBlock& row_block : row_blocks_) {
            compute_qkv(layer, row_block);
            attend(layer, row_block, row_block.last_plan);
            if (row_block.num_samples == 0) continue;
            const Rows rows{heads(), Layout::plain(query_size_)};  // heads are free: attention has read them
            take_samples(row_block, heads());
            Bf16* const residual = sampled() + row_block.first_sample * hidden_;
            multiply_into_residual(layer.output, rows, layer.attention_output_norm, residual, row_block.num_samples,
                                   low_rank(layer, OUTPUT, row_block.adapted_samples));
            if (layer.sparse == nullptr) add_mlp(layer, residual, row_block.num_samples, row_block.adapted_samples);
        }
        if (layer.sparse != nullptr) add_experts(layer, sampled(), step_.num_samples);
    }

    // Elementwise ops after a GEMM are fused: they use its results while they are in registers.
    void compute_qkv(const Layer& layer, const RowBlock& row_block) const {
        Bf16* const to = heads();
        const Rows x = norm_of(layer.input_norm, residual_of(row_block), row_block.num_rows);
        const LowRankGemm added = low_rank(layer, QKV, row_block.adapted);
        added.project(x);
        multiply_rows(layer.qkv, x, row_block.num_rows, [&](std::int64_t row, std::int64_t output, const HalfRow& result) {
            store_half(to + row * heads_size_ + output, added.add(row, output, result));
        });
        rotate_rows<HEAD_DIM>(model_, layer, pool_.num_kv_heads, row_block.num_rows,
                              buffers_->cosines.data() + angles_from(layer.rope, row_block.first_row),
                              buffers_->sines.data() + angles_from(layer.rope, row_block.first_row), to);
    }

    // The low-rank additions to a weight of a layer, for these rows.
    enum LayerWeight { QKV, OUTPUT, GATE_UP, DOWN };
    LowRankGemm low_rank(const Layer& layer, LayerWeight weight, const AdaptedRows& rows) const {
        const std::int64_t number = (&layer - model_.layers) * WEIGHTS_OF_LAYER + weight;
        return {step_.adapters, rows, number, buffers_->products.data()};
    }

    void add_mlp(const Layer& layer, Bf16* residual, std::int64_t num_rows, const AdaptedRows& adapters) const {
        multiply_gated(layer, norm_of(layer.post_attention_norm, residual, num_rows), num_rows,
                       low_rank(layer, GATE_UP, adapters));
        multiply_into_residual(layer.down, inner_rows(layer.gate_up), layer.mlp_output_norm, residual, num_rows,
                               low_rank(layer, DOWN, adapters));
    }

    void add_experts(const Layer& layer, Bf16* residual, std::int64_t num_rows) const {
        for (std::int64_t row = 0; row < num_rows; row += MAX_EXPERT_ROWS) {
            const std::int64_t count = std::min(MAX_EXPERT_ROWS, num_rows - row);
            Bf16* const rows = residual + row * hidden_;
            mix_experts(layer, norm_of(layer.post_attention_norm, rows, count), rows, count);
        }
    }

    void mix_experts(const Layer& layer, const Rows& normed, Bf16* residual, std::int64_t num_rows) const {
        ExpertBuffers& buffers = buffers_->experts;
        RouterStep(layer.sparse->router, buffers).choose(normed, num_rows);
        const ExpertStep experts(layer.sparse->experts, buffers);
        const std::int64_t* chosen = buffers.chosen.data();
        const float* weights = buffers.weights.data();
        if (layer.gate_up.words == nullptr)
            return experts.mix(normed, num_rows, chosen, weights, [&](std::int64_t row, std::int64_t number, const HalfRow& sum) {
                add_half(residual + row * hidden_ + number, rounded(sum));
            });
        Bf16* const mixed = buffers.mixed.data();
        experts.mix(normed, num_rows, chosen, weights, [&](std::int64_t row, std::int64_t number, const HalfRow& sum) {
            store_half(mixed + row * hidden_ + number, sum);
        });
        multiply_gated(layer, normed, num_rows, low_rank(layer, GATE_UP, NO_ADAPTED_ROWS));
        multiply_rows(layer.down, inner_rows(layer.gate_up), num_rows,
                      [&](std::int64_t row, std::int64_t output, const HalfRow& result) {
                          add_half(mixed + row * hidden_ + output, rounded(result));
                          add_half(residual + row * hidden_ + output, load_half(mixed + row * hidden_ + output));
                      });
    }

    // Gathers the residuals of the sampled rows, and their attention outputs to `to`.
    void take_samples(const RowBlock& row_block, Bf16* to) const {
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < row_block.num_samples; ++i) {
            const std::int64_t sample = row_block.first_sample + i, row = step_.sample_rows[sample];
            std::memcpy(sampled() + sample * hidden_, x() + row * hidden_, hidden_ * sizeof(Bf16));
            const Bf16* from = attended() + (row - row_block.first_row) * query_size_;
            std::memcpy(to + i * query_size_, from, query_size_ * sizeof(Bf16));
        }
    }

    Bf16* x() const { return buffers_->x.data(); }

    Bf16* sampled() const { return buffers_->sampled.data(); }

    Bf16* normed() const { return buffers_->normed_or_attended.data(); }

    Bf16* attended() const { return buffers_->normed_or_attended.data(); }

    Bf16* heads() const { return buffers_->heads_or_inner.data(); }

    Bf16* inner() const { return buffers_->heads_or_inner.data(); }

    Bf16* residual_of(const RowBlock& row_block) const { return x() + row_block.first_row * hidden_; }

    // The norm before attention or MLP, as the input of its first GEMM.
    Rows norm_of(const void* weight, const Bf16* residual, std::int64_t num_rows) const {
        const Rows to{normed(), Layout::tiled(hidden_)};
        normalize_rows(residual, weight, num_rows, model_.norm, normed(), to.layout);
        return to;
    }

    Rows attended_rows() const { return {attended(), Layout::plain(query_size_)}; }

    // The size of an MLP: its gates and ups are one weight.
    static std::int64_t inner_size_of(const Weight& gate_up) { return gate_up.num_outputs / 2; }

    Rows inner_rows(const Weight& gate_up) const { return {inner(), Layout::tiled(inner_size_of(gate_up))}; }

    // The place of a row's angles of a rope.
    std::int64_t angles_from(std::int64_t rope, std::int64_t row) const { return (rope * step_.num_tokens + row) * half_; }

    // norm: what the outputs go through before they are added, or null
    void multiply_into_residual(
        const Weight& weight, const Rows& x, const void* norm, Bf16* residual, std::int64_t num_rows,
        const LowRankGemm& added) const {
        added.project(x);
        if (norm != nullptr) return multiply_into_residual_normed(weight, x, norm, residual, num_rows, added);
        multiply_rows(weight, x, num_rows, [&](std::int64_t row, std::int64_t output, const HalfRow& result) {
            add_half(residual + row * hidden_ + output, rounded(added.add(row, output, result)));
        });
    }

    void multiply_into_residual_normed(
        const Weight& weight, const Rows& x, const void* norm, Bf16* residual, std::int64_t num_rows,
        const LowRankGemm& added) const {
        Bf16* const outputs = buffers_->outputs.data();
        const auto store = store_rows(weight, outputs);
        multiply_rows(weight, x, num_rows, [&](std::int64_t row, std::int64_t output, const HalfRow& result) {
            store(row, output, added.add(row, output, result));
        });
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < num_rows; ++row) {
            Bf16* const output = outputs + row * hidden_;
            normalize(output, norm, hidden_, model_.norm, output);
            for (std::int64_t i = 0; i < hidden_; i += HALF_UNIT) add_half(residual + row * hidden_ + i, load_half(output + i));
        }
    }

    void compute_logits() const {
        auto* const logits = static_cast<Bf16*>(step_.logits);
        if (model_.is_headless) return normalize_sampled(logits);
        const Rows rows{normed(), Layout::tiled(hidden_)};
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < step_.num_samples; ++i)
            normalize(sampled() + i * hidden_, model_.final_norm, hidden_, model_.norm,
                      normed() + rows.layout.of(i, 0), rows.layout.chunk_stride);
        const auto store = store_rows(model_.head, logits);
        const auto cap = static_cast<float>(model_.logit_cap);
        if (cap == 0) return multiply_rows(model_.head, rows, step_.num_samples, store);
        // Not rounded in between, as torch would: many logits would become the same.
        multiply_rows(model_.head, rows, step_.num_samples, [&](std::int64_t row, std::int64_t output, const HalfRow& result) {
            store(row, output, soft_capped(result, cap));
        });
    }

    void normalize_sampled(Bf16* rows) const {
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < step_.num_samples; ++i)
            normalize(sampled() + i * hidden_, model_.final_norm, hidden_, model_.norm, rows + i * hidden_);
    }

    // inner = silu(gate) * up, or with GELU; the gates are the first half of the outputs.
    void multiply_gated(const Layer& layer, const Rows& x, std::int64_t num_rows, const LowRankGemm& added) const {
        added.project(x);
        if (fits_one_block(num_rows))
            multiply_gated_few(layer, x, static_cast<int>(num_rows), added);
        else
            multiply_gated_many(layer, x, num_rows, added);
    }

    void multiply_gated_few(const Layer& layer, const Rows& x, int num_rows, const LowRankGemm& added) const {
        const Weight& weight = layer.gate_up;
        const std::int64_t num_units = inner_size_of(weight) / UNIT;
#pragma omp for schedule(static)
        for (std::int64_t unit = 0; unit < num_units; ++unit) {
            alignas(64) float gates[MAX_GEMM_ROWS * UNIT], ups[MAX_GEMM_ROWS * UNIT];
            multiply_unit(weight, unit, x, num_rows, gates);
            multiply_unit(weight, num_units + unit, x, num_rows, ups);
            for (int i = 0; i < num_rows * UNIT; i += HALF_UNIT)
                store_gated(layer, i / UNIT, unit * UNIT + i % UNIT, gates + i, ups + i, added);
        }
    }

    // A unit is HALF_UNIT gates and the HALF_UNIT ups that they are multiplied with.
    void multiply_gated_many(const Layer& layer, const Rows& x, std::int64_t num_rows, const LowRankGemm& added) const {
        const Weight& weight = layer.gate_up;
        const std::int64_t size = inner_size_of(weight);
        const auto outputs_of = [&](std::int64_t unit) { return Halves{unit * HALF_UNIT, size + unit * HALF_UNIT}; };
        const auto keep = [&](std::int64_t unit, std::int64_t row, const float* sums) {
            store_gated(layer, row, unit * HALF_UNIT, sums, sums + HALF_UNIT, added);
        };
        BlockedGemm(weight, x, num_rows).multiply(size / HALF_UNIT, outputs_of, keep);
    }

    // Stores the gated ups of the HALF_UNIT outputs from `output` on, given their sums.
    void store_gated(const Layer& layer, std::int64_t row, std::int64_t output, const float* gates, const float* ups,
                     const LowRankGemm& added) const {
        const Weight& weight = layer.gate_up;
        const std::int64_t size = inner_size_of(weight);
        const HalfRow gate = rounded(added.add(row, output, result_of(weight, output, gates)));
        const HalfRow up = rounded(added.add(row, size + output, result_of(weight, size + output, ups)));
        store_half(inner() + inner_rows(weight).layout.of(row, output), gated(gate, up, layer.by_gelu != 0));
    }

    void attend(const Layer& layer, const RowBlock& row_block, const std::vector<QueryBlock>& plan) const {
        if (row_block.decodes.num_seqs > 0) {
            const Heads heads = heads_of(layer, 0);
            DecodeAttention<Bf16, HEAD_DIM>(pool_, decodes_[layer.group], layer.slot, heads)
                .work(*plan_for(layer), buffers_->partials.data());
        }
        if (row_block.prefills.num_seqs > 0) {
            const Heads heads = heads_of(layer, row_block.decodes.num_seqs);
            const Sequences prefills = prefills_of(row_block, layer.group);
            PrefillAttention<HEAD_DIM>(pool_, prefills, layer.slot, heads).work(plan);
        }
    }

    // A block's prefills with the block tables of a KV cache group.
    Sequences prefills_of(const RowBlock& row_block, std::int64_t group) const {
        Sequences prefills = row_block.prefills;
        prefills.block_tables = prefills_[group].block_tables + (prefills.block_tables - prefills_->block_tables);
        return prefills;
    }

    // The heads of a block, from one of its rows on.
    Heads heads_of(const Layer& layer, std::int64_t first_row) const {
        const Bf16* query = heads() + first_row * heads_size_;
        const Bf16* key = query + query_size_;
        return {query,       key,         key + pool_.num_kv_heads * HEAD_DIM,
                attended() + first_row * query_size_,
                heads_size_, heads_size_, heads_size_, query_size_,
                model_.num_heads, layer.reach, model_.attention_scale, model_.attention_cap, layer.sinks};
    }

    const Model& model_;
    const Pool& pool_;
    const Sequences *const decodes_, *const prefills_;  // of each KV cache group
    const Step& step_;
    const std::int64_t hidden_, query_size_, heads_size_, half_;
    StepBuffers* buffers_;
    std::deque<RowBlock> row_blocks_;                           // a deque: they contain pointers into themselves
    std::vector<DecodePlan> plans_;
};

}  // namespace

#endif
