// Mamba-2's selective scan (arXiv 2405.21060): a state fades by a step's length, takes in each token's input, and
// is read by the token's C.

#pragma once

#include "states.h"

extern "C" {

// Rows of x are [num_heads, head_size], those of b and c [num_groups, state_size], `stride` elements apart.
struct SelectiveScan {
    const void *x, *b, *c;
    const float* dt;                  // [tokens, num_heads], without its bias
    const float *a, *d, *dt_bias;     // [num_heads]; a < 0; d and dt_bias may be null
    float* pool;                      // [slots, num_heads, head_size, state_size]
    void* output;                     // [tokens, num_heads, head_size]
    std::int64_t x_stride, b_stride, c_stride, slot_stride;
    std::int64_t num_heads, head_size, num_groups, state_size;
    std::int64_t is_bf16;  // x, b, c and output
};

}  // extern "C"

namespace {

// Tokens one after the other, a head's state in L1, as in delta_rule.h.
template <typename T>
class SelectiveScanStep {
  public:
    explicit SelectiveScanStep(const SelectiveScan& scan)
        : scan_(scan), n_padded_(padded_to_lanes(scan.state_size)), p_padded_((scan.head_size + ROWS - 1) / ROWS * ROWS) {}

    // Run by all threads of a team.
    void run(const StateBatch& batch) const {
        static thread_local Buffers kept;
        Buffers& buffers = kept;
        for (Lines<float>* lines : {&buffers.x, &buffers.inputs, &buffers.output}) grow(*lines, BLOCK_TOKENS * p_padded_);
        for (Lines<float>* lines : {&buffers.b, &buffers.c}) grow(*lines, BLOCK_TOKENS * n_padded_);
        grow(buffers.state, p_padded_ * n_padded_);
        share_states(batch, scan_.num_heads, [&](const StateWork& work, std::int64_t head) { run(buffers, work, head); });
    }

  private:
    static constexpr int ROWS = 4;  // of the state, whose sums over lanes are made at once

    struct Buffers {
        Lines<float> state;              // [p_padded_, n_padded_]
        Lines<float> b, c;               // [BLOCK_TOKENS, n_padded_]
        Lines<float> x, inputs, output;  // [BLOCK_TOKENS, p_padded_]; inputs: x times the length of the step
        float decays[BLOCK_TOKENS];
    };

    void run(Buffers& buffers, const StateWork& work, std::int64_t head) const {
        load_state(buffers, work.source, head);
        for (std::int64_t done = 0; done < work.num_tokens; done += BLOCK_TOKENS) {
            const std::int64_t first = work.first_token + done, count = std::min(BLOCK_TOKENS, work.num_tokens - done);
            for (std::int64_t i = 0; i < count; ++i) load_token(buffers, i, first + i, head);
            for (std::int64_t row = 0; row < p_padded_; row += ROWS)
                for (std::int64_t i = 0; i < count; ++i) add_token(buffers, i, row);
            for (std::int64_t i = 0; i < count; ++i) store_output(buffers, i, first + i, head);
        }
        float* const to = state_of(work.target, head);
        for (std::int64_t row = 0; row < scan_.head_size; ++row)
            std::memcpy(to + row * scan_.state_size, buffers.state.data() + row * n_padded_, scan_.state_size * sizeof(float));
    }

    float* state_of(std::int64_t slot, std::int64_t head) const {
        return scan_.pool + slot * scan_.slot_stride + head * scan_.head_size * scan_.state_size;
    }

    void load_state(Buffers& buffers, std::int64_t source, std::int64_t head) const {
        float* const to = buffers.state.data();
        if (source == 0 || n_padded_ != scan_.state_size || p_padded_ != scan_.head_size)
            std::memset(to, 0, p_padded_ * n_padded_ * sizeof(float));
        if (source == 0) return;
        const float* const from = state_of(source, head);
        for (std::int64_t row = 0; row < scan_.head_size; ++row)
            std::memcpy(to + row * n_padded_, from + row * scan_.state_size, scan_.state_size * sizeof(float));
    }

    void load_token(Buffers& buffers, std::int64_t i, std::int64_t token, std::int64_t head) const {
        const std::int64_t group = head / (scan_.num_heads / scan_.num_groups);
        load_row(scan_.b, token * scan_.b_stride + group * scan_.state_size, scan_.state_size, buffers.b, i, n_padded_);
        load_row(scan_.c, token * scan_.c_stride + group * scan_.state_size, scan_.state_size, buffers.c, i, n_padded_);
        load_row(scan_.x, token * scan_.x_stride + head * scan_.head_size, scan_.head_size, buffers.x, i, p_padded_);
        const float bias = scan_.dt_bias == nullptr ? 0.0f : scan_.dt_bias[head];
        const float length = softplus(scan_.dt[token * scan_.num_heads + head] + bias);
        buffers.decays[i] = std::exp(length * scan_.a[head]);
        for (std::int64_t row = 0; row < p_padded_; ++row)
            buffers.inputs[i * p_padded_ + row] = buffers.x[i * p_padded_ + row] * length;
    }

    // Row i of `to`, padded with zeros.
    static void load_row(
        const void* from, std::int64_t place, std::int64_t count, Lines<float>& to, std::int64_t i, std::int64_t padded) {
        float* const row = to.data() + i * padded;
        to_floats(static_cast<const T*>(from) + place, count, row);
        std::fill(row + count, row + padded, 0.0f);
    }

    static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

    // ROWS rows of the state: S = decay S + input b^T; the output is S c.
    void add_token(Buffers& buffers, std::int64_t i, std::int64_t row) const {
        const std::int64_t size = n_padded_;  // a local: stores might change members
        const float* const b = buffers.b.data() + i * size;
        const float* const c = buffers.c.data() + i * size;
        float* const state = buffers.state.data() + row * size;
        Lane inputs[ROWS];
        for (int j = 0; j < ROWS; ++j) inputs[j] = spread(buffers.inputs[i * p_padded_ + row + j]);
        const Lane decay = spread(buffers.decays[i]);
        Lane sums[ROWS] = {};
        for (std::int64_t n = 0; n < size; n += LANES) {
            const Lane written = load<Lane>(b + n), read = load<Lane>(c + n);
            for (int j = 0; j < ROWS; ++j) {
                float* const s = state + j * size + n;
                const Lane next = load<Lane>(s) * decay + written * inputs[j];
                store(s, next);
                sums[j] += next * read;
            }
        }
        sum_lanes<LANES>(sums, buffers.output.data() + i * p_padded_ + row);
    }

    void store_output(Buffers& buffers, std::int64_t i, std::int64_t token, std::int64_t head) const {
        float* const output = buffers.output.data() + i * p_padded_;
        const float d = scan_.d == nullptr ? 0.0f : scan_.d[head];
        for (std::int64_t row = 0; row < scan_.head_size; ++row) output[row] += d * buffers.x[i * p_padded_ + row];
        from_floats(output, scan_.head_size, static_cast<T*>(scan_.output) + (token * scan_.num_heads + head) * scan_.head_size);
    }

    const SelectiveScan& scan_;
    const std::int64_t n_padded_, p_padded_;
};

}  // namespace
