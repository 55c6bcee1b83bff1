// What the AVX-512 units share: panels of up to 64 tokens, running maxima in registers, conversions.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
#pragma once

#include <immintrin.h>

#include "max_sim_kernels.hpp"
#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 16;
constexpr int kMaxVectors = 4;
constexpr int kMaxSplit = 16;
constexpr int kLine = 64;  // bytes of a cache line, and of a vector

// The first `count` lanes.
PEAKSIM_INLINE __mmask16 mask_of(int64_t count) {
    return count >= kLanes ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << count) - 1u);
}

// 4 * SPLIT bytes at `from`, repeated over the vector.
template <int SPLIT>
PEAKSIM_INLINE __m512i repeated(const char* from) {
    if constexpr (SPLIT == 1) {
        int32_t word;
        std::memcpy(&word, from, sizeof word);
        return _mm512_set1_epi32(word);
    } else if constexpr (SPLIT == 2) {
        long long word;
        std::memcpy(&word, from, sizeof word);
        return _mm512_set1_epi64(word);
    } else if constexpr (SPLIT == 4) {
        return _mm512_maskz_broadcast_i32x4(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    } else if constexpr (SPLIT == 8) {
        return _mm512_maskz_broadcast_i64x4(0xFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    } else {
        return _mm512_loadu_si512(from);
    }
}

// The same of the first `count` bytes, zeros in place of the others.
template <int SPLIT>
PEAKSIM_INLINE __m512i repeated_rest(const char* from, int64_t count) {
    const __mmask64 bytes = (__mmask64{1} << count) - 1;
    if constexpr (SPLIT <= 4) {
        const __m128i x = _mm_maskz_loadu_epi8(static_cast<__mmask16>(bytes), from);
        if constexpr (SPLIT == 1) return _mm512_maskz_broadcastd_epi32(0xFFFF, x);
        if constexpr (SPLIT == 2) return _mm512_maskz_broadcastq_epi64(0xFF, x);
        return _mm512_maskz_broadcast_i32x4(0xFFFF, x);
    } else if constexpr (SPLIT == 8) {
        return _mm512_maskz_broadcast_i64x4(0xFF, _mm256_maskz_loadu_epi8(static_cast<__mmask32>(bytes), from));
    } else {
        return _mm512_maskz_loadu_epi8(bytes, from);
    }
}

// Similarities of MR rows and the panel's tokens. Kernel::add(acc, row, tokens) is one instruction's worth.
template <class Kernel, int MR, int NR, int SPLIT>
struct Products {
    static constexpr int kStep = 4 * SPLIT;

    __m512 acc[MR][NR];

    PEAKSIM_INLINE void add(int m, __m512i row, const __m512i (&t)[NR]) {
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) acc[m][v] = Kernel::add(acc[m][v], row, t[v]);
    }

    PEAKSIM_INLINE void step(const char* const (&from)[MR], int64_t k, const char* tokens) {
        __m512i t[NR];
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) t[v] = _mm512_load_si512(tokens + v * kLine);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) add(m, repeated<SPLIT>(from[m] + k), t);
    }

    PEAKSIM_INLINE void run(const char* const (&from)[MR], const char* const (&next)[MR], int64_t bytes,
                            const char* tokens) {
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm512_setzero_ps();
        }
        int64_t k = 0;
        while (k + kLine <= bytes) {
            PEAKSIM_UNROLL
            for (int m = 0; m < MR; ++m) _mm_prefetch(next[m] + k, _MM_HINT_T1);
            for (const int64_t end = k + kLine; k < end; k += kStep, tokens += NR * kLine) step(from, k, tokens);
        }
        for (; k + kStep <= bytes; k += kStep, tokens += NR * kLine) step(from, k, tokens);
        if (k == bytes) return;
        // The last elements alone: what follows them in memory is not the row's, and 0 times it may be NaN.
        __m512i t[NR];
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) t[v] = _mm512_load_si512(tokens + v * kLine);
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) add(m, repeated_rest<SPLIT>(from[m] + k, bytes - k), t);
    }
};

// The sum of each token's lanes, moved to the front of the vector.
template <int SPLIT>
PEAKSIM_INLINE __m512 settled(__m512 x) {
    if constexpr (SPLIT >= 2) x = _mm512_add_ps(x, _mm512_maskz_permute_ps(0xFFFF, x, 0xB1));
    if constexpr (SPLIT >= 4) x = _mm512_add_ps(x, _mm512_maskz_permute_ps(0xFFFF, x, 0x4E));
    if constexpr (SPLIT >= 8) x = _mm512_add_ps(x, _mm512_maskz_shuffle_f32x4(0xFFFF, x, x, 0xB1));
    if constexpr (SPLIT >= 16) x = _mm512_add_ps(x, _mm512_maskz_shuffle_f32x4(0xFFFF, x, x, 0x4E));
    if constexpr (SPLIT > 1) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        x = _mm512_maskz_permutexvar_ps(0xFFFF, _mm512_maskz_mullo_epi32(0xFFFF, lane, _mm512_set1_epi32(SPLIT)), x);
    }
    return x;
}

