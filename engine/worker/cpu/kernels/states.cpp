// The C interface of the kernels for models with states. Works on raw addresses; knows neither torch nor requests.

#include "causal_conv.h"
#include "channel_scan.h"
#include "delta_rule.h"
#include "selective_scan.h"

namespace {

template <typename Step, typename Arguments>
void run_states(const Arguments& arguments, const StateBatch& batch, std::int64_t num_threads) {
    const Step step(arguments);
#pragma omp parallel num_threads(num_threads)
    step.run(batch);
}

}  // namespace

extern "C" void continuum_gated_delta_rule(const DeltaRule* rule, const StateBatch* batch, std::int64_t num_threads) {
    if (rule->is_bf16 && rule->by_channel)
        run_states<DeltaRuleStep<Bf16, true>>(*rule, *batch, num_threads);
    else if (rule->is_bf16)
        run_states<DeltaRuleStep<Bf16, false>>(*rule, *batch, num_threads);
    else if (rule->by_channel)
        run_states<DeltaRuleStep<float, true>>(*rule, *batch, num_threads);
    else
        run_states<DeltaRuleStep<float, false>>(*rule, *batch, num_threads);
}

extern "C" void continuum_selective_scan(const SelectiveScan* scan, const StateBatch* batch, std::int64_t num_threads) {
    if (scan->is_bf16)
        run_states<SelectiveScanStep<Bf16>>(*scan, *batch, num_threads);
    else
        run_states<SelectiveScanStep<float>>(*scan, *batch, num_threads);
}

extern "C" void continuum_channel_scan(const ChannelScan* scan, const StateBatch* batch, std::int64_t num_threads) {
    run_states<ChannelScanStep>(*scan, *batch, num_threads);
}

extern "C" void continuum_causal_conv(const CausalConv* conv, const StateBatch* batch, std::int64_t num_threads) {
    if (conv->is_bf16 && conv->pool_is_bf16)
        run_states<CausalConvStep<Bf16, Bf16>>(*conv, *batch, num_threads);
    else if (conv->is_bf16)
        run_states<CausalConvStep<Bf16, float>>(*conv, *batch, num_threads);
    else if (conv->pool_is_bf16)
        run_states<CausalConvStep<float, Bf16>>(*conv, *batch, num_threads);
    else
        run_states<CausalConvStep<float, float>>(*conv, *batch, num_threads);
}
