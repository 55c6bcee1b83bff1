// Max-sim of int8 codes with one scale a token: what the bindings call. The contract stands in
// engine/reference/max_sim_int8.py.
#pragma once

#include <cstdint>

#include "max_sim.hpp"

namespace peaksim {

struct MaxSimInt8Inputs {
    int64_t dim;
    Tokens q;  // data are int8_t
    Tokens d;
    const float* q_scales;  // laid out as masks are
    const float* d_scales;
    bool pairs;  // query i meets document i alone; the second axis of results has length 1

    // Where the score of query i and document j lies.
    int64_t cell(int64_t i, int64_t j) const { return pairs ? i : i * d.n + j; }
};

// Writes what is not null of `scores`, `argmax` and `values`; there is no reverse direction.
void max_sim_int8(const MaxSimInt8Inputs& in, const MaxSimOutputs& out, const char* isa, int threads);

// Writes the best k documents of each query: scores and indices (q.n, k).
void max_sim_int8_topk(const MaxSimInt8Inputs& in, int64_t k, float* scores, int64_t* indices, const char* isa,
                       int threads);

}  // namespace peaksim
