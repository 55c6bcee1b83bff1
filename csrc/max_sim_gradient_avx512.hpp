// Vectors of the AVX-512 units of max-sim's backward.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
#pragma once

#include <immintrin.h>

#include "max_sim_gradient_passes.hpp"

namespace peaksim {
namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kRows = 12, kWide = 2, kLong = 16;
    using Reg = __m512;

    static inline Reg zero() { return _mm512_setzero_ps(); }
    static inline Reg set(float c) { return _mm512_set1_ps(c); }
    static inline Reg load(const float* p) { return _mm512_loadu_ps(p); }
    static inline void store(float* p, Reg v) { _mm512_storeu_ps(p, v); }
    static inline Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static inline Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
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

}  // namespace
}  // namespace peaksim
