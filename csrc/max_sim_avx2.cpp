// Max-sim for AVX2 with FMA and F16C: panels of 16 tokens, blocks of 6 document rows.

#include "max_sim_kernels.hpp"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))

#include <immintrin.h>

#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 8;

constexpr int kMaxVectors = 2;
constexpr int kMaxSplit = 8;

// SPLIT floats at `from`, repeated over the vector.
template <int SPLIT>
PEAKSIM_INLINE __m256 repeated(const float* from) {
    if constexpr (SPLIT == 1) return _mm256_broadcast_ss(from);
    if constexpr (SPLIT == 2) {
        double both;
        std::memcpy(&both, from, sizeof both);
        return _mm256_castpd_ps(_mm256_set1_pd(both));
    }
    if constexpr (SPLIT == 4) {
        const __m128 x = _mm_loadu_ps(from);
        return _mm256_insertf128_ps(_mm256_castps128_ps256(x), x, 1);
    }
    return _mm256_loadu_ps(from);
}

// The sum of each token's lanes, moved to the front of the vector.
template <int SPLIT>
PEAKSIM_INLINE __m256 settled(__m256 x) {
    if constexpr (SPLIT >= 2) x = _mm256_add_ps(x, _mm256_permute_ps(x, 0xB1));
    if constexpr (SPLIT >= 4) x = _mm256_add_ps(x, _mm256_permute_ps(x, 0x4E));
    if constexpr (SPLIT >= 8) x = _mm256_add_ps(x, _mm256_permute2f128_ps(x, x, 0x01));
    if constexpr (SPLIT == 2) x = _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    if constexpr (SPLIT == 4) x = _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    return x;
}

// Lanes that hold a token's sum.
template <int SPLIT>
PEAKSIM_INLINE __m256i tokens_of() {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(kLanes / SPLIT), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Running maxima of a block of rows.
struct Fold {
    const RowRun& run;
    int64_t stride;
    float* best;
    int32_t* index;

    template <int SPLIT, int MR, int NR>
    PEAKSIM_INLINE void take(const __m256 (&acc)[MR][NR], const int64_t (&at)[MR]) const {
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) {
            // In memory, for the documents' borders lie anywhere.
            __m256 column[MR];
            PEAKSIM_UNROLL
            for (int m = 0; m < MR; ++m) column[m] = acc[m][v];
            rows(column, at, v, tokens_of<SPLIT>());
        }
    }

    template <int MR>
    PEAKSIM_INLINE void rows(const __m256 (&column)[MR], const int64_t (&at)[MR], int v, __m256i lanes) const {
        for (int m = 0; m < MR;) {
            const int32_t document = run.document[at[m]];
            const int64_t place = document * stride + v * kLanes;
            __m256 most = _mm256_maskload_ps(best + place, lanes);
            __m256i token = index ? _mm256_maskload_epi32(index + place, lanes) : _mm256_setzero_si256();
            for (; m < MR && run.document[at[m]] == document; ++m) {
                // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
                const __m256 wins = _mm256_and_ps(_mm256_cmp_ps(column[m], most, _CMP_NLE_UQ),
                                                  _mm256_cmp_ps(most, most, _CMP_ORD_Q));
                most = _mm256_blendv_ps(most, column[m], wins);
                token = _mm256_blendv_epi8(token, _mm256_set1_epi32(run.token[at[m]]), _mm256_castps_si256(wins));
            }
            _mm256_maskstore_ps(best + place, lanes, most);
            if (index) _mm256_maskstore_epi32(index + place, lanes, token);
        }
    }
};

// All similarities of a block of rows.
struct Tile {
    int64_t stride;
    float* out;

    template <int SPLIT, int MR, int NR>
    PEAKSIM_INLINE void take(const __m256 (&acc)[MR][NR], const int64_t (&at)[MR]) const {
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) {
                _mm256_maskstore_ps(out + at[m] * stride + v * kLanes, tokens_of<SPLIT>(), acc[m][v]);
            }
        }
    }
};

