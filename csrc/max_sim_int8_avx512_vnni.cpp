// Max-sim of int8 codes for AVX-512 with VNNI: products of four codes at a time, exact in int32.

#include "max_sim_int8_kernels.hpp"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

#include <cstring>

namespace peaksim {
namespace {

constexpr int kLanes = 16;

// Sums of 16 tokens. Of its own vectors of long long, GCC 12 keeps two copies each through a loop.
#if defined(__GNUC__)
typedef int Sums __attribute__((vector_size(64)));
#else
typedef __m512i Sums;
#endif

// sums + Σ tokens · row over each four neighbours: codes + 128 of tokens, codes of a row.
PEAKSIM_INLINE Sums add(Sums sums, __m512i tokens, __m512i row) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, tokens, row);
}

// 128 times the sum of a row's codes: what its products with codes + 128 are too great by.
inline int32_t excess(const int8_t* row, int64_t dim) {
    // Half vectors: GCC 12 warns of its own header where whole ones are split.
    const __m256i many = _mm256_set1_epi8(static_cast<char>(128));
    __m256i sum = _mm256_setzero_si256();
    int64_t k = 0;
    for (; k + 32 <= dim; k += 32) {
        sum = _mm256_dpbusd_epi32(sum, many, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
    }
    if (k < dim) {
        const __mmask32 left = (uint32_t{1} << (dim - k)) - 1;
        sum = _mm256_dpbusd_epi32(sum, many, _mm256_maskz_loadu_epi8(left, row + k));
    }
    __m128i rest = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    rest = _mm_add_epi32(rest, _mm_shuffle_epi32(rest, 0x4E));
    rest = _mm_add_epi32(rest, _mm_shuffle_epi32(rest, 0xB1));
    return _mm_cvtsi128_si32(rest);
}

struct Vnni {
    // Products of four codes of each row, or of the `left` last ones, with all tokens of the panel.
    template <bool LAST, int MR, int NR>
    static PEAKSIM_INLINE void step(Sums (&acc)[MR][NR], const int8_t* const (&from)[MR], int64_t k,
                                    const uint8_t* tokens, __mmask16 left) {
        __m512i t[NR];
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) t[v] = _mm512_loadu_si512(tokens + v * 4 * kLanes);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            __m512i x;
            if constexpr (LAST) {
                // What follows the last codes in memory is not the row's: zeros in its place.
                x = _mm512_maskz_broadcastd_epi32(0xFFFF, _mm_maskz_loadu_epi8(left, from[m] + k));
            } else {
                int32_t four;
                std::memcpy(&four, from[m] + k, sizeof four);
                x = _mm512_set1_epi32(four);
            }
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = add(acc[m][v], t[v], x);
        }
    }

    // MR * NR sums, NR vectors of tokens and four broadcast codes fit the 32 registers.
    template <int MR, int NR, class Sink>
    static PEAKSIM_INLINE void block(const void* const* rows, int64_t dim, const void* panel, int64_t row,
                                     const Sink& sink) {
        Sums acc[MR][NR];
        const int8_t* from[MR];
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const int8_t*>(rows[m]);
            const Sums start = (Sums)_mm512_set1_epi32(-excess(from[m], dim));
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = start;
        }
        const uint8_t* tokens = static_cast<const uint8_t*>(panel);
        const int64_t whole = dim & ~int64_t{3};
        // The rest first, for compilers double the registers of sums that are used after the loop too.
        if (whole < dim) {
            step<true>(acc, from, whole, tokens + whole * NR * kLanes, static_cast<__mmask16>((1u << (dim - whole)) - 1u));
        }
        for (int64_t k = 0; k < whole; k += 4) step<false>(acc, from, k, tokens + k * NR * kLanes, 0);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) sink((__m512i)acc[m][v], row + m, v * kLanes);
        }
    }
};

void fold(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel, int32_t first,
          float* best, int32_t* index) {
    const auto sink = [=](__m512i products, int64_t row, int token) {
        // The zeroing form: GCC 12 warns of its own header for the plain one.
        const __m512 exact = _mm512_maskz_cvtepi32_ps(0xFFFF, products);
        const __m512 s = _mm512_mul_ps(exact, _mm512_set1_ps(scales[row]));
        const __m512 old = _mm512_loadu_ps(best + token);
        // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
        const __mmask16 ordered = _mm512_cmp_ps_mask(old, old, _CMP_ORD_Q);
        const __mmask16 wins = _mm512_mask_cmp_ps_mask(ordered, s, old, _CMP_NLE_UQ);
        _mm512_mask_storeu_ps(best + token, wins, s);
        if (index) {
            _mm512_mask_storeu_epi32(index + token, wins, _mm512_set1_epi32(first + static_cast<int32_t>(row)));
        }
    };
    switch (panel.vectors) {
        case 4: return for_code_rows<Vnni, 6, 4>(rows, n, dim, panel.data, 0, sink);
        case 3: return for_code_rows<Vnni, 8, 3>(rows, n, dim, panel.data, 0, sink);
        case 2: return for_code_rows<Vnni, 12, 2>(rows, n, dim, panel.data, 0, sink);
        default: return for_code_rows<Vnni, 12, 1>(rows, n, dim, panel.data, 0, sink);
    }
}

constexpr MaxSimInt8Kernels kKernels = {"avx512_vnni", kLanes, 4, 4, false, fold, nullptr};

}  // namespace

const MaxSimInt8Kernels* max_sim_int8_avx512_vnni() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimInt8Kernels* max_sim_int8_avx512_vnni() { return nullptr; }
}  // namespace peaksim

#endif
