// Max-sim on the CPU: what bindings.cpp calls. The contract stands in engine/reference/max_sim.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// Queries or documents (n, length, dim). Strides count elements, the last axis is dense. Mask and weights are
// dense (n, length), or null for "all kept" and "all one".
struct Tokens {
    const void* data;
    int64_t n;
    int64_t length;
    int64_t batch_stride;
    int64_t token_stride;
    const uint8_t* mask;
    const float* weights;

    const char* row(DType dtype, int64_t i, int64_t u) const {
        return static_cast<const char*>(data) + (i * batch_stride + u * token_stride) * size_of(dtype);
    }
    bool kept(int64_t i, int64_t u) const { return !mask || mask[i * length + u]; }
    float weight(int64_t i, int64_t u) const { return weights ? weights[i * length + u] : 1.0f; }
};

struct MaxSimInputs {
    DType dtype;
    int64_t dim;
    Tokens q;
    Tokens d;
    bool pairs;         // query i meets document i alone; the second axis of results has length 1
    float temperature;  // 0: hard maximum
};

// Dense results (q.n, pairs ? 1 : d.n[, length]); null where one is not wanted. Every element is written.
struct MaxSimOutputs {
    float* scores;
    float* reverse_scores;
    int32_t* argmax;
    float* values;
    int32_t* reverse_argmax;
    float* reverse_values;

    bool reverse() const { return reverse_scores || reverse_argmax || reverse_values; }
};

// One direction of the hard form's backward: gradients of scores and (or null) of values, winners.
struct MaxSimIncoming {
    const float* scores;
    const float* values;
    const int32_t* argmax;
};

// Throws std::invalid_argument for an `isa` that is unknown or not to be had here; "" takes the best.
void max_sim(const MaxSimInputs& in, const MaxSimOutputs& out, const char* isa, int threads);

// Writes grad_q (q.n, q.length, dim) and grad_d (d.n, d.length, dim), dense float32. `reverse.scores` may be
// null. Owner computes: each gradient row is summed by one thread in a fixed order.
void max_sim_backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
                      float* grad_q, float* grad_d, const char* isa, int threads);

}  // namespace peaksim
