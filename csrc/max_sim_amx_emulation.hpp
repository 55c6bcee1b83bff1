// Tile registers in plain C++, operation by operation as the AMX instructions are defined (Intel's architecture
// reference: TDPBF16PS, TDPBSUD): packing, borders and masks of the AMX path tested on any processor. Slow, never chosen.
#pragma once

#include <cmath>

#include "dtype.hpp"
#include "max_sim_amx_tiles.hpp"

namespace peaksim {
namespace {

constexpr int kRegisters = 8;

// Product::run(c, a, b): 16 x 16 sums at c, grown by the products of tiles at a and b.
template <class Product>
struct EmulatedTiles {
    static constexpr int64_t kElement = Product::kElement;
    using Sum = typename Product::Sum;

    alignas(kTileBytes) char tiles[kRegisters][kTileRows * kTileBytes];

    template <int T>
    void zero() {
        std::memset(tiles[T], 0, sizeof tiles[T]);
    }

    template <int T>
    void load(const char* from, int64_t stride) {
        for (int r = 0; r < kTileRows; ++r) std::memcpy(tiles[T] + r * kTileBytes, from + r * stride, kTileBytes);
    }

    template <int T>
    void store(Sum* to, int64_t stride) {
        char* bytes = reinterpret_cast<char*>(to);
        for (int r = 0; r < kTileRows; ++r) std::memcpy(bytes + r * stride, tiles[T] + r * kTileBytes, kTileBytes);
    }

    template <int C, int A, int B>
    void product() {
        for (int m = 0; m < kTileRows; ++m) {
            for (int n = 0; n < kTileTokens; ++n) {
                char* place = tiles[C] + m * kTileBytes + n * 4;
                Sum sum;
                std::memcpy(&sum, place, sizeof sum);
                sum = Product::run(sum, tiles[A] + m * kTileBytes, tiles[B] + n * 4);
                std::memcpy(place, &sum, sizeof sum);
            }
        }
    }

    void fetch(const char*) const {}
};

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// Sums of even and of odd places apart, then both to what there is; subnormals are zeros.
struct EmulatedBfloat16 {
    static constexpr int64_t kElement = 2;
    using Sum = float;

    static float element(const char* from) {
        uint16_t bits;
        std::memcpy(&bits, from, sizeof bits);
        return flushed(from_bfloat16(bits));
    }

    // A row, and a column of fours of bytes below each other.
    static float run(float sum, const char* row, const char* column) {
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < kTileBytes / 4; ++k) {
            for (int odd = 0; odd < 2; ++odd) {
                // The product of two bfloat16 is exact.
                const float x = element(row + k * 4 + odd * 2) * element(column + k * kTileBytes + odd * 2);
                sums[odd] = flushed(sums[odd] + x);
            }
        }
        return flushed(flushed(sum) + flushed(sums[0] + sums[1]));
    }
};

// Signed codes of a row, unsigned ones of tokens; exact.
struct EmulatedCodes {
    static constexpr int64_t kElement = 1;
    using Sum = int32_t;

    static int32_t run(int32_t sum, const char* row, const char* column) {
        for (int k = 0; k < kTileBytes; ++k) {
            const char token = column[k / 4 * kTileBytes + k % 4];
            sum += static_cast<int8_t>(row[k]) * static_cast<uint8_t>(token);
        }
        return sum;
    }
};

}  // namespace
}  // namespace peaksim
