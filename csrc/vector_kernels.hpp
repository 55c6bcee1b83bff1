// Operations on float32 rows that ops share, one table per instruction set.
//
// Units with instruction-set flags must hold no function that another unit could be linked to (see
// max_sim_kernels.hpp): what they share stands in vector_passes.hpp, in an unnamed namespace.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

struct VectorKernels {
    const char* isa;

    // to = from as float32.
    void (*widen)(DType dtype, const void* from, float* to, int64_t n);

    // Σ x, and Σ (x − shift)².
    float (*sum)(const float* x, int64_t n);
    float (*squares)(const float* x, float shift, int64_t n);

    // to = (x − shift) · scale · gamma + beta; null gamma is ones, null beta zeros. `to` may be `x`.
    void (*affine)(const float* x, float shift, float scale, const float* gamma, const float* beta, float* to,
                   int64_t n);

    // out[m] = ⟨rows + m · stride, x⟩ for m < count.
    void (*dots)(const float* x, const float* rows, int64_t count, int64_t stride, int64_t n, float* out);

    // to[m · n + k] = Σ_t coefficients[m · stride + t] · rows[t][k] for m < count, t < n_rows in ascending order;
    // with `add`, on top of what is there.
    void (*combine)(const float* const* rows, int64_t n_rows, const float* coefficients, int64_t stride,
                    int64_t count, int64_t n, bool add, float* to);

    // to = x · y, and to += c · x.
    void (*multiply)(const float* x, const float* y, float* to, int64_t n);
    void (*axpy)(float c, const float* x, float* to, int64_t n);
};

// The best table that the processor has, or no better than `isa` ("" for no limit).
// Throws std::invalid_argument for a name that is unknown or not to be had here.
const VectorKernels& vector_kernels(const char* isa);

// Null where the compiler had no such instructions.
const VectorKernels* vector_kernels_avx512();
const VectorKernels* vector_kernels_avx2();
const VectorKernels* vector_kernels_generic();

}  // namespace peaksim
