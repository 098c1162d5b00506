// All layers of a decoder over the tokens of a step, by one team of threads: a small step pays for calls and for threads
// that have to be woken, not for numbers, and a large one for passes over rows. Numbers are rounded to bf16 where the plain
// path rounds them.

#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "decode.h"
#include "prompt.h"
#include "rows.h"

#if defined(__AVX512BF16__)

extern "C" {

struct Layer {
    Weight qkv, output, gate_up, down;
    const void *input_norm, *post_attention_norm;  // [hidden_size]
    const void *q_norm, *k_norm;                   // [head_dim] or null
    std::int64_t window;                           // 0: all is seen
};

struct Model {
    const Layer* layers;
    Weight head;
    const void* final_norm;    // [hidden_size]
    const float* frequencies;  // [head_dim / 2]
    std::int64_t num_layers, hidden_size, intermediate_size, num_heads;
    double norm_eps, rotary_scaling;
};

// The tokens of a step, those of `decodes` first.
struct Step {
    std::int64_t num_tokens, num_samples;
    void* x;                         // [num_tokens, hidden_size] the embedded tokens; overwritten
    const std::int64_t* positions;   // [num_tokens]
    const std::int64_t* sample_rows; // [num_samples]
    void* logits;                    // [num_samples, vocab_size]
};

}  // extern "C"

namespace {

// What a step's threads share; kept from step to step.
struct StepBuffers {
    Lines<Bf16> normed, heads, attended, inner, added;  // rows, with room for whole tiles
    Lines<float> cosines, sines, partials;
};

// to = from / its root mean square * weight; width: a multiple of HALF_UNIT, of which `to` has each after `stride` numbers
inline void normalise(
    const Bf16* from, const void* weight, std::int64_t width, double eps, Bf16* to, std::int64_t stride = HALF_UNIT) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < width; i += HALF_UNIT) {
        const HalfRow x = load_half(from + i);
        low = _mm512_fmadd_ps(x.low, x.low, low);
        high = _mm512_fmadd_ps(x.high, x.high, high);
    }
    const float mean = _mm512_reduce_add_ps(_mm512_add_ps(low, high)) / static_cast<float>(width);
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + static_cast<float>(eps)));
    for (std::int64_t i = 0; i < width; i += HALF_UNIT) {
        const HalfRow x = load_half(from + i), w = load_half(static_cast<const Bf16*>(weight) + i);
        store_half(to + i / HALF_UNIT * stride, {_mm512_mul_ps(_mm512_mul_ps(x.low, factor), w.low),
                                                _mm512_mul_ps(_mm512_mul_ps(x.high, factor), w.high)});
    }
}

// to += added
inline void add_half(Bf16* to, const HalfRow& added) {
    const HalfRow before = load_half(to);
    store_half(to, {_mm512_add_ps(before.low, added.low), _mm512_add_ps(before.high, added.high)});
}

inline __m512 silu(__m512 x) {
    const __m512 positive = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
    const __m512 e = bits_as<__m512>(exp_negative<16>(bits_as<Floats<16>>(_mm512_sub_ps(_mm512_setzero_ps(), positive))));
    const __m512 share = _mm512_div_ps(one, _mm512_add_ps(one, e));  // sigmoid(|x|)
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mul_ps(x, _mm512_mask_mul_ps(share, negative, share, e));
}

inline float rounded(float x) { return bits_as<float>(static_cast<std::uint32_t>(round_to_bf16(x).bits) << 16); }

// Rotates the pairs (i, i + HEAD_DIM / 2) of a head in place.
template <int HEAD_DIM>
inline void rotate(Bf16* head, const float* cosines, const float* sines) {
    constexpr int HALF = HEAD_DIM / 2;
    for (int i = 0; i < HALF; i += 16) {
        const HalfRow x{as_floats(load<__m256i>(head + i)), as_floats(load<__m256i>(head + HALF + i))};
        const __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(sines + i);
        const HalfRow straight = rounded({_mm512_mul_ps(x.low, cosine), _mm512_mul_ps(x.high, cosine)});
        const HalfRow crossed = rounded({_mm512_mul_ps(x.high, sine), _mm512_mul_ps(x.low, sine)});
        store(head + i, _mm512_cvtneps_pbh(_mm512_sub_ps(straight.low, crossed.low)));
        store(head + HALF + i, _mm512_cvtneps_pbh(_mm512_add_ps(straight.high, crossed.high)));
    }
}

