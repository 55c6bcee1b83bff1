// Centroids: float32 sums of blocks of rows, float64 sums of the blocks of a class, one worker to a range of columns.

#include "centroid.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.hpp"
#include "vector_kernels.hpp"

namespace peaksim {
namespace {

// Rows that are summed before the sum is added to those of other blocks.
constexpr int64_t kBlock = 64;
// Columns of one worker at least: whole cache lines, and enough of them for a stream.
constexpr int64_t kNarrowest = 64;
constexpr float kShortest = 1e-12f;  // see engine/reference/unit.py

struct Block {
    int64_t first, last;  // rows
    int64_t label;        // class
};

int64_t class_of(const CentroidInputs& in, int64_t set) {
    const int64_t label = in.classes ? in.classes[set] : set;
    return label >= 0 && label < in.n_classes ? label : -1;
}

void cut(int64_t begin, int64_t end, int64_t label, std::vector<Block>& blocks) {
    for (int64_t row = begin; row < end; row += kBlock) blocks.push_back({row, std::min(end, row + kBlock), label});
}

// All rows in order, cut into blocks; label -1 for those of no class.
std::vector<Block> blocks_of(const CentroidInputs& in) {
    std::vector<Block> blocks;
    int64_t done = 0;
    for (int64_t s = 0; s < in.n_sets; ++s) {
        const int64_t begin = std::clamp<int64_t>(in.cu_seqlens[s], done, in.total);
        const int64_t end = std::clamp<int64_t>(in.cu_seqlens[s + 1], begin, in.total);
        cut(done, begin, -1, blocks);
        cut(begin, end, class_of(in, s), blocks);
        done = end;
    }
    cut(done, in.total, -1, blocks);
    return blocks;
}

// Sums of the columns [begin, begin + width) of every class, by one worker.
class Columns {
public:
    Columns(const CentroidInputs& in, const VectorKernels& kernels, int64_t begin, int64_t width)
        : in_(in), kernels_(kernels), begin_(begin), width_(width), sum_(static_cast<size_t>(width)) {}

    // Adds the block to its class's `total`, of which the caller gives the row.
    void add(const Block& block, double* total) {
        // Row by row: one stream is what a processor fetches ahead best.
        kernels_.widen(in_.dtype, row(block.first), sum_.data(), width_);
        for (int64_t i = block.first + 1; i < block.last; ++i) {
            kernels_.axpy(in_.dtype, 1.0f, row(i), sum_.data(), width_);
        }
        for (int64_t k = 0; k < width_; ++k) total[begin_ + k] += static_cast<double>(sum_[static_cast<size_t>(k)]);
    }

private:
    const char* row(int64_t i) const {
        return static_cast<const char*>(in_.tokens) + (i * in_.stride + begin_) * size_of(in_.dtype);
    }

    const CentroidInputs& in_;
    const VectorKernels& kernels_;
    int64_t begin_, width_;
    std::vector<float> sum_;
};

// Mean and direction of a class from its sums.
void finish(const CentroidInputs& in, const VectorKernels& kernels, const double* total, int64_t n, float* to,
            float* length) {
    for (int64_t k = 0; k < in.dim; ++k) {
        to[k] = static_cast<float>(total[k] / static_cast<double>(std::max<int64_t>(n, 1)));
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
    const int64_t dim = in.dim;
    threads = useful_threads(2.0 * static_cast<double>(in.total) * static_cast<double>(dim), threads);
    std::vector<double> totals(static_cast<size_t>(in.n_classes * dim), 0.0);
    // Columns do not meet in a sum: however many workers share them, every sum has one order.
    const int64_t least = std::max<int64_t>(kNarrowest, (dim + threads - 1) / threads);
    const int64_t width = (least + kNarrowest - 1) / kNarrowest * kNarrowest;
    parallel_for((dim + width - 1) / width, threads, [&](int64_t i, int) {
        Columns columns(in, kernels, i * width, std::min(width, dim - i * width));
        for (const Block& block : blocks) {
            if (block.label >= 0) columns.add(block, totals.data() + block.label * dim);
        }
    });
    std::vector<int64_t> tokens(static_cast<size_t>(in.n_classes), 0);
    for (const Block& block : blocks) {
        if (block.label >= 0) tokens[static_cast<size_t>(block.label)] += block.last - block.first;
    }
    for (int64_t c = 0; c < in.n_classes; ++c) {
        const int64_t n = tokens[static_cast<size_t>(c)];
        count[c] = static_cast<float>(n);
        finish(in, kernels, totals.data() + c * dim, n, direction + c * dim, length + c);
    }
}

void centroids_spread(const CentroidInputs& in, const float* rows, float* tokens, const char* isa, int threads) {
    vector_kernels(isa);  // refuses an unknown name; copying needs no instructions
    const std::vector<Block> blocks = blocks_of(in);
    threads = useful_threads(static_cast<double>(in.total) * static_cast<double>(in.dim), threads);
    parallel_for(static_cast<int64_t>(blocks.size()), threads, [&](int64_t i, int) {
        const Block& block = blocks[static_cast<size_t>(i)];
        float* to = tokens + block.first * in.dim;
        if (block.label < 0) {
            std::fill_n(to, (block.last - block.first) * in.dim, 0.0f);
            return;
        }
        for (int64_t row = block.first; row < block.last; ++row, to += in.dim) {
            std::copy_n(rows + block.label * in.dim, in.dim, to);
        }
    });
}

}  // namespace peaksim
