// Max-sim for AMX with BF16: sums on tiles, maxima of them with AVX-512.

#include "max_sim_kernels.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "max_sim_amx_tiles.hpp"
#include "max_sim_avx512_common.hpp"

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
struct HardwareTiles {
    static constexpr int64_t kElement = 2;

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
    PEAKSIM_INLINE void store(float* to, int64_t stride) {
#define PEAKSIM_STORE(t) _tile_stored(t, to, stride)
        PEAKSIM_FOR_TILE(T, PEAKSIM_STORE);
        __asm__ volatile("" ::: "memory");
    }

    // The instruction takes subnormals for zero: less than 2^-126 of each product is lost.
    template <int C, int A, int B>
    PEAKSIM_INLINE void product() {
        static_assert(A == kRowTile + C / 2 && B == kTokenTile + C % 2, "the four pairs there are");
        if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
        if constexpr (C == 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (C == 2) _tile_dpbf16ps(2, 5, 6);
        if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
    }

    PEAKSIM_INLINE void fetch(const char* place) const { _mm_prefetch(place, _MM_HINT_T1); }
};

// Hands sums to what takes blocks of eight rows of vectors.
template <class Taker>
struct FromTiles {
    const Taker& taker;

    template <int VT>
    PEAKSIM_INLINE void take(const float* sums, int64_t first, int64_t n) const {
        constexpr int kRows = 8;
        for (int64_t r = 0; r < n; r += kRows) {
            __m512 acc[kRows][VT];
            int64_t at[kRows];
            PEAKSIM_UNROLL
            for (int m = 0; m < kRows; ++m) {
                const int64_t row = r + m < n ? r + m : n - 1;
                at[m] = first + row;
                for (int v = 0; v < VT; ++v) acc[m][v] = _mm512_load_ps(sums + (row * VT + v) * kLanes);
            }
            taker.template take<1>(acc, at);
        }
    }
};

void amx_fold(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index) {
    const Fold taker{run, stride, best, index};
    tile_panel<HardwareTiles>(run, dim, panel, FromTiles<Fold>{taker});
}

void amx_tile(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out) {
    const Tile taker{stride, out};
    tile_panel<HardwareTiles>(run, dim, panel, FromTiles<Tile>{taker});
}

constexpr MaxSimKernels kKernels = {
    "amx_bf16", kLanes,   kTileMaxVectors, 1,           2,       kTileBytes / 2, true,
    amx_fold,   amx_tile, columns,         column_sums, row_max, row_sum,        widen, axpy};

}  // namespace

const MaxSimKernels* max_sim_amx(DType dtype) { return dtype == DType::bfloat16 ? &kKernels : nullptr; }

}  // namespace peaksim

#else

namespace peaksim {
const MaxSimKernels* max_sim_amx(DType) { return nullptr; }
}  // namespace peaksim

#endif
