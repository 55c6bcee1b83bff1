// Max-sim on tiles of 16 rows of 64 bytes: documents are the left factor, straight from memory, tokens the right one,
// packed in fours of bytes. `Tiles` is the processor's registers or their emulation, `Take` what becomes of the sums.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
//
// Tiles: product<C, A, B>(): tile C += A * B; load<T>(from, stride), store<T>(to, stride) in bytes; zero<T>();
// fetch(place): will be needed soon; kElement: bytes of an element; Sum: type of a tile's sums.
// Take: take<VT>(sums, first, n): sums[r * 16 * VT + token] of rows [first, first + n) of the run.
#pragma once

#include <cstdint>
#include <cstring>

namespace peaksim {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;
constexpr int kTileTokens = 16;
constexpr int kTileMaxVectors = 2;
// Of the eight registers: four sums, two tiles of rows from kRowTile on, two of tokens from kTokenTile on.
constexpr int kRowTile = 4;
constexpr int kTokenTile = 6;

// 16 rows of the run: loaded from where they lie if they are evenly spaced, else gathered piece by piece.
struct TileRows {
    const char* at[kTileRows];
    int64_t stride;
    bool even;
    alignas(kTileBytes) char piece[kTileRows * kTileBytes];

    // Rows from `first` on; past the run's end the last one repeats.
    template <class Run>
    void set(const Run& run, int64_t first) {
        for (int m = 0; m < kTileRows; ++m) {
            at[m] = static_cast<const char*>(run.rows[first + m < run.n ? first + m : run.n - 1]);
        }
        // As numbers: rows of different arrays have no difference as pointers.
        const auto place = [&](int m) { return reinterpret_cast<intptr_t>(at[m]); };
        stride = place(1) - place(0);
        even = true;
        for (int m = 2; m < kTileRows; ++m) even = even && place(m) - place(m - 1) == stride;
    }

    // Bytes [k, k + n) of each row, n <= 64, the others zero: what follows a row in memory is not the row's.
    template <int T, class Tiles>
    void load(Tiles& tiles, int64_t k, int64_t n) {
        if (even && n == kTileBytes) return tiles.template load<T>(at[0] + k, stride);
        for (int m = 0; m < kTileRows; ++m) {
            char* to = piece + m * kTileBytes;
            if (n == kTileBytes) {
                std::memcpy(to, at[m] + k, kTileBytes);
            } else {
                std::memset(to, 0, kTileBytes);
                std::memcpy(to, at[m] + k, static_cast<size_t>(n));
            }
        }
        tiles.template load<T>(piece, kTileBytes);
    }
};

// One step along the rows: n <= 64 bytes of RT tiles of rows against VT vectors of tokens.
template <int RT, int VT, class Tiles>
inline void tile_step(Tiles& tiles, TileRows (&rows)[2], int64_t k, int64_t n, const char* tokens) {
    alignas(kTileBytes) char last[kTileRows * VT * kTileBytes];
    if (n < kTileBytes) {
        // The panel ends with the last four bytes of its tokens.
        const size_t there = static_cast<size_t>((n + 3) / 4 * VT * kTileBytes);
        std::memcpy(last, tokens, there);
        std::memset(last + there, 0, sizeof last - there);
        tokens = last;
    }
    tiles.template load<kTokenTile>(tokens, VT * kTileBytes);
    if constexpr (VT == 2) tiles.template load<kTokenTile + 1>(tokens + kTileBytes, VT * kTileBytes);
    rows[0].template load<kRowTile>(tiles, k, n);
    tiles.template product<0, kRowTile, kTokenTile>();
    if constexpr (VT == 2) tiles.template product<1, kRowTile, kTokenTile + 1>();
    if constexpr (RT == 2) {
        rows[1].template load<kRowTile + 1>(tiles, k, n);
        tiles.template product<2, kRowTile + 1, kTokenTile>();
        if constexpr (VT == 2) tiles.template product<3, kRowTile + 1, kTokenTile + 1>();
    }
}

template <int RT, int VT, class Tiles>
inline void tile_sums(Tiles& tiles, TileRows (&rows)[2], const char* const* next, int64_t bytes, const char* tokens,
                      typename Tiles::Sum* sums) {
    tiles.template zero<0>();
    if constexpr (VT == 2) tiles.template zero<1>();
    if constexpr (RT == 2) tiles.template zero<2>();
    if constexpr (RT == 2 && VT == 2) tiles.template zero<3>();
    for (int64_t k = 0; k < bytes; k += kTileBytes, tokens += int64_t{kTileRows} * VT * kTileBytes) {
        const int64_t n = bytes - k < kTileBytes ? bytes - k : kTileBytes;
        for (int m = 0; m < RT * kTileRows; ++m) tiles.fetch(next[m] + k);
        tile_step<RT, VT>(tiles, rows, k, n, tokens);
    }
    constexpr int64_t kStride = int64_t{VT} * kTileBytes;
    constexpr int64_t kDown = int64_t{kTileRows} * VT * kTileTokens;  // sums
    tiles.template store<0>(sums, kStride);
    if constexpr (VT == 2) tiles.template store<1>(sums + kTileTokens, kStride);
    if constexpr (RT == 2) tiles.template store<2>(sums + kDown, kStride);
    if constexpr (RT == 2 && VT == 2) tiles.template store<3>(sums + kDown + kTileTokens, kStride);
}

// All rows of the run against one panel. A run has `rows`, `n` and `known` as RowRun does.
template <int VT, class Tiles, class Run, class Take>
void tile_run(Tiles& tiles, const Run& run, int64_t bytes, const char* tokens, const Take& take) {
    TileRows rows[2];
    alignas(kTileBytes) typename Tiles::Sum sums[2 * kTileRows * VT * kTileTokens];
    constexpr int64_t kBlock = 2 * kTileRows;
    for (int64_t first = 0; first < run.n; first += kBlock) {
        const int64_t n = run.n - first < kBlock ? run.n - first : kBlock;
        const char* next[kBlock];
        for (int64_t m = 0; m < kBlock; ++m) {
            const int64_t later = first + kBlock + m < run.known ? first + kBlock + m : run.known - 1;
            next[m] = static_cast<const char*>(run.rows[later]);
        }
        rows[0].set(run, first);
        if (n > kTileRows) {
            rows[1].set(run, first + kTileRows);
            tile_sums<2, VT>(tiles, rows, next, bytes, tokens, sums);
        } else {
            tile_sums<1, VT>(tiles, rows, next, bytes, tokens, sums);
        }
        take.template take<VT>(sums, first, n);
    }
}

// Tokens of `vectors` vectors, one or two.
template <class Tiles, class Run, class Take>
void tile_panel(const Run& run, int64_t dim, const void* panel, int vectors, const Take& take) {
    const char* tokens = static_cast<const char*>(panel);
    const int64_t bytes = dim * Tiles::kElement;
    Tiles tiles;
    if (vectors == 2) {
        tile_run<2>(tiles, run, bytes, tokens, take);
    } else {
        tile_run<1>(tiles, run, bytes, tokens, take);
    }
}

}  // namespace
}  // namespace peaksim
