// PeakPatch's features and corrections on the CPU: what bindings_peak_patch.cpp calls. The contracts stand in
// engine/reference/peak_patch.py and engine/reference/peak_patch_correct.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// Tokens (n, length, width). Strides count elements, the last axis is dense. A batch of single vectors has a token
// stride of 0.
struct Batch {
    DType dtype;
    const void* data;
    int64_t batch_stride;
    int64_t token_stride;

    const char* row(int64_t b, int64_t t) const {
        return static_cast<const char*>(data) + (b * batch_stride + t * token_stride) * size_of(dtype);
    }
};

struct PoolInputs {
    int64_t n, length, width, heads;
    Batch peak, anchor;
    bool anchor_is_single;  // (n, width): the tokens at `end` alone
    const float* keys;      // (heads, width)
    const uint8_t* mask;    // (n, length)
    const int64_t* end;     // (n)
    const float* factors;   // (n, heads, length) or null
    const float* norm_weight;  // (width), null with norm_bias for no norm
    const float* norm_bias;
    float eps;
};

// pooled (n, heads + 3, width): heads, mean, end of peak, end of anchor. attention (n, heads, length) or null.
void peak_patch_pool(const PoolInputs& in, float* pooled, float* attention, const char* isa, int threads);

struct PoolIncoming {
    const float* pooled;            // gradient of pooled
    const float* attention;         // gradient of attention, or null
    const float* attention_weights;  // the attention that forward gave
};

// Gradients: keys (heads, width); peak (n, length, width) and anchor (n, length or 1, width), both or neither null.
// Every element is written. Sums run in an order that the number of threads does not change.
void peak_patch_pool_backward(const PoolInputs& in, const PoolIncoming& grad, float* keys, float* peak,
                              float* anchor, const char* isa, int threads);

// Rows of unit(f + alpha * delta), (n, dim).
void peak_patch_correct(const Batch& f, const Batch& delta, float alpha, int64_t n, int64_t dim, float* out,
                        const char* isa, int threads);

// grad (n, dim) -> gradients of f and delta (n, dim), and of alpha row by row (n).
void peak_patch_correct_backward(const Batch& f, const Batch& delta, float alpha, const float* grad, int64_t n,
                                 int64_t dim, float* grad_f, float* grad_delta, float* grad_alpha, const char* isa,
                                 int threads);

// Each of n images meets its own `count` captions.
struct PairInputs {
    int64_t n, count, dim;
    Batch image;      // one token
    Batch text, low;  // `count` tokens each
};

// sims (n, count, 2) and cross (n, count, dim).
void peak_patch_pairs(const PairInputs& in, float* sims, float* cross, const char* isa, int threads);

// Gradients of sims and cross -> of image (n, dim), text and low (n, count, dim).
void peak_patch_pairs_backward(const PairInputs& in, const float* sims, const float* cross, float* image, float* text,
                               float* low, const char* isa, int threads);

}  // namespace peaksim
