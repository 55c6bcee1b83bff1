// The walk of window attention: for each image and head its keys and values as float32 rows, small enough for the
// nearest cache, then window after window over the cells that it sees.

#include "window_attention.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.hpp"
#include "window_attention_kernels.hpp"

namespace peaksim {
namespace {

using Kernels = WindowAttentionKernels;

// Rows of one head lie far apart, where no hardware prefetcher looks for them: they are asked for ahead of time.
void fetch(const void* row, int64_t bytes) {
#if defined(__GNUC__)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
#else
    (void)row, (void)bytes;
#endif
}

// Float32 rows of one length for one worker, filled up with zeros and aligned for whole vectors.
class Rows {
public:
    Rows(int64_t rows, int64_t stride) : stride_(stride), data_(static_cast<size_t>(rows * stride + kAlign), 0.0f) {
        const size_t past = reinterpret_cast<uintptr_t>(data_.data()) / sizeof(float) % kAlign;
        first_ = (kAlign - past) % kAlign;
    }
    float* row(int64_t r) { return data_.data() + first_ + r * stride_; }
    void clear() { std::fill(data_.begin(), data_.end(), 0.0f); }

private:
    static constexpr size_t kAlign = 64 / sizeof(float);
    int64_t stride_;
    std::vector<float> data_;
    size_t first_;
};

// Windows that are worked on together, step by step: each by itself is a chain of instructions that wait for one
// another (products, maximum, exponentials, sum, products), side by side they fill the gaps.
constexpr int64_t kTogether = 8;
constexpr int64_t kAhead = 8;  // rows that are fetched before they are read

// What one worker holds for one image and head, and of up to kTogether windows. Their own keys and values lie in the
// rows after the cells.
class Head {
public:
    Head(const WindowAttentionInputs& in, const Kernels& kernels)
        : in_(in), kernels_(kernels), stride_(up(in.dim)), room_(up(in.cells() + 1)), scores_(kTogether, room_),
          queries_(kTogether, stride_), vectors_(2, stride_), keys_(in.cells() + kTogether, stride_),
          values_(in.cells() + kTogether, stride_), cells_(static_cast<size_t>(kTogether * room_)) {}

    void load(int64_t b, int64_t h) {
        b_ = b, h_ = h;
        for (int64_t p = 0; p < in_.cells(); ++p) {
            if (p + kAhead < in_.cells()) {
                fetch(in_.k.row(in_.dtype, b, p + kAhead, h), in_.dim * size_of(in_.dtype));
                fetch(in_.v.row(in_.dtype, b, p + kAhead, h), in_.dim * size_of(in_.dtype));
            }
            kernels_.widen(in_.dtype, in_.k.row(in_.dtype, b, p, h), keys_.row(p), in_.dim);
            kernels_.widen(in_.dtype, in_.v.row(in_.dtype, b, p, h), values_.row(p), in_.dim);
        }
    }

    // Loads windows [first, last), at most kTogether, and weighs what they see: scores(i) are exponentials, sum(i)
    // is their sum. A window with seen(i) = 0 has neither.
    void open(int64_t first, int64_t last) {
        const int64_t count = last - first;
        for (int64_t i = 0; i < count; ++i) seen_[i] = load_window(first + i, i);
        for (int64_t i = 0; i < count; ++i) {
            if (seen_[i] > 0) dots(i, query(i), keys_, scores(i));
        }
        for (int64_t i = 0; i < count; ++i) {
            if (seen_[i] > 0) sums_[i] = kernels_.exponentials(scores(i), seen_[i], in_.scale);
        }
    }

    // Asks for what window w will read, if there is such a window.
    void expect(int64_t w) const {
        if (w >= in_.windows) return;
        const int64_t bytes = in_.dim * size_of(in_.dtype);
        fetch(in_.q.row(in_.dtype, b_, w, h_), bytes);
        if (!in_.own_k.data) return;
        fetch(in_.own_k.row(in_.dtype, b_, w, h_), bytes);
        fetch(in_.own_v.row(in_.dtype, b_, w, h_), bytes);
    }

    void dots(int64_t i, const float* x, Rows& rows, float* out) {
        for_parts([&](int64_t k, int chunks) {
            kernels_.dots(x + k, rows.row(0) + k, stride_, cells(i), seen_[i], chunks, k > 0, out);
        });
    }
    void mix(int64_t i, const float* weights, Rows& rows, float factor, float* out) {
        for_parts([&](int64_t k, int chunks) {
            kernels_.mix(weights, rows.row(0) + k, stride_, cells(i), seen_[i], chunks, factor, out + k);
        });
    }
    void spread(int64_t i, const float* weights, const float* x, Rows& rows) {
        const int chunks = static_cast<int>(stride_ / kernels_.lanes);
        kernels_.spread(weights, x, cells(i), seen_[i], chunks, rows.row(0), stride_);
    }

