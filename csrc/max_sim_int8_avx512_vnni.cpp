// Max-sim of int8 codes for AVX-512 with VNNI: products of four codes at a time, exact in int32.

#include "max_sim_int8_kernels.hpp"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

#include <cstring>

namespace peaksim {
namespace {

constexpr int kLanes = 16;
constexpr int kLine = 64;  // bytes of a vector

// Sums of 16 lanes. Of its own vectors of long long, GCC 12 keeps two copies each through a loop.
#if defined(__GNUC__)
typedef int Sums __attribute__((vector_size(64)));
#else
typedef __m512i Sums;
#endif

// sums + Σ tokens · row over each four neighbours: codes + 128 of tokens, codes of a row.
PEAKSIM_INLINE Sums add(Sums sums, __m512i tokens, __m512i row) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, tokens, row);
}

PEAKSIM_INLINE __m256i half(__m512i x, int which) {
    __m256i part;
    std::memcpy(&part, reinterpret_cast<const char*>(&x) + 32 * which, sizeof part);
    return part;
}

// 128 times the sum of a row's codes: what its products with codes + 128 are too great by.
PEAKSIM_INLINE __m512i excess(const int8_t* row, int64_t dim) {
    const __m512i many = _mm512_set1_epi8(static_cast<char>(128));
    Sums sum = (Sums)_mm512_setzero_si512();
    int64_t k = 0;
    for (; k + kLine <= dim; k += kLine) sum = add(sum, many, _mm512_loadu_si512(row + k));
    if (k < dim) sum = add(sum, many, _mm512_maskz_loadu_epi8((__mmask64{1} << (dim - k)) - 1, row + k));
    const __m256i both = _mm256_add_epi32(half((__m512i)sum, 0), half((__m512i)sum, 1));
    __m128i rest = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    rest = _mm_add_epi32(rest, _mm_shuffle_epi32(rest, 0x4E));
    rest = _mm_add_epi32(rest, _mm_shuffle_epi32(rest, 0xB1));
    return _mm512_set1_epi32(_mm_cvtsi128_si32(rest));
}

// 4 * SPLIT codes at `from`, or the first `count` of them and zeros, repeated over the vector.
template <int SPLIT, bool LAST>
PEAKSIM_INLINE __m512i repeated(const int8_t* from, int64_t count) {
    const __mmask64 there = LAST ? (__mmask64{1} << count) - 1 : ~__mmask64{0};
    if constexpr (SPLIT == 1 && !LAST) {
        int32_t word;
        std::memcpy(&word, from, sizeof word);
        return _mm512_set1_epi32(word);
    } else if constexpr (SPLIT == 2 && !LAST) {
        long long word;
        std::memcpy(&word, from, sizeof word);
        return _mm512_set1_epi64(word);
    } else if constexpr (SPLIT <= 4) {
        const __m128i x = LAST ? _mm_maskz_loadu_epi8(static_cast<__mmask16>(there), from)
                               : _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        if constexpr (SPLIT == 1) return _mm512_maskz_broadcastd_epi32(0xFFFF, x);
        if constexpr (SPLIT == 2) return _mm512_maskz_broadcastq_epi64(0xFF, x);
        return _mm512_maskz_broadcast_i32x4(0xFFFF, x);
    } else {
        return _mm512_maskz_loadu_epi8(there, from);
    }
}

// The sum of each token's lanes, moved to the front of the vector.
template <int SPLIT>
PEAKSIM_INLINE __m512i settled(__m512i x) {
    if constexpr (SPLIT >= 2) x = _mm512_add_epi32(x, _mm512_maskz_shuffle_epi32(0xFFFF, x, _MM_PERM_CDAB));
    if constexpr (SPLIT >= 4) x = _mm512_add_epi32(x, _mm512_maskz_shuffle_epi32(0xFFFF, x, _MM_PERM_BADC));
    if constexpr (SPLIT >= 16) {
        x = _mm512_add_epi32(x, _mm512_maskz_shuffle_i32x4(0xFFFF, x, x, 0xB1));
        x = _mm512_add_epi32(x, _mm512_maskz_shuffle_i32x4(0xFFFF, x, x, 0x4E));
    }
    if constexpr (SPLIT > 1) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i from = _mm512_maskz_mullo_epi32(0xFFFF, lane, _mm512_set1_epi32(SPLIT));
        x = _mm512_maskz_permutexvar_epi32(0xFFFF, from, x);
    }
    return x;
}

struct Maxima {
    const float* scales;
    int32_t first;
    float* best;
    int32_t* index;

    // One row after the other; NaN and places may matter.
    PEAKSIM_INLINE void row(__m512 s, int64_t at, float* to, int32_t* places) const {
        const __m512 old = _mm512_loadu_ps(to);
        // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
        const __mmask16 ordered = _mm512_cmp_ps_mask(old, old, _CMP_ORD_Q);
        const __mmask16 wins = _mm512_mask_cmp_ps_mask(ordered, s, old, _CMP_NLE_UQ);
        _mm512_mask_storeu_ps(to, wins, s);
        if (places) _mm512_mask_storeu_epi32(places, wins, _mm512_set1_epi32(first + static_cast<int32_t>(at)));
    }

