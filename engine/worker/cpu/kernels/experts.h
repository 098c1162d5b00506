// Mixtures of experts: rows are sorted by expert, so that the weights of each expert are read once for all of
// its rows. Results are rounded to bf16 where torch rounds them; a row's result depends neither on the other
// rows nor on the threads.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <omp.h>

#include "elementwise.h"
#include "rows.h"

#if defined(__AVX512BF16__)

extern "C" {

// The experts of a layer, one after the other in the same weight. A unit of gate_up is HALF_UNIT gates and
// the HALF_UNIT ups that they are multiplied with.
struct Experts {
    Weight gate_up;  // [num_experts * 2 * expert_size, hidden_size]
    Weight down;     // [num_experts * hidden_size, expert_size]
    std::int64_t first, num_experts;  // those of this rank
    std::int64_t per_token;
    std::int64_t rounded;  // whether outputs are rounded once weighted, as torch does where weights are bf16
    double alpha, limit;   // of a clamped gate; alpha 0: silu(gate) * up, or with GELU
    std::int64_t by_gelu;
};

// How experts are chosen; see engine/worker/models/routing.py.
struct Router {
    Weight weight;            // [num_experts, hidden_size] in bf16
    const float* correction;  // [num_experts], of a router by sigmoid; null: by softmax
    std::int64_t per_token, normalized, rounded, num_groups, num_top_groups;
    double scale;
};

}  // extern "C"

namespace {

// The rows of one expert, from `begin` on among the sorted rows.
struct ExpertRows {
    std::int64_t expert, begin, count, cost;  // cost: of a unit, relative to others
};

// What the threads of a step share; kept from step to step.
struct ExpertBuffers {
    Lines<float> logits;         // [rows, experts, padded to HALF_UNIT]
    Lines<std::int64_t> chosen;  // [rows, per_token]
    Lines<float> weights;        // [rows, per_token]
    // The rows sorted by expert, those of each padded to a multiple of TILE_ROWS.
    Lines<std::int64_t> places;  // [rows, per_token] where among them; -1: another rank has the expert
    std::vector<ExpertRows> groups;
    std::int64_t total_cost = 0;
    Lines<Bf16> gathered, inner, outputs;
    Lines<Bf16> mixed;  // [rows, hidden_size]
};

// Chooses the experts of rows. Functions are run by all threads of a team and end with a barrier.
class RouterStep {
  public:
    RouterStep(const Router& router, ExpertBuffers& buffers) : router_(router), buffers_(buffers) {}

    void resize(std::int64_t num_rows) const {
        grow(buffers_.logits, num_rows * padded_experts());
        grow(buffers_.chosen, num_rows * router_.per_token);
        grow(buffers_.weights, num_rows * router_.per_token);
    }

    void choose(const Rows& x, std::int64_t num_rows) const {
        multiply_rows(router_.weight, x, num_rows, [&](std::int64_t row, std::int64_t output, const HalfRow& result) {
            const HalfRow logits = router_.correction == nullptr ? rounded(result) : result;
            float* const to = buffers_.logits.data() + row * padded_experts() + output;
            _mm512_storeu_ps(to, logits.low);
            _mm512_storeu_ps(to + 16, logits.high);
        });
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < num_rows; ++row) {
            float* const logits = buffers_.logits.data() + row * padded_experts();
            choose(logits, buffers_.chosen.data() + row * router_.per_token, buffers_.weights.data() + row * router_.per_token);
        }
    }

  private:
    std::int64_t num_experts() const { return router_.weight.num_outputs; }

    std::int64_t padded_experts() const { return (num_experts() + HALF_UNIT - 1) / HALF_UNIT * HALF_UNIT; }

    // Overwrites the logits.
    void choose(float* logits, std::int64_t* chosen, float* weights) const {
        static thread_local std::vector<float> eligible;
        eligible.assign(logits, logits + num_experts());
        if (router_.correction == nullptr)
            soften(logits);
        else
            correct(logits, eligible);
        float total = 0;
        for (std::int64_t i = 0; i < router_.per_token; ++i) {
            chosen[i] = take_best(eligible);
            weights[i] = logits[chosen[i]];
            total += weights[i];
        }
        const float divisor = !router_.normalized ? 1.0f : router_.correction == nullptr ? total : total + 1e-20f;
        for (std::int64_t i = 0; i < router_.per_token; ++i) {
            weights[i] = weights[i] / divisor * static_cast<float>(router_.scale);
            if (router_.rounded) weights[i] = as_float(round_to_bf16(weights[i]));
        }
    }

    // logits -> their softmax
    void soften(float* logits) const {
        float highest = logits[0], total = 0;
        for (std::int64_t i = 1; i < num_experts(); ++i) highest = std::max(highest, logits[i]);
        for (std::int64_t i = 0; i < num_experts(); ++i) total += logits[i] = std::exp(logits[i] - highest);
        for (std::int64_t i = 0; i < num_experts(); ++i) logits[i] /= total;
    }

