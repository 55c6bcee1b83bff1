// How the compiler is told to inline and unroll.
#pragma once

// Sums live in registers only if all that touches them ends up in one function, with constant indices: such a function
// is PEAKSIM_INLINE, a loop over sums PEAKSIM_UNROLL.
#if defined(_MSC_VER)
#define PEAKSIM_INLINE __forceinline
#else
#define PEAKSIM_INLINE __attribute__((always_inline)) inline
#endif
#if defined(__clang__)
#define PEAKSIM_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define PEAKSIM_UNROLL _Pragma("GCC unroll 16")
#else
#define PEAKSIM_UNROLL
#endif
