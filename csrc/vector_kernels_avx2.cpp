// Row operations for AVX2 with FMA and F16C.

#include "vector_kernels.hpp"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))

#include <immintrin.h>

#include "vector_passes.hpp"

namespace peaksim {
namespace {

struct Avx2 {
    static constexpr int kLanes = 8, kRows = 4, kWide = 2;
    using Reg = __m256;

    static inline __m256i first(int64_t n) {
        const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), place);
    }
    static inline Reg zero() { return _mm256_setzero_ps(); }
    static inline Reg set(float c) { return _mm256_set1_ps(c); }
    static inline Reg load(const float* p) { return _mm256_loadu_ps(p); }
    static inline Reg load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
    static inline void store(float* p, Reg v) { _mm256_storeu_ps(p, v); }
    static inline void store(float* p, Reg v, int64_t n) { _mm256_maskstore_ps(p, first(n), v); }
    static inline Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static inline Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static inline Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static inline Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static inline float reduce(Reg v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
    static inline Reg widen(DType dtype, const void* from, int64_t k) {
        if (dtype == DType::float32) return _mm256_loadu_ps(static_cast<const float*>(from) + k);
        const __m128i bits =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + k));
        if (dtype == DType::float16) return _mm256_cvtph_ps(bits);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
};

constexpr VectorKernels kKernels = table<Avx2>("avx2");

}  // namespace

const VectorKernels* vector_kernels_avx2() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const VectorKernels* vector_kernels_avx2() { return nullptr; }
}  // namespace peaksim

#endif