    Rows& keys() { return keys_; }
    Rows& values() { return values_; }
    float* query(int64_t i) { return queries_.row(i); }
    float* scores(int64_t i) { return scores_.row(i); }
    int64_t seen(int64_t i) const { return seen_[i]; }
    float sum(int64_t i) const { return sums_[i]; }
    int64_t own_row(int64_t i) const { return in_.cells() + i; }
    float* gradient() { return vectors_.row(0); }
    float* result() { return vectors_.row(1); }
    int64_t stride() const { return stride_; }
    int64_t room() const { return room_; }

private:
    int64_t up(int64_t n) const { return (n + kernels_.lanes - 1) / kernels_.lanes * kernels_.lanes; }
    int32_t* cells(int64_t i) { return cells_.data() + i * room_; }

    template <class Body>
    void for_parts(Body body) const {
        const int64_t part = int64_t{kernels_.max_chunks} * kernels_.lanes;
        for (int64_t k = 0; k < stride_; k += part) {
            body(k, static_cast<int>(std::min(part, stride_ - k) / kernels_.lanes));
        }
    }

    int64_t load_window(int64_t w, int64_t i) {
        int32_t* const begin = cells(i);
        int32_t* end = list(in_.boxes + b_ * in_.boxes_batch_stride + 4 * w, begin);
        if (in_.own_k.data) {
            kernels_.widen(in_.dtype, in_.own_k.row(in_.dtype, b_, w, h_), keys_.row(own_row(i)), in_.dim);
            kernels_.widen(in_.dtype, in_.own_v.row(in_.dtype, b_, w, h_), values_.row(own_row(i)), in_.dim);
            *end++ = static_cast<int32_t>(own_row(i));
        }
        const int64_t n = end - begin;
        if (n == 0) return 0;
        std::fill(end, begin + up(n), end[-1]);
        kernels_.widen(in_.dtype, in_.q.row(in_.dtype, b_, w, h_), query(i), in_.dim);
        return n;
    }

    int32_t* list(const int32_t* box, int32_t* to) const {
        const int64_t x0 = std::max<int64_t>(box[0], 0), x1 = std::min<int64_t>(box[2], in_.grid_columns);
        const int64_t y0 = std::max<int64_t>(box[1], 0), y1 = std::min<int64_t>(box[3], in_.grid_rows);
        for (int64_t y = y0; y < y1; ++y) {
            const int32_t first = static_cast<int32_t>(y * in_.grid_columns);
            for (int64_t x = x0; x < x1; ++x) *to++ = first + static_cast<int32_t>(x);
        }
        return to;
    }

    const WindowAttentionInputs& in_;
    const Kernels& kernels_;
    int64_t stride_, room_;
    Rows scores_, queries_, vectors_, keys_, values_;
    std::vector<int32_t> cells_;
    int64_t seen_[kTogether] = {};
    float sums_[kTogether] = {};
    int64_t b_ = 0, h_ = 0;
};

double work_of(const WindowAttentionInputs& in) {
    // A window of a sliding grid sees about a sixth of the cells.
    return static_cast<double>(in.batch * in.heads * in.windows) * static_cast<double>(in.cells() + 6) / 6.0 *
           static_cast<double>(2 * in.dim);
}

std::vector<Head> heads_for(const WindowAttentionInputs& in, const Kernels& kernels, int threads) {
    std::vector<Head> heads;
    heads.reserve(static_cast<size_t>(threads));
    for (int worker = 0; worker < threads; ++worker) heads.emplace_back(in, kernels);
    return heads;
}

void write_windows(const WindowAttentionInputs& in, const Kernels& kernels, Head& head, int64_t b, int64_t h,
                   int64_t first, int64_t last, char* out) {
    head.open(first, last);
    for (int64_t i = 0; i < last - first; ++i) {
        head.expect(last + i);
        char* to = out + ((b * in.windows + first + i) * in.heads + h) * in.dim * size_of(in.dtype);
        if (head.seen(i) == 0) {
            std::memset(to, 0, static_cast<size_t>(in.dim * size_of(in.dtype)));
            continue;
        }
        head.mix(i, head.scores(i), head.values(), 1.0f / head.sum(i), head.result());
        kernels.narrow(in.dtype, head.result(), to, in.dim);
    }
}

}  // namespace

void window_attention(const WindowAttentionInputs& in, void* out, const char* isa, int threads) {
    const Kernels& kernels = window_attention_kernels(isa);
    const int64_t pairs = in.batch * in.heads;
    if (pairs * in.windows * in.dim == 0) return;
    threads = useful_threads(work_of(in), threads);
    // Where images and heads are too few for the threads, each is dealt out in several runs of windows.
    const int64_t runs = std::clamp<int64_t>((2 * threads + pairs - 1) / pairs, 1, threads > 1 ? in.windows : 1);
    std::vector<Head> heads = heads_for(in, kernels, threads);
    parallel_for(pairs * runs, threads, [&](int64_t task, int worker) {
        Head& head = heads[static_cast<size_t>(worker)];
        const int64_t pair = task / runs, run = task % runs, b = pair / in.heads, h = pair % in.heads;
        head.load(b, h);
        const int64_t end = (run + 1) * in.windows / runs;
        for (int64_t w = run * in.windows / runs; w < end; w += kTogether) {
            write_windows(in, kernels, head, b, h, w, std::min(w + kTogether, end), static_cast<char*>(out));
        }
    });
}

namespace {

// The rows that gather gradients, beside the Head that they belong to.
struct HeadGradients {
    HeadGradients(const WindowAttentionInputs& in, const Head& head)
        : keys(in.cells() + kTogether, head.stride()), values(in.cells() + kTogether, head.stride()),
          slopes(1, head.room()) {}

