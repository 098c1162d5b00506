// The C interface of the sampling kernel, for all models. Works on raw addresses; knows neither torch nor requests.

#include "sampling.h"

extern "C" void continuum_sample(const SamplingRows* rows, std::int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        static thread_local SamplingScratch scratch;
        RowSampler sampler(*rows, scratch);
#pragma omp for schedule(dynamic)
        for (std::int64_t row = 0; row < rows->num_rows; ++row) sampler.run(row);
    }
}
