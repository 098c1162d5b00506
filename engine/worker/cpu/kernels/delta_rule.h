// The gated delta rule (arXiv 2412.06464): each token lets a state fade, and corrects what it holds for the
// token's key.

#pragma once

#include "states.h"

extern "C" {

// Rows are [heads, head size], `stride` elements apart; sums are fp32.
struct DeltaRule {
    const void *q, *k, *v;
    // The logarithm of what stays, [tokens, num_v_heads] or [tokens, num_v_heads, k_size], and the share that is
    // corrected, [tokens, num_v_heads].
    const float *g, *beta;
    float* pool;            // [slots, num_v_heads, k_size, v_size]
    void* output;           // [tokens, num_v_heads, v_size]
    std::int64_t q_stride, k_stride, v_stride, slot_stride;
    std::int64_t num_k_heads, num_v_heads, k_size, v_size;
    std::int64_t is_bf16;     // q, k, v and output
    std::int64_t by_channel;  // whether each row of a state has its own g
};

}  // extern "C"

namespace {

// Columns of a head's state, which depend on no others: few enough that a state of usual size stays in L1, and that
// the sums over its rows are registers.
constexpr int SLICE_VECTORS = NUM_VECTOR_REGISTERS / 8;
constexpr int SLICE = SLICE_VECTORS * LANES;

// Tokens one after the other, the state in L1: a state has the same bits however its tokens are split in steps.
template <typename T, bool BY_CHANNEL>
class DeltaRuleStep {
  public:
    explicit DeltaRuleStep(const DeltaRule& rule) : rule_(rule), k_padded_(padded_to_lanes(rule.k_size)) {}

    // Run by all threads of a team.
    void run(const StateBatch& batch) const {
        const std::int64_t num_slices = (rule_.v_size + SLICE - 1) / SLICE;
        static thread_local Buffers kept;
        Buffers& buffers = kept;
        grow(buffers.state, rule_.k_size * SLICE);
        grow(buffers.q, (1 + BLOCK_TOKENS) * k_padded_);
        grow(buffers.k, (1 + BLOCK_TOKENS) * k_padded_);
        if constexpr (BY_CHANNEL)
            for (Lines<float>* rows : {&buffers.decays, &buffers.faded_q, &buffers.faded_k}) grow(*rows, (1 + BLOCK_TOKENS) * k_padded_);
        share_states(batch, rule_.num_v_heads * num_slices, [&](const StateWork& work, std::int64_t part) {
            const std::int64_t column = part % num_slices * SLICE;
            run(buffers, work, part / num_slices, column, std::min<std::int64_t>(SLICE, rule_.v_size - column));
        });
    }

  private:
    struct Buffers {
        Lines<float> state;                         // [k_size, SLICE]
        Lines<float> q, k;                          // [1 + BLOCK_TOKENS, k_padded_] normalized; q times k_size^-0.5
        Lines<float> decays, faded_q, faded_k;      // the same shape, by channel; q and k times the decays
        float products[BLOCK_TOKENS];               // q . k
        alignas(64) float v[BLOCK_TOKENS * SLICE];  // values, then outputs
    };

    // What a token does to the state: it becomes decay S + k delta^T. It is done when the next token reads the
    // state, in the same pass.
    struct Change {
        float decay = 1.0f;
        Lane delta[SLICE_VECTORS] = {};
    };

    void run(Buffers& buffers, const StateWork& work, std::int64_t head, std::int64_t column, std::int64_t width) const {
        load_state(buffers, work.source, head, column, width);
        Change change;
        std::int64_t last = 0;  // the row of q and k of the token of `change`; at first none
        std::fill(buffers.k.data(), buffers.k.data() + k_padded_, 0.0f);
        if constexpr (BY_CHANNEL) std::fill(buffers.decays.data(), buffers.decays.data() + k_padded_, 1.0f);
        for (std::int64_t done = 0; done < work.num_tokens; done += BLOCK_TOKENS) {
            const std::int64_t first = work.first_token + done, count = std::min(BLOCK_TOKENS, work.num_tokens - done);
            std::memmove(buffers.k.data(), buffers.k.data() + last * k_padded_, k_padded_ * sizeof(float));
            if constexpr (BY_CHANNEL)
                std::memmove(buffers.decays.data(), buffers.decays.data() + last * k_padded_, k_padded_ * sizeof(float));
            load_tokens(buffers, first, count, head, column, width);
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t place = (first + i) * rule_.num_v_heads + head;
                add_token(buffers, i, BY_CHANNEL ? 1.0f : std::exp(rule_.g[place]), rule_.beta[place], change);
                from_floats(buffers.v + i * SLICE, width, static_cast<T*>(rule_.output) + place * rule_.v_size + column);
            }
            last = count;
        }
        store_state(buffers, change, last, state_of(work.target, head) + column, width);
    }

    float* state_of(std::int64_t slot, std::int64_t head) const {
        return rule_.pool + slot * rule_.slot_stride + head * rule_.k_size * rule_.v_size;
    }

    void load_state(Buffers& buffers, std::int64_t source, std::int64_t head, std::int64_t column, std::int64_t width) const {
        float* const to = buffers.state.data();
        if (source == 0 || width < SLICE) std::memset(to, 0, rule_.k_size * SLICE * sizeof(float));
        if (source == 0) return;
        const float* const from = state_of(source, head) + column;
        for (std::int64_t row = 0; row < rule_.k_size; ++row)
            std::memcpy(to + row * SLICE, from + row * rule_.v_size, width * sizeof(float));
    }

