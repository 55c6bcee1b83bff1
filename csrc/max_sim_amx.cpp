// Max-sim for AMX with BF16: sums on tiles, maxima of them with AVX-512.

#include "max_sim_kernels.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_amx_hardware.hpp"
#include "max_sim_avx512_common.hpp"

namespace peaksim {
namespace {

// The instruction takes subnormals for zero: less than 2^-126 of each product is lost.
struct Bfloat16Product {
    static constexpr int64_t kElement = 2;
    using Sum = float;

    template <int C>
    static PEAKSIM_INLINE void run() {
        if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
        if constexpr (C == 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (C == 2) _tile_dpbf16ps(2, 5, 6);
        if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
    }
};

using Tiles = HardwareTiles<Bfloat16Product>;

// Hands sums to what takes blocks of eight rows of vectors.
template <class Taker>
struct FromTiles {
    const Taker& taker;

    template <int VT>
    PEAKSIM_INLINE void take(const float* sums, int64_t first, int64_t n) const {
        constexpr int kRows = 8;
        for (int64_t r = 0; r < n; r += kRows) {
            __m512 acc[kRows][VT];
            int64_t at[kRows];
            PEAKSIM_UNROLL
            for (int m = 0; m < kRows; ++m) {
                const int64_t row = r + m < n ? r + m : n - 1;
                at[m] = first + row;
                for (int v = 0; v < VT; ++v) acc[m][v] = _mm512_load_ps(sums + (row * VT + v) * kLanes);
            }
            taker.template take<1>(acc, at);
        }
    }
};

void amx_fold(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index) {
    const Fold taker{run, stride, best, index};
    tile_panel<Tiles>(run, dim, panel.data, panel.vectors, FromTiles<Fold>{taker});
}

void amx_tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    const Tile taker{stride, out};
    tile_panel<Tiles>(run, dim, panel.data, panel.vectors, FromTiles<Tile>{taker});
}

constexpr MaxSimKernels kKernels = {
    "amx_bf16", kLanes,   kTileMaxVectors, 1,           2,       true,
    amx_fold,   amx_tile, columns,         column_sums, row_max, row_sum, widen};

}  // namespace

const MaxSimKernels* max_sim_amx(DType dtype) { return dtype == DType::bfloat16 ? &kKernels : nullptr; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_amx(DType) { return nullptr; }
}  // namespace peaksim

#endif