// Similarities of MR rows and the panel's tokens.
template <int MR, int NR, int SPLIT>
struct Products {
    __m256 acc[MR][NR];

    PEAKSIM_INLINE void step(const float* const (&from)[MR], int64_t k, const float* tokens) {
        __m256 t[NR];
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) t[v] = _mm256_load_ps(tokens + v * kLanes);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            const __m256 x = repeated<SPLIT>(from[m] + k);
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm256_fmadd_ps(x, t[v], acc[m][v]);
        }
    }

    PEAKSIM_INLINE void run(const float* const (&from)[MR], const float* const (&next)[MR], int64_t dim,
                            const float* tokens) {
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm256_setzero_ps();
        }
        constexpr int64_t kLine = 16;  // floats
        int64_t k = 0;
        while (k + kLine <= dim) {
            PEAKSIM_UNROLL
            for (int m = 0; m < MR; ++m) _mm_prefetch(reinterpret_cast<const char*>(next[m] + k), _MM_HINT_T1);
            for (const int64_t end = k + kLine; k < end; k += SPLIT, tokens += NR * kLanes) step(from, k, tokens);
        }
        for (; k + SPLIT <= dim; k += SPLIT, tokens += NR * kLanes) step(from, k, tokens);
        if (k == dim) return;
        // The last elements alone: what follows them in memory is not the row's, and 0 times it may be NaN.
        float rest[MR][SPLIT] = {};
        const float* padded[MR];
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            for (int64_t e = 0; e < dim - k; ++e) rest[m][e] = from[m][k + e];
            padded[m] = rest[m];
        }
        step(padded, 0, tokens);
    }
};

// What for_rows runs: MR rows against the whole panel.
template <int NR, int SPLIT, class Take>
struct Block {
    const RowRun& rows;
    int64_t dim, ahead;
    const float* panel;
    const Take& taker;

    template <int MR>
    PEAKSIM_INLINE void run(const int64_t (&at)[MR], const int64_t (&next)[MR]) const {
        Products<MR, NR, SPLIT> products;
        const float *from[MR], *later[MR];
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const float*>(rows.rows[at[m]]);
            later[m] = static_cast<const float*>(rows.rows[next[m]]);
        }
        products.run(from, later, dim, panel);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) products.acc[m][v] = settled<SPLIT>(products.acc[m][v]);
        }
        taker.template take<SPLIT>(products.acc, at);
    }
};

// MR * NR sums, NR vectors of tokens and one repeated element fit the 16 registers.
template <class Take>
void for_panel(const RowRun& run, int64_t dim, const Panel& panel, const Take& take) {
    const int64_t ahead = rows_ahead(dim * int64_t(sizeof(float)));
    const float* tokens = static_cast<const float*>(panel.data);
    if (panel.vectors == 2) return for_rows<6>(run, Block<2, 1, Take>{run, dim, ahead, tokens, take});
    switch (panel.split) {
        case 1: return for_rows<12>(run, Block<1, 1, Take>{run, dim, ahead, tokens, take});
        case 2: return for_rows<12>(run, Block<1, 2, Take>{run, dim, ahead, tokens, take});
        case 4: return for_rows<12>(run, Block<1, 4, Take>{run, dim, ahead, tokens, take});
        default: return for_rows<12>(run, Block<1, 8, Take>{run, dim, ahead, tokens, take});
    }
}

void fold(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index) {
    for_panel(run, dim, panel, Fold{run, stride, best, index});
}

void tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    for_panel(run, dim, panel, Tile{stride, out});
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

constexpr MaxSimKernels kKernels = {"avx2", kLanes,  kMaxVectors, kMaxSplit, 1,     false,
                                    fold,   tile,    columns,     column_sums, row_max, row_sum, widen};

}  // namespace

const MaxSimKernels* max_sim_avx2(DType) { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_avx2(DType) { return nullptr; }
}  // namespace peaksim

#endif
