// The short causal convolution before a linear attention: each channel's last few inputs, weighted.

#pragma once

#include "states.h"

extern "C" {

struct CausalConv {
    const void* x;       // [tokens, num_channels], `stride` elements apart
    const void* weight;  // [num_channels, width], the latest input last
    const void* bias;    // [num_channels] or null
    void* pool;          // [slots, num_channels, width - 1] the inputs before, the latest last
    void* output;        // [tokens, num_channels]
    std::int64_t stride, slot_stride, num_channels, width;
    std::int64_t is_bf16, pool_is_bf16;  // the former: all but the pool
    std::int64_t has_silu;
};

}  // extern "C"

namespace {

// x / (1 + exp(-x))
inline Lane silu_of(Lane x) {
    const Lane zero = {}, e = exp_negative<LANES>(x < zero ? x : -x), share = 1.0f / (1.0f + e);
    return x * (x < zero ? e * share : share);
}

// T: of all but the pool, P: of the pool
template <typename T, typename P>
class CausalConvStep {
  public:
    explicit CausalConvStep(const CausalConv& conv) : conv_(conv), before_(conv.width - 1) {}

    // Run by all threads of a team.
    void run(const StateBatch& batch) const {
        static thread_local Buffers kept;
        Buffers& buffers = kept;
        grow(buffers.weight, conv_.width * CHANNELS);
        grow(buffers.rows, (before_ + BLOCK_TOKENS) * CHANNELS);
        const std::int64_t num_parts = (conv_.num_channels + CHANNELS - 1) / CHANNELS;
        share_states(batch, num_parts, [&](const StateWork& work, std::int64_t part) {
            const std::int64_t channel = part * CHANNELS;
            run(buffers, work, channel, std::min(CHANNELS, conv_.num_channels - channel));
        });
    }

  private:
    static constexpr std::int64_t CHANNELS = 64;  // of a part

    struct Buffers {
        Lines<float> weight;  // [width, CHANNELS]
        Lines<float> rows;    // [width - 1 + BLOCK_TOKENS, CHANNELS] the inputs before, then those of tokens
        alignas(64) float bias[CHANNELS], output[CHANNELS];
    };

    void run(Buffers& buffers, const StateWork& work, std::int64_t channel, std::int64_t count) const {
        load_weight(buffers, channel, count);
        load_state(buffers, work.source, channel, count);
        for (std::int64_t done = 0; done < work.num_tokens; done += BLOCK_TOKENS) {
            const std::int64_t first = work.first_token + done, num_tokens = std::min(BLOCK_TOKENS, work.num_tokens - done);
            for (std::int64_t i = 0; i < num_tokens; ++i)
                to_floats(static_cast<const T*>(conv_.x) + (first + i) * conv_.stride + channel, count, row_of(buffers, before_ + i));
            for (std::int64_t i = 0; i < num_tokens; ++i) {
                convolve(buffers, i);
                from_floats(buffers.output, count, static_cast<T*>(conv_.output) + (first + i) * conv_.num_channels + channel);
            }
            std::memmove(row_of(buffers, 0), row_of(buffers, num_tokens), before_ * CHANNELS * sizeof(float));
        }
        P* const to = state_of(work.target, channel);
        for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t j = 0; j < before_; ++j) from_floats(row_of(buffers, j) + i, 1, to + i * before_ + j);
    }

    static float* row_of(Buffers& buffers, std::int64_t row) { return buffers.rows.data() + row * CHANNELS; }

    P* state_of(std::int64_t slot, std::int64_t channel) const {
        return static_cast<P*>(conv_.pool) + slot * conv_.slot_stride + channel * before_;
    }

    void load_weight(Buffers& buffers, std::int64_t channel, std::int64_t count) const {
        std::memset(buffers.bias, 0, sizeof buffers.bias);
        if (conv_.bias != nullptr) to_floats(static_cast<const T*>(conv_.bias) + channel, count, buffers.bias);
        const T* const from = static_cast<const T*>(conv_.weight) + channel * conv_.width;
        for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t j = 0; j < conv_.width; ++j)
                to_floats(from + i * conv_.width + j, 1, buffers.weight.data() + j * CHANNELS + i);
    }

    void load_state(Buffers& buffers, std::int64_t source, std::int64_t channel, std::int64_t count) const {
        std::memset(row_of(buffers, 0), 0, before_ * CHANNELS * sizeof(float));
        if (source == 0) return;
        const P* const from = state_of(source, channel);
        for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t j = 0; j < before_; ++j) to_floats(from + i * before_ + j, 1, row_of(buffers, j) + i);
    }

    void convolve(Buffers& buffers, std::int64_t token) const {
        for (std::int64_t i = 0; i < CHANNELS; i += LANES) {
            Lane sum = load<Lane>(buffers.bias + i);
            for (std::int64_t j = 0; j < conv_.width; ++j)
                sum += load<Lane>(row_of(buffers, token + j) + i) * load<Lane>(buffers.weight.data() + j * CHANNELS + i);
            store(buffers.output + i, conv_.has_silu ? silu_of(sum) : sum);
        }
    }

    const CausalConv& conv_;
    const std::int64_t before_;
};

}  // namespace
