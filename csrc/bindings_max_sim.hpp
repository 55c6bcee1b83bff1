// Queries and documents from numpy arrays, for the units of bindings of max-sim and its siblings.
#pragma once

#include <algorithm>
#include <string>

#include "bindings.hpp"
#include "max_sim.hpp"

namespace peaksim::arrays {

// Sets n, length and offsets of packed tokens from their boundaries, which ascend from 0 to no more than the total.
inline void pack(Tokens& tokens, const Array& offsets, const char* name) {
    if (offsets.ndim() != 1 || offsets.shape(0) < 1) refuse(name, "given with offsets of shape (n + 1,)");
    tokens.n = offsets.shape(0) - 1;
    tokens.offsets = dense<int64_t>(offsets, "offsets", 'i', {tokens.n + 1}, false);
    bool right = tokens.offsets[0] == 0 && tokens.offsets[tokens.n] <= tokens.total;
    tokens.length = 0;
    for (int64_t i = 0; i < tokens.n; ++i) {
        right = right && tokens.offsets[i] <= tokens.offsets[i + 1];
        tokens.length = std::max(tokens.length, tokens.length_of(i));
    }
    if (!right) refuse(name, "given with offsets that ascend from 0 to no more than their number");
}

// Dense (n, length, dim), or packed (total, dim) with offsets; elements of a kind and a size in bytes.
inline Tokens tokens_of(const Array& array, const char* name, char kind, int64_t size, const MaybeArray& offsets,
                        const MaybeArray& mask, const MaybeArray& weights) {
    const int64_t last = offsets ? 1 : 2;
    const bool type = array.dtype().kind() == kind && array.itemsize() == size;
    if (!type || array.ndim() != last + 1) refuse(name, "an array of the dtype, 3-dimensional or packed");
    // An empty array's strides say nothing.
    const bool packed = array.size() == 0 || array.shape(last) == 1 || array.strides(last) == size;
    if (!packed || array.strides(0) % size != 0 || array.strides(last - 1) % size != 0) {
        refuse(name, "dense in its last axis");
    }
    Tokens tokens{array.data(), array.shape(0), array.shape(last - 1), array.strides(0) / size,
                  array.strides(last - 1) / size, nullptr, nullptr, nullptr, array.shape(0)};
    if (offsets) {
        tokens.mask = dense<uint8_t>(mask, name, 'b', {tokens.total}, false);
        tokens.weights = dense<float>(weights, name, 'f', {tokens.total}, false);
        pack(tokens, *offsets, name);
    } else {
        tokens.mask = dense<uint8_t>(mask, name, 'b', {tokens.n, tokens.length}, false);
        tokens.weights = dense<float>(weights, name, 'f', {tokens.n, tokens.length}, false);
        tokens.total = tokens.n * tokens.length;
    }
    return tokens;
}

inline MaxSimInputs inputs_of(const Array& q, const Array& d, const std::string& dtype_name,
                              const MaybeArray& q_offsets, const MaybeArray& d_offsets, const MaybeArray& q_mask,
                              const MaybeArray& d_mask, const MaybeArray& q_weights, const MaybeArray& d_weights,
                              float temperature, bool pairs) {
    const DType dtype = dtype_of(dtype_name);
    const Tokens left = tokens_of(q, "q", kind_of(dtype), size_of(dtype), q_offsets, q_mask, q_weights);
    const Tokens right = tokens_of(d, "d", kind_of(dtype), size_of(dtype), d_offsets, d_mask, d_weights);
    const int64_t dim = q.shape(q.ndim() - 1);
    if (dim != d.shape(d.ndim() - 1)) refuse("d", "of q's last dimension");
    if (pairs && left.n != right.n) refuse("d", "as many as q in pairs");
    return {dtype, dim, left, right, pairs, temperature};
}

// A result per token of one side: (rows, columns, length), or packed (others, total).
template <class T>
T* per_token(const MaybeArray& array, const char* name, const MaxSimInputs& in, const Tokens& own, int64_t others,
             bool write) {
    const char kind = std::is_integral_v<T> ? 'i' : 'f';
    if (own.offsets) return dense<T>(array, name, kind, {in.pairs ? 1 : others, own.total}, write);
    return dense<T>(array, name, kind, {in.q.n, in.pairs ? 1 : in.d.n, own.length}, write);
}

}  // namespace peaksim::arrays
