// Max-sim of int8 codes in plain C++: for processors without a path of their own, and the yardstick of the others.

#include "max_sim_int8_kernels.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 8;

struct Generic {
    template <int MR, int NR, class Sink>
    static void block(const void* const* rows, int64_t dim, const void* panel, int64_t row, const Sink& sink) {
        int32_t acc[MR][kLanes] = {};
        const int16_t* tokens = static_cast<const int16_t*>(panel);
        for (int64_t k = 0; k < dim; ++k, tokens += kLanes) {
            for (int m = 0; m < MR; ++m) {
                const int32_t x = static_cast<const int16_t*>(rows[m])[k];
                for (int u = 0; u < kLanes; ++u) acc[m][u] += x * tokens[u];
            }
        }
        for (int m = 0; m < MR; ++m) sink(acc[m], row + m);
    }
};

void fold(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel, int32_t first,
          float* best, int32_t* index) {
    const auto sink = [=](const int32_t* products, int64_t row) {
        for (int u = 0; u < kLanes; ++u) {
            const float s = static_cast<float>(products[u]) * scales[row];
            if (!(s > best[u] || (s != s && best[u] == best[u]))) continue;
            best[u] = s;
            if (index) index[u] = first + static_cast<int32_t>(row);
        }
    };
    for_code_rows<Generic, 4, 1>(rows, n, dim, panel.data, 0, sink);
}

void widen(const int8_t* from, int16_t* to, int64_t n) {
    for (int64_t k = 0; k < n; ++k) to[k] = from[k];
}

constexpr MaxSimInt8Kernels kKernels = {"generic", kLanes, 1, 1, true, fold, widen};

}  // namespace

const MaxSimInt8Kernels* max_sim_int8_generic() { return &kKernels; }

}  // namespace peaksim
