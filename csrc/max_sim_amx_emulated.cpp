// Max-sim on tiles in plain C++, operation by operation as the AMX instructions are defined (Intel's architecture
// reference, TDPBF16PS): packing, borders and masks of the AMX path tested on any processor. Slow, never chosen.

#include <cmath>

#include "max_sim_amx_tiles.hpp"
#include "max_sim_passes.hpp"

namespace peaksim {
namespace {

constexpr int kRegisters = 8;

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

struct EmulatedTiles {
    static constexpr int64_t kElement = 2;

    char tiles[kRegisters][kTileRows * kTileBytes];

    template <int T>
    void zero() {
        std::memset(tiles[T], 0, sizeof tiles[T]);
    }

    template <int T>
    void load(const char* from, int64_t stride) {
        for (int r = 0; r < kTileRows; ++r) std::memcpy(tiles[T] + r * kTileBytes, from + r * stride, kTileBytes);
    }

    template <int T>
    void store(float* to, int64_t stride) {
        char* bytes = reinterpret_cast<char*>(to);
        for (int r = 0; r < kTileRows; ++r) std::memcpy(bytes + r * stride, tiles[T] + r * kTileBytes, kTileBytes);
    }

    static float element(const char* tile, int row, int place) {
        uint16_t bits;
        std::memcpy(&bits, tile + row * kTileBytes + place * 2, sizeof bits);
        return flushed(from_bfloat16(bits));
    }

    // Sums of even and of odd places apart, then both to what the tile holds.
    template <int C, int A, int B>
    void product() {
        for (int m = 0; m < kTileRows; ++m) {
            for (int n = 0; n < kTileTokens; ++n) {
                float sums[2] = {0.0f, 0.0f};
                for (int k = 0; k < kTileBytes / 4; ++k) {
                    for (int odd = 0; odd < 2; ++odd) {
                        // The product of two bfloat16 is exact.
                        const float x = element(tiles[A], m, 2 * k + odd) * element(tiles[B], k, 2 * n + odd);
                        sums[odd] = flushed(sums[odd] + x);
                    }
                }
                char* place = tiles[C] + m * kTileBytes + n * 4;
                float sum;
                std::memcpy(&sum, place, sizeof sum);
                sum = flushed(flushed(sum) + flushed(sums[0] + sums[1]));
                std::memcpy(place, &sum, sizeof sum);
            }
        }
    }

    void fetch(const char*) const {}
};

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
    tile_panel<EmulatedTiles>(run, dim, panel, PlainFold{run, stride, best, index});
}

void tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    tile_panel<EmulatedTiles>(run, dim, panel, PlainTile{stride, out});
}

MaxSimKernels on_tiles(MaxSimKernels kernels) {
    kernels.isa = "amx_emulated";
    kernels.lanes = kTileTokens;
    kernels.max_vectors = kTileMaxVectors;
    kernels.group = 2;
    kernels.depth = kTileBytes / 2;
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