    // Products of MR rows, the first of which is `at`.
    template <int MR, int NR>
    PEAKSIM_INLINE void take(const __m512i (&products)[MR][NR], int64_t at) const {
        const __m512 some = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << MR) - 1u), scales + at);
        const bool plain = !index && _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q) == 0;
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) {
            float* to = best + v * kLanes;
            __m512 most = _mm512_loadu_ps(to);
            PEAKSIM_UNROLL
            for (int m = 0; m < MR; ++m) {
                // The zeroing form: GCC 12 warns of its own header for the plain one.
                const __m512 exact = _mm512_maskz_cvtepi32_ps(0xFFFF, products[m][v]);
                const __m512 s = _mm512_mul_ps(exact, _mm512_set1_ps(scales[at + m]));
                // A NaN that is there already stays: the second operand comes out.
                if (plain) most = _mm512_maskz_max_ps(0xFFFF, s, most);
                else row(s, at + m, to, index ? index + v * kLanes : nullptr);
            }
            if (plain) _mm512_storeu_ps(to, most);
        }
    }
};

// MR * NR sums, NR vectors of tokens and four broadcast codes fit the 32 registers. With SPLIT > 1 a token's codes
// lie on SPLIT lanes, for a panel of few tokens. Rows `ahead` bytes further on are fetched meanwhile.
template <int SPLIT, int MR, int NR>
void block(const void* const* rows, int64_t at, int64_t dim, const void* panel, int64_t ahead, const Maxima& maxima) {
    constexpr int64_t kStep = 4 * SPLIT;
    Sums acc[MR][NR];
    const int8_t* from[MR];
    PEAKSIM_UNROLL
    for (int m = 0; m < MR; ++m) {
        from[m] = static_cast<const int8_t*>(rows[at + m]);
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) acc[m][v] = (Sums)_mm512_setzero_si512();
    }
    const char* tokens = static_cast<const char*>(panel);
    const int64_t whole = dim / kStep * kStep;
    for (int64_t k = 0; k < whole;) {
        // Many short streams at once are more than the processor foresees.
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) _mm_prefetch(reinterpret_cast<const char*>(from[m]) + ahead + k, _MM_HINT_T0);
        for (const int64_t end = k + kLine < whole ? k + kLine : whole; k < end; k += kStep, tokens += NR * kLine) {
            __m512i t[NR];
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) t[v] = _mm512_loadu_si512(tokens + v * kLine);
            PEAKSIM_UNROLL
            for (int m = 0; m < MR; ++m) {
                const __m512i x = repeated<SPLIT, false>(from[m] + k, kStep);
                PEAKSIM_UNROLL
                for (int v = 0; v < NR; ++v) acc[m][v] = add(acc[m][v], t[v], x);
            }
        }
    }
    __m512i products[MR][NR];
    PEAKSIM_UNROLL
    for (int m = 0; m < MR; ++m) {
        const __m512i over = excess(from[m], dim);
        // What follows the last codes in memory is not the row's: zeros in its place.
        const __m512i x = whole < dim ? repeated<SPLIT, true>(from[m] + whole, dim - whole) : _mm512_setzero_si512();
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) {
            if (whole < dim) acc[m][v] = add(acc[m][v], _mm512_loadu_si512(tokens + v * kLine), x);
            products[m][v] = _mm512_sub_epi32(settled<SPLIT>((__m512i)acc[m][v]), over);
        }
    }
    maxima.take(products, at);
}

template <int SPLIT, int MR, int NR>
PEAKSIM_INLINE void block_of(int64_t count, const void* const* rows, int64_t at, int64_t dim, const void* panel,
                             int64_t ahead, const Maxima& maxima) {
    if constexpr (MR > 1) {
        if (count < MR) return block_of<SPLIT, MR - 1, NR>(count, rows, at, dim, panel, ahead, maxima);
    }
    block<SPLIT, MR, NR>(rows, at, dim, panel, ahead, maxima);
}

// All rows in blocks of at most MR, as equal as can be.
template <int SPLIT, int MR, int NR>
void all(const void* const* rows, int64_t n, int64_t dim, const void* panel, const Maxima& maxima) {
    // Of rows that lie one after the other the next block's, beyond the document's end the next document's.
    const int64_t stride = n > 1 ? static_cast<const char*>(rows[1]) - static_cast<const char*>(rows[0]) : dim;
    for (int64_t blocks = (n + MR - 1) / MR, b = 0, at = 0; b < blocks; ++b) {
        const int64_t count = (n - at) / (blocks - b);
        block_of<SPLIT, MR, NR>(count, rows, at, dim, panel, count * stride, maxima);
        at += count;
    }
}

void fold(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel, int32_t first,
          float* best, int32_t* index) {
    const Maxima maxima{scales, first, best, index};
    switch (panel.split) {
        case 2: return all<2, 12, 1>(rows, n, dim, panel.data, maxima);
        case 4: return all<4, 12, 1>(rows, n, dim, panel.data, maxima);
        case 16: return all<16, 12, 1>(rows, n, dim, panel.data, maxima);
        default: break;
    }
    switch (panel.vectors) {
        case 4: return all<1, 6, 4>(rows, n, dim, panel.data, maxima);
        case 3: return all<1, 8, 3>(rows, n, dim, panel.data, maxima);
        case 2: return all<1, 12, 2>(rows, n, dim, panel.data, maxima);
        default: return all<1, 12, 1>(rows, n, dim, panel.data, maxima);
    }
}

constexpr MaxSimInt8Kernels kKernels = {"avx512_vnni", kLanes, 4, 4, true, false, fold, nullptr};

}  // namespace

const MaxSimInt8Kernels* max_sim_int8_avx512_vnni() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimInt8Kernels* max_sim_int8_avx512_vnni() { return nullptr; }
}  // namespace peaksim

#endif
