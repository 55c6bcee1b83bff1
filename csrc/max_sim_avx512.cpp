// Max-sim for AVX-512 (F, BW, DQ, VL): float32 products.

#include "max_sim_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_avx512_common.hpp"

namespace peaksim {
namespace {

struct Avx512 {
    static constexpr int64_t kElement = sizeof(float);

    static inline __m512 add(__m512 acc, __m512i row, __m512i tokens) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(row), _mm512_castsi512_ps(tokens), acc);
    }
};

constexpr MaxSimKernels kKernels = {
    "avx512",     kLanes,       kMaxVectors, kMaxSplit,   1,       false,
    fold<Avx512>, tile<Avx512>, columns,     column_sums, row_max, row_sum, widen};

}  // namespace

const MaxSimKernels* max_sim_avx512(DType) { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_avx512(DType) { return nullptr; }
}  // namespace peaksim

#endif
