// Max-sim for AVX2 with FMA and F16C: panels of 16 tokens, blocks of 6 document rows.

#include "max_sim_kernels.hpp"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))

#include <immintrin.h>

#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 8;

struct Avx2 {
    // MR * NR sums, NR vectors of tokens and one broadcast element fit the 16 registers.
    template <int MR, int NR, class Sink>
    static inline void block(const void* const* rows, int64_t dim, const void* panel, int64_t row, Sink& sink) {
        __m256 acc[MR][NR];
        const float* from[MR];
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const float*>(rows[m]);
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm256_setzero_ps();
        }
        const float* tokens = static_cast<const float*>(panel);
        for (int64_t k = 0; k < dim; ++k, tokens += NR * kLanes) {
            __m256 t[NR];
            for (int v = 0; v < NR; ++v) t[v] = _mm256_loadu_ps(tokens + v * kLanes);
            for (int m = 0; m < MR; ++m) {
                const __m256 x = _mm256_broadcast_ss(from[m] + k);
                for (int v = 0; v < NR; ++v) acc[m][v] = _mm256_fmadd_ps(x, t[v], acc[m][v]);
            }
        }
        for (int m = 0; m < MR; ++m) {
            for (int v = 0; v < NR; ++v) sink(acc[m][v], row + m, v * kLanes);
        }
    }
};

template <class Sink>
void for_panel(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, Sink& sink) {
    if (panel.vectors == 2) {
        for_rows<Avx2, 6, 2>(rows, n, dim, panel.data, 0, sink);
    } else {
        for_rows<Avx2, 12, 1>(rows, n, dim, panel.data, 0, sink);
    }
}

void fold(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, int32_t first, float* best,
          int32_t* index) {
    const auto sink = [=](__m256 s, int64_t row, int token) {
        const __m256 old = _mm256_loadu_ps(best + token);
        // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
        const __m256 wins =
            _mm256_and_ps(_mm256_cmp_ps(s, old, _CMP_NLE_UQ), _mm256_cmp_ps(old, old, _CMP_ORD_Q));
        _mm256_storeu_ps(best + token, _mm256_blendv_ps(old, s, wins));
        if (index) {
            const __m256 ordinal = _mm256_castsi256_ps(_mm256_set1_epi32(first + static_cast<int32_t>(row)));
            float* places = reinterpret_cast<float*>(index + token);
            _mm256_storeu_ps(places, _mm256_blendv_ps(_mm256_loadu_ps(places), ordinal, wins));
        }
    };
    for_panel(rows, n, dim, panel, sink);
}

void tile(const void* const* rows, int64_t n, int64_t dim, const Panel& panel, float* out, int64_t stride) {
    const auto sink = [=](__m256 s, int64_t row, int token) { _mm256_storeu_ps(out + row * stride + token, s); };
    for_panel(rows, n, dim, panel, sink);
}

__m256 load(DType dtype, const void* from, int64_t k) {
    if (dtype == DType::float32) return _mm256_loadu_ps(static_cast<const float*>(from) + k);
    const __m128i bits =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + k));
    if (dtype == DType::float16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

float load_one(DType dtype, const void* from, int64_t k) {
    if (dtype == DType::float32) return static_cast<const float*>(from)[k];
    const uint16_t bits = static_cast<const uint16_t*>(from)[k];
    return dtype == DType::float16 ? from_float16(bits) : from_bfloat16(bits);
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) _mm256_storeu_ps(to + k, load(dtype, from, k));
    for (; k < n; ++k) to[k] = load_one(dtype, from, k);
}

void axpy(DType dtype, float c, const void* from, float* to, int64_t n) {
    const __m256 factor = _mm256_set1_ps(c);
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) {
        _mm256_storeu_ps(to + k, _mm256_fmadd_ps(factor, load(dtype, from, k), _mm256_loadu_ps(to + k)));
    }
    for (; k < n; ++k) to[k] += c * load_one(dtype, from, k);
}

constexpr MaxSimKernels kKernels = {"avx2",  kLanes,      2,       1,       false, fold, tile,
                                    columns, column_sums, row_max, row_sum, widen, axpy};

}  // namespace

const MaxSimKernels* max_sim_avx2(DType) { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_avx2(DType) { return nullptr; }
}  // namespace peaksim

#endif
