// Window attention in plain C++: for processors without a path of their own, and the yardstick of the others.

#include <cmath>
#include <cstring>

#include "window_attention_kernels.hpp"

namespace peaksim {
namespace {

constexpr int kLanes = 8;

void dots(const float* x, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks, bool add,
          float* out) {
    for (int64_t i = 0; i < n; ++i) {
        const float* row = rows + cells[i] * stride;
        float part[kLanes] = {};
        for (int64_t k = 0; k < int64_t{chunks} * kLanes; k += kLanes) {
            for (int u = 0; u < kLanes; ++u) part[u] += x[k + u] * row[k + u];
        }
        float sum = add ? out[i] : 0.0f;
        for (int u = 0; u < kLanes; ++u) sum += part[u];
        out[i] = sum;
    }
}

float exponentials(float* s, int64_t n, float scale) {
    float top = scale * s[0];
    for (int64_t i = 0; i < n; ++i) {
        s[i] *= scale;
        top = s[i] > top ? s[i] : top;
    }
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        s[i] = std::exp(s[i] - top);
        sum += s[i];
    }
    return sum;
}

void mix(const float* weights, const float* rows, int64_t stride, const int32_t* cells, int64_t n, int chunks,
         float factor, float* out) {
    for (int64_t k = 0; k < int64_t{chunks} * kLanes; k += kLanes) {
        float sum[kLanes] = {};
        for (int64_t i = 0; i < n; ++i) {
            const float* row = rows + cells[i] * stride + k;
            for (int u = 0; u < kLanes; ++u) sum[u] += weights[i] * row[u];
        }
        for (int u = 0; u < kLanes; ++u) out[k + u] = factor * sum[u];
    }
}

void spread(const float* weights, const float* x, const int32_t* cells, int64_t n, int chunks, float* rows,
            int64_t stride) {
    for (int64_t i = 0; i < n; ++i) {
        float* row = rows + cells[i] * stride;
        for (int64_t k = 0; k < int64_t{chunks} * kLanes; ++k) row[k] += weights[i] * x[k];
    }
}

void widen(DType dtype, const void* from, float* to, int64_t n) {
    const uint16_t* bits = static_cast<const uint16_t*>(from);
    if (dtype == DType::float32) {
        std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    } else if (dtype == DType::bfloat16) {
        for (int64_t k = 0; k < n; ++k) to[k] = from_bfloat16(bits[k]);
    } else {
        for (int64_t k = 0; k < n; ++k) to[k] = from_float16(bits[k]);
    }
}

void narrow(DType dtype, const float* from, void* to, int64_t n) {
    uint16_t* bits = static_cast<uint16_t*>(to);
    if (dtype == DType::float32) {
        std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    } else if (dtype == DType::bfloat16) {
        for (int64_t k = 0; k < n; ++k) bits[k] = to_bfloat16(from[k]);
    } else {
        for (int64_t k = 0; k < n; ++k) bits[k] = to_float16(from[k]);
    }
}

constexpr WindowAttentionKernels kKernels = {"generic", kLanes, 1 << 20, dots,  exponentials,
                                             mix,       spread, widen,   narrow};

}  // namespace

const WindowAttentionKernels* window_attention_generic() { return &kKernels; }

}  // namespace peaksim
