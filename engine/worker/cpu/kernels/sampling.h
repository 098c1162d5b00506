// Draws the next token of each row of logits: penalties, temperature, min-p, top-k, top-p, then one draw.
//
// A row is read a few times and never sorted. Top-k: the k-th best of the parts' best scores is a bound that
// few tokens reach. Top-p: the bound is searched by the mass above it, eight ways at a time, until few tokens
// are left to sort.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

extern "C" {

// Rows of logits and their parameters; every array has num_rows elements.
struct SamplingRows {
    const void* logits;         // [num_rows, vocab_size]
    const float* temperature;   // 0: the best token
    const float* top_p;         // 1: all
    const float* min_p;         // 0: all
    const std::int64_t* top_k;  // vocab_size: all
    const double* draws;        // in [0, 1)
    const float* repetition;    // 1: none
    const float* presence;      // 0: none
    const float* frequency;     // 0: none
    const std::int64_t* history;     // token ids: prompt, then output, at row * history_stride
    const std::int64_t* history_row;
    const std::int64_t* num_prompt;
    const std::int64_t* num_output;
    std::int64_t* tokens;       // out: the drawn token
    float* best;                // out: the best logit after penalties; NaN if any logit is
    std::int64_t stride, history_stride, num_rows, vocab_size, is_bf16;
};

}  // extern "C"

namespace {

constexpr int SAMPLE_LANES = lanes_for(32);
constexpr int PART = 64;          // tokens of which the best one is kept
constexpr int SUMMED = 512;       // tokens that are summed in fp32; sums of these are fp64
constexpr int NUM_BOUNDS = 7;     // bounds that are tried at a time
constexpr std::int64_t FEW = 1024;  // tokens that are sorted
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float MASKED = -std::numeric_limits<float>::infinity();

using Lane = Floats<SAMPLE_LANES>;

inline float sum_of(const Lane& v) {
    float sum = 0;
    for (int lane = 0; lane < SAMPLE_LANES; ++lane) sum += v[lane];
    return sum;
}

inline float max_of(const Lane& v) {
    float most = v[0];
    for (int lane = 1; lane < SAMPLE_LANES; ++lane) most = v[lane] > most ? v[lane] : most;
    return most;
}

// One thread's memory for a row.
struct SamplingScratch {
    Lines<float> scores;               // logits, then logits / temperature; padded with MASKED
    Lines<float> weights;              // exp(score - best), 0 below the bound
    Lines<float> left;                 // weights among which a bound is searched
    std::vector<float> bests;          // the best score of each part
    std::vector<float> sorted;
    std::vector<std::int64_t> kept;    // tokens, in their order
    std::vector<std::int32_t> counts;  // by token; all 0 between rows
};

class RowSampler {
  public:
    RowSampler(const SamplingRows& rows, SamplingScratch& scratch)
        : rows_(rows), scratch_(scratch), padded_((rows.vocab_size + SUMMED - 1) / SUMMED * SUMMED) {
        grow(scratch.scores, padded_);
        grow(scratch.weights, padded_);
        grow(scratch.left, padded_);
        scratch.bests.resize(padded_ / PART);
        scratch.counts.resize(rows.vocab_size);
    }

    void run(std::int64_t row) {
        row_ = row;
        if (rows_.is_bf16)
            read(static_cast<const Bf16*>(rows_.logits) + row * rows_.stride);
        else
            read(static_cast<const float*>(rows_.logits) + row * rows_.stride);
        penalize();
        const float temperature = rows_.temperature[row];
        const float best_logit = scale(1.0f);
        rows_.best[row] = best_logit;
        rows_.tokens[row] = 0;
        if (!std::isfinite(best_logit)) return;
        best_ = temperature > 0 ? scale(temperature) : best_logit;
        rows_.tokens[row] = temperature > 0 && std::isfinite(best_) ? draw() : first_best();
    }

