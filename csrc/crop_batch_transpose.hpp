// 16 x 16 bytes turned by SSE2 unpacking: four rounds, each of which interleaves row i with row i + 8.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace peaksim {
namespace {

inline void transpose_16x16(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
    __m128i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
    for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 8; ++i) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        for (int i = 0; i < 8; ++i) {
            a[2 * i] = _mm_unpacklo_epi8(b[i], b[i + 8]);
            a[2 * i + 1] = _mm_unpackhi_epi8(b[i], b[i + 8]);
        }
    }
    for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), a[i]);
}

}  // namespace
}  // namespace peaksim
