// The tile registers of a processor with AMX, as max_sim_amx_tiles.hpp wants them. For units with its flags alone.
// The unnamed namespace gives each unit its own copy.
#pragma once

#include <immintrin.h>

#include "inlining.hpp"
#include "max_sim_amx_tiles.hpp"

namespace peaksim {
namespace {

// Names of tiles are part of the instructions.
#define PEAKSIM_FOR_TILE(T, WHAT)     \
    if constexpr (T == 0) WHAT(0);    \
    if constexpr (T == 1) WHAT(1);    \
    if constexpr (T == 2) WHAT(2);    \
    if constexpr (T == 3) WHAT(3);    \
    if constexpr (T == 4) WHAT(4);    \
    if constexpr (T == 5) WHAT(5);    \
    if constexpr (T == 6) WHAT(6);    \
    if constexpr (T == 7) WHAT(7)

// This thread's tile registers, all of 16 rows of 64 bytes, from construction to destruction.
template <class Product>
struct HardwareTiles {
    static constexpr int64_t kElement = Product::kElement;
    using Sum = typename Product::Sum;

    HardwareTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        static_assert(sizeof config == 64, "the format of LDTILECFG");
        // GCC's header says that only the first bytes are read: the others have to be there as well.
        __asm__ volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~HardwareTiles() { _tile_release(); }
    HardwareTiles(const HardwareTiles&) = delete;
    HardwareTiles& operator=(const HardwareTiles&) = delete;

    template <int T>
    PEAKSIM_INLINE void zero() {
#define PEAKSIM_ZERO(t) _tile_zero(t)
        PEAKSIM_FOR_TILE(T, PEAKSIM_ZERO);
    }

    template <int T>
    PEAKSIM_INLINE void load(const void* from, int64_t stride) {
        // GCC does not know that the instruction reads memory: what was written there has to be there.
        __asm__ volatile("" ::: "memory");
#define PEAKSIM_LOAD(t) _tile_loadd(t, from, stride)
        PEAKSIM_FOR_TILE(T, PEAKSIM_LOAD);
    }

    template <int T>
    PEAKSIM_INLINE void store(Sum* to, int64_t stride) {
#define PEAKSIM_STORE(t) _tile_stored(t, to, stride)
        PEAKSIM_FOR_TILE(T, PEAKSIM_STORE);
        __asm__ volatile("" ::: "memory");
    }

    template <int C, int A, int B>
    PEAKSIM_INLINE void product() {
        static_assert(A == kRowTile + C / 2 && B == kTokenTile + C % 2, "the four pairs there are");
        Product::template run<C>();
    }

    PEAKSIM_INLINE void fetch(const char* place) const { _mm_prefetch(place, _MM_HINT_T1); }
};

}  // namespace
}  // namespace peaksim