  private:
    template <typename T>
    void read(const T* logits) {
        float* scores = scratch_.scores.data();
        for (std::int64_t token = 0; token < rows_.vocab_size; ++token) scores[token] = number(logits[token]);
        std::fill(scores + rows_.vocab_size, scores + padded_, MASKED);
    }

    static float number(float x) { return x; }
    static float number(Bf16 x) { return as_float(x); }

    // Only tokens of the history change. A count holds how often a token is in the output, and whether it is
    // in the prompt.
    void penalize() {
        const float repetition = rows_.repetition[row_], presence = rows_.presence[row_],
                    frequency = rows_.frequency[row_];
        if (repetition == 1 && presence == 0 && frequency == 0) return;
        constexpr std::int32_t IN_PROMPT = 1 << 30;
        const std::int64_t* prompt = rows_.history + rows_.history_row[row_] * rows_.history_stride;
        const std::int64_t* output = prompt + rows_.num_prompt[row_];
        const std::int64_t* end = output + rows_.num_output[row_];
        std::int32_t* counts = scratch_.counts.data();
        for (const std::int64_t* token = prompt; token < output; ++token)
            if (is_known(*token)) counts[*token] = IN_PROMPT;
        for (const std::int64_t* token = output; token < end; ++token)
            if (is_known(*token)) ++counts[*token];
        for (const std::int64_t* token = prompt; token < end; ++token) {
            if (!is_known(*token) || counts[*token] == 0) continue;
            const std::int32_t in_output = counts[*token] & (IN_PROMPT - 1);
            counts[*token] = 0;
            float& score = scratch_.scores[*token];
            score = score > 0 ? score / repetition : score * repetition;
            score -= frequency * static_cast<float>(in_output);
            score -= in_output > 0 ? presence : 0;
        }
    }

    bool is_known(std::int64_t token) const { return token >= 0 && token < rows_.vocab_size; }

    // Divides all scores, keeps the best of each part, and returns the best of all; NaN if any is NaN.
    float scale(float by) {
        float* scores = scratch_.scores.data();
        Lane strange = {};
        float best = MASKED;
        for (std::int64_t part = 0; part * PART < padded_; ++part) {
            Lane most = Lane{} + MASKED;
            for (std::int64_t i = part * PART; i < (part + 1) * PART; i += SAMPLE_LANES) {
                Lane x = load<Lane>(scores + i);
                if (by != 1) store(scores + i, x = x / by);
                most = x > most ? x : most;
                strange = x == x ? strange : Lane{} + 1.0f;
            }
            scratch_.bests[part] = max_of(most);
            best = std::max(best, scratch_.bests[part]);
        }
        return sum_of(strange) > 0 ? std::numeric_limits<float>::quiet_NaN() : best;
    }

    std::int64_t first_best() const {
        const auto part = std::find(scratch_.bests.begin(), scratch_.bests.end(), best_) - scratch_.bests.begin();
        const float* scores = scratch_.scores.data() + part * PART;
        return part * PART + (std::find(scores, scores + PART, best_) - scores);
    }

    std::int64_t draw() {
        const float min_p = rows_.min_p[row_], top_p = rows_.top_p[row_];
        float bound = min_p > 0 ? std::max(LOWEST, best_ + std::log(min_p)) : LOWEST;
        if (rows_.top_k[row_] < rows_.vocab_size) {
            bound = std::max(bound, best_of(rows_.top_k[row_]));
            keep(bound);
            if (top_p < 1) keep(bound_of_share(top_p));
            return draw_kept();
        }
        weigh(bound);
        return draw_weighted(top_p < 1 ? weight_of_share(top_p) : 0);
    }

