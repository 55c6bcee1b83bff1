// What loops over similarities are made of: the exponential, and the order of the contract.
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

}  // namespace
}  // namespace peaksim
