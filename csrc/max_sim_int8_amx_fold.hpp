// Maxima of int8 products from tiles of sums, in plain C++ for the unit's compiler to vectorise.
#pragma once

#include "max_sim_amx_tiles.hpp"

namespace peaksim {
namespace {

// Rows of codes: no border between documents, nothing after them to fetch.
struct CodeRun {
    const void* const* rows;
    int64_t n;
    int64_t known;
};

// See MaxSimInt8Kernels::fold; the panel holds code + 128.
struct CodeFold {
    const CodeRun& run;
    const float* scales;
    int64_t dim;
    int32_t ordinal;  // of the run's first row
    float* best;
    int32_t* index;

    template <int VT>
    void take(const int32_t* sums, int64_t first, int64_t n) const {
        constexpr int kWidth = VT * kTileTokens;
        // Copies that the compiler knows nothing else points to.
        float most[kWidth];
        int32_t place[kWidth];
        for (int u = 0; u < kWidth; ++u) most[u] = best[u], place[u] = index ? index[u] : 0;
        for (int64_t r = 0; r < n; ++r) {
            const int8_t* row = static_cast<const int8_t*>(run.rows[first + r]);
            int32_t total = 0;
            for (int64_t k = 0; k < dim; ++k) total += row[k];
            const int32_t excess = 128 * total, at = ordinal + static_cast<int32_t>(first + r);
            const float scale = scales[first + r];
            for (int u = 0; u < kWidth; ++u) {
                const float s = static_cast<float>(sums[r * kWidth + u] - excess) * scale;
                const bool wins = (s > most[u]) | ((s != s) & (most[u] == most[u]));
                most[u] = wins ? s : most[u];
                place[u] = wins ? at : place[u];
            }
        }
        for (int u = 0; u < kWidth; ++u) {
            best[u] = most[u];
            if (index) index[u] = place[u];
        }
    }
};

template <class Tiles>
void fold_codes(const void* const* rows, const float* scales, int64_t n, int64_t dim, const void* panel, int vectors,
                int32_t first, float* best, int32_t* index) {
    const CodeRun run{rows, n, n};
    tile_panel<Tiles>(run, dim, panel, vectors, CodeFold{run, scales, dim, first, best, index});
}

}  // namespace
}  // namespace peaksim
