// Max-sim in plain C++: for processors without a path of their own, and the yardstick of the others.

#include "max_sim_kernels.hpp"
#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 8;

// What for_rows runs: MR rows against a panel of one vector.
template <class Take>
struct Block {
    const RowRun& rows;
    int64_t dim, ahead;
    const float* panel;
    const Take& take;

    template <int MR>
    void run(const int64_t (&at)[MR], const int64_t (&)[MR]) const {
        float acc[MR][kLanes] = {};
        const float* tokens = panel;
        for (int64_t k = 0; k < dim; ++k, tokens += kLanes) {
            for (int m = 0; m < MR; ++m) {
                const float x = static_cast<const float*>(rows.rows[at[m]])[k];
                for (int u = 0; u < kLanes; ++u) acc[m][u] += x * tokens[u];
            }
        }
        for (int m = 0; m < MR; ++m) take(acc[m], at[m]);
    }
};

void fold(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index) {
    const auto take = [&](const float* sims, int64_t row) {
        const int64_t place = run.document[row] * stride;
        columns(sims, 1, 0, kLanes, run.token[row], best + place, index ? index + place : nullptr);
    };
    for_rows<4>(run, Block<decltype(take)>{run, dim, 1, static_cast<const float*>(panel.data), take});
}

void tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    const auto take = [&](const float* sims, int64_t row) {
        for (int u = 0; u < kLanes; ++u) out[row * stride + u] = sims[u];
    };
    for_rows<4>(run, Block<decltype(take)>{run, dim, 1, static_cast<const float*>(panel.data), take});
}

template <class Convert>
void convert(const void* from, int64_t n, Convert store) {
    const uint16_t* bits = static_cast<const uint16_t*>(from);
    for (int64_t k = 0; k < n; ++k) store(k, bits[k]);
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    if (dtype == DType::float32) {
        for (int64_t k = 0; k < n; ++k) to[k] = static_cast<const float*>(from)[k];
    } else if (dtype == DType::bfloat16) {
        convert(from, n, [=](int64_t k, uint16_t x) { to[k] = from_bfloat16(x); });
    } else {
        convert(from, n, [=](int64_t k, uint16_t x) { to[k] = from_float16(x); });
    }
}

constexpr MaxSimKernels kKernels = {"generic", kLanes, 1,       1,           1,       false,
                                    fold,      tile,   columns, column_sums, row_max, row_sum, widen};

}  // namespace

const MaxSimKernels* max_sim_generic(DType) { return &kKernels; }

}  // namespace peaksim
