// The operations of VectorKernels for any vector type V: loads, stores and a few sums.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
//
// V has: Reg, kLanes, kRows x kWide registers of sums for `combine`; zero(), set(c), load(p), store(p, v),
// load(p, n) and store(p, v, n) for n < kLanes elements, add, sub, mul, fma(a, b, c) = a b + c, reduce(v),
// widen(dtype, from, k) for kLanes elements.
#pragma once

#include <cstdint>

#include "vector_kernels.hpp"

namespace peaksim {
namespace {

float widen_one(DType dtype, const void* from, int64_t k) {
    if (dtype == DType::float32) return static_cast<const float*>(from)[k];
    const uint16_t bits = static_cast<const uint16_t*>(from)[k];
    return dtype == DType::float16 ? from_float16(bits) : from_bfloat16(bits);
}

template <class V>
void widen(DType dtype, const void* from, float* to, int64_t n) {
    int64_t k = 0;
    for (; k + V::kLanes <= n; k += V::kLanes) V::store(to + k, V::widen(dtype, from, k));
    for (; k < n; ++k) to[k] = widen_one(dtype, from, k);
}

// Sum of term(k) over vectors: eight sums side by side hide the latency of additions.
template <class V, class Term, class Last>
float total(int64_t n, Term term, Last last) {
    constexpr int kSums = 8;
    typename V::Reg sums[kSums];
    for (int i = 0; i < kSums; ++i) sums[i] = V::zero();
    int64_t k = 0;
    for (; k + kSums * V::kLanes <= n; k += kSums * V::kLanes) {
        for (int i = 0; i < kSums; ++i) sums[i] = term(k + i * V::kLanes, sums[i]);
    }
    for (; k + V::kLanes <= n; k += V::kLanes) sums[0] = term(k, sums[0]);
    if (k < n) sums[1] = last(k, n - k, sums[1]);
    for (int width = kSums / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sums[i] = V::add(sums[i], sums[i + width]);
    }
    return V::reduce(sums[0]);
}

template <class V>
float sum(const float* x, int64_t n) {
    using Reg = typename V::Reg;
    return total<V>(
        n, [&](int64_t k, Reg s) { return V::add(s, V::load(x + k)); },
        [&](int64_t k, int64_t left, Reg s) { return V::add(s, V::load(x + k, left)); });
}

template <class V>
float squares(const float* x, float shift, int64_t n) {
    using Reg = typename V::Reg;
    const Reg by = V::set(shift);
    float rest = 0.0f;
    const float most = total<V>(
        n,
        [&](int64_t k, Reg s) {
            const Reg y = V::sub(V::load(x + k), by);
            return V::fma(y, y, s);
        },
        [&](int64_t k, int64_t left, Reg s) {
            // Lanes beyond the end would add the square of the shift.
            for (int64_t i = k; i < k + left; ++i) rest += (x[i] - shift) * (x[i] - shift);
            return s;
        });
    return most + rest;
}

template <class V>
void affine(const float* x, float shift, float scale, const float* gamma, const float* beta, float* to, int64_t n) {
    using Reg = typename V::Reg;
    const Reg by = V::set(shift), times = V::set(scale);
    int64_t k = 0;
    for (; k + V::kLanes <= n; k += V::kLanes) {
        Reg y = V::mul(V::sub(V::load(x + k), by), times);
        if (gamma) y = V::mul(y, V::load(gamma + k));
        if (beta) y = V::add(y, V::load(beta + k));
        V::store(to + k, y);
    }
    for (; k < n; ++k) {
        float y = (x[k] - shift) * scale;
        if (gamma) y *= gamma[k];
        to[k] = beta ? y + beta[k] : y;
    }
}

template <class V, int M, int U>
void dots_of(const float* x, const float* rows, int64_t stride, int64_t n, float* out) {
    using Reg = typename V::Reg;
    Reg sums[M][U];
    for (int m = 0; m < M; ++m) {
        for (int u = 0; u < U; ++u) sums[m][u] = V::zero();
    }
    int64_t k = 0;
    for (; k + U * V::kLanes <= n; k += U * V::kLanes) {
        for (int u = 0; u < U; ++u) {
            const Reg y = V::load(x + k + u * V::kLanes);
            for (int m = 0; m < M; ++m) {
                sums[m][u] = V::fma(y, V::load(rows + m * stride + k + u * V::kLanes), sums[m][u]);
            }
        }
    }
    for (; k < n; k += V::kLanes) {
        const int64_t left = n - k < V::kLanes ? n - k : V::kLanes;
        const Reg y = V::load(x + k, left);
        for (int m = 0; m < M; ++m) sums[m][0] = V::fma(y, V::load(rows + m * stride + k, left), sums[m][0]);
    }
    for (int m = 0; m < M; ++m) {
        for (int u = 1; u < U; ++u) sums[m][0] = V::add(sums[m][0], sums[m][u]);
        out[m] = V::reduce(sums[m][0]);
    }
}

template <class V>
void dots(const float* x, const float* rows, int64_t count, int64_t stride, int64_t n, float* out) {
    int64_t m = 0;
    for (; m + 8 <= count; m += 8) dots_of<V, 8, 1>(x, rows + m * stride, stride, n, out + m);
    for (; m + 2 <= count; m += 2) dots_of<V, 2, 4>(x, rows + m * stride, stride, n, out + m);
    for (; m < count; ++m) dots_of<V, 1, 8>(x, rows + m * stride, stride, n, out + m);
}

// M results, columns [k, k + W · kLanes), or `left` < kLanes columns with W = 1.
template <class V, int M, int W>
void combine_block(const float* const* rows, int64_t n_rows, const float* coefficients, int64_t stride, int64_t n,
                   bool add, float* to, int64_t k, int64_t left) {
    using Reg = typename V::Reg;
    Reg sums[M][W];
    for (int m = 0; m < M; ++m) {
        for (int w = 0; w < W; ++w) {
            const float* old = to + m * n + k + w * V::kLanes;
            sums[m][w] = !add ? V::zero() : left ? V::load(old, left) : V::load(old);
        }
    }
    for (int64_t t = 0; t < n_rows; ++t) {
        Reg x[W];
        for (int w = 0; w < W; ++w) {
            const float* from = rows[t] + k + w * V::kLanes;
            x[w] = left ? V::load(from, left) : V::load(from);
        }
        for (int m = 0; m < M; ++m) {
            const Reg c = V::set(coefficients[m * stride + t]);
            for (int w = 0; w < W; ++w) sums[m][w] = V::fma(c, x[w], sums[m][w]);
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int w = 0; w < W; ++w) {
            float* result = to + m * n + k + w * V::kLanes;
            if (left) {
                V::store(result, sums[m][w], left);
            } else {
                V::store(result, sums[m][w]);
            }
        }
    }
}

template <class V, int M, int W>
void combine_rows(const float* const* rows, int64_t n_rows, const float* coefficients, int64_t stride, int64_t n,
                  bool add, float* to) {
    int64_t k = 0;
    for (; k + W * V::kLanes <= n; k += W * V::kLanes) {
        combine_block<V, M, W>(rows, n_rows, coefficients, stride, n, add, to, k, 0);
    }
    for (; k + V::kLanes <= n; k += V::kLanes) {
        combine_block<V, M, 1>(rows, n_rows, coefficients, stride, n, add, to, k, 0);
    }
    if (k < n) combine_block<V, M, 1>(rows, n_rows, coefficients, stride, n, add, to, k, n - k);
}

template <class V>
void combine(const float* const* rows, int64_t n_rows, const float* coefficients, int64_t stride, int64_t count,
             int64_t n, bool add, float* to) {
    int64_t m = 0;
    for (; m + V::kRows <= count; m += V::kRows) {
        combine_rows<V, V::kRows, V::kWide>(rows, n_rows, coefficients + m * stride, stride, n, add, to + m * n);
    }
    for (; m < count; ++m) {
        combine_rows<V, 1, 4>(rows, n_rows, coefficients + m * stride, stride, n, add, to + m * n);
    }
}

template <class V>
void multiply(const float* x, const float* y, float* to, int64_t n) {
    int64_t k = 0;
    for (; k + V::kLanes <= n; k += V::kLanes) V::store(to + k, V::mul(V::load(x + k), V::load(y + k)));
    for (; k < n; ++k) to[k] = x[k] * y[k];
}

template <class V>
void axpy(float c, const float* x, float* to, int64_t n) {
    const typename V::Reg factor = V::set(c);
    int64_t k = 0;
    for (; k + V::kLanes <= n; k += V::kLanes) {
        V::store(to + k, V::fma(factor, V::load(x + k), V::load(to + k)));
    }
    if (k < n) V::store(to + k, V::fma(factor, V::load(x + k, n - k), V::load(to + k, n - k)), n - k);
}

template <class V>
constexpr VectorKernels table(const char* isa) {
    return {isa, widen<V>, sum<V>, squares<V>, affine<V>, dots<V>, combine<V>, multiply<V>, axpy<V>};
}

}  // namespace
}  // namespace peaksim
