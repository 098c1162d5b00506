// The C interface of the CPU kernels: paged attention that reads KV blocks in place, GEMMs, and whole decoder
// steps. Works on raw addresses; knows neither torch nor requests. Compiled for one CONTINUUM_HEAD_DIM, a
// multiple of 8, and for one dtype: bf16 with CONTINUUM_BF16, else fp32.

#include "decode.h"
#include "experts.h"
#include "latent.h"
#include "pool.h"
#include "prefill.h"
#include "step.h"

#if defined(CONTINUUM_BF16)
using Element = Bf16;
#else
using Element = float;
#endif

// Attention with one query per sequence: writes each sequence's new key and value to the pool, and its
// attention to the output.
extern "C" void continuum_attend_decode(
    const Pool* pool, const Sequences* decodes, std::int64_t slot, const Heads* heads, std::int64_t num_threads) {
    DecodeAttention<Element, CONTINUUM_HEAD_DIM>(*pool, *decodes, slot, *heads).run(static_cast<int>(num_threads));
}

#if defined(CONTINUUM_BF16) && defined(__AVX512BF16__)

// Packs rows [num_outputs, 2 * num_words] of bf16 as the words of a bf16 Weight.
extern "C" void continuum_interleave(
    const void* rows, std::int64_t num_outputs, std::int64_t num_words, void* to, std::int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (std::int64_t output = 0; output < num_outputs; output += HALF_UNIT)
        interleave(static_cast<const std::uint32_t*>(rows) + output * num_words, num_outputs - output, num_words,
                   static_cast<std::uint32_t*>(to) + output * num_words);
}

// GEMM: to [num_rows, num_outputs] = x [num_rows, inputs] times a weight; x is padded to a multiple of
// TILE_ROWS rows.
extern "C" void continuum_multiply(
    const Weight* weight, const void* x, std::int64_t num_rows, void* to, std::int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        begin_amx();
        multiply_rows(*weight, plain_rows(*weight, static_cast<const Bf16*>(x)), num_rows,
                      store_rows(*weight, static_cast<Bf16*>(to)));
        end_amx();
    }
}

// Mixture of experts: to [num_rows, hidden_size] = the sums of the experts `chosen` [num_rows, per_token] of
// rows x, times `weights` [num_rows, per_token].
extern "C" void continuum_mix_experts(
    const Experts* experts, const void* x, std::int64_t num_rows, const std::int64_t* chosen, const float* weights, void* to,
    std::int64_t num_threads) {
    static thread_local ExpertBuffers kept;
    ExpertBuffers& buffers = kept;
    const ExpertStep step(*experts, buffers);
    const std::int64_t hidden = 2 * experts->gate_up.num_words;
    step.resize(num_rows);
#pragma omp parallel num_threads(num_threads)
    {
        begin_amx();
        step.mix(plain_rows(experts->gate_up, static_cast<const Bf16*>(x)), num_rows, chosen, weights,
                 [&](std::int64_t row, std::int64_t number, const HalfRow& sum) {
                     store_half(static_cast<Bf16*>(to) + row * hidden + number, sum);
                 });
        end_amx();
    }
}

#endif

#if defined(CONTINUUM_BF16) && defined(__AVX512BF16__) && CONTINUUM_HEAD_DIM % 32 == 0

// Attention with several new tokens per sequence (prefill). Not compiled without AVX512_BF16.
extern "C" void continuum_attend_prefill(
    const Pool* pool, const Sequences* prefills, std::int64_t slot, const Heads* heads, std::int64_t num_threads) {
    PrefillAttention<CONTINUUM_HEAD_DIM>(*pool, *prefills, slot, *heads).run(static_cast<int>(num_threads));
}

// Attention over latents, of any number of new tokens per sequence: writes each new latent to the pool, which
// is key and value at once.
extern "C" void continuum_attend_latent(
    const Pool* pool, const Sequences* sequences, std::int64_t slot, const Heads* heads, std::int64_t num_threads) {
    LatentAttention<CONTINUUM_HEAD_DIM>(*pool, *sequences, slot, *heads).run(static_cast<int>(num_threads));
}

// A whole decoder step, from token ids to logits. The sequences are those of each KV cache group, which differ
// only in their block tables.
extern "C" void continuum_run_step(
    const Model* model, const Pool* pool, const Sequences* decodes, const Sequences* prefills, const Step* step,
    const Cores* cores, std::int64_t num_threads) {
    DecoderStep<CONTINUUM_HEAD_DIM>(*model, *pool, decodes, prefills, *step).run(*cores, static_cast<int>(num_threads));
}

#endif
