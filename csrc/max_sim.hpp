// Max-sim on the CPU: what bindings.cpp calls. The contract stands in engine/reference/max_sim.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// Queries or documents. Strides count elements, the last axis is dense.
// Dense: (n, length, dim); mask and weights are dense (n, length), or null for "all kept" and "all one".
// Packed: with `offsets` (n + 1), ascending from 0 to no more than `total`, item i is the rows from offsets[i] to
// offsets[i + 1] of (total, dim); mask and weights are (total); `length` is that of the longest item.
struct Tokens {
    const void* data;
    int64_t n;
    int64_t length;
    int64_t batch_stride;  // of dense items
    int64_t token_stride;
    const uint8_t* mask;
    const float* weights;
    const int64_t* offsets;
    int64_t total;  // rows of all items

    int64_t length_of(int64_t i) const { return offsets ? offsets[i + 1] - offsets[i] : length; }
    // Row of the item's first token among all rows.
    int64_t first(int64_t i) const { return offsets ? offsets[i] : i * length; }
    // Elements before token u of item i.
    int64_t place(int64_t i, int64_t u) const {
        return (offsets ? offsets[i] * token_stride : i * batch_stride) + u * token_stride;
    }
    const char* row(DType dtype, int64_t i, int64_t u) const {
        return static_cast<const char*>(data) + place(i, u) * size_of(dtype);
    }
    bool kept(int64_t i, int64_t u) const { return !mask || mask[first(i) + u]; }
    float weight(int64_t i, int64_t u) const { return weights ? weights[first(i) + u] : 1.0f; }
};

struct MaxSimInputs {
    DType dtype;
    int64_t dim;
    Tokens q;
    Tokens d;
    bool pairs;         // query i meets document i alone; the second axis of results has length 1
    float temperature;  // 0: hard maximum

    // Where the score of query i and document j lies, and where the results of their tokens begin.
    int64_t cell(int64_t i, int64_t j) const { return pairs ? i : i * d.n + j; }
    int64_t q_cell(int64_t i, int64_t j) const {
        return q.offsets ? (pairs ? 0 : j * q.total) + q.offsets[i] : cell(i, j) * q.length;
    }
    int64_t d_cell(int64_t i, int64_t j) const {
        return d.offsets ? (pairs ? 0 : i * d.total) + d.offsets[j] : cell(i, j) * d.length;
    }
};

// Dense results (q.n, pairs ? 1 : d.n[, length]); null where one is not wanted. Every element is written.
// Those of packed queries' tokens are (pairs ? 1 : d.n, q.total), those of packed documents' tokens
// (pairs ? 1 : q.n, d.total); what belongs to no item is not written.
struct MaxSimOutputs {
    float* scores;
    float* reverse_scores;
    int32_t* argmax;
    float* values;
    int32_t* reverse_argmax;
    float* reverse_values;

    bool reverse() const { return reverse_scores || reverse_argmax || reverse_values; }
};

// One direction of the backward: gradients of scores and (or null) of values; winners in the hard form.
struct MaxSimIncoming {
    const float* scores;
    const float* values;
    const void* argmax;
    int64_t argmax_size;  // bytes of an index: 1, 2 or 4, signed

    int64_t winner(int64_t at) const {
        if (argmax_size == 1) return static_cast<const int8_t*>(argmax)[at];
        if (argmax_size == 2) return static_cast<const int16_t*>(argmax)[at];
        return static_cast<const int32_t*>(argmax)[at];
    }
};

// Throws std::invalid_argument for an `isa` that is unknown or not to be had here; "" takes the best.
void max_sim(const MaxSimInputs& in, const MaxSimOutputs& out, const char* isa, int threads);

// Writes grad_q (q.n, q.length, dim) and grad_d (d.n, d.length, dim), or (total, dim), dense float32. `reverse.scores`
// may be null. Owner computes: each gradient row is summed by one thread in a fixed order.
void max_sim_backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
                      float* grad_q, float* grad_d, const char* isa, int threads);

// The same for the soft form, without winners; either direction's scores may be null.
void max_sim_soft_backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
                           float* grad_q, float* grad_d, const char* isa, int threads);

}  // namespace peaksim
