// What an instruction set contributes to window attention. A unit that offers one defines its function below.
//
// Units with instruction-set flags must hold no function that another unit could be linked to; see
// max_sim_kernels.hpp.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// Rows are float32, `stride` numbers apart, and filled up with zeros to whole chunks of `lanes` numbers. `cells` are
// the n rows that a window sees; the list goes on to a multiple of `lanes` with rows that may be read. Results of n
// numbers have room for whole lanes.
struct WindowAttentionKernels {
    const char* isa;
    int lanes;
    int max_chunks;  // of one call; longer rows come in parts

    // out[i] (+)= ⟨x, rows[cells[i]]⟩ for i < n.
    void (*dots)(const float* x, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks,
                 bool add, float* out);
    // s[i] = exp(scale · s[i] - max) for i < n; returns the sum. NaN stays NaN.
    float (*exponentials)(float* s, int64_t n, float scale);
    // out = factor · Σ_i weights[i] · rows[cells[i]]
    void (*mix)(const float* weights, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks,
                float factor, float* out);
    // rows[cells[i]] += weights[i] · x
    void (*spread)(const float* weights, const float* x, const int32_t* cells, int64_t n, int chunks, float* rows,
                   int64_t stride);
    void (*widen)(DType dtype, const void* from, float* to, int64_t n);
    void (*narrow)(DType dtype, const float* from, void* to, int64_t n);
};

// Null where the unit was compiled without its instructions.
const WindowAttentionKernels* window_attention_generic();
const WindowAttentionKernels* window_attention_avx2();
const WindowAttentionKernels* window_attention_avx512();

// The best kernels on this processor, or no better than `isa`, a name of max_sim_isas(); throws
// std::invalid_argument.
const WindowAttentionKernels& window_attention_kernels(const char* isa);

}  // namespace peaksim