    void load_tokens(
        Buffers& buffers, std::int64_t first, std::int64_t count, std::int64_t head, std::int64_t column,
        std::int64_t width) const {
        const std::int64_t k_head = head / (rule_.num_v_heads / rule_.num_k_heads);
        for (std::int64_t i = 0; i < count; ++i) {
            float* const q = buffers.q.data() + (1 + i) * k_padded_;
            float* const k = buffers.k.data() + (1 + i) * k_padded_;
            to_floats(row_of(rule_.q, first + i, rule_.q_stride, k_head, rule_.k_size), rule_.k_size, q);
            to_floats(row_of(rule_.k, first + i, rule_.k_stride, k_head, rule_.k_size), rule_.k_size, k);
            buffers.products[i] = normalize_keys(q, k);
            if constexpr (BY_CHANNEL) fade(buffers, i, rule_.g + ((first + i) * rule_.num_v_heads + head) * rule_.k_size);
            if (width < SLICE) std::fill(buffers.v + i * SLICE, buffers.v + (i + 1) * SLICE, 0.0f);
            to_floats(row_of(rule_.v, first + i, rule_.v_stride, head, rule_.v_size) + column, width, buffers.v + i * SLICE);
        }
    }

    // The decays of a token, given their logarithms, and q and k times them.
    void fade(Buffers& buffers, std::int64_t i, const float* g) const {
        const std::int64_t row = (1 + i) * k_padded_;
        for (std::int64_t channel = 0; channel < rule_.k_size; ++channel) {
            const float decay = std::exp(g[channel]);
            buffers.decays.data()[row + channel] = decay;
            buffers.faded_q.data()[row + channel] = decay * buffers.q.data()[row + channel];
            buffers.faded_k.data()[row + channel] = decay * buffers.k.data()[row + channel];
        }
    }

    static const T* row_of(const void* rows, std::int64_t token, std::int64_t stride, std::int64_t head, std::int64_t size) {
        return static_cast<const T*>(rows) + token * stride + head * size;
    }

    // Divides q and k by their norms, and q by the root of its size; returns q . k.
    float normalize_keys(float* q, float* k) const {
        std::fill(q + rule_.k_size, q + k_padded_, 0.0f);
        std::fill(k + rule_.k_size, k + k_padded_, 0.0f);
        Lane sums[4] = {};
        for (std::int64_t i = 0; i < k_padded_; i += LANES) {
            const Lane a = load<Lane>(q + i), b = load<Lane>(k + i);
            sums[0] += a * a;
            sums[1] += b * b;
            sums[2] += a * b;
        }
        float products[4];
        sum_lanes<LANES>(sums, products);
        const float q_factor = 1.0f / std::sqrt((products[0] + 1e-6f) * static_cast<float>(rule_.k_size));
        const float k_factor = 1.0f / std::sqrt(products[1] + 1e-6f);
        for (std::int64_t i = 0; i < k_padded_; i += LANES) {
            store(q + i, load<Lane>(q + i) * q_factor);
            store(k + i, load<Lane>(k + i) * k_factor);
        }
        return products[2] * q_factor * k_factor;
    }

    // With S the state before: delta = beta (v - decay S^T k); the output is the product of the state behind the
    // token with q, which is decay S^T q + (q . k) delta. Changes the state by the token before, and `change` to
    // this one's.
    void add_token(Buffers& buffers, std::int64_t i, float decay, float beta, Change& change) const {
        const std::int64_t own = (1 + i) * k_padded_;
        const float* const q = (BY_CHANNEL ? buffers.faded_q : buffers.q).data() + own;
        const float* const k = (BY_CHANNEL ? buffers.faded_k : buffers.k).data() + own;
        const float* const k_before = buffers.k.data() + own - k_padded_;
        const float* const decays_before = BY_CHANNEL ? buffers.decays.data() + own - k_padded_ : nullptr;
        float* const state = buffers.state.data();
        float* const v = buffers.v + i * SLICE;
        const std::int64_t num_rows = rule_.k_size;  // a local: stores might change members
        const Change before = change;
        Lane found[SLICE_VECTORS] = {}, output[SLICE_VECTORS] = {};
        for (std::int64_t row = 0; row < num_rows; ++row)
            for (int j = 0; j < SLICE_VECTORS; ++j) {
                float* const at = state + row * SLICE + j * LANES;
                const float stays = BY_CHANNEL ? decays_before[row] : before.decay;
                const Lane s = load<Lane>(at) * stays + before.delta[j] * k_before[row];
                store(at, s);
                found[j] += s * k[row];
                output[j] += s * q[row];
            }
        change.decay = decay;
        for (int j = 0; j < SLICE_VECTORS; ++j) {
            change.delta[j] = (load<Lane>(v + j * LANES) - found[j] * decay) * beta;
            store(v + j * LANES, output[j] * decay + change.delta[j] * buffers.products[i]);
        }
    }

    // Stores the state behind the last token, whose row of keys is `last`.
    void store_state(const Buffers& buffers, const Change& change, std::int64_t last, float* to, std::int64_t width) const {
        const std::int64_t num_rows = rule_.k_size, stride = rule_.v_size;
        const float* const k = buffers.k.data() + last * k_padded_;
        const float* const decays = BY_CHANNEL ? buffers.decays.data() + last * k_padded_ : nullptr;
        for (std::int64_t row = 0; row < num_rows; ++row) {
            Lane changed[SLICE_VECTORS];
            for (int j = 0; j < SLICE_VECTORS; ++j)
                changed[j] = load<Lane>(buffers.state.data() + row * SLICE + j * LANES) * (BY_CHANNEL ? decays[row] : change.decay) +
                             change.delta[j] * k[row];
            std::memcpy(to + row * stride, changed, width * sizeof(float));
        }
    }

    const DeltaRule& rule_;
    const std::int64_t k_padded_;
};

}  // namespace
