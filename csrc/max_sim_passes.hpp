// Loops over similarities that every instruction set shares, in plain C++ for its compiler to vectorise.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
#pragma once

#include <cstdint>

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

// Runs Kernel::block<MR, NR> over all rows: full blocks of MR, then of half as many, down to one.
template <class Kernel, int MR, int NR, class Sink>
void for_rows(const void* const* rows, int64_t n, int64_t dim, const void* panel, int64_t done, Sink& sink) {
    for (; done + MR <= n; done += MR) Kernel::template block<MR, NR>(rows + done, dim, panel, done, sink);
    if constexpr (MR > 1) {
        if (done < n) for_rows<Kernel, MR / 2, NR>(rows, n, dim, panel, done, sink);
    }
}

}  // namespace
}  // namespace peaksim
