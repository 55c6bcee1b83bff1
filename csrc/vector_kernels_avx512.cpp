// Row operations for AVX-512 (F, BW, DQ, VL).

#include "vector_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

#include "vector_passes.hpp"

namespace peaksim {
namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kRows = 8, kWide = 2;
    using Reg = __m512;

    static inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
    static inline Reg zero() { return _mm512_setzero_ps(); }
    static inline Reg set(float c) { return _mm512_set1_ps(c); }
    static inline Reg load(const float* p) { return _mm512_loadu_ps(p); }
    static inline Reg load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static inline void store(float* p, Reg v) { _mm512_storeu_ps(p, v); }
    static inline void store(float* p, Reg v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
    static inline Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static inline Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static inline Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static inline Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static inline float reduce(Reg v) {
        // By hand: GCC 12 warns of its own _mm512_reduce_add_ps.
        float lane[16];
        _mm512_storeu_ps(lane, v);
        for (int width = 8; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
        }
        return lane[0];
    }
    static inline Reg widen(DType dtype, const void* from, int64_t k) {
        if (dtype == DType::float32) return _mm512_loadu_ps(static_cast<const float*>(from) + k);
        const __m256i bits =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + k));
        // The zeroing forms: GCC 12 warns of its own header for the plain ones.
        constexpr __mmask16 kAll = 0xFFFF;
        if (dtype == DType::float16) return _mm512_maskz_cvtph_ps(kAll, bits);
        return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, bits), 16));
    }
};

constexpr VectorKernels kKernels = table<Avx512>("avx512");

}  // namespace

const VectorKernels* vector_kernels_avx512() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const VectorKernels* vector_kernels_avx512() { return nullptr; }
}  // namespace peaksim

#endif
