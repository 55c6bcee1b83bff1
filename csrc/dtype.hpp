// The element types of token vectors, and their conversion from (exact) and to (to nearest, ties to even) float32.
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

static inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of_float(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;  // rounding could carry a NaN over to infinity
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static inline uint16_t to_float16(float x) {
    const uint32_t bits = bits_of_float(x);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return sign | 0x7E00u;
    if (rest >= 0x477FF000u) return sign | 0x7C00u;  // from halfway to the next beyond 65504: infinite
    if (rest < 0x38800000u) {                        // subnormal: the addition rounds to multiples of 2^-24
        const float shifted = float_of_bits(rest) + 0.5f;
        return sign | static_cast<uint16_t>(bits_of_float(shifted) - 0x3F000000u);
    }
    return sign | static_cast<uint16_t>((rest + 0xFFFu + ((rest >> 13) & 1u) - (112u << 23)) >> 13);
}

}  // namespace peaksim