    // logits -> scores, and those that are eligible: corrected, of the best groups
    void correct(float* logits, std::vector<float>& eligible) const {
        for (std::int64_t i = 0; i < num_experts(); ++i) {
            logits[i] = 1.0f / (1.0f + std::exp(-logits[i]));
            eligible[i] = logits[i] + router_.correction[i];
        }
        if (router_.num_groups > 1) keep_best_groups(eligible);
    }

    // A group is scored by its two best experts.
    void keep_best_groups(std::vector<float>& eligible) const {
        static thread_local std::vector<float> scores;
        static thread_local std::vector<bool> is_kept;
        const std::int64_t size = num_experts() / router_.num_groups;
        scores.assign(router_.num_groups, 0);
        is_kept.assign(router_.num_groups, false);
        for (std::int64_t group = 0; group < router_.num_groups; ++group) {
            float best = OUT, second = OUT;
            for (std::int64_t i = group * size; i < (group + 1) * size; ++i) {
                second = std::max(second, std::min(best, eligible[i]));
                best = std::max(best, eligible[i]);
            }
            scores[group] = best + second;
        }
        for (std::int64_t i = 0; i < router_.num_top_groups; ++i) is_kept[take_best(scores)] = true;
        for (std::int64_t i = 0; i < num_experts(); ++i)
            if (!is_kept[i / size]) eligible[i] = OUT;
    }

    // The number of the highest score, of equal ones the first, which cannot be taken again.
    static std::int64_t take_best(std::vector<float>& scores) {
        const std::int64_t best = std::max_element(scores.begin(), scores.end()) - scores.begin();
        scores[best] = OUT;
        return best;
    }

    static constexpr float OUT = -std::numeric_limits<float>::infinity();

    const Router& router_;
    ExpertBuffers& buffers_;
};

// Computes the experts of rows. Functions are run by all threads of a team and end with a barrier.
class ExpertStep {
  public:
    ExpertStep(const Experts& experts, ExpertBuffers& buffers) : experts_(experts), buffers_(buffers) {}

