// Loops over similarities that every instruction set shares, in plain C++ for its compiler to vectorise.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
#pragma once

#include <cstdint>

#include "inlining.hpp"
#include "max_sim_kernels.hpp"
#include "similarity.hpp"

namespace peaksim {
namespace {

void columns(const float* s, int64_t n, int64_t stride, int64_t width, int32_t first, float* __restrict best,
             int32_t* __restrict index) {
    for (int64_t r = 0; r < n; ++r) {
        const float* row = s + r * stride;
        const int32_t ordinal = first + static_cast<int32_t>(r);
        if (index) {
            for (int64_t u = 0; u < width; ++u) {
                const bool wins = beats(row[u], best[u]);
                index[u] = wins ? ordinal : index[u];
                best[u] = wins ? row[u] : best[u];
            }
        } else {
            for (int64_t u = 0; u < width; ++u) best[u] = beats(row[u], best[u]) ? row[u] : best[u];
        }
    }
}

void column_sums(const float* s, int64_t n, int64_t stride, int64_t width, const float* shift, float temperature,
                 float* __restrict total) {
    const float inverse = 1.0f / temperature;
    for (int64_t r = 0; r < n; ++r) {
        const float* row = s + r * stride;
        for (int64_t u = 0; u < width; ++u) total[u] += exp_of((row[u] - shift[u]) * inverse);
    }
}

float row_max(const float* s, int64_t n, int32_t* place) {
    float best = s[0];
    int32_t where = 0;
    for (int64_t u = 1; u < n; ++u) {
        if (beats(s[u], best)) {
            best = s[u];
            where = static_cast<int32_t>(u);
        }
    }
    *place = where;
    return best;
}

float row_sum(const float* s, int64_t n, float shift, float temperature) {
    const float inverse = 1.0f / temperature;
    float total = 0.0f;
    for (int64_t u = 0; u < n; ++u) total += exp_of((s[u] - shift) * inverse);
    return total;
}

// How many rows of so many bytes a fetch from memory should be ahead: a block of them at least.
inline int64_t rows_ahead(int64_t bytes) {
    constexpr int64_t kAhead = 12 << 10;
    const int64_t rows = kAhead / (bytes + 1);
    return rows > 12 ? rows : 12;
}

// Blocks of MR rows one after the other, what is left in blocks of half or a quarter as many. Where fewer rows are left
// than a block has, its last row repeats the run's last: maxima do not change by it, and a tile's row is written twice.
// Block::run<MR>(at, next): indices of its rows, and of the rows to fetch ahead, block.ahead further on.
template <int MR, class Block>
void for_rows(const RowRun& run, const Block& block, int64_t done = 0) {
    int64_t at[MR], next[MR];
    for (; done + MR <= run.n; done += MR) {
        const int64_t later = done + block.ahead + MR <= run.known ? done + block.ahead : run.known - MR;
        for (int m = 0; m < MR; ++m) at[m] = done + m, next[m] = later + m;
        block.template run<MR>(at, next);
    }
    if (done == run.n) return;
    if constexpr (MR > 3) {
        if (run.n - done <= MR / 2) return for_rows<MR / 2>(run, block, done);
    }
    for (int m = 0; m < MR; ++m) at[m] = next[m] = done + m < run.n ? done + m : run.n - 1;
    block.template run<MR>(at, next);
}

}  // namespace
}  // namespace peaksim
