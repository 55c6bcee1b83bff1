// Max-sim for AVX-512 (F, BW, DQ, VL): float32 products.

#include "max_sim_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_avx512_common.hpp"

namespace peaksim {
namespace {

struct Avx512 {
    template <int MR, int NR, class Sink>
    static inline void block(const void* const* rows, int64_t dim, const void* panel, int64_t row, Sink& sink) {
        __m512 acc[MR][NR];
        const float* from[MR];
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const float*>(rows[m]);
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm512_setzero_ps();
        }
        const float* tokens = static_cast<const float*>(panel);
        for (int64_t k = 0; k < dim; ++k, tokens += NR * kLanes) {
            __m512 t[NR];
            for (int v = 0; v < NR; ++v) t[v] = _mm512_loadu_ps(tokens + v * kLanes);
            for (int m = 0; m < MR; ++m) {
                const __m512 x = _mm512_set1_ps(from[m][k]);
                for (int v = 0; v < NR; ++v) acc[m][v] = _mm512_fmadd_ps(x, t[v], acc[m][v]);
            }
        }
        for (int m = 0; m < MR; ++m) {
            for (int v = 0; v < NR; ++v) sink(acc[m][v], row + m, v * kLanes);
        }
    }
};

constexpr MaxSimKernels kKernels = {
    "avx512", kLanes,      kMaxVectors, 1,       false, fold<Avx512>, tile<Avx512>,
    columns,  column_sums, row_max,     row_sum, widen, axpy};

}  // namespace

const MaxSimKernels* max_sim_avx512(DType) { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_avx512(DType) { return nullptr; }
}  // namespace peaksim

#endif
