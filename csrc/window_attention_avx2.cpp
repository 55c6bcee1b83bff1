// Window attention for AVX2 with FMA and F16C: scores of 8 cells at a time, sums in registers.

#include "window_attention_kernels.hpp"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))

#include <immintrin.h>

#include <cmath>

namespace peaksim {
namespace {

constexpr int kLanes = 8;

// Element i of the result is the sum of all elements of acc[i].
inline __m256 row_sums(const __m256* acc) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(acc[4], acc[5]), _mm256_hadd_ps(acc[6], acc[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

template <int C>
void dots_of(const float* x, const float* rows, int64_t stride, const int32_t* cells, int64_t n, bool add,
             float* out) {
    __m256 q[C];
    for (int c = 0; c < C; ++c) q[c] = _mm256_loadu_ps(x + c * kLanes);
    for (int64_t i = 0; i < n; i += kLanes) {
        __m256 acc[kLanes];
        for (int u = 0; u < kLanes; ++u) {
            const float* row = rows + cells[i + u] * stride;
            acc[u] = _mm256_mul_ps(q[0], _mm256_loadu_ps(row));
            for (int c = 1; c < C; ++c) acc[u] = _mm256_fmadd_ps(q[c], _mm256_loadu_ps(row + c * kLanes), acc[u]);
        }
        const __m256 sums = row_sums(acc);
        _mm256_storeu_ps(out + i, add ? _mm256_add_ps(_mm256_loadu_ps(out + i), sums) : sums);
    }
}

void dots(const float* x, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks, bool add,
          float* out) {
    switch (chunks) {
        case 1: return dots_of<1>(x, rows, stride, cells, n, add, out);
        case 2: return dots_of<2>(x, rows, stride, cells, n, add, out);
        case 3: return dots_of<3>(x, rows, stride, cells, n, add, out);
        default: return dots_of<4>(x, rows, stride, cells, n, add, out);
    }
}

// exp(x) for x <= 0 within two units in the last place; 0 where the result would be subnormal, NaN stays NaN.
inline __m256 exp_ps(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.3f);
    const __m256 gone = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    // The second operand is returned for NaN.
    x = _mm256_max_ps(lowest, x);
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    // Taylor's polynomial: |r| <= ln 2 / 2, the first term left out is below 2^-26.
    __m256 p = _mm256_set1_ps(1.0f / 720.0f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(gone, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

float exponentials(float* s, int64_t n, float scale) {
    // What fills up the last vector is lower than any score that matters, and its exponential is 0 or NaN.
    const __m256 factor = _mm256_set1_ps(scale), lowest = _mm256_set1_ps(-INFINITY);
    const __m256 places = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 top = lowest;
    for (int64_t i = 0; i < n; i += kLanes) {
        const __m256 keep = _mm256_cmp_ps(places, _mm256_set1_ps(static_cast<float>(n - i)), _CMP_LT_OQ);
        const __m256 x = _mm256_blendv_ps(lowest, _mm256_mul_ps(factor, _mm256_loadu_ps(s + i)), keep);
        _mm256_storeu_ps(s + i, x);
        top = _mm256_max_ps(top, x);
    }
    top = _mm256_max_ps(top, _mm256_permute2f128_ps(top, top, 1));
    top = _mm256_max_ps(top, _mm256_permute_ps(top, 0x4E));
    top = _mm256_max_ps(top, _mm256_permute_ps(top, 0xB1));
    __m256 sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += kLanes) {
        const __m256 p = exp_ps(_mm256_sub_ps(_mm256_loadu_ps(s + i), top));
        _mm256_storeu_ps(s + i, p);
        sum = _mm256_add_ps(sum, p);
    }
    sum = _mm256_add_ps(sum, _mm256_permute2f128_ps(sum, sum, 1));
    sum = _mm256_add_ps(sum, _mm256_permute_ps(sum, 0x4E));
    sum = _mm256_add_ps(sum, _mm256_permute_ps(sum, 0xB1));
    return _mm256_cvtss_f32(sum);
}

// Two cells at a time keep 2 · C sums: enough independent ones to hide the latency of an addition.
template <int C>
void mix_of(const float* weights, const float* rows, int64_t stride, const int32_t* cells, int64_t n, float factor,
            float* out) {
    __m256 even[C], odd[C];
    for (int c = 0; c < C; ++c) even[c] = odd[c] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 2 <= n; i += 2) {
        const float *first = rows + cells[i] * stride, *second = rows + cells[i + 1] * stride;
        const __m256 p = _mm256_broadcast_ss(weights + i), r = _mm256_broadcast_ss(weights + i + 1);
        for (int c = 0; c < C; ++c) {
            even[c] = _mm256_fmadd_ps(p, _mm256_loadu_ps(first + c * kLanes), even[c]);
            odd[c] = _mm256_fmadd_ps(r, _mm256_loadu_ps(second + c * kLanes), odd[c]);
        }
    }
    if (i < n) {
        const float* row = rows + cells[i] * stride;
        const __m256 p = _mm256_broadcast_ss(weights + i);
        for (int c = 0; c < C; ++c) even[c] = _mm256_fmadd_ps(p, _mm256_loadu_ps(row + c * kLanes), even[c]);
    }
    for (int c = 0; c < C; ++c) {
        _mm256_storeu_ps(out + c * kLanes, _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_add_ps(even[c], odd[c])));
    }
}

void mix(const float* weights, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks,
         float factor, float* out) {
    switch (chunks) {
        case 1: return mix_of<1>(weights, rows, stride, cells, n, factor, out);
        case 2: return mix_of<2>(weights, rows, stride, cells, n, factor, out);
        case 3: return mix_of<3>(weights, rows, stride, cells, n, factor, out);
        default: return mix_of<4>(weights, rows, stride, cells, n, factor, out);
    }
}

void spread(const float* weights, const float* x, const int32_t* cells, int64_t n, int chunks, float* rows,
            int64_t stride) {
    for (int64_t i = 0; i < n; ++i) {
        float* row = rows + cells[i] * stride;
        const __m256 p = _mm256_broadcast_ss(weights + i);
        for (int c = 0; c < chunks; ++c) {
            const int64_t k = int64_t{c} * kLanes;
            _mm256_storeu_ps(row + k, _mm256_fmadd_ps(p, _mm256_loadu_ps(x + k), _mm256_loadu_ps(row + k)));
        }
    }
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    const float* numbers = static_cast<const float*>(from);
    const uint16_t* bits = static_cast<const uint16_t*>(from);
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) {
        if (dtype == DType::float32) {
            _mm256_storeu_ps(to + k, _mm256_loadu_ps(numbers + k));
            continue;
        }
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + k));
        const __m256 x = dtype == DType::float16
                             ? _mm256_cvtph_ps(half)
                             : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
        _mm256_storeu_ps(to + k, x);
    }
    for (; k < n; ++k) {
        to[k] = dtype == DType::float32 ? numbers[k]
                : dtype == DType::float16 ? from_float16(bits[k]) : from_bfloat16(bits[k]);
    }
}

void narrow(DType dtype, const float* from, void* to, int64_t n) {
    float* numbers = static_cast<float*>(to);
    uint16_t* bits = static_cast<uint16_t*>(to);
    int64_t k = 0;
    if (dtype == DType::bfloat16) {
        for (; k < n; ++k) bits[k] = to_bfloat16(from[k]);
        return;
    }
    for (; k + kLanes <= n; k += kLanes) {
        const __m256 x = _mm256_loadu_ps(from + k);
        if (dtype == DType::float32) {
            _mm256_storeu_ps(numbers + k, x);
        } else {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(bits + k), _mm256_cvtps_ph(x, 0));
        }
    }
    for (; k < n; ++k) {
        if (dtype == DType::float32) {
            numbers[k] = from[k];
        } else {
            bits[k] = to_float16(from[k]);
        }
    }
}

constexpr WindowAttentionKernels kKernels = {"avx2", kLanes, 4, dots, exponentials, mix, spread, widen, narrow};

}  // namespace

const WindowAttentionKernels* window_attention_avx2() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const WindowAttentionKernels* window_attention_avx2() { return nullptr; }
}  // namespace peaksim

#endif
