#include "cpu_features.hpp"

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace peaksim {
namespace {

struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
#if defined(_MSC_VER)
    int r[4];
    __cpuidex(r, static_cast<int>(leaf), static_cast<int>(subleaf));
    return {uint32_t(r[0]), uint32_t(r[1]), uint32_t(r[2]), uint32_t(r[3])};
#else
    Registers r{0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
#endif
}

// Register states that the operating system saves on a task switch.
uint64_t saved_states() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
#endif
}

bool bit(uint32_t word, int n) { return (word >> n) & 1u; }

// Tile registers are 8 KiB of state a thread: Linux saves them for those processes alone that have asked.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

CpuFeatures detect() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
    if (!bit(one.c, 27)) return {};  // no XGETBV: no vector state beyond SSE
    const uint64_t states = saved_states();
    const bool ymm = (states & 0x6) == 0x6, zmm = ymm && (states & 0xE0) == 0xE0;
    CpuFeatures f{};
    f.avx2 = ymm && bit(seven.b, 5) && bit(one.c, 12) && bit(one.c, 29);
    f.avx512 = f.avx2 && zmm && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);
    f.avx512_vnni = f.avx512 && bit(seven.c, 11);
    f.avx512_bf16 = f.avx512 && bit(seven_one.a, 5);
    const bool tiles = f.avx512 && (states & 0x60000) == 0x60000 && bit(seven.d, 24);
    if (tiles && (bit(seven.d, 22) || bit(seven.d, 25)) && may_use_tiles()) {
        f.amx_bf16 = bit(seven.d, 22);
        f.amx_int8 = bit(seven.d, 25);
    }
    return f;
}

}  // namespace
#else
namespace peaksim {
namespace {
CpuFeatures detect() { return {}; }
}  // namespace
#endif

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

}  // namespace peaksim
