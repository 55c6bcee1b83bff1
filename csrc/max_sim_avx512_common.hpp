// What the AVX-512 units share: panels of up to 64 tokens, running maxima under masks, conversions.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
#pragma once

#include <immintrin.h>

#include "max_sim_kernels.hpp"
#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 16;
constexpr int kMaxVectors = 4;

// MR * NR sums, NR vectors of tokens and one broadcast element fit the 32 registers.
template <class Kernel, class Sink>
void for_panel(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, Sink& sink) {
    switch (panel.vectors) {
        case 4: return for_rows<Kernel, 6, 4>(rows, n, dim, panel.data, 0, sink);
        case 3: return for_rows<Kernel, 8, 3>(rows, n, dim, panel.data, 0, sink);
        case 2: return for_rows<Kernel, 12, 2>(rows, n, dim, panel.data, 0, sink);
        default: return for_rows<Kernel, 12, 1>(rows, n, dim, panel.data, 0, sink);
    }
}

template <class Kernel>
void fold(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, int32_t first, float* best,
          int32_t* index) {
    const auto sink = [=](__m512 s, int64_t row, int token) {
        const __m512 old = _mm512_loadu_ps(best + token);
        // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
        const __mmask16 ordered = _mm512_cmp_ps_mask(old, old, _CMP_ORD_Q);
        const __mmask16 wins = _mm512_mask_cmp_ps_mask(ordered, s, old, _CMP_NLE_UQ);
        _mm512_mask_storeu_ps(best + token, wins, s);
        if (index) {
            _mm512_mask_storeu_epi32(index + token, wins, _mm512_set1_epi32(first + static_cast<int32_t>(row)));
        }
    };
    for_panel<Kernel>(rows, n, dim, panel, sink);
}

template <class Kernel>
void tile(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, float* out, int64_t stride) {
    const auto sink = [=](__m512 s, int64_t row, int token) { _mm512_storeu_ps(out + row * stride + token, s); };
    for_panel<Kernel>(rows, n, dim, panel, sink);
}

// 16 elements from `from + k`, or the first ones of them under `mask`, as float32.
inline __m512 load(DType dtype, const void* from, int64_t k, __mmask16 mask) {
    if (dtype == DType::float32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + k);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + k);
    // The zeroing forms: GCC 12 warns of its own header for the plain ones.
    if (dtype == DType::float16) return _mm512_maskz_cvtph_ps(mask, bits);
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(mask, _mm512_maskz_cvtepu16_epi32(mask, bits), 16));
}

inline __mmask16 mask_of(int64_t left) {
    return left >= kLanes ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << left) - 1u);
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes) {
        const __mmask16 mask = mask_of(n - k);
        _mm512_mask_storeu_ps(to + k, mask, load(dtype, from, k, mask));
    }
}

void axpy(DType dtype, float c, const void* from, float* to, int64_t n) {
    const __m512 factor = _mm512_set1_ps(c);
    for (int64_t k = 0; k < n; k += kLanes) {
        const __mmask16 mask = mask_of(n - k);
        const __m512 sum = _mm512_fmadd_ps(factor, load(dtype, from, k, mask), _mm512_maskz_loadu_ps(mask, to + k));
        _mm512_mask_storeu_ps(to + k, mask, sum);
    }
}

}  // namespace
}  // namespace peaksim
