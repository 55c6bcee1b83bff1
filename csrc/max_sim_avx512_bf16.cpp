// Max-sim for AVX-512 with BF16: products of bfloat16 pairs, document rows read as they are stored.

#include "max_sim_kernels.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_avx512_common.hpp"

namespace peaksim {
namespace {

struct Avx512Bf16 {
    static constexpr int64_t kElement = sizeof(uint16_t);

    // The instruction takes subnormal bfloat16 for zero: less than 2^-126 of each product is lost.
    static inline __m512 add(__m512 acc, __m512i row, __m512i tokens) {
        __m512bh x, t;
        std::memcpy(&x, &row, sizeof x);
        std::memcpy(&t, &tokens, sizeof t);
        return _mm512_dpbf16_ps(acc, x, t);
    }
};

constexpr MaxSimKernels kKernels = {
    "avx512_bf16",    kLanes,           kMaxVectors, kMaxSplit,   2,       true,
    fold<Avx512Bf16>, tile<Avx512Bf16>, columns,     column_sums, row_max, row_sum, widen};

}  // namespace

const MaxSimKernels* max_sim_avx512_bf16(DType dtype) { return dtype == DType::bfloat16 ? &kKernels : nullptr; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_avx512_bf16(DType) { return nullptr; }
}  // namespace peaksim

#endif