// Sums of the lanes of up to 16 vectors, each on the lane of its number: halves of pairs change places and are added.
template <int MR>
PEAKSIM_INLINE __m512 sums_of(const __m512 (&acc)[MR][1]) {
    static_assert(MR <= kLanes);
    const __m512 zero = _mm512_setzero_ps();
    __m512 two[8], four[4];
    PEAKSIM_UNROLL
    for (int m = 0; m < 8; ++m) {
        const __m512 a = 2 * m < MR ? acc[2 * m < MR ? 2 * m : 0][0] : zero;
        const __m512 b = 2 * m + 1 < MR ? acc[2 * m + 1 < MR ? 2 * m + 1 : 0][0] : zero;
        two[m] = _mm512_add_ps(_mm512_maskz_unpacklo_ps(0xFFFF, a, b), _mm512_maskz_unpackhi_ps(0xFFFF, a, b));
    }
    PEAKSIM_UNROLL
    for (int m = 0; m < 4; ++m) {
        const __m512d a = _mm512_castps_pd(two[2 * m]), b = _mm512_castps_pd(two[2 * m + 1]);
        four[m] = _mm512_add_ps(_mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, a, b)),
                                _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, a, b)));
    }
    const __m512 low = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xFFFF, four[0], four[1], 0x88),
                                     _mm512_maskz_shuffle_f32x4(0xFFFF, four[0], four[1], 0xDD));
    const __m512 high = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xFFFF, four[2], four[3], 0x88),
                                      _mm512_maskz_shuffle_f32x4(0xFFFF, four[2], four[3], 0xDD));
    return _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xFFFF, low, high, 0x88),
                         _mm512_maskz_shuffle_f32x4(0xFFFF, low, high, 0xDD));
}

// Lanes that hold a token's sum.
template <int SPLIT>
constexpr __mmask16 kTokens = static_cast<__mmask16>((1u << (kLanes / SPLIT)) - 1u);

// Running maxima of a block of rows.
struct Fold {
    const RowRun& run;
    int64_t stride;
    float* best;
    int32_t* index;

    template <int SPLIT, int MR, int NR>
    PEAKSIM_INLINE void take(const __m512 (&acc)[MR][NR], const int64_t (&at)[MR]) const {
        __mmask16 nan = 0;
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; m += 2) {
            const int other = m + 1 < MR ? m + 1 : m;  // two at a time
            for (int v = 0; v < NR; ++v) nan |= _mm512_cmp_ps_mask(acc[m][v], acc[other][v], _CMP_UNORD_Q);
        }
        const int32_t first = run.document[at[0]];
        if (!nan && !index && first == run.document[at[MR - 1]]) return one_document<SPLIT>(acc, first);
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) {
            __m512 column[MR];
            PEAKSIM_UNROLL
            for (int m = 0; m < MR; ++m) column[m] = acc[m][v];
            any_documents(column, at, MR, v, kTokens<SPLIT>);
        }
    }

    // Similarities of MR rows with a single token, a row on each lane.
    template <int MR>
    PEAKSIM_INLINE void take_token(__m512 sums, const int64_t (&at)[MR]) const {
        alignas(kLine) float s[kLanes];
        const int32_t first = run.document[at[0]];
        const __mmask16 rows = mask_of(MR);
        if (!index && first == run.document[at[MR - 1]] && !_mm512_mask_cmp_ps_mask(rows, sums, sums, _CMP_UNORD_Q)) {
            const float most = _mm512_mask_reduce_max_ps(rows, sums);
            float& to = best[first * stride];
            if (beats(most, to)) to = most;
            return;
        }
        _mm512_store_ps(s, sums);
        for (int m = 0; m < MR; ++m) {
            const int64_t place = run.document[at[m]] * stride;
            if (!beats(s[m], best[place])) continue;
            best[place] = s[m];
            if (index) index[place] = run.token[at[m]];
        }
    }

    template <int SPLIT, int MR, int NR>
    PEAKSIM_INLINE void one_document(const __m512 (&acc)[MR][NR], int32_t document) const {
        float* to = best + document * stride;
        PEAKSIM_UNROLL
        for (int v = 0; v < NR; ++v) {
            __m512 most = acc[0][v];
            PEAKSIM_UNROLL
            for (int m = 1; m < MR; ++m) most = _mm512_max_ps(most, acc[m][v]);
            // Of a NaN and a number the instruction takes its second operand: a NaN that is there already stays.
            most = _mm512_max_ps(most, _mm512_maskz_loadu_ps(kTokens<SPLIT>, to + v * kLanes));
            _mm512_mask_storeu_ps(to + v * kLanes, kTokens<SPLIT>, most);
        }
    }

    // Vector v of tokens of `count` rows, whatever is among them and wherever documents end.
    void any_documents(const __m512* column, const int64_t* at, int count, int v, __mmask16 tokens) const {
        for (int m = 0; m < count;) {
            const int32_t document = run.document[at[m]];
            const int64_t place = document * stride + v * kLanes;
            __m512 most = _mm512_maskz_loadu_ps(tokens, best + place);
            __m512i token = index ? _mm512_maskz_loadu_epi32(tokens, index + place) : _mm512_setzero_si512();
            for (; m < count && run.document[at[m]] == document; ++m) {
                // "Not less or equal" holds for greater and for NaN; a NaN that is there already stays.
                const __mmask16 ordered = _mm512_cmp_ps_mask(most, most, _CMP_ORD_Q);
                const __mmask16 wins = _mm512_mask_cmp_ps_mask(ordered, column[m], most, _CMP_NLE_UQ);
                most = _mm512_mask_mov_ps(most, wins, column[m]);
                token = _mm512_mask_set1_epi32(token, wins, run.token[at[m]]);
            }
            _mm512_mask_storeu_ps(best + place, tokens, most);
            if (index) _mm512_mask_storeu_epi32(index + place, tokens, token);
        }
    }
};

