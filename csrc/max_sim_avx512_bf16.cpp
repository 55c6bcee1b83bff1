// Max-sim for AVX-512 with BF16: products of bfloat16 pairs, document rows read as they are stored.

#include "max_sim_kernels.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_avx512_common.hpp"

namespace peaksim {
namespace {

struct Avx512Bf16 {
    template <int MR, int NR>
    static inline void step(__m512 (&acc)[MR][NR], const __m512bh (&t)[NR], int m, uint32_t pair) {
        // The instruction takes subnormal bfloat16 for zero: less than 2^-126 of each product is lost.
        const __m512i both = _mm512_set1_epi32(static_cast<int32_t>(pair));
        __m512bh x;
        std::memcpy(&x, &both, sizeof x);
        for (int v = 0; v < NR; ++v) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], x, t[v]);
    }

    template <int NR>
    static inline void load_tokens(__m512bh (&t)[NR], const uint16_t* tokens) {
        for (int v = 0; v < NR; ++v) std::memcpy(&t[v], tokens + v * 2 * kLanes, sizeof t[v]);
    }

    template <int MR, int NR, class Sink>
    static inline void block(const void* const* rows, int64_t dim, const void* panel, int64_t row, Sink& sink) {
        __m512 acc[MR][NR];
        const uint16_t* from[MR];
        for (int m = 0; m < MR; ++m) {
            from[m] = static_cast<const uint16_t*>(rows[m]);
            for (int v = 0; v < NR; ++v) acc[m][v] = _mm512_setzero_ps();
        }
        const uint16_t* tokens = static_cast<const uint16_t*>(panel);
        __m512bh t[NR];
        int64_t k = 0;
        for (; k + 2 <= dim; k += 2, tokens += NR * 2 * kLanes) {
            load_tokens<NR>(t, tokens);
            for (int m = 0; m < MR; ++m) {
                uint32_t pair;
                std::memcpy(&pair, from[m] + k, sizeof pair);
                step<MR, NR>(acc, t, m, pair);
            }
        }
        if (k < dim) {
            // The last element alone: what follows it in memory is not the row's, and 0 times it may be NaN.
            load_tokens<NR>(t, tokens);
            for (int m = 0; m < MR; ++m) step<MR, NR>(acc, t, m, from[m][k]);
        }
        for (int m = 0; m < MR; ++m) {
            for (int v = 0; v < NR; ++v) sink(acc[m][v], row + m, v * kLanes);
        }
    }
};

constexpr MaxSimKernels kKernels = {
    "avx512_bf16", kLanes,      kMaxVectors, 2,       true,  fold<Avx512Bf16>, tile<Avx512Bf16>,
    columns,       column_sums, row_max,     row_sum, widen, axpy};

}  // namespace

const MaxSimKernels* max_sim_avx512_bf16(DType dtype) { return dtype == DType::bfloat16 ? &kKernels : nullptr; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_avx512_bf16(DType) { return nullptr; }
}  // namespace peaksim

#endif
