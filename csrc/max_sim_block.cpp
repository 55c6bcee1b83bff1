#include "max_sim_block.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace peaksim {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Panels begin at a cache line, for a vector that spans two is loaded twice.
constexpr uintptr_t kAlignment = 64;

int64_t packed_size(const MaxSimInputs& in, const MaxSimKernels& kernels) {
    return kernels.as_stored ? size_of(in.dtype) : static_cast<int64_t>(sizeof(float));
}

int64_t lane_bytes(const MaxSimInputs& in, const MaxSimKernels& kernels) {
    return round_up(in.dim, kernels.group) * packed_size(in, kernels);
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
    : in_(in), kernels_(kernels) {
    segments_.reserve(static_cast<size_t>(last - first));
    for (int64_t i = first; i < last; ++i) {
        const int64_t begin = static_cast<int64_t>(tokens_.size());
        for (int64_t u = 0; u < in.q.length_of(i); ++u) {
            if (in.q.kept(i, u)) tokens_.push_back(static_cast<int32_t>(u));
        }
        segments_.push_back({i, begin, static_cast<int64_t>(tokens_.size()) - begin});
    }
    plan();
    // Zeros in the unused lanes and in the filled-up last group.
    data_.assign(static_cast<size_t>(size_ + kAlignment), 0);
}

// Full vectors in panels of nearly equal width; a rest of few tokens in panels that give each of them several lanes.
void QueryBlock::plan() {
    const int lanes = kernels_.lanes, smallest = lanes / kernels_.max_split;
    const int64_t count = static_cast<int64_t>(tokens_.size());
    int64_t vectors = count / lanes, rest = count % lanes;
    if (4 * rest > 3 * lanes || (rest > 0 && smallest == lanes)) ++vectors, rest = 0;
    for (int64_t panels = (vectors + kernels_.max_vectors - 1) / kernels_.max_vectors; panels > 0; --panels) {
        const int64_t now = (vectors + panels - 1) / panels;
        add_panel(static_cast<int>(now), 1);
        vectors -= now;
    }
    if (2 * rest > lanes) add_panel(1, 2), rest -= lanes / 2;
    if (rest == 0) return;
    int tokens = smallest;
    while (tokens < rest) tokens *= 2;
    add_panel(1, lanes / tokens);
}

void QueryBlock::add_panel(int vectors, int split) {
    const int64_t tokens = static_cast<int64_t>(vectors) * kernels_.lanes / split;
    places_.push_back({width_, tokens, size_, vectors, split});
    width_ += tokens;
    size_ += tokens * packed_depth(split) * packed_size(in_, kernels_);
}

int64_t QueryBlock::packed_depth(int split) const {
    return round_up(in_.dim, static_cast<int64_t>(kernels_.group) * split);
}

char* QueryBlock::data() const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(data_.data());
    return reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

Panel QueryBlock::panel(int64_t p) const {
    const Place& place = places_[size_t(p)];
    return {data() + place.offset, place.vectors, place.split};
}

void QueryBlock::pack() {
    size_t p = 0;
    for (const Segment& segment : segments_) {
        for (int64_t x = segment.begin; x < segment.begin + segment.count; ++x) {
            while (x >= places_[p].begin + places_[p].tokens) ++p;
            const char* row = in_.q.row(in_.dtype, segment.query, tokens_[size_t(x)]);
            pack_token(places_[p], x - places_[p].begin, row);
        }
    }
}

void QueryBlock::pack_token(const Place& place, int64_t lane, const char* row) const {
    char* panel = data() + place.offset;
    const int64_t group = static_cast<int64_t>(kernels_.group) * place.split;
    for (int64_t k = 0; k < in_.dim; k += group) {
        const int64_t at = k * place.tokens + lane * group, n = std::min(group, in_.dim - k);
        if (kernels_.as_stored) {
            const int64_t element = size_of(in_.dtype);
            std::memcpy(panel + at * element, row + k * element, static_cast<size_t>(n * element));
        } else {
            float* to = reinterpret_cast<float*>(panel) + at;
            for (int64_t e = 0; e < n; ++e) to[e] = as_float(in_.dtype, row, k + e);
        }
    }
}

}  // namespace peaksim
