// Centroids: sums of sets first, in parallel, then of the sets of a class, in order.

#include "centroid.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.hpp"
#include "vector_kernels.hpp"

namespace peaksim {
namespace {

// Rows that are summed before the sum is added to those of other blocks; also the rows of one task.
constexpr int64_t kBlock = 64;
constexpr float kShortest = 1e-12f;  // see engine/reference/unit.py

struct Block {
    int64_t first, last;  // rows
    int64_t label;        // class
};

int64_t class_of(const CentroidInputs& in, int64_t set) {
    const int64_t label = in.classes ? in.classes[set] : set;
    return label < in.n_classes ? label : -1;
}

// All rows that belong to a class, cut into blocks, classes in order and sets in order within a class.
std::vector<Block> blocks_of(const CentroidInputs& in) {
    std::vector<Block> blocks;
    for (int64_t s = 0; s < in.n_sets; ++s) {
        const int64_t label = class_of(in, s);
        if (label < 0) continue;
        const int64_t begin = std::clamp<int64_t>(in.cu_seqlens[s], 0, in.total);
        const int64_t end = std::clamp<int64_t>(in.cu_seqlens[s + 1], begin, in.total);
        for (int64_t row = begin; row < end; row += kBlock) {
            blocks.push_back({row, std::min(end, row + kBlock), label});
        }
    }
    std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.label < b.label; });
    return blocks;
}

// One worker's memory: a block's rows as float32.
class Rows {
public:
    Rows(const CentroidInputs& in, const VectorKernels& kernels)
        : in_(in), kernels_(kernels), rows_(kBlock), ones_(kBlock, 1.0f) {
        if (in.dtype != DType::float32) values_.resize(static_cast<size_t>(kBlock * in.dim));
    }

    // Sum of the block's rows, written or added.
    void sum(const Block& block, bool add, float* to) {
        const int64_t n = block.last - block.first;
        for (int64_t i = 0; i < n; ++i) {
            const char* row =
                static_cast<const char*>(in_.tokens) + (block.first + i) * in_.stride * size_of(in_.dtype);
            if (in_.dtype == DType::float32) {
                rows_[i] = reinterpret_cast<const float*>(row);
            } else {
                float* value = values_.data() + i * in_.dim;
                kernels_.widen(in_.dtype, row, value, in_.dim);
                rows_[i] = value;
            }
        }
        kernels_.combine(rows_.data(), n, ones_.data(), n, 1, in_.dim, add, to);
    }

private:
    const CentroidInputs& in_;
    const VectorKernels& kernels_;
    std::vector<const float*> rows_;
    std::vector<float> ones_, values_;
};

// Unit mean of a class's blocks [first, last) into `to`; the few sums of blocks are added in float64.
void finish(const CentroidInputs& in, const VectorKernels& kernels, const std::vector<Block>& blocks, int64_t first,
            int64_t last, const float* sums, std::vector<double>& total, float* to, float* length, float* count) {
    std::fill(total.begin(), total.end(), 0.0);
    int64_t n = 0;
    for (int64_t i = first; i < last; ++i) {
        const Block& block = blocks[static_cast<size_t>(i)];
        n += block.last - block.first;
        for (int64_t k = 0; k < in.dim; ++k) total[static_cast<size_t>(k)] += sums[i * in.dim + k];
    }
    *count = static_cast<float>(n);
    for (int64_t k = 0; k < in.dim; ++k) {
        to[k] = static_cast<float>(total[static_cast<size_t>(k)] / static_cast<double>(std::max<int64_t>(n, 1)));
    }
    *length = std::sqrt(kernels.squares(to, 0.0f, in.dim));
    if (*length < kShortest) {
        std::fill_n(to, in.dim, 0.0f);
    } else {
        for (int64_t k = 0; k < in.dim; ++k) to[k] /= *length;
    }
}

}  // namespace

void centroids(const CentroidInputs& in, float* direction, float* length, float* count, const char* isa,
               int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    const std::vector<Block> blocks = blocks_of(in);
    const int64_t n = static_cast<int64_t>(blocks.size()), dim = in.dim;
    threads = useful_threads(2.0 * static_cast<double>(in.total) * static_cast<double>(dim), threads);
    std::vector<Rows> workers;
    for (int i = 0; i < threads; ++i) workers.emplace_back(in, kernels);
    std::vector<float> sums(static_cast<size_t>(n * dim));
    parallel_for(n, threads, [&](int64_t i, int worker) {
        workers[static_cast<size_t>(worker)].sum(blocks[static_cast<size_t>(i)], false, sums.data() + i * dim);
    });
    std::vector<double> total(static_cast<size_t>(dim));
    for (int64_t c = 0, first = 0, last = 0; c < in.n_classes; ++c, first = last) {
        while (last < n && blocks[static_cast<size_t>(last)].label == c) ++last;
        finish(in, kernels, blocks, first, last, sums.data(), total, direction + c * dim, length + c, count + c);
    }
}

void centroids_spread(const CentroidInputs& in, const float* rows, float* tokens, const char* isa, int threads) {
    vector_kernels(isa);  // refuses an unknown name; copying needs no instructions
    const std::vector<Block> blocks = blocks_of(in);
    std::fill_n(tokens, in.total * in.dim, 0.0f);
    threads = useful_threads(static_cast<double>(in.total) * static_cast<double>(in.dim), threads);
    parallel_for(static_cast<int64_t>(blocks.size()), threads, [&](int64_t i, int) {
        const Block& block = blocks[static_cast<size_t>(i)];
        for (int64_t row = block.first; row < block.last; ++row) {
            std::copy_n(rows + block.label * in.dim, in.dim, tokens + row * in.dim);
        }
    });
}

}  // namespace peaksim
