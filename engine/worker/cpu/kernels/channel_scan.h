// Mamba's selective scan (arXiv 2312.00752): like Mamba-2's, but each number of a channel's state fades in its own way.

#pragma once

#include "states.h"

extern "C" {

// padded_size: state_size, rounded up to a multiple of 16; a, b and c have zeros behind state_size.
struct ChannelScan {
    const float *x, *dt;   // [tokens, num_channels]; dt without its bias
    const float *b, *c;    // [tokens, padded_size]
    const float* a;        // [num_channels, padded_size]; a <= 0
    const float* dt_bias;  // [num_channels]
    float* pool;           // [slots, num_channels, state_size]
    float* output;         // [tokens, num_channels]
    std::int64_t slot_stride, num_channels, state_size, padded_size;
};

}  // extern "C"

namespace {

// Tokens one after the other, a channel's state in L1.
class ChannelScanStep {
  public:
    explicit ChannelScanStep(const ChannelScan& scan) : scan_(scan) {}

    // Run by all threads of a team.
    void run(const StateBatch& batch) const {
        static thread_local Lines<float> state;
        grow(state, scan_.padded_size);
        share_states(batch, scan_.num_channels, [&](const StateWork& work, std::int64_t channel) {
            run(state.data(), work, channel);
        });
    }

  private:
    void run(float* state, const StateWork& work, std::int64_t channel) const {
        std::memset(state, 0, scan_.padded_size * sizeof(float));
        if (work.source != 0) std::memcpy(state, state_of(work.source, channel), scan_.state_size * sizeof(float));
        for (std::int64_t done = 0; done < work.num_tokens; done += LANES) {
            const std::int64_t first = work.first_token + done, count = std::min<std::int64_t>(LANES, work.num_tokens - done);
            Lane steps = {};
            for (std::int64_t i = 0; i < count; ++i) steps[i] = scan_.dt[(first + i) * scan_.num_channels + channel];
            const Lane lengths = softplus(steps + scan_.dt_bias[channel]);
            for (std::int64_t i = 0; i < count; ++i) add_token(state, first + i, channel, lengths[i]);
        }
        std::memcpy(state_of(work.target, channel), state, scan_.state_size * sizeof(float));
    }

    float* state_of(std::int64_t slot, std::int64_t channel) const {
        return scan_.pool + slot * scan_.slot_stride + channel * scan_.state_size;
    }

    // max(x, 0) + log(1 + y) of y = exp(-|x|), by the series of log(1 + y) = 2 atanh(y / (2 + y)).
    static Lane softplus(Lane x) {
        const Lane zero = {}, above = x > zero ? x : zero;
        const Lane y = exp_negative<LANES>(x > zero ? -x : x), z = y / (y + 2.0f), square = z * z;
        Lane series = square * (1.0f / 15) + 1.0f / 13;
        for (const float term : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) series = series * square + 1.0f / term;
        return above + 2.0f * z * series;
    }

    // S = exp(length a) S + length x b; the output is S c.
    void add_token(float* state, std::int64_t token, std::int64_t channel, float length) const {
        const std::int64_t size = scan_.padded_size, place = token * scan_.num_channels + channel;
        const Lane input = spread(scan_.x[place] * length);
        const float *const a = scan_.a + channel * size, *const b = scan_.b + token * size, *const c = scan_.c + token * size;
        Lane sums = {};
        for (std::int64_t n = 0; n < size; n += LANES) {
            const Lane decay = exp_negative<LANES>(load<Lane>(a + n) * length);
            const Lane next = load<Lane>(state + n) * decay + load<Lane>(b + n) * input;
            store(state + n, next);
            sums += next * load<Lane>(c + n);
        }
        float sum = 0;
        for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
        scan_.output[place] = sum;
    }

    const ChannelScan& scan_;
};

}  // namespace
