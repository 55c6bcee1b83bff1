// Max-sim's backward for AVX-512 (F, BW, DQ, VL).

#include "max_sim_gradient_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_gradient_avx512.hpp"

namespace peaksim {
namespace {

constexpr MaxSimGradientKernels kKernels = gradient_table<Avx512>("avx512");

}  // namespace

const MaxSimGradientKernels* max_sim_gradient_avx512(DType) { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimGradientKernels* max_sim_gradient_avx512(DType) { return nullptr; }
}  // namespace peaksim

#endif
