// Max-sim of int8 codes on emulated AMX tiles: for tests.

#include "max_sim_amx_emulation.hpp"
#include "max_sim_int8_amx_fold.hpp"
#include "max_sim_int8_kernels.hpp"

namespace peaksim {
namespace {

void fold(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel, int32_t first,
          float* best, int32_t* index) {
    fold_codes<EmulatedTiles<EmulatedCodes>>(rows, scales, n, dim, panel.data, panel.vectors, first, best, index);
}

constexpr MaxSimInt8Kernels kKernels = {"amx_emulated", kTileTokens, kTileMaxVectors, 4, false, fold, nullptr};

}  // namespace

const MaxSimInt8Kernels* max_sim_int8_amx_emulated() { return &kKernels; }

}  // namespace peaksim
