// Max-sim in plain C++: for processors without a path of their own, and the yardstick of the others.

#include "max_sim_kernels.hpp"
#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 8;

struct Generic {
    template <int MR, int NR, class Sink>
    static void block(const void* const* rows, int64_t dim, const void* panel, int64_t row, Sink& sink) {
        float acc[MR][kLanes] = {};
        const float* tokens = static_cast<const float*>(panel);
        for (int64_t k = 0; k < dim; ++k, tokens += kLanes) {
            for (int m = 0; m < MR; ++m) {
                const float x = static_cast<const float*>(rows[m])[k];
                for (int u = 0; u < kLanes; ++u) acc[m][u] += x * tokens[u];
            }
        }
        for (int m = 0; m < MR; ++m) sink(acc[m], row + m);
    }
};

void fold(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, int32_t first, float* best,
          int32_t* index) {
    const auto sink = [=](const float* sims, int64_t row) {
        columns(sims, 1, 0, kLanes, first + static_cast<int32_t>(row), best, index);
    };
    for_rows<Generic, 4, 1>(rows, n, dim, panel.data, 0, sink);
}

void tile(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, float* out, int64_t stride) {
    const auto sink = [=](const float* sims, int64_t row) {
        for (int u = 0; u < kLanes; ++u) out[row * stride + u] = sims[u];
    };
    for_rows<Generic, 4, 1>(rows, n, dim, panel.data, 0, sink);
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

void axpy(DType dtype, float c, const void* from, float* to, int64_t n) {
    if (dtype == DType::float32) {
        for (int64_t k = 0; k < n; ++k) to[k] += c * static_cast<const float*>(from)[k];
    } else if (dtype == DType::bfloat16) {
        convert(from, n, [=](int64_t k, uint16_t x) { to[k] += c * from_bfloat16(x); });
    } else {
        convert(from, n, [=](int64_t k, uint16_t x) { to[k] += c * from_float16(x); });
    }
}

constexpr MaxSimKernels kKernels = {"generic", kLanes, 1, 1, false, fold, tile,
                                    columns, column_sums, row_max, row_sum, widen, axpy};

}  // namespace

const MaxSimKernels* max_sim_generic(DType) { return &kKernels; }

}  // namespace peaksim
