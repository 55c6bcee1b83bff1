// Window attention for AVX-512 (F, BW, DQ, VL): scores of 16 cells at a time, sums in registers.

#include "window_attention_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

#include <cmath>

namespace peaksim {
namespace {

constexpr int kLanes = 16;
// GCC 12 warns of its own header for the plain forms of some instructions; with all lanes kept the zeroing forms do
// the same.
constexpr __mmask16 kAll = 0xFFFF;
constexpr __mmask8 kAllPairs = 0xFF;

inline __mmask16 mask_of(int64_t left) {
    return left >= kLanes ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << left) - 1u);
}

inline __m512 sum_ps(__m512 low, __m512 high) { return _mm512_add_ps(low, high); }

// The sums of four vectors over each 128-bit lane, side by side.
inline __m512 fold4(const __m512* a) {
    const __m512 ab = sum_ps(_mm512_maskz_unpacklo_ps(kAll, a[0], a[1]), _mm512_maskz_unpackhi_ps(kAll, a[0], a[1]));
    const __m512 cd = sum_ps(_mm512_maskz_unpacklo_ps(kAll, a[2], a[3]), _mm512_maskz_unpackhi_ps(kAll, a[2], a[3]));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return sum_ps(_mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllPairs, x, y)),
                  _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllPairs, x, y)));
}

inline __m512 join(__m512 a, __m512 b) {
    return sum_ps(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xDD));
}

// Scores of the 4 · G cells from the i-th on, beside each other; what lies beyond them is of no use.
template <int C, int G>
inline __m512 scores_of(const __m512* q, const float* rows, int64_t stride, const int32_t* cells) {
    __m512 sums[4];
    for (int g = 0; g < 4; ++g) {
        if (g >= G) {
            sums[g] = _mm512_setzero_ps();
            continue;
        }
        __m512 acc[4];
        for (int u = 0; u < 4; ++u) {
            const float* row = rows + cells[4 * g + u] * stride;
            acc[u] = _mm512_mul_ps(q[0], _mm512_loadu_ps(row));
            for (int c = 1; c < C; ++c) acc[u] = _mm512_fmadd_ps(q[c], _mm512_loadu_ps(row + c * kLanes), acc[u]);
        }
        sums[g] = fold4(acc);
    }
    return join(join(sums[0], sums[1]), join(sums[2], sums[3]));
}

template <int C>
void dots_of(const float* x, const float* rows, int64_t stride, const int32_t* cells, int64_t n, bool add,
             float* out) {
    __m512 q[C];
    for (int c = 0; c < C; ++c) q[c] = _mm512_loadu_ps(x + c * kLanes);
    for (int64_t i = 0; i < n; i += kLanes) {
        __m512 s;
        if (n - i > 8) {
            s = n - i > 12 ? scores_of<C, 4>(q, rows, stride, cells + i) : scores_of<C, 3>(q, rows, stride, cells + i);
        } else {
            s = n - i > 4 ? scores_of<C, 2>(q, rows, stride, cells + i) : scores_of<C, 1>(q, rows, stride, cells + i);
        }
        _mm512_storeu_ps(out + i, add ? sum_ps(_mm512_loadu_ps(out + i), s) : s);
    }
}

void dots(const float* x, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks, bool add,
          float* out) {
    switch (chunks) {
        case 1: return dots_of<1>(x, rows, stride, cells, n, add, out);
        case 2: return dots_of<2>(x, rows, stride, cells, n, add, out);
        case 3: return dots_of<3>(x, rows, stride, cells, n, add, out);
        case 4: return dots_of<4>(x, rows, stride, cells, n, add, out);
        case 5: return dots_of<5>(x, rows, stride, cells, n, add, out);
        case 6: return dots_of<6>(x, rows, stride, cells, n, add, out);
        case 7: return dots_of<7>(x, rows, stride, cells, n, add, out);
        default: return dots_of<8>(x, rows, stride, cells, n, add, out);
    }
}

