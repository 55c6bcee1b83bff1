// Window attention on the CPU: what its bindings call. The contract stands in engine/reference/window_attention.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// A view (batch, rows, heads, dim) of elements; strides count elements, the last axis is dense. Null data: absent.
struct HeadRows {
    const void* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;

    const void* row(DType dtype, int64_t b, int64_t r, int64_t h) const {
        const int64_t offset = b * batch_stride + r * row_stride + h * head_stride;
        return static_cast<const char*>(data) + offset * size_of(dtype);
    }
};

struct WindowAttentionInputs {
    DType dtype;
    int64_t batch;
    int64_t windows;
    int64_t heads;
    int64_t dim;
    int64_t grid_rows;
    int64_t grid_columns;
    HeadRows q;      // (batch, windows, heads, dim)
    HeadRows k;      // (batch, cells, heads, dim)
    HeadRows v;
    HeadRows own_k;  // (batch, windows, heads, dim), both or neither
    HeadRows own_v;
    const int32_t* boxes;      // x0, y0, x1, y1 of each window, half-open, clipped to the grid here
    int64_t boxes_batch_stride;  // 0 where all images share their windows
    float scale;

    int64_t cells() const { return grid_rows * grid_columns; }
};

// Dense float32 (batch, windows or cells, heads, dim); own_k and own_v null where the inputs have none.
struct WindowAttentionGradients {
    float* q;
    float* k;
    float* v;
    float* own_k;
    float* own_v;
};

// Writes `out`, dense (batch, windows, heads, dim) of the inputs' dtype. Throws std::invalid_argument for an `isa`
// that is unknown or not to be had here; "" takes the best.
void window_attention(const WindowAttentionInputs& in, void* out, const char* isa, int threads);

// Gradients of all inputs for `grad`, the gradient of `out`, a view like q. Owner computes: each gradient row is
// summed by one thread in a fixed order.
void window_attention_backward(const WindowAttentionInputs& in, const HeadRows& grad,
                               const WindowAttentionGradients& to, const char* isa, int threads);

}  // namespace peaksim
