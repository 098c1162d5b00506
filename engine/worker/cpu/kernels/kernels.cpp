// Attention over the pages of a KV pool, on a CPU: nothing is gathered or copied; and a decoder's steps. A plain C
// interface over bare addresses; knows neither torch nor requests. Compiled for one CONTINUUM_HEAD_DIM, a multiple of 8,
// and for one type of numbers: bf16 with CONTINUUM_BF16, else fp32.

#include "decode.h"
#include "pool.h"
#include "prefill.h"
#include "step.h"

#if defined(CONTINUUM_BF16)
using Element = Bf16;
#else
using Element = float;
#endif

// Keeps each sequence's new key and value, and writes its attention to the output.
extern "C" void continuum_attend_decode(
    const Pool* pool, const Sequences* decodes, std::int64_t layer, const Heads* heads, std::int64_t num_threads) {
    Decoder<Element, CONTINUUM_HEAD_DIM>(*pool, *decodes, layer, *heads).run(static_cast<int>(num_threads));
}

#if defined(CONTINUUM_BF16) && defined(__AVX512BF16__)

// to: the words of a Weight in 16 bits, out of rows [num_outputs, 2 * num_words] of bf16
extern "C" void continuum_interleave(
    const void* rows, std::int64_t num_outputs, std::int64_t num_words, void* to, std::int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (std::int64_t output = 0; output < num_outputs; output += HALF_UNIT)
        interleave(static_cast<const std::uint32_t*>(rows) + output * num_words, num_outputs - output, num_words,
                   static_cast<std::uint32_t*>(to) + output * num_words);
}

// to [num_rows, num_outputs] = x [num_rows, inputs] times a weight; x has room for whole tiles of rows
extern "C" void continuum_multiply(
    const Weight* weight, const void* x, std::int64_t num_rows, void* to, std::int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        begin_tiles();
        multiply_rows(*weight, plain_rows(*weight, static_cast<const Bf16*>(x)), num_rows,
                      keep_rows(*weight, static_cast<Bf16*>(to)));
        end_tiles();
    }
}

#endif

#if defined(CONTINUUM_BF16) && defined(__AVX512BF16__) && CONTINUUM_HEAD_DIM % 32 == 0

// The same for sequences that compute several tokens. Missing where the CPU cannot multiply pairs of bf16.
extern "C" void continuum_attend_prefill(
    const Pool* pool, const Sequences* prompts, std::int64_t layer, const Heads* heads, std::int64_t num_threads) {
    Prompter<CONTINUUM_HEAD_DIM>(*pool, *prompts, layer, *heads).run(static_cast<int>(num_threads));
}

// A step, from its tokens' vectors to the logits.
extern "C" void continuum_run_step(
    const Model* model, const Pool* pool, const Sequences* decodes, const Sequences* prompts, const Step* step,
    const Cores* cores, std::int64_t num_threads) {
    OneCall<CONTINUUM_HEAD_DIM>(*model, *pool, *decodes, *prompts, *step).run(*cores, static_cast<int>(num_threads));
}

#endif
