// Loops over similarities that every instruction set shares, in plain C++ for its compiler to vectorise.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.hpp"

namespace peaksim {
namespace {

// exp(x) for float32 within 2 units in the last place; subnormal results, 0, inf and NaN included. The C
// library's has no vector form here.
inline float exp_of(float x) {
    const float log2e = 1.44269504088896341f, ln2_high = 0.693145751953125f, ln2_low = 1.42860682030941723212e-6f;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    x = x < -105.0f ? -105.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = x * log2e + magic;
    const float n = shifted - magic;
    const float r = (x - n * ln2_high) - n * ln2_low;
    float p = 1.9841270e-4f;
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int32_t whole = static_cast<int32_t>(bits - 0x4B400000u);
    // In two steps, since 2^whole itself may be too small or too great for a normal float.
    const int32_t half = whole >> 1;
    const uint32_t first = static_cast<uint32_t>(half + 127) << 23;
    const uint32_t second = static_cast<uint32_t>(whole - half + 127) << 23;
    return p * float_of_bits(first) * float_of_bits(second);
}

// Whether s wins over best: greater, or the first NaN.
inline bool beats(float s, float best) { return (s > best) | ((s != s) & (best == best)); }

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
