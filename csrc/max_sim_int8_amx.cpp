// Max-sim of int8 codes for AMX: products on tiles, exact in int32.

#include "max_sim_int8_kernels.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_amx_hardware.hpp"
#include "max_sim_int8_amx_fold.hpp"

namespace peaksim {
namespace {

// Signed codes of rows, codes + 128 of tokens.
struct CodeProduct {
    static constexpr int64_t kElement = 1;
    using Sum = int32_t;

    template <int C>
    static PEAKSIM_INLINE void run() {
        if constexpr (C == 0) _tile_dpbsud(0, 4, 6);
        if constexpr (C == 1) _tile_dpbsud(1, 4, 7);
        if constexpr (C == 2) _tile_dpbsud(2, 5, 6);
        if constexpr (C == 3) _tile_dpbsud(3, 5, 7);
    }
};

void fold(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel, int32_t first,
          float* best, int32_t* index) {
    fold_codes<HardwareTiles<CodeProduct>>(rows, scales, n, dim, panel.data, panel.vectors, first, best, index);
}

constexpr MaxSimInt8Kernels kKernels = {"amx_int8", kTileTokens, kTileMaxVectors, 4, false, fold, nullptr};

}  // namespace

const MaxSimInt8Kernels* max_sim_int8_amx() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimInt8Kernels* max_sim_int8_amx() { return nullptr; }
}  // namespace peaksim

#endif
