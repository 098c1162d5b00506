// The arguments of the kernels: a KV pool, the sequences of a step, the heads of a layer. Raw addresses.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

extern "C" {

// The KV pool [num_blocks, num_slots, 2, block_size, num_kv_heads, head_dim]; strides in elements. Of latents
// there is one vector, and the value_offset is 0.
struct Pool {
    void* data;
    std::int64_t block_stride, slot_stride, value_offset, token_stride;
    std::int64_t block_size, num_kv_heads;
};

// Some of a step's sequences. Their tokens are contiguous, as many as each has queries.
struct Sequences {
    std::int64_t num_seqs;
    std::int64_t max_blocks;
    const std::int64_t* query_lens;    // [num_seqs] new tokens of each, the last of its seq_lens
    const std::int64_t* seq_lens;      // [num_seqs]
    const std::int64_t* block_tables;  // [num_seqs, max_blocks]; what no query sees may be any block
};

// What a token sees before it: a window, itself included, its chunk, or, if both are 0, everything.
struct Reach {
    std::int64_t window, chunk;
};

// One layer's query, key, value and output: for each token a row [heads, head_dim], `stride` elements apart.
// soft_cap 0: none.
struct Heads {
    const void* query;
    const void* key;
    const void* value;
    void* output;
    std::int64_t query_stride, key_stride, value_stride, output_stride;
    std::int64_t num_heads;
    Reach reach;
    double scale, soft_cap;
    const float* sinks;  // [num_heads], the score of one more key without a value; or null
    std::int64_t value_size;  // of latents: their first numbers, which are the values and the output's heads
};

}  // extern "C"

namespace {

// The first token that the one at a position sees.
inline std::int64_t first_seen(std::int64_t position, Reach reach) {
    if (reach.window > 0) return position < reach.window ? 0 : position - reach.window + 1;
    return reach.chunk > 0 ? position - position % reach.chunk : 0;
}

inline bool operator==(Reach left, Reach right) { return left.window == right.window && left.chunk == right.chunk; }

// Prefetches a token's row of one head.
template <typename T, int HEAD_DIM>
inline void prefetch_row(const T* row) {
    for (std::size_t byte = 0; byte < HEAD_DIM * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, FETCH_FOR_LATER);
}

// One layer of a pool, with the block tables of some sequences.
template <typename T, int HEAD_DIM>
class Pages {
  public:
    Pages(const Pool& pool, const Sequences& sequences, std::int64_t slot)
        : pool_(pool),
          sequences_(sequences),
          keys(static_cast<T*>(pool.data) + slot * pool.slot_stride),
          values(keys + pool.value_offset) {}

    // The offset of a token's row in `keys` and in `values`.
    std::int64_t offset_of(std::int64_t seq, std::int64_t position) const {
        const std::int64_t* table = sequences_.block_tables + seq * sequences_.max_blocks;
        return table[position / pool_.block_size] * pool_.block_stride +
               position % pool_.block_size * pool_.token_stride;
    }

    // Writes a new token's key and value to its slot.
    void write(std::int64_t seq, std::int64_t position, std::int64_t token, const Heads& heads) const {
        const std::int64_t place = offset_of(seq, position);
        const std::size_t bytes = pool_.num_kv_heads * HEAD_DIM * sizeof(T);
        std::memcpy(keys + place, static_cast<const T*>(heads.key) + token * heads.key_stride, bytes);
        std::memcpy(values + place, static_cast<const T*>(heads.value) + token * heads.value_stride, bytes);
    }

  private:
    const Pool& pool_;
    const Sequences& sequences_;

  public:
    T* const keys;
    T* const values;
};

}  // namespace