    // The k-th best score.
    float best_of(std::int64_t k) {
        std::vector<float>& sorted = scratch_.sorted;
        const auto order = std::greater<float>();
        if (k > static_cast<std::int64_t>(scratch_.bests.size())) {
            sorted.assign(scratch_.scores.begin(), scratch_.scores.begin() + rows_.vocab_size);
        } else {
            sorted = scratch_.bests;
            std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), order);
            keep(std::max(LOWEST, sorted[k - 1]));
            sorted.clear();
            for (const std::int64_t token : scratch_.kept) sorted.push_back(scratch_.scores[token]);
            if (k > static_cast<std::int64_t>(sorted.size())) return LOWEST;
        }
        std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), order);
        return std::max(LOWEST, sorted[k - 1]);
    }

    // Keeps the tokens whose score is not below the bound.
    void keep(float bound) {
        scratch_.kept.clear();
        for (std::size_t part = 0; part < scratch_.bests.size(); ++part) {
            if (scratch_.bests[part] < bound) continue;
            const std::int64_t first = part * PART;
            for (std::int64_t token = first; token < first + PART; ++token)
                if (scratch_.scores[token] >= bound) scratch_.kept.push_back(token);
        }
    }

    // The lowest score of the best kept tokens that reach this share of the mass of all kept ones.
    float bound_of_share(float share) {
        std::vector<float>& sorted = scratch_.sorted;
        sorted.clear();
        for (const std::int64_t token : scratch_.kept) sorted.push_back(scratch_.scores[token]);
        std::sort(sorted.begin(), sorted.end(), std::greater<float>());
        const std::size_t most = std::min<std::size_t>(sorted.size(), rows_.top_k[row_]);
        sorted.resize(most);  // not all that equal the last of them
        double all = 0, before = 0;
        for (const float score : sorted) all += std::exp(score - best_);
        float bound = best_;
        for (const float score : sorted) {
            if (before >= share * all) break;
            bound = score;
            before += std::exp(score - best_);
        }
        return bound;
    }

    std::int64_t draw_kept() {
        double all = 0, until = 0;
        for (const std::int64_t token : scratch_.kept) all += std::exp(scratch_.scores[token] - best_);
        const double target = rows_.draws[row_] * all;
        for (const std::int64_t token : scratch_.kept) {
            until += std::exp(scratch_.scores[token] - best_);
            if (until > target) return token;
        }
        return first_best();
    }

    void weigh(float bound) {
        const float* scores = scratch_.scores.data();
        float* weights = scratch_.weights.data();
        for (std::int64_t i = 0; i < padded_; i += SAMPLE_LANES) {
            const Lane x = load<Lane>(scores + i);
            const Lane weight = exp_negative<SAMPLE_LANES>(x - best_);
            store(weights + i, x >= bound ? weight : Lane{});
        }
    }

    // The sum of the weights from `first` on, of SUMMED tokens, that are not below the bound.
    float sum_from(std::int64_t first, float bound) const {
        const float* weights = scratch_.weights.data() + first;
        Lane sum = {};
        for (int i = 0; i < SUMMED; i += SAMPLE_LANES) {
            const Lane weight = load<Lane>(weights + i);
            sum += weight >= bound ? weight : Lane{};
        }
        return sum_of(sum);
    }

    double mass(float bound) const {
        double sum = 0;
        for (std::int64_t first = 0; first < padded_; first += SUMMED) sum += sum_from(first, bound);
        return sum;
    }

    // The lowest weight of the heaviest tokens that reach this share of all weights.
    float weight_of_share(float share) {
        Lines<float>& left = scratch_.left;
        std::copy_n(scratch_.weights.begin(), padded_, left.begin());
        std::int64_t num_left = padded_;
        double above = 0;  // mass of the weights from `high` on; below `wanted`
        const double wanted = share * mass(0);
        std::uint32_t low = 1, high = bits_as<std::uint32_t>(1.0f) + 1;
        float bounds[NUM_BOUNDS] = {0x1p-21f, 0x1p-13f, 0x1p-8f, 0x1p-5f, 0x1p-3f, 0x1p-2f, 0x1p-1f};
        while (num_left > FEW && high - low > NUM_BOUNDS + 1) {
            narrow(bounds, num_left, wanted, low, high, above);
            num_left = leave(num_left, bits_as<float>(low), bits_as<float>(high));
            // The bits of weights, as integers, are in the order of the weights.
            const std::uint32_t step = (high - low) / (NUM_BOUNDS + 1);
            for (int i = 0; i < NUM_BOUNDS; ++i) bounds[i] = bits_as<float>(low + (i + 1) * step);
        }
        std::sort(left.begin(), left.begin() + num_left, std::greater<float>());
        float bound = bits_as<float>(high);
        for (std::int64_t i = 0; i < num_left && left[i] > 0 && above < wanted; ++i) above += bound = left[i];
        return bound;
    }

    // Finds the two neighbours of `bounds` between which the mass reaches `wanted`.
    void narrow(const float (&bounds)[NUM_BOUNDS], std::int64_t num_left, double wanted, std::uint32_t& low,
                std::uint32_t& high, double& above) const {
        float sums[NUM_BOUNDS];
        masses(bounds, num_left, sums);
        const double before = above;
        for (int i = NUM_BOUNDS - 1; i >= 0; --i) {
            if (before + sums[i] >= wanted) {
                low = bits_as<std::uint32_t>(bounds[i]);
                return;
            }
            high = bits_as<std::uint32_t>(bounds[i]);
            above = before + sums[i];
        }
    }

    // The masses of what is left from each bound on, in one pass.
    void masses(const float (&bounds)[NUM_BOUNDS], std::int64_t num_left, float (&sums)[NUM_BOUNDS]) const {
        const float* left = scratch_.left.data();
        Lane all[NUM_BOUNDS] = {};
        for (std::int64_t first = 0; first < num_left; first += SUMMED) {
            Lane parts[NUM_BOUNDS] = {};
            for (int i = 0; i < SUMMED; i += SAMPLE_LANES) {
                const Lane weight = load<Lane>(left + first + i);
                for (int bound = 0; bound < NUM_BOUNDS; ++bound)
                    parts[bound] += weight >= bounds[bound] ? weight : Lane{};
            }
            for (int bound = 0; bound < NUM_BOUNDS; ++bound) all[bound] += parts[bound];
        }
        for (int bound = 0; bound < NUM_BOUNDS; ++bound) sums[bound] = sum_of(all[bound]);
    }

    // Leaves the weights of [from, to), followed by zeros up to a multiple of SUMMED; returns how many.
    std::int64_t leave(std::int64_t num_left, float from, float to) {
        float* left = scratch_.left.data();
        std::int64_t count = 0, i = 0;
#if defined(__AVX512F__)
        for (; i + 16 <= num_left; i += 16) {
            const __m512 weight = _mm512_loadu_ps(left + i);
            const __mmask16 stays = _mm512_cmp_ps_mask(weight, _mm512_set1_ps(from), _CMP_GE_OQ) &
                                    _mm512_cmp_ps_mask(weight, _mm512_set1_ps(to), _CMP_LT_OQ);
            _mm512_mask_compressstoreu_ps(left + count, stays, weight);
            count += __builtin_popcount(stays);
        }
#endif
        for (; i < num_left; ++i) {
            const float weight = left[i];
            left[count] = weight;
            count += weight >= from && weight < to;
        }
        std::fill(left + count, left + (count + SUMMED - 1) / SUMMED * SUMMED, 0.0f);
        return count;
    }

    std::int64_t draw_weighted(float bound) {
        const float least = std::max(bound, std::numeric_limits<float>::min());
        const double target = rows_.draws[row_] * mass(least);
        double until = 0;
        for (std::int64_t first = 0; first < padded_; first += SUMMED) {
            const float part = sum_from(first, least);
            if (until + part <= target) {
                until += part;
                continue;
            }
            std::int64_t last = -1;
            for (std::int64_t token = first; token < first + SUMMED; ++token) {
                const float weight = scratch_.weights[token];
                if (weight < least) continue;
                last = token;
                until += weight;
                if (until > target) return token;
            }
            return last;  // a sum in another order is a little larger
        }
        return first_best();
    }

    const SamplingRows& rows_;
    SamplingScratch& scratch_;
    const std::int64_t padded_;
    std::int64_t row_ = 0;
    float best_ = 0;
};

}  // namespace
