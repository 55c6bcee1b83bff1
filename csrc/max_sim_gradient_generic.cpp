// Max-sim's backward in plain C++, four numbers at a time so that the compiler may use what every processor has.

#include "max_sim_gradient_passes.hpp"

namespace peaksim {
namespace {

struct Generic {
    static constexpr int kLanes = 4, kRows = 4, kWide = 2, kLong = 4;
    struct Reg {
        float lane[kLanes];
    };

    template <class F>
    static inline Reg each(F f) {
        Reg r;
        for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
        return r;
    }
    static inline Reg zero() { return set(0.0f); }
    static inline Reg set(float c) {
        return each([=](int) { return c; });
    }
    static inline Reg load(const float* p) {
        return each([=](int i) { return p[i]; });
    }
    static inline void store(float* p, Reg v) {
        for (int i = 0; i < kLanes; ++i) p[i] = v.lane[i];
    }
    static inline Reg add(Reg a, Reg b) {
        return each([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static inline Reg fma(Reg a, Reg b, Reg c) {
        return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
    }
    static inline Reg widen(DType dtype, const void* from, int64_t k) {
        return each([=](int i) { return element(dtype, from, k + i); });
    }
};

constexpr MaxSimGradientKernels kKernels = gradient_table<Generic>("generic");

}  // namespace

const MaxSimGradientKernels* max_sim_gradient_generic(DType) { return &kKernels; }

}  // namespace peaksim