    Rows keys, values, slopes;
};

// slopes := scale · p · (slopes - Σ p · slopes), the backward of the softmax p of scaled scores.
void through_softmax(const float* p, float* slopes, int64_t n, float scale) {
    float mean = 0.0f;
    for (int64_t i = 0; i < n; ++i) mean += p[i] * slopes[i];
    for (int64_t i = 0; i < n; ++i) slopes[i] = scale * p[i] * (slopes[i] - mean);
}

class Backward {
public:
    Backward(const WindowAttentionInputs& in, const HeadRows& grad, const WindowAttentionGradients& to,
             const Kernels& kernels)
        : in_(in), grad_(grad), to_(to), kernels_(kernels) {}

    void run(int64_t b, int64_t h, Head& head, HeadGradients& sums) const {
        head.load(b, h);
        sums.keys.clear();
        sums.values.clear();
        for (int64_t w = 0; w < in_.windows; w += kTogether) {
            const int64_t last = std::min(w + kTogether, in_.windows);
            head.open(w, last);
            for (int64_t i = 0; i < last - w; ++i) window(b, h, w + i, i, head, sums);
        }
        for (int64_t p = 0; p < in_.cells(); ++p) {
            write(sums.keys.row(p), to_.k, in_.cells(), b, p, h);
            write(sums.values.row(p), to_.v, in_.cells(), b, p, h);
        }
    }

private:
    // Window w, which is the i-th of those that are open.
    void window(int64_t b, int64_t h, int64_t w, int64_t i, Head& head, HeadGradients& sums) const {
        head.expect(w + kTogether);
        const int64_t n = head.seen(i);
        if (n == 0) {
            std::fill(head.result(), head.result() + in_.dim, 0.0f);
            write(head.result(), to_.q, in_.windows, b, w, h);
            return;
        }
        float *own_key = sums.keys.row(head.own_row(i)), *own_value = sums.values.row(head.own_row(i));
        std::fill(own_key, own_key + head.stride(), 0.0f);
        std::fill(own_value, own_value + head.stride(), 0.0f);
        kernels_.widen(in_.dtype, grad_.row(in_.dtype, b, w, h), head.gradient(), in_.dim);
        float *p = head.scores(i), *slopes = sums.slopes.row(0);
        const float inverse = 1.0f / head.sum(i);
        for (int64_t j = 0; j < n; ++j) p[j] *= inverse;
        head.spread(i, p, head.gradient(), sums.values);
        head.dots(i, head.gradient(), head.values(), slopes);
        through_softmax(p, slopes, n, in_.scale);
        head.spread(i, slopes, head.query(i), sums.keys);
        head.mix(i, slopes, head.keys(), 1.0f, head.result());
        write(head.result(), to_.q, in_.windows, b, w, h);
        if (to_.own_k) {
            write(own_key, to_.own_k, in_.windows, b, w, h);
            write(own_value, to_.own_v, in_.windows, b, w, h);
        }
    }

    void write(const float* from, float* to, int64_t rows, int64_t b, int64_t row, int64_t h) const {
        const int64_t place = ((b * rows + row) * in_.heads + h) * in_.dim;
        std::memcpy(to + place, from, static_cast<size_t>(in_.dim) * sizeof(float));
    }

    const WindowAttentionInputs& in_;
    const HeadRows& grad_;
    const WindowAttentionGradients& to_;
    const Kernels& kernels_;
};

}  // namespace

void window_attention_backward(const WindowAttentionInputs& in, const HeadRows& grad,
                               const WindowAttentionGradients& to, const char* isa, int threads) {
    const Kernels& kernels = window_attention_kernels(isa);
    if (in.batch * in.heads * in.dim == 0) return;
    threads = useful_threads(3.0 * work_of(in), threads);
    std::vector<Head> heads = heads_for(in, kernels, threads);
    std::vector<HeadGradients> sums;
    sums.reserve(heads.size());
    for (const Head& head : heads) sums.emplace_back(in, head);
    const Backward backward(in, grad, to, kernels);
    parallel_for(in.batch * in.heads, threads, [&](int64_t task, int worker) {
        const size_t own = static_cast<size_t>(worker);
        backward.run(task / in.heads, task % in.heads, heads[own], sums[own]);
    });
}

}  // namespace peaksim