// exp(x) for x <= 0 within two units in the last place; NaN stays NaN.
inline __m512 exp_ps(__m512 x) {
    // The second operand is returned for NaN.
    x = _mm512_maskz_max_ps(kAll, _mm512_set1_ps(-104.0f), x);
    const __m512 n = _mm512_maskz_roundscale_ps(kAll, _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    // Taylor's polynomial: |r| <= ln 2 / 2, the first term left out is below 2^-26.
    __m512 p = _mm512_set1_ps(1.0f / 720.0f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(kAll, p, n);
}

// The greatest element on all lanes, or any if there is a NaN: its exponential will say so.
inline __m512 highest(__m512 x) {
    x = _mm512_maskz_max_ps(kAll, x, _mm512_maskz_shuffle_f32x4(kAll, x, x, 0x4E));
    x = _mm512_maskz_max_ps(kAll, x, _mm512_maskz_shuffle_f32x4(kAll, x, x, 0xB1));
    x = _mm512_maskz_max_ps(kAll, x, _mm512_maskz_permute_ps(kAll, x, 0x4E));
    return _mm512_maskz_max_ps(kAll, x, _mm512_maskz_permute_ps(kAll, x, 0xB1));
}

inline float total(__m512 x) {
    x = sum_ps(x, _mm512_maskz_shuffle_f32x4(kAll, x, x, 0x4E));
    x = sum_ps(x, _mm512_maskz_shuffle_f32x4(kAll, x, x, 0xB1));
    x = sum_ps(x, _mm512_maskz_permute_ps(kAll, x, 0x4E));
    x = sum_ps(x, _mm512_maskz_permute_ps(kAll, x, 0xB1));
    return _mm512_cvtss_f32(x);
}

float exponentials(float* s, int64_t n, float scale) {
    const __m512 lowest = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
    __m512 top = lowest;
    for (int64_t i = 0; i < n; i += kLanes) {
        const __m512 x = _mm512_mask_mul_ps(lowest, mask_of(n - i), factor, _mm512_loadu_ps(s + i));
        _mm512_storeu_ps(s + i, x);
        top = _mm512_maskz_max_ps(kAll, top, x);
    }
    const __m512 shift = highest(top);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += kLanes) {
        const __m512 p = _mm512_maskz_mov_ps(mask_of(n - i), exp_ps(_mm512_sub_ps(_mm512_loadu_ps(s + i), shift)));
        _mm512_storeu_ps(s + i, p);
        sum = _mm512_add_ps(sum, p);
    }
    return total(sum);
}

// U cells at a time keep U · C sums: enough independent ones to hide the latency of an addition.
template <int C, int U>
void mix_of(const float* weights, const float* rows, int64_t stride, const int32_t* cells, int64_t n, float factor,
            float* out) {
    __m512 acc[U][C];
    for (int u = 0; u < U; ++u) {
        for (int c = 0; c < C; ++c) acc[u][c] = _mm512_setzero_ps();
    }
    int64_t i = 0;
    for (; i + U <= n; i += U) {
        for (int u = 0; u < U; ++u) {
            const float* row = rows + cells[i + u] * stride;
            const __m512 p = _mm512_set1_ps(weights[i + u]);
            for (int c = 0; c < C; ++c) acc[u][c] = _mm512_fmadd_ps(p, _mm512_loadu_ps(row + c * kLanes), acc[u][c]);
        }
    }
    for (; i < n; ++i) {
        const float* row = rows + cells[i] * stride;
        const __m512 p = _mm512_set1_ps(weights[i]);
        for (int c = 0; c < C; ++c) acc[0][c] = _mm512_fmadd_ps(p, _mm512_loadu_ps(row + c * kLanes), acc[0][c]);
    }
    for (int c = 0; c < C; ++c) {
        __m512 sum = acc[0][c];
        for (int u = 1; u < U; ++u) sum = _mm512_add_ps(sum, acc[u][c]);
        _mm512_storeu_ps(out + c * kLanes, _mm512_mul_ps(_mm512_set1_ps(factor), sum));
    }
}

void mix(const float* weights, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks,
         float factor, float* out) {
    switch (chunks) {
        case 1: return mix_of<1, 4>(weights, rows, stride, cells, n, factor, out);
        case 2: return mix_of<2, 4>(weights, rows, stride, cells, n, factor, out);
        case 3: return mix_of<3, 2>(weights, rows, stride, cells, n, factor, out);
        case 4: return mix_of<4, 2>(weights, rows, stride, cells, n, factor, out);
        case 5: return mix_of<5, 2>(weights, rows, stride, cells, n, factor, out);
        case 6: return mix_of<6, 1>(weights, rows, stride, cells, n, factor, out);
        case 7: return mix_of<7, 1>(weights, rows, stride, cells, n, factor, out);
        default: return mix_of<8, 1>(weights, rows, stride, cells, n, factor, out);
    }
}

void spread(const float* weights, const float* x, const int32_t* cells, int64_t n, int chunks, float* rows,
            int64_t stride) {
    for (int64_t i = 0; i < n; ++i) {
        float* row = rows + cells[i] * stride;
        const __m512 p = _mm512_set1_ps(weights[i]);
        for (int c = 0; c < chunks; ++c) {
            const int64_t k = int64_t{c} * kLanes;
            _mm512_storeu_ps(row + k, _mm512_fmadd_ps(p, _mm512_loadu_ps(x + k), _mm512_loadu_ps(row + k)));
        }
    }
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes) {
        const __mmask16 mask = mask_of(n - k);
        if (dtype == DType::float32) {
            _mm512_mask_storeu_ps(to + k, mask, _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + k));
            continue;
        }
        const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + k);
        const __m512i wide = _mm512_maskz_slli_epi32(mask, _mm512_maskz_cvtepu16_epi32(mask, bits), 16);
        const __m512 x = dtype == DType::float16 ? _mm512_maskz_cvtph_ps(mask, bits) : _mm512_castsi512_ps(wide);
        _mm512_mask_storeu_ps(to + k, mask, x);
    }
}

void narrow(DType dtype, const float* from, void* to, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes) {
        const __mmask16 mask = mask_of(n - k);
        const __m512 x = _mm512_maskz_loadu_ps(mask, from + k);
        if (dtype == DType::float32) {
            _mm512_mask_storeu_ps(static_cast<float*>(to) + k, mask, x);
        } else if (dtype == DType::float16) {
            _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + k, mask, _mm512_maskz_cvtps_ph(mask, x, 0));
        } else {
            const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
            const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(mask, bits, 16), one);
            __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
            const __m256i half = _mm512_maskz_cvtepi32_epi16(mask, _mm512_maskz_srli_epi32(mask, up, 16));
            _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + k, mask, half);
        }
    }
}

constexpr WindowAttentionKernels kKernels = {"avx512", kLanes, 8, dots, exponentials, mix, spread, widen, narrow};

}  // namespace

const WindowAttentionKernels* window_attention_avx512() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const WindowAttentionKernels* window_attention_avx512() { return nullptr; }
}  // namespace peaksim

#endif
