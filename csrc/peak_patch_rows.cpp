// PeakPatch's corrections: row by row, from float32 copies of the row in the worker's memory.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.hpp"
#include "peak_patch.hpp"
#include "vector_kernels.hpp"

namespace peaksim {
namespace {

// Vectors shorter than this have no direction: see engine/reference/unit.py.
constexpr float kShortest = 1e-12f;

// Rows of one task: one row costs less than handing it out.
constexpr int64_t kRowsPerTask = 64;

// x becomes unit(x); returns the length it had.
float to_unit(const VectorKernels& kernels, float* x, int64_t n) {
    const float length = std::sqrt(kernels.squares(x, 0.0f, n));
    if (length < kShortest) {
        std::fill_n(x, n, 0.0f);
    } else {
        for (int64_t k = 0; k < n; ++k) x[k] /= length;
    }
    return length;
}

// grad, of unit(x), becomes that of x.
void through_unit(const VectorKernels& kernels, const float* unit, float length, float* grad, int64_t n) {
    if (length < kShortest) {
        std::fill_n(grad, n, 0.0f);
        return;
    }
    float along;
    kernels.dots(unit, grad, 1, n, n, &along);
    kernels.axpy(-along, unit, grad, n);
    for (int64_t k = 0; k < n; ++k) grad[k] /= length;
}

// Calls body(row, scratch) for all rows; scratch holds `floats` numbers of the worker.
template <class Body>
void for_rows(int64_t n, double work, int64_t floats, int threads, const Body& body) {
    threads = useful_threads(work, threads);
    std::vector<std::vector<float>> scratch(static_cast<size_t>(threads), std::vector<float>(static_cast<size_t>(floats)));
    parallel_for((n + kRowsPerTask - 1) / kRowsPerTask, threads, [&](int64_t task, int worker) {
        const int64_t last = std::min(n, (task + 1) * kRowsPerTask);
        for (int64_t i = task * kRowsPerTask; i < last; ++i) body(i, scratch[static_cast<size_t>(worker)].data());
    });
}

double elements(int64_t rows, int64_t dim) { return static_cast<double>(rows) * static_cast<double>(dim); }

}  // namespace

void peak_patch_correct(const Batch& f, const Batch& delta, float alpha, int64_t n, int64_t dim, float* out,
                        const char* isa, int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    for_rows(n, 6 * elements(n, dim), dim, threads, [&](int64_t i, float* moved) {
        float* to = out + i * dim;
        kernels.widen(f.dtype, f.row(i, 0), to, dim);
        kernels.widen(delta.dtype, delta.row(i, 0), moved, dim);
        kernels.axpy(alpha, moved, to, dim);
        to_unit(kernels, to, dim);
    });
}

void peak_patch_correct_backward(const Batch& f, const Batch& delta, float alpha, const float* grad, int64_t n,
                                 int64_t dim, float* grad_f, float* grad_delta, float* grad_alpha, const char* isa,
                                 int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    for_rows(n, 12 * elements(n, dim), 2 * dim, threads, [&](int64_t i, float* scratch) {
        float *moved = scratch, *step = scratch + dim, *to_f = grad_f + i * dim;
        kernels.widen(f.dtype, f.row(i, 0), moved, dim);
        kernels.widen(delta.dtype, delta.row(i, 0), step, dim);
        kernels.axpy(alpha, step, moved, dim);
        const float length = to_unit(kernels, moved, dim);
        std::copy_n(grad + i * dim, dim, to_f);
        through_unit(kernels, moved, length, to_f, dim);
        kernels.affine(to_f, 0.0f, alpha, nullptr, nullptr, grad_delta + i * dim, dim);
        kernels.dots(to_f, step, 1, dim, dim, grad_alpha + i);
    });
}

void peak_patch_pairs(const PairInputs& in, float* sims, float* cross, const char* isa, int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    const int64_t dim = in.dim;
    for_rows(in.n, 8 * elements(in.n * in.count, dim), 3 * dim, threads, [&](int64_t i, float* scratch) {
        float *v = scratch, *t = v + dim, *low = t + dim;
        kernels.widen(in.image.dtype, in.image.row(i, 0), v, dim);
        to_unit(kernels, v, dim);
        for (int64_t k = 0; k < in.count; ++k) {
            const int64_t pair = i * in.count + k;
            kernels.widen(in.text.dtype, in.text.row(i, k), t, dim);
            kernels.widen(in.low.dtype, in.low.row(i, k), low, dim);
            to_unit(kernels, t, dim);
            to_unit(kernels, low, dim);
            kernels.dots(v, low, 1, dim, dim, sims + 2 * pair);
            kernels.dots(v, t, 1, dim, dim, sims + 2 * pair + 1);
            kernels.multiply(v, t, cross + pair * dim, dim);
        }
    });
}

void peak_patch_pairs_backward(const PairInputs& in, const float* sims, const float* cross, float* image, float* text,
                               float* low, const char* isa, int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    const int64_t dim = in.dim;
    for_rows(in.n, 20 * elements(in.n * in.count, dim), 4 * dim, threads, [&](int64_t i, float* scratch) {
        float *v = scratch, *t = v + dim, *early = t + dim, *to_cross = early + dim, *to_v = image + i * dim;
        kernels.widen(in.image.dtype, in.image.row(i, 0), v, dim);
        const float length = to_unit(kernels, v, dim);
        std::fill_n(to_v, dim, 0.0f);
        for (int64_t k = 0; k < in.count; ++k) {
            const int64_t pair = i * in.count + k;
            kernels.widen(in.text.dtype, in.text.row(i, k), t, dim);
            kernels.widen(in.low.dtype, in.low.row(i, k), early, dim);
            const float t_length = to_unit(kernels, t, dim), early_length = to_unit(kernels, early, dim);
            // The second similarity is the sum of cross: x - (-s) is x + s.
            kernels.affine(cross + pair * dim, -sims[2 * pair + 1], 1.0f, nullptr, nullptr, to_cross, dim);
            float *to_t = text + pair * dim, *to_early = low + pair * dim;
            kernels.multiply(to_cross, v, to_t, dim);
            through_unit(kernels, t, t_length, to_t, dim);
            kernels.affine(v, 0.0f, sims[2 * pair], nullptr, nullptr, to_early, dim);
            through_unit(kernels, early, early_length, to_early, dim);
            kernels.multiply(to_cross, t, to_cross, dim);
            kernels.axpy(1.0f, to_cross, to_v, dim);
            kernels.axpy(sims[2 * pair], early, to_v, dim);
        }
        through_unit(kernels, v, length, to_v, dim);
    });
}

}  // namespace peaksim
