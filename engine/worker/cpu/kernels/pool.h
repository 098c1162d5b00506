// What a caller hands over: a KV pool, the sequences of a step, the heads of a layer. Bare addresses.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

extern "C" {

// The pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; strides in numbers.
struct Pool {
    void* data;
    std::int64_t block_stride, layer_stride, value_offset, token_stride;
    std::int64_t block_size, num_kv_heads;
};

// Some of a step's sequences. Their tokens stand one after another, as many as each has queries.
struct Sequences {
    std::int64_t num_seqs;
    std::int64_t max_blocks;
    const std::int64_t* query_lens;    // [num_seqs] new tokens of each, the last of its seq_lens
    const std::int64_t* seq_lens;      // [num_seqs]
    const std::int64_t* block_tables;  // [num_seqs, max_blocks]
};

// What a layer brings: for each token a row [heads, head_dim], `stride` numbers apart. window 0: all is seen.
struct Heads {
    const void* query;
    const void* key;
    const void* value;
    void* output;
    std::int64_t query_stride, key_stride, value_stride, output_stride;
    std::int64_t num_heads, window;
    double scale;
};

}  // extern "C"

namespace {

// A head's numbers of a token.
template <typename T, int HEAD_DIM>
inline void prefetch_row(const T* row) {
    for (std::size_t byte = 0; byte < HEAD_DIM * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, FETCH_FOR_LATER);
}

// One layer of a pool, as seen by some sequences.
template <typename T, int HEAD_DIM>
class Pages {
  public:
    Pages(const Pool& pool, const Sequences& sequences, std::int64_t layer)
        : pool_(pool),
          sequences_(sequences),
          keys(static_cast<T*>(pool.data) + layer * pool.layer_stride),
          values(keys + pool.value_offset) {}

    // From `keys` or `values` to a token's row.
    std::int64_t offset_of(std::int64_t seq, std::int64_t position) const {
        const std::int64_t* table = sequences_.block_tables + seq * sequences_.max_blocks;
        return table[position / pool_.block_size] * pool_.block_stride +
               position % pool_.block_size * pool_.token_stride;
    }

    // A new token's own key and value go to their place.
    void keep(std::int64_t seq, std::int64_t position, std::int64_t token, const Heads& heads) const {
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
