// What an instruction set contributes to max-sim's backward. A unit that offers one defines the function for it below.
//
// Units with instruction-set flags must hold no function that another unit could be linked to (see
// max_sim_kernels.hpp): what they share stands in max_sim_gradient_passes.hpp, in an unnamed namespace.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

struct MaxSimGradientKernels {
    const char* isa;
    int64_t columns;  // rows are packed in panels of so many columns, the last one filled up with zeros

    // n rows as combine() takes them, at `to`, which has room for packed_floats().
    void (*pack)(DType dtype, const void* const* rows, int64_t n, int64_t dim, float* to);
    // to[m][k] += Σ_r c[m * c_row + r * c_step] · row r [k] for m < count, over the n packed rows in ascending order.
    // Kernels for bfloat16 round c to it.
    void (*combine)(const float* packed, int64_t n, int64_t dim, const float* c, int64_t c_row, int64_t c_step,
                    int64_t count, float* const* to);
    // to[k] += Σ_r c[r] · rows[r][k], in ascending order.
    void (*gather)(DType dtype, const void* const* rows, const float* c, int64_t n, int64_t dim, float* to);

    // s[r * stride + x] becomes c[x] · softmax_r(s / temperature) for x < width, 1 <= n rows. Infinite and NaN
    // similarities give what exp(s - log-sum-exp) gives. `most` and `total` hold width numbers meanwhile.
    void (*softmax_columns)(float* s, int64_t n, int64_t stride, int64_t width, float temperature, const float* c,
                            float* most, float* total);
    // to[x] = c · softmax_x(s / temperature) for x < n, 1 <= n. `to` may be `s`.
    void (*softmax_row)(const float* s, int64_t n, float temperature, float c, float* to);

    // Room for n packed rows, which need not be float32.
    int64_t packed_floats(int64_t n, int64_t dim) const { return n * ((dim + columns - 1) / columns * columns); }
};

// Null where the unit was compiled without its instructions or has nothing for the dtype.
const MaxSimGradientKernels* max_sim_gradient_generic(DType dtype);
const MaxSimGradientKernels* max_sim_gradient_avx2(DType dtype);
const MaxSimGradientKernels* max_sim_gradient_avx512(DType dtype);
const MaxSimGradientKernels* max_sim_gradient_avx512_bf16(DType dtype);

// The best kernels for the dtype on this processor, or no better than `isa`; throws std::invalid_argument.
const MaxSimGradientKernels& max_sim_gradient_kernels(DType dtype, const char* isa);

}  // namespace peaksim
