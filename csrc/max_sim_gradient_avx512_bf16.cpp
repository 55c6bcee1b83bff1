// Max-sim's backward for AVX-512 with products of bfloat16: two rows at once, their sums in float32.

#include "max_sim_gradient_kernels.hpp"

#if defined(__AVX512BF16__)

#include "max_sim_gradient_avx512.hpp"

namespace peaksim {
namespace {

constexpr int64_t kColumns = 32, kHalf = 16;

// 16 columns of two rows, or the first ones of them under `mask`, side by side; a null row is zeros.
inline __m512i interleaved(const uint16_t* one, const uint16_t* two, int64_t k, __mmask16 mask) {
    const __m512i low = _mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, one + k));
    if (!two) return low;
    const __m512i high = _mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, two + k));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

inline __mmask16 mask_of(int64_t left) {
    if (left >= kHalf) return 0xFFFF;
    return left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1u);
}

// Rows in twos: to[((k / 32 * twos + r / 2) * 32 + k % 32) * 2 + r % 2] = rows[r][k].
void pack_bf16(DType, const void* const* rows, int64_t n, int64_t dim, float* to) {
    const int64_t twos = (n + 1) / 2;
    for (int64_t pair = 0; pair < twos; ++pair) {
        const uint16_t* one = static_cast<const uint16_t*>(rows[2 * pair]);
        const uint16_t* two = 2 * pair + 1 < n ? static_cast<const uint16_t*>(rows[2 * pair + 1]) : nullptr;
        float* at = to + pair * kColumns;
        for (int64_t k = 0; k < dim; k += kColumns, at += twos * kColumns) {
            _mm512_storeu_si512(at, interleaved(one, two, k, mask_of(dim - k)));
            _mm512_storeu_si512(at + kHalf, interleaved(one, two, k + kHalf, mask_of(dim - k - kHalf)));
        }
    }
}

// As bfloat16 on the lower halves of 32-bit lanes.
inline __m512i rounded(__m512 c) {
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(c));
}

// M results, one panel; c[pair * 16 + m] holds the coefficients of both rows.
template <int M>
void combine_panel_bf16(const float* panel, int64_t twos, const uint32_t* c, float* const* to, int64_t k,
                        int64_t left) {
    __m512 sums[M][2];
    for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < twos; ++pair, panel += kColumns, c += kHalf) {
        const __m512bh x0 = (__m512bh)_mm512_loadu_si512(panel), x1 = (__m512bh)_mm512_loadu_si512(panel + kHalf);
        for (int m = 0; m < M; ++m) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(c[m]));
            sums[m][0] = _mm512_dpbf16_ps(sums[m][0], factor, x0);
            sums[m][1] = _mm512_dpbf16_ps(sums[m][1], factor, x1);
        }
    }
    const __mmask16 low = mask_of(left), high = mask_of(left - kHalf);
    for (int m = 0; m < M; ++m) {
        float* at = to[m] + k;
        _mm512_mask_storeu_ps(at, low, _mm512_add_ps(_mm512_maskz_loadu_ps(low, at), sums[m][0]));
        at += kHalf;
        _mm512_mask_storeu_ps(at, high, _mm512_add_ps(_mm512_maskz_loadu_ps(high, at), sums[m][1]));
    }
}

template <int M>
void combine_rows_bf16(const float* packed, int64_t n, int64_t dim, const float* c, int64_t c_row, int64_t c_step,
                       int64_t count, float* const* to) {
    const int64_t twos = (n + 1) / 2;
    uint32_t beside[kDeep / 2 * kHalf];
    for (; count >= M; count -= M, c += M * c_row, to += M) {
        for (int64_t first = 0; first < n; first += kDeep) {
            const int64_t rows = n - first < kDeep ? n - first : kDeep, pairs = (rows + 1) / 2;
            for (int64_t pair = 0; pair < pairs; ++pair) {
                float one[kHalf] = {}, two[kHalf] = {};
                const float* from = c + (first + 2 * pair) * c_step;
                for (int m = 0; m < M; ++m) one[m] = from[m * c_row];
                if (2 * pair + 1 < rows) {
                    for (int m = 0; m < M; ++m) two[m] = from[m * c_row + c_step];
                }
                const __m512i high = _mm512_slli_epi32(rounded(_mm512_loadu_ps(two)), 16);
                _mm512_storeu_si512(beside + pair * kHalf, _mm512_or_si512(rounded(_mm512_loadu_ps(one)), high));
            }
            const float* panel = packed + first / 2 * kColumns;
            for (int64_t k = 0; k < dim; k += kColumns, panel += twos * kColumns) {
                combine_panel_bf16<M>(panel, pairs, beside, to, k, dim - k);
            }
        }
    }
    if constexpr (M > 1) {
        if (count > 0) combine_rows_bf16<(M + 2) / 3>(packed, n, dim, c, c_row, c_step, count, to);
    }
}

void combine_bf16(const float* packed, int64_t n, int64_t dim, const float* c, int64_t c_row, int64_t c_step,
                  int64_t count, float* const* to) {
    combine_rows_bf16<12>(packed, n, dim, c, c_row, c_step, count, to);
}

constexpr MaxSimGradientKernels kKernels = {"avx512_bf16", kColumns,       pack_bf16,       combine_bf16,
                                            gather<Avx512>, softmax_columns, softmax_row};

}  // namespace

const MaxSimGradientKernels* max_sim_gradient_avx512_bf16(DType dtype) {
    return dtype == DType::bfloat16 ? &kKernels : nullptr;
}

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimGradientKernels* max_sim_gradient_avx512_bf16(DType) { return nullptr; }
}  // namespace peaksim

#endif
