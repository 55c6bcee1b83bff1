#include "max_sim_block.hpp"

#include <algorithm>
#include <cstring>

namespace peaksim {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t lane_bytes(const MaxSimInputs& in, const MaxSimKernels& kernels) {
    const int64_t element = kernels.as_stored ? size_of(in.dtype) : static_cast<int64_t>(sizeof(float));
    return round_up(in.dim, kernels.group) * element;
}

float as_float(DType dtype, const char* row, int64_t k) {
    if (dtype == DType::float32) return reinterpret_cast<const float*>(row)[k];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[k];
    return dtype == DType::float16 ? from_float16(bits) : from_bfloat16(bits);
}

}  // namespace

int64_t QueryBlock::bytes(const MaxSimInputs& in, const MaxSimKernels& kernels, int64_t tokens) {
    return round_up(tokens, kernels.lanes) * lane_bytes(in, kernels);
}

QueryBlock::QueryBlock(const MaxSimInputs& in, const MaxSimKernels& kernels, int64_t first, int64_t last)
    : in_(in), kernels_(kernels), panel_width_(kernels.lanes * kernels.max_vectors) {
    segments_.reserve(static_cast<size_t>(last - first));
    for (int64_t i = first; i < last; ++i) {
        const int64_t begin = static_cast<int64_t>(tokens_.size());
        for (int64_t u = 0; u < in.q.length_of(i); ++u) {
            if (in.q.kept(i, u)) tokens_.push_back(static_cast<int32_t>(u));
        }
        segments_.push_back({i, begin, static_cast<int64_t>(tokens_.size()) - begin});
    }
    width_ = round_up(static_cast<int64_t>(tokens_.size()), kernels.lanes);
    // Zeros in the unused lanes and in the filled-up last group.
    data_.assign(static_cast<size_t>(width_ * lane_bytes(in, kernels)), 0);
}

Panel QueryBlock::panel(int64_t p) const {
    const int64_t begin = panel_begin(p), lanes = std::min(panel_width_, width_ - begin);
    return {data_.data() + begin * lane_bytes(in_, kernels_), static_cast<int>(lanes / kernels_.lanes)};
}

void QueryBlock::pack() {
    for (const Segment& segment : segments_) {
        for (int64_t x = segment.begin; x < segment.begin + segment.count; ++x) {
            const int64_t p = x / panel_width_;
            char* to = data_.data() + panel_begin(p) * lane_bytes(in_, kernels_);
            const int64_t lanes = panel(p).vectors * static_cast<int64_t>(kernels_.lanes);
            pack_token(to, lanes, x - panel_begin(p), in_.q.row(in_.dtype, segment.query, tokens_[size_t(x)]));
        }
    }
}

void QueryBlock::pack_token(char* panel, int64_t panel_lanes, int64_t lane, const char* row) const {
    if (!kernels_.as_stored) {
        float* to = reinterpret_cast<float*>(panel) + lane;
        for (int64_t k = 0; k < in_.dim; ++k) to[k * panel_lanes] = as_float(in_.dtype, row, k);
        return;
    }
    const int64_t element = size_of(in_.dtype), group = kernels_.group;
    for (int64_t k = 0; k < in_.dim; k += group) {
        char* to = panel + (k * panel_lanes + lane * group) * element;
        std::memcpy(to, row + k * element, static_cast<size_t>(std::min(group, in_.dim - k) * element));
    }
}

}  // namespace peaksim
