// States of sequences: where they lie, how their work is shared among threads, and rows in fp32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <omp.h>

#include "vectors.h"

extern "C" {

// The sequences of a step. Their tokens are contiguous, sequence by sequence. Each begins with the state in its
// source slot, or with zeros if that is 0, and leaves its state in its target slot.
struct StateBatch {
    std::int64_t num_seqs;
    const std::int64_t* query_lens;  // [num_seqs] new tokens of each
    const std::int64_t* sources;     // [num_seqs]
    const std::int64_t* targets;     // [num_seqs]
};

}  // extern "C"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
using Lane = Floats<LANES>;
using LaneWords = Vector<LANES>::Words;
typedef std::uint16_t LaneHalves __attribute__((vector_size(LANES * 2)));

constexpr std::int64_t BLOCK_TOKENS = 8;  // tokens whose rows are converted at a time: they stay in L1

inline std::int64_t padded_to_lanes(std::int64_t count) { return (count + LANES - 1) / LANES * LANES; }

inline Lane spread(float x) { return Lane{} + x; }

// A sequence's part of a step.
struct StateWork {
    std::int64_t source, target;  // slots; source 0: zeros
    std::int64_t first_token, num_tokens;
};

// Calls work(StateWork, part) for all parts of the state of all sequences: each thread of a team has neighboring
// ones, of about the same cost.
template <typename Work>
void share_states(const StateBatch& batch, std::int64_t num_parts, Work work) {
    constexpr std::int64_t COST_OF_STATE = 4;  // of reading it from memory and writing it back, in tokens
    std::int64_t total = 0;
    for (std::int64_t seq = 0; seq < batch.num_seqs; ++seq) total += (COST_OF_STATE + batch.query_lens[seq]) * num_parts;
    const std::int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    const std::int64_t begin = total * thread / num_threads, end = total * (thread + 1) / num_threads;
    std::int64_t before = 0, token = 0;  // cost and tokens of the sequences before
    for (std::int64_t seq = 0; seq < batch.num_seqs; ++seq) {
        const std::int64_t count = batch.query_lens[seq], cost = COST_OF_STATE + count;
        const auto first_from = [&](std::int64_t bound) {
            return std::min(num_parts, std::max<std::int64_t>(0, bound - before + cost - 1) / cost);
        };
        for (std::int64_t part = first_from(begin), last = first_from(end); part < last; ++part)
            work(StateWork{batch.sources[seq], batch.targets[seq], token, count}, part);
        before += cost * num_parts;
        token += count;
    }
}

inline void to_floats(const float* from, std::int64_t count, float* to) { std::copy(from, from + count, to); }

inline void to_floats(const Bf16* from, std::int64_t count, float* to) {
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const auto bits = __builtin_convertvector(load<LaneHalves>(from + i), LaneWords) << 16;
        store(to + i, bits_as<Lane>(bits));
    }
    for (; i < count; ++i) to[i] = as_float(from[i]);
}

inline void from_floats(const float* from, std::int64_t count, float* to) { std::copy(from, from + count, to); }

inline void from_floats(const float* from, std::int64_t count, Bf16* to) {
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Lane x = load<Lane>(from + i);
        const auto bits = bits_as<LaneWords>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        store(to + i, __builtin_convertvector(x != x ? LaneWords{} + 0x7fc0 : rounded, LaneHalves));
    }
    for (; i < count; ++i) to[i] = round_to_bf16(from[i]);
}

}  // namespace