// What stands between the products of a layer, row by row. The functions named *_rows are run by all threads of a
// team and end when all have done theirs.

// to = the norm of x, to which `added` is added before unless it is null
inline void add_and_normalise_rows(
    Bf16* x, const Bf16* added, const void* weight, std::int64_t num_rows, double eps, Bf16* to, const Place& place) {
    const std::int64_t width = place.width;
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        Bf16* sum = x + row * width;
        for (std::int64_t i = 0; added != nullptr && i < width; i += HALF_UNIT)
            add_half(sum + i, load_half(added + row * width + i));
        normalise(sum, weight, width, eps, to + place.of(row, 0), place.chunk_stride);
    }
}

// Where the pairs of a head stand at each position: [num_rows, HEAD_DIM / 2]
inline void find_angle_rows(
    const Model& model, const std::int64_t* positions, std::int64_t num_rows, int half, float* cosines, float* sines) {
    const auto scaling = static_cast<float>(model.rotary_scaling);
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row)
        for (int i = 0; i < half; ++i) {
            const float angle = static_cast<float>(positions[row]) * model.frequencies[i];
            cosines[row * half + i] = rounded(std::cos(angle) * scaling);
            sines[row * half + i] = rounded(std::sin(angle) * scaling);
        }
}

// Queries and keys, normed where the model does that. heads: [num_rows, num_heads + 2 * num_kv_heads, HEAD_DIM]
template <int HEAD_DIM>
void rotate_rows(
    const Model& model, const Layer& layer, std::int64_t num_kv_heads, std::int64_t num_rows, const float* cosines,
    const float* sines, Bf16* heads) {
    const std::int64_t num_rotated = model.num_heads + num_kv_heads, row_heads = num_rotated + num_kv_heads;
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < num_rows * num_rotated; ++i) {
        const std::int64_t row = i / num_rotated, number = i % num_rotated;
        Bf16* head = heads + (row * row_heads + number) * HEAD_DIM;
        const void* norm = number < model.num_heads ? layer.q_norm : layer.k_norm;
        if (norm != nullptr) normalise(head, norm, HEAD_DIM, model.norm_eps, head);
        rotate<HEAD_DIM>(head, cosines + row * (HEAD_DIM / 2), sines + row * (HEAD_DIM / 2));
    }
}

// x += added
inline void add_rows(const Bf16* added, std::int64_t size, Bf16* x) {
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < size; i += HALF_UNIT) add_half(x + i, load_half(added + i));
}

// silu(gate) * up, each rounded
inline HalfRow gated(const HalfRow& gate, const HalfRow& up) {
    const HalfRow opened = rounded({silu(gate.low), silu(gate.high)});
    return {_mm512_mul_ps(opened.low, up.low), _mm512_mul_ps(opened.high, up.high)};
}

template <int HEAD_DIM>
class OneCall {
  public:
    OneCall(const Model& model, const Pool& pool, const Sequences& decodes, const Sequences& prompts, const Step& step)
        : model_(model),
          pool_(pool),
          decodes_(decodes),
          prompts_(prompts),
          step_(step),
          x_(static_cast<Bf16*>(step.x)),
          num_rows_(static_cast<int>(step.num_tokens)),
          hidden_(model.hidden_size),
          query_size_(model.num_heads * HEAD_DIM),
          heads_size_(query_size_ + 2 * pool.num_kv_heads * HEAD_DIM) {
        static thread_local StepBuffers kept;
        buffers_ = &kept;
    }

    void run(int num_threads) {
        plan(num_threads);
        resize_buffers();
#pragma omp parallel num_threads(num_threads)
        {
            begin_tiles();
            find_angle_rows(model_, step_.positions, num_rows_, HALF, buffers_->cosines.data(), buffers_->sines.data());
            if (num_rows_ <= MAX_PRODUCT_ROWS)
                for (std::int64_t layer = 0; layer < model_.num_layers; ++layer) run_layer_of_few(layer);
            else
                run_layers();
            find_logits();
            end_tiles();
        }
    }

  private:
    static constexpr int HALF = HEAD_DIM / 2;

