// Centroids of classes of ragged token sets on the CPU: what bindings_centroid.cpp calls. The contract stands in
// engine/reference/centroid.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

struct CentroidInputs {
    DType dtype;
    const void* tokens;  // (total, dim), dense in the last axis
    int64_t total, dim, stride;
    const int64_t* cu_seqlens;  // (n_sets + 1)
    const int64_t* classes;     // (n_sets), or null: every set is its own class
    int64_t n_sets, n_classes;
};

// direction (n_classes, dim): unit centroids; length, count (n_classes): of the mean, and of its tokens.
// Rows that cu_seqlens names beyond `total` are not read. Sums run in an order that threads do not change.
void centroids(const CentroidInputs& in, float* direction, float* length, float* count, const char* isa,
               int threads);

// rows (n_classes, dim) -> tokens (total, dim): every token gets the row of its class, 0 without one.
void centroids_spread(const CentroidInputs& in, const float* rows, float* tokens, const char* isa, int threads);

}  // namespace peaksim
