// Max-sim's backward for AVX2 with FMA and F16C.

#include "max_sim_gradient_kernels.hpp"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))

#include <immintrin.h>

#include "max_sim_gradient_passes.hpp"

namespace peaksim {
namespace {

struct Avx2 {
    static constexpr int kLanes = 8, kRows = 6, kWide = 2, kLong = 8;
    using Reg = __m256;

    static inline Reg zero() { return _mm256_setzero_ps(); }
    static inline Reg set(float c) { return _mm256_set1_ps(c); }
    static inline Reg load(const float* p) { return _mm256_loadu_ps(p); }
    static inline void store(float* p, Reg v) { _mm256_storeu_ps(p, v); }
    static inline Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static inline Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static inline Reg widen(DType dtype, const void* from, int64_t k) {
        if (dtype == DType::float32) return _mm256_loadu_ps(static_cast<const float*>(from) + k);
        const __m128i bits =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + k));
        if (dtype == DType::float16) return _mm256_cvtph_ps(bits);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
};

constexpr MaxSimGradientKernels kKernels = gradient_table<Avx2>("avx2");

}  // namespace

const MaxSimGradientKernels* max_sim_gradient_avx2(DType) { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimGradientKernels* max_sim_gradient_avx2(DType) { return nullptr; }
}  // namespace peaksim

#endif
