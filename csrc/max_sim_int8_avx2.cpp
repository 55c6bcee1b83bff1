// Max-sim of int8 codes for AVX2: codes widened to int16, products of neighbours added in int32.

#include "max_sim_int8_kernels.hpp"

#if defined(__AVX2__)

#include <immintrin.h>

#include <cstring>

namespace peaksim {
namespace {

constexpr int kLanes = 8;

struct Avx2 {
    // Products of a pair of codes of each row, or of the last one, with all tokens of the panel.
    template <bool LAST, int MR, int NR>
    static PEAKSIM_INLINE void step(__m256i (&acc)[MR][NR], const int16_t* const (&from)[MR], int64_t k,
                                    const int16_t* tokens) {
        __m256i t[NR];
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) t[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens) + v);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            // What follows the last code in memory is not the row's: zero in its place.
            int32_t pair = static_cast<uint16_t>(from[m][k]);
            if constexpr (!LAST) std::memcpy(&pair, from[m] + k, sizeof pair);
            const __m256i x = _mm256_set1_epi32(pair);
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm256_add_epi32(acc[m][v], _mm256_madd_epi16(x, t[v]));
        }
    }

    // MR * NR sums, NR vectors of tokens, a pair of codes and a product fit the 16 registers.
    template <int MR, int NR, class Sink>
    static PEAKSIM_INLINE void block(const void* const* rows, int64_t dim, const void* panel, int64_t row,
                                     const Sink& sink) {
        __m256i acc[MR][NR];
        const int16_t* from[MR];
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const int16_t*>(rows[m]);
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm256_setzero_si256();
        }
        const int16_t* tokens = static_cast<const int16_t*>(panel);
        int64_t k = 0;
        for (; k + 2 <= dim; k += 2, tokens += NR * 2 * kLanes) step<false>(acc, from, k, tokens);
        if (k < dim) step<true>(acc, from, k, tokens);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) sink(acc[m][v], row + m, v * kLanes);
        }
    }
};

void fold(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel, int32_t first,
          float* best, int32_t* index) {
    const auto sink = [=](__m256i products, int64_t row, int token) {
        const __m256 s = _mm256_mul_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(scales[row]));
        const __m256 old = _mm256_loadu_ps(best + token);
        // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
        const __m256 wins = _mm256_and_ps(_mm256_cmp_ps(s, old, _CMP_NLE_UQ), _mm256_cmp_ps(old, old, _CMP_ORD_Q));
        _mm256_storeu_ps(best + token, _mm256_blendv_ps(old, s, wins));
        if (index) {
            const __m256 ordinal = _mm256_castsi256_ps(_mm256_set1_epi32(first + static_cast<int32_t>(row)));
            float* places = reinterpret_cast<float*>(index + token);
            _mm256_storeu_ps(places, _mm256_blendv_ps(_mm256_loadu_ps(places), ordinal, wins));
        }
    };
    if (panel.vectors == 2) {
        for_code_rows<Avx2, 6, 2>(rows, n, dim, panel.data, 0, sink);
    } else {
        for_code_rows<Avx2, 12, 1>(rows, n, dim, panel.data, 0, sink);
    }
}

void widen(const int8_t* from, int16_t* to, int64_t n) {
    int64_t k = 0;
    for (; k + 16 <= n; k += 16) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k), _mm256_cvtepi8_epi16(codes));
    }
    for (; k < n; ++k) to[k] = from[k];
}

constexpr MaxSimInt8Kernels kKernels = {"avx2", kLanes, 2, 2, true, fold, widen};

}  // namespace

const MaxSimInt8Kernels* max_sim_int8_avx2() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimInt8Kernels* max_sim_int8_avx2() { return nullptr; }
}  // namespace peaksim

#endif
