// The element types of token vectors, and their exact conversion to float32 in plain C++.
#pragma once

#include <cstdint>
#include <cstring>

namespace peaksim {

enum class DType { float32, float16, bfloat16 };

static inline int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

static inline float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bfloat16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

static inline float from_float16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t rest = bits & 0x7FFFu;
    if (rest >= 0x7C00u) return float_of_bits(sign | 0x7F800000u | (rest & 0x3FFu) << 13);  // infinities, NaN
    if (rest >= 0x0400u) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;  // subnormal: multiples of 2^-24
    return sign ? -magnitude : magnitude;
}

}  // namespace peaksim