    void plan(int num_threads) {
        for (std::int64_t layer = 0; layer < model_.num_layers; ++layer) {
            const std::int64_t window = model_.layers[layer].window;
            if (plan_for(window) == nullptr)
                plans_.emplace_back(window, plan_decodes(pool_, decodes_, window, num_threads));
        }
        if (prompts_.num_seqs > 0)
            prompt_plan_ = Prompter<HEAD_DIM>(pool_, prompts_, 0, heads_of(0, decodes_.num_seqs)).plan(num_threads);
    }

    const Plan* plan_for(std::int64_t window) const {
        for (const auto& [known, plan] : plans_)
            if (known == window) return &plan;
        return nullptr;
    }

    void resize_buffers() {
        const auto room = static_cast<std::size_t>(num_rows_ + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        buffers_->normed.resize(room * hidden_);
        buffers_->heads.resize(room * heads_size_);
        buffers_->attended.resize(room * query_size_);
        buffers_->inner.resize(room * model_.intermediate_size);
        if (num_rows_ > MAX_PRODUCT_ROWS) buffers_->added.resize(room * hidden_);
        buffers_->cosines.resize(room * HALF);
        buffers_->sines.resize(room * HALF);
        std::size_t num_partials = 0;
        for (const auto& known : plans_)
            num_partials =
                std::max(num_partials, Decoder<Bf16, HEAD_DIM>::num_partial_floats(known.second, model_.num_heads));
        buffers_->partials.resize(num_partials);
    }

    // What follows is run by all threads of the team.

    // For so few rows what follows a product is done with its results while they are at hand.
    void run_layer_of_few(std::int64_t index) const {
        const Layer& layer = model_.layers[index];
        Bf16* const heads = buffers_->heads.data();
        multiply_few(layer.qkv, norm_of(layer.input_norm), num_rows_, [&](int row, std::int64_t output, const HalfRow& result) {
            store_half(heads + row * heads_size_ + output, result);
        });
        rotate_rows<HEAD_DIM>(model_, layer, pool_.num_kv_heads, num_rows_, buffers_->cosines.data(),
                              buffers_->sines.data(), heads);
        attend(index);
        multiply_into_residual(layer.output, attended());
        multiply_gated(layer.gate_up, norm_of(layer.post_attention_norm));
        multiply_into_residual(layer.down, inner());
    }

    void run_layers() const {
        const Bf16* added = nullptr;
        Bf16* const heads = buffers_->heads.data();
        for (std::int64_t index = 0; index < model_.num_layers; ++index) {
            const Layer& layer = model_.layers[index];
            multiply(layer.qkv, norm_of(layer.input_norm, added), heads);
            rotate_rows<HEAD_DIM>(model_, layer, pool_.num_kv_heads, num_rows_, buffers_->cosines.data(),
                                  buffers_->sines.data(), heads);
            attend(index);
            added = multiply(layer.output, attended(), buffers_->added.data());
            multiply_gated_rows(layer.gate_up, norm_of(layer.post_attention_norm, added));
            multiply(layer.down, inner(), buffers_->added.data());
        }
        add_rows(added, num_rows_ * hidden_, x_);
    }

    // The norm of x, to which `added` is added before: what the products of a half of a layer are of.
    Rows norm_of(const void* weight, const Bf16* added = nullptr) const {
        const Rows to{buffers_->normed.data(), Place::tiled(hidden_)};
        add_and_normalise_rows(x_, added, weight, num_rows_, model_.norm_eps, buffers_->normed.data(), to.place);
        return to;
    }

    Rows attended() const { return {buffers_->attended.data(), Place::plain(query_size_)}; }

    Rows inner() const { return {buffers_->inner.data(), Place::tiled(model_.intermediate_size)}; }

    const Bf16* multiply(const Weight& weight, const Rows& x, Bf16* to) const {
        multiply_rows(weight, x, num_rows_, to);
#pragma omp barrier
        return to;
    }

    void find_logits() const {
        Bf16 *const normed = buffers_->normed.data(), *const logits = static_cast<Bf16*>(step_.logits);
        const Rows rows{normed, Place::tiled(hidden_)};
        const auto num_samples = static_cast<int>(step_.num_samples);
#pragma omp for schedule(static)
        for (int i = 0; i < num_samples; ++i)
            normalise(x_ + step_.sample_rows[i] * hidden_, model_.final_norm, hidden_, model_.norm_eps,
                      normed + rows.place.of(i, 0), rows.place.chunk_stride);
        if (num_samples > MAX_PRODUCT_ROWS) return multiply_rows(model_.head, rows, num_samples, logits);
        multiply_few(model_.head, rows, num_samples, [&](int row, std::int64_t output, const HalfRow& result) {
            keep_results(model_.head, output, result, logits + row * model_.head.num_outputs + output);
        });
    }

    void multiply_into_residual(const Weight& weight, const Rows& x) const {
        multiply_few(weight, x, num_rows_, [&](int row, std::int64_t output, const HalfRow& result) {
            add_half(x_ + row * hidden_ + output, rounded(result));
        });
    }

    // inner = silu(gate) * up; the gates are the first half of the outputs.
    void multiply_gated(const Weight& weight, const Rows& x) const {
        const std::int64_t num_units = model_.intermediate_size / UNIT;
#pragma omp for schedule(static)
        for (std::int64_t unit = 0; unit < num_units; ++unit) {
            alignas(64) float gates[MAX_PRODUCT_ROWS * UNIT], ups[MAX_PRODUCT_ROWS * UNIT];
            multiply_unit(weight, unit, x, num_rows_, gates);
            multiply_unit(weight, num_units + unit, x, num_rows_, ups);
            for (int i = 0; i < num_rows_ * UNIT; i += HALF_UNIT)
                keep_gated(weight, i / UNIT, unit * UNIT + i % UNIT, gates + i, ups + i);
        }
    }

    // The same for many rows: a unit is gates and what they are multiplied with.
    void multiply_gated_rows(const Weight& weight, const Rows& x) const {
        const std::int64_t size = model_.intermediate_size;
        const auto outputs_of = [&](std::int64_t unit) { return Halves{unit * HALF_UNIT, size + unit * HALF_UNIT}; };
        const auto keep = [&](std::int64_t unit, std::int64_t row, const float* sums) {
            keep_gated(weight, row, unit * HALF_UNIT, sums, sums + HALF_UNIT);
        };
        ManyRows(weight, x, num_rows_).multiply(size / HALF_UNIT, outputs_of, keep);
#pragma omp barrier
    }

    // Of the HALF_UNIT outputs that begin with `output`, whose sums these are.
    void keep_gated(
        const Weight& weight, std::int64_t row, std::int64_t output, const float* gates, const float* ups) const {
        const HalfRow gate = rounded(result_of(weight, output, gates));
        const HalfRow up = rounded(result_of(weight, model_.intermediate_size + output, ups));
        store_half(buffers_->inner.data() + inner().place.of(row, output), gated(gate, up));
    }

    void attend(std::int64_t layer) const {
        const std::int64_t window = model_.layers[layer].window;
        if (decodes_.num_seqs > 0) {
            const Heads heads = heads_of(window, 0);
            Decoder<Bf16, HEAD_DIM>(pool_, decodes_, layer, heads).work(*plan_for(window), buffers_->partials.data());
        }
        if (prompts_.num_seqs > 0) {
            const Heads heads = heads_of(window, decodes_.num_seqs);
            Prompter<HEAD_DIM>(pool_, prompts_, layer, heads).work(prompt_plan_);
        }
    }

    Heads heads_of(std::int64_t window, std::int64_t first_row) const {
        const Bf16* query = buffers_->heads.data() + first_row * heads_size_;
        const Bf16* key = query + query_size_;
        return {query,       key,         key + pool_.num_kv_heads * HEAD_DIM,
                buffers_->attended.data() + first_row * query_size_,
                heads_size_, heads_size_, heads_size_, query_size_,
                model_.num_heads, window, 1.0 / std::sqrt(static_cast<double>(HEAD_DIM))};
    }

    const Model& model_;
    const Pool& pool_;
    const Sequences& decodes_;
    const Sequences& prompts_;
    const Step& step_;
    Bf16* const x_;
    const int num_rows_;
    const std::int64_t hidden_, query_size_, heads_size_;
    StepBuffers* buffers_;
    std::vector<std::pair<std::int64_t, Plan>> plans_;  // by window
    std::vector<QueryBlock> prompt_plan_;
};

}  // namespace

#endif
