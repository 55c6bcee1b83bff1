// Max-sim on emulated AMX tiles, bfloat16: for tests.

#include "max_sim_amx_emulation.hpp"
#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

struct PlainFold {
    const RowRun& run;
    int64_t stride;
    float* best;
    int32_t* index;

    template <int VT>
    void take(const float* sums, int64_t first, int64_t n) const {
        for (int64_t r = 0; r < n; ++r) {
            const int64_t place = run.document[first + r] * stride;
            columns(sums + r * VT * kTileTokens, 1, 0, VT * kTileTokens, run.token[first + r], best + place,
                    index ? index + place : nullptr);
        }
    }
};

struct PlainTile {
    int64_t stride;
    float* out;

    template <int VT>
    void take(const float* sums, int64_t first, int64_t n) const {
        constexpr int kWidth = VT * kTileTokens;
        for (int64_t r = 0; r < n; ++r) std::memcpy(out + (first + r) * stride, sums + r * kWidth, kWidth * 4);
    }
};

void fold(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index) {
    tile_panel<EmulatedTiles<EmulatedBfloat16>>(run, dim, panel.data, panel.vectors, PlainFold{run, stride, best, index});
}

void tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    tile_panel<EmulatedTiles<EmulatedBfloat16>>(run, dim, panel.data, panel.vectors, PlainTile{stride, out});
}

MaxSimKernels on_tiles(MaxSimKernels kernels) {
    kernels.isa = "amx_emulated";
    kernels.lanes = kTileTokens;
    kernels.max_vectors = kTileMaxVectors;
    kernels.group = 2;
    kernels.as_stored = true;
    kernels.fold = fold;
    kernels.tile = tile;
    kernels.columns = columns;
    kernels.column_sums = column_sums;
    kernels.row_max = row_max;
    kernels.row_sum = row_sum;
    return kernels;
}

}  // namespace

const MaxSimKernels* max_sim_amx_emulated(DType dtype) {
    static const MaxSimKernels kernels = on_tiles(*max_sim_generic(DType::bfloat16));
    return dtype == DType::bfloat16 ? &kernels : nullptr;
}

}  // namespace peaksim