// All similarities of a block of rows.
struct Tile {
    int64_t stride;
    float* out;

    template <int SPLIT, int MR, int NR>
    PEAKSIM_INLINE void take(const __m512 (&acc)[MR][NR], const int64_t (&at)[MR]) const {
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) _mm512_mask_storeu_ps(out + at[m] * stride + v * kLanes, kTokens<SPLIT>, acc[m][v]);
        }
    }

    template <int MR>
    PEAKSIM_INLINE void take_token(__m512 sums, const int64_t (&at)[MR]) const {
        alignas(kLine) float s[kLanes];
        _mm512_store_ps(s, sums);
        for (int m = 0; m < MR; ++m) out[at[m] * stride] = s[m];
    }
};

// What for_rows runs: MR rows against the whole panel.
template <class Kernel, int NR, int SPLIT, class Take>
struct Block {
    const RowRun& rows;
    int64_t bytes, ahead;
    const char* tokens;
    const Take& taker;

    template <int MR>
    PEAKSIM_INLINE void run(const int64_t (&at)[MR], const int64_t (&next)[MR]) const {
        Products<Kernel, MR, NR, SPLIT> products;
        const char *from[MR], *ahead[MR];
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const char*>(rows.rows[at[m]]);
            ahead[m] = static_cast<const char*>(rows.rows[next[m]]);
        }
        products.run(from, ahead, bytes, tokens);
        if constexpr (SPLIT == kLanes) {
            taker.take_token(sums_of(products.acc), at);
            return;
        }
        PEAKSIM_UNROLL
        for (int m = 0; m < MR; ++m) {
            PEAKSIM_UNROLL
            for (int v = 0; v < NR; ++v) products.acc[m][v] = settled<SPLIT>(products.acc[m][v]);
        }
        taker.template take<SPLIT>(products.acc, at);
    }
};

// MR * NR sums, NR vectors of tokens and one repeated element fit the 32 registers.
template <class Kernel, class Take>
void for_panel(const RowRun& run, int64_t dim, const Panel& panel, const Take& take) {
    const int64_t bytes = dim * Kernel::kElement, ahead = rows_ahead(bytes);
    const char* tokens = static_cast<const char*>(panel.data);
    if (panel.vectors == 4) return for_rows<6>(run, Block<Kernel, 4, 1, Take>{run, bytes, ahead, tokens, take});
    if (panel.vectors == 3) return for_rows<8>(run, Block<Kernel, 3, 1, Take>{run, bytes, ahead, tokens, take});
    if (panel.vectors == 2) return for_rows<12>(run, Block<Kernel, 2, 1, Take>{run, bytes, ahead, tokens, take});
    switch (panel.split) {
        case 1: return for_rows<12>(run, Block<Kernel, 1, 1, Take>{run, bytes, ahead, tokens, take});
        case 2: return for_rows<12>(run, Block<Kernel, 1, 2, Take>{run, bytes, ahead, tokens, take});
        case 4: return for_rows<12>(run, Block<Kernel, 1, 4, Take>{run, bytes, ahead, tokens, take});
        case 8: return for_rows<12>(run, Block<Kernel, 1, 8, Take>{run, bytes, ahead, tokens, take});
        default: return for_rows<12>(run, Block<Kernel, 1, 16, Take>{run, bytes, ahead, tokens, take});
    }
}

template <class Kernel>
void fold(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index) {
    for_panel<Kernel>(run, dim, panel, Fold{run, stride, best, index});
}

template <class Kernel>
void tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    for_panel<Kernel>(run, dim, panel, Tile{stride, out});
}

// 16 elements from `from + k`, or the first ones of them under `mask`, as float32.
PEAKSIM_INLINE __m512 load(DType dtype, const void* from, int64_t k, __mmask16 mask) {
    if (dtype == DType::float32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + k);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + k);
    // The zeroing forms: GCC 12 warns of its own header for the plain ones.
    if (dtype == DType::float16) return _mm512_maskz_cvtph_ps(mask, bits);
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(mask, _mm512_maskz_cvtepu16_epi32(mask, bits), 16));
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes) {
        const __mmask16 mask = mask_of(n - k);
        _mm512_mask_storeu_ps(to + k, mask, load(dtype, from, k, mask));
    }
}

}  // namespace
}  // namespace peaksim