    void resize(std::int64_t num_rows) const {
        const std::int64_t num_chosen = num_rows * experts_.per_token;
        const std::int64_t num_padded =
            (num_chosen + std::min(num_chosen, experts_.num_experts) * (TILE_ROWS - 1) + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        grow(buffers_.places, num_chosen);
        grow(buffers_.gathered, num_padded * hidden_size());
        grow(buffers_.inner, num_padded * expert_size());
        grow(buffers_.outputs, num_padded * hidden_size());
    }

    // Computes the experts `chosen` [num_rows, per_token] of the rows of x, and calls finish(row, i, the
    // HALF_UNIT numbers from i on) with the sums of their outputs times `weights` [num_rows, per_token].
    template <typename Finish>
    void mix(const Rows& x, std::int64_t num_rows, const std::int64_t* chosen, const float* weights, Finish finish) const {
#pragma omp single
        sort(num_rows, chosen);
        gather(x, num_rows);
        compute_inner();
        compute_outputs();
        add_up(num_rows, weights, finish);
    }

  private:
    // The cost of a unit grows with its rows once its words are read sooner than multiplied.
    static constexpr std::int64_t ROWS_WHILE_READING = 8;

    std::int64_t hidden_size() const { return 2 * experts_.gate_up.num_words; }

    std::int64_t expert_size() const { return 2 * experts_.down.num_words; }

    void sort(std::int64_t num_rows, const std::int64_t* chosen) const {
        static thread_local std::vector<std::int64_t> next;
        next.assign(experts_.num_experts, 0);
        const std::int64_t num_chosen = num_rows * experts_.per_token;
        for (std::int64_t i = 0; i < num_chosen; ++i)
            if (is_here(chosen[i])) ++next[chosen[i] - experts_.first];
        buffers_.groups.clear();
        buffers_.total_cost = 0;
        std::int64_t begin = 0;
        for (std::int64_t expert = 0; expert < experts_.num_experts; ++expert) {
            const std::int64_t count = next[expert], cost = std::max(count, ROWS_WHILE_READING);
            next[expert] = begin;
            if (count == 0) continue;
            buffers_.groups.push_back({expert, begin, count, cost});
            buffers_.total_cost += cost;
            begin += (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        }
        for (std::int64_t i = 0; i < num_chosen; ++i)
            buffers_.places[i] = is_here(chosen[i]) ? next[chosen[i] - experts_.first]++ : -1;
    }

    bool is_here(std::int64_t expert) const {
        return expert >= experts_.first && expert < experts_.first + experts_.num_experts;
    }

    void gather(const Rows& x, std::int64_t num_rows) const {
        const Layout to = gathered().layout;
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < num_rows * experts_.per_token; ++i) {
            const std::int64_t place = buffers_.places[i], row = i / experts_.per_token;
            if (place < 0) continue;
            for (std::int64_t number = 0; number < hidden_size(); number += HALF_UNIT)
                std::memcpy(buffers_.gathered.data() + to.of(place, number), x.chunk(row, number / 2), HALF_UNIT * sizeof(Bf16));
        }
    }

    Rows gathered() const { return {buffers_.gathered.data(), Layout::tiled(hidden_size())}; }

    Rows inner() const { return {buffers_.inner.data(), Layout::tiled(expert_size())}; }

    // inner = silu(gate) * up, or with GELU, or (up + 1) * gate * sigmoid(alpha * gate), clamped
    void compute_inner() const {
        const Layout layout = inner().layout;
        share_units(expert_size() / HALF_UNIT, [&](const ExpertRows& group, std::int64_t unit, std::int64_t own_unit) {
            multiply(experts_.gate_up, unit, gathered(), group, [&](std::int64_t row, const float* sums) {
                const HalfRow gate = rounded(result_of(experts_.gate_up, unit * UNIT, sums));
                const HalfRow up = rounded(result_of(experts_.gate_up, unit * UNIT + HALF_UNIT, sums + HALF_UNIT));
                store_half(buffers_.inner.data() + layout.of(group.begin + row, own_unit * HALF_UNIT), gated_inner(gate, up));
            });
        });
    }

    HalfRow gated_inner(const HalfRow& gate, const HalfRow& up) const {
        if (experts_.alpha == 0) return gated(gate, up, experts_.by_gelu != 0);
        return gated_clamped(gate, up, static_cast<float>(experts_.alpha), static_cast<float>(experts_.limit));
    }

    void compute_outputs() const {
        share_units(hidden_size() / UNIT, [&](const ExpertRows& group, std::int64_t unit, std::int64_t own_unit) {
            multiply(experts_.down, unit, inner(), group, [&](std::int64_t row, const float* sums) {
                Bf16* const to = buffers_.outputs.data() + (group.begin + row) * hidden_size() + own_unit * UNIT;
                store_half(to, result_of(experts_.down, unit * UNIT, sums));
                store_half(to + HALF_UNIT, result_of(experts_.down, unit * UNIT + HALF_UNIT, sums + HALF_UNIT));
            });
        });
    }

    // Calls work(group, unit, the unit's number within the expert) for all units of all chosen experts: each
    // thread has neighboring ones, of about the same cost.
    template <typename Work>
    void share_units(std::int64_t num_units, Work work) const {
        const std::int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        const std::int64_t total = buffers_.total_cost * num_units;
        const std::int64_t begin = total * thread / num_threads, end = total * (thread + 1) / num_threads;
        std::int64_t cost = 0;  // of the groups before
        for (const ExpertRows& group : buffers_.groups) {
            const auto first_from = [&](std::int64_t bound) {
                return std::min(num_units, std::max<std::int64_t>(0, bound - cost + group.cost - 1) / group.cost);
            };
            for (std::int64_t unit = first_from(begin), last = first_from(end); unit < last; ++unit)
                work(group, group.expert * num_units + unit, unit);
            cost += group.cost * num_units;
        }
#pragma omp barrier
    }

    template <typename Finish>
    void multiply(const Weight& weight, std::int64_t unit, const Rows& x, const ExpertRows& group, Finish finish) const {
        const Rows rows = x.from(group.begin, 0);
        if (!fits_one_block(group.count)) return BlockedGemm(weight, rows, group.count).multiply_unit(unit, finish);
        alignas(64) float sums[MAX_GEMM_ROWS * UNIT];
        multiply_unit(weight, unit, rows, static_cast<int>(group.count), sums);
        for (std::int64_t row = 0; row < group.count; ++row) finish(row, sums + row * UNIT);
    }

    template <typename Finish>
    void add_up(std::int64_t num_rows, const float* weights, Finish finish) const {
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < num_rows; ++row)
            for (std::int64_t number = 0; number < hidden_size(); number += HALF_UNIT) {
                HalfRow total{_mm512_setzero_ps(), _mm512_setzero_ps()};
                for (std::int64_t i = row * experts_.per_token; i < (row + 1) * experts_.per_token; ++i)
                    if (buffers_.places[i] >= 0) {
                        const HalfRow output = load_half(buffers_.outputs.data() + buffers_.places[i] * hidden_size() + number);
                        const __m512 weight = _mm512_set1_ps(weights[i]);
                        HalfRow weighted{_mm512_mul_ps(output.low, weight), _mm512_mul_ps(output.high, weight)};
                        if (experts_.rounded) weighted = rounded(weighted);
                        total = {_mm512_add_ps(total.low, weighted.low), _mm512_add_ps(total.high, weighted.high)};
                    }
                finish(row, number, total);
            }
    }

    const Experts& experts_;
    ExpertBuffers& buffers_;
};

}  // namespace

#endif
