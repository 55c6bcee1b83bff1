// PeakPatch's caption features: the caption is read from memory once and stays in the cache for what follows.

#include "peak_patch.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.hpp"
#include "vector_kernels.hpp"

namespace peaksim {
namespace {

enum Row { kMean = 0, kEnd = 1, kAnchor = 2, kRows = 3 };  // of `pooled` after the heads

// Captions whose gradients of the keys are summed by one task: fixed, so that threads change no digit.
constexpr int64_t kChunk = 16;

// One worker's memory: the kept tokens of one caption as float32 rows, after the norm.
class Caption {
public:
    Caption(const PoolInputs& in, const VectorKernels& kernels)
        : in_(in),
          kernels_(kernels),
          direct_(in.peak.dtype == DType::float32 && !in.norm_weight),
          rows_(static_cast<size_t>(in.length)),
          places_(static_cast<size_t>(in.length)),
          values_(direct_ ? 0 : static_cast<size_t>(in.length * in.width)) {}

    void read(int64_t b) {
        kept_ = 0;
        for (int64_t t = 0; t < in_.length; ++t) {
            if (!in_.mask[b * in_.length + t]) continue;
            if (direct_) {
                rows_[kept_] = reinterpret_cast<const float*>(in_.peak.row(b, t));
            } else {
                float* row = values_.data() + kept_ * in_.width;
                normalised(in_.peak, b, t, row);
                rows_[kept_] = row;
            }
            places_[kept_++] = t;
        }
    }

    // The token in float32 after the norm, for one that is not among the kept ones.
    void normalised(const Batch& batch, int64_t b, int64_t t, float* to) const {
        kernels_.widen(batch.dtype, batch.row(b, t), to, in_.width);
        if (!in_.norm_weight) return;
        float mean, scale;
        statistics(to, &mean, &scale);
        kernels_.affine(to, mean, scale, in_.norm_weight, in_.norm_bias, to, in_.width);
    }

    void statistics(const float* x, float* mean, float* scale) const {
        const float n = static_cast<float>(in_.width);
        *mean = kernels_.sum(x, in_.width) / n;
        *scale = 1.0f / std::sqrt(kernels_.squares(x, *mean, in_.width) / n + in_.eps);
    }

    int64_t kept() const { return kept_; }
    int64_t place(int64_t i) const { return places_[i]; }
    const float* const* rows() const { return rows_.data(); }

private:
    const PoolInputs& in_;
    const VectorKernels& kernels_;
    bool direct_;
    int64_t kept_ = 0;
    std::vector<const float*> rows_;
    std::vector<int64_t> places_;
    std::vector<float> values_;
};

bool has_end(const PoolInputs& in, int64_t b) { return in.end[b] >= 0 && in.end[b] < in.length; }

int64_t anchor_token(const PoolInputs& in, int64_t b) { return in.anchor_is_single ? 0 : in.end[b]; }

// In place: scores of one head to attention. NaN, +inf and nothing but -inf all give NaN.
void softmax(float* scores, int64_t n) {
    float most = -INFINITY;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, scores[i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(scores[i] - most);
    for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

class Forward {
public:
    Forward(const PoolInputs& in, const VectorKernels& kernels)
        : in_(in),
          kernels_(kernels),
          caption_(in, kernels),
          of_token_(static_cast<size_t>(in.heads)),
          weights_(static_cast<size_t>((in.heads + 1) * in.length)) {}

    void run(int64_t b, float* pooled, float* attention) {
        caption_.read(b);
        const int64_t kept = caption_.kept(), width = in_.width, heads = in_.heads;
        for (int64_t i = 0; i < kept; ++i) {
            kernels_.dots(caption_.rows()[i], in_.keys, heads, width, width, of_token_.data());
            for (int64_t h = 0; h < heads; ++h) weights_[h * kept + i] = of_token_[h];
        }
        for (int64_t h = 0; h < heads; ++h) softmax(weights_.data() + h * kept, kept);
        if (attention) spread(attention);
        if (in_.factors) {
            for (int64_t h = 0; h < heads; ++h) {
                const float* factors = in_.factors + (b * heads + h) * in_.length;
                for (int64_t i = 0; i < kept; ++i) weights_[h * kept + i] *= factors[caption_.place(i)];
            }
        }
        // The mean is one more way of weighing tokens.
        std::fill_n(weights_.data() + heads * kept, kept, 1.0f / static_cast<float>(std::max<int64_t>(kept, 1)));
        kernels_.combine(caption_.rows(), kept, weights_.data(), kept, heads + 1, width, false, pooled);
        end_row(in_.peak, b, has_end(in_, b), in_.end[b], pooled + (heads + kEnd) * width);
        end_row(in_.anchor, b, has_end(in_, b), anchor_token(in_, b), pooled + (heads + kAnchor) * width);
    }

private:
    void spread(float* attention) const {
        std::fill_n(attention, in_.heads * in_.length, 0.0f);
        for (int64_t h = 0; h < in_.heads; ++h) {
            for (int64_t i = 0; i < caption_.kept(); ++i) {
                attention[h * in_.length + caption_.place(i)] = weights_[h * caption_.kept() + i];
            }
        }
    }

    void end_row(const Batch& batch, int64_t b, bool found, int64_t t, float* to) const {
        if (found) {
            caption_.normalised(batch, b, t, to);
        } else {
            std::fill_n(to, in_.width, 0.0f);
        }
    }

    const PoolInputs& in_;
    const VectorKernels& kernels_;
    Caption caption_;
    std::vector<float> of_token_, weights_;
};

class Backward {
public:
    Backward(const PoolInputs& in, const PoolIncoming& grad, const VectorKernels& kernels)
        : in_(in),
          grad_(grad),
          kernels_(kernels),
          caption_(in, kernels),
          of_token_(static_cast<size_t>(in.heads)),
          to_scores_(static_cast<size_t>(in.heads * in.length)),
          sources_(static_cast<size_t>(2 * in.heads + 2)),
          shares_(static_cast<size_t>(2 * in.heads + 2)),
          row_(static_cast<size_t>(in.width)),
          standard_(static_cast<size_t>(in.width)) {}

    // Adds this caption's part to `keys`; writes its tokens' gradients unless null.
    void run(int64_t b, float* keys, float* peak, float* anchor) {
        caption_.read(b);
        scores(b);
        const int64_t kept = caption_.kept(), width = in_.width;
        kernels_.combine(caption_.rows(), kept, to_scores_.data(), kept, in_.heads, width, true, keys);
        if (!peak) return;
        std::fill_n(peak, in_.length * width, 0.0f);
        for (int64_t i = 0; i < kept; ++i) token(b, i, peak + caption_.place(i) * width);
        const float* grad = grad_.pooled + (b * (in_.heads + kRows) + in_.heads) * width;
        if (has_end(in_, b)) add_end(in_.peak, b, in_.end[b], grad + kEnd * width, peak + in_.end[b] * width);
        const int64_t t = anchor_token(in_, b);
        std::fill_n(anchor, (in_.anchor_is_single ? 1 : in_.length) * width, 0.0f);
        if (has_end(in_, b)) add_end(in_.anchor, b, t, grad + kAnchor * width, anchor + t * width);
    }

private:
    float factor(int64_t b, int64_t h, int64_t t) const {
        return in_.factors ? in_.factors[(b * in_.heads + h) * in_.length + t] : 1.0f;
    }

    float attention(int64_t b, int64_t h, int64_t t) const {
        return grad_.attention_weights[(b * in_.heads + h) * in_.length + t];
    }

    // Gradients of the scores of the kept tokens, (heads, kept).
    void scores(int64_t b) {
        const int64_t kept = caption_.kept(), heads = in_.heads;
        const float* pooled = grad_.pooled + b * (heads + kRows) * in_.width;
        for (int64_t i = 0; i < kept; ++i) {
            const int64_t t = caption_.place(i);
            kernels_.dots(caption_.rows()[i], pooled, heads, in_.width, in_.width, of_token_.data());
            for (int64_t h = 0; h < heads; ++h) {
                float d = factor(b, h, t) * of_token_[h];
                if (grad_.attention) d += grad_.attention[(b * heads + h) * in_.length + t];
                to_scores_[h * kept + i] = d;
            }
        }
        for (int64_t h = 0; h < heads; ++h) {
            float* d = to_scores_.data() + h * kept;
            float mean = 0.0f;
            for (int64_t i = 0; i < kept; ++i) mean += attention(b, h, caption_.place(i)) * d[i];
            for (int64_t i = 0; i < kept; ++i) d[i] = attention(b, h, caption_.place(i)) * (d[i] - mean);
        }
    }

    // Gradient of the i-th kept token from pooling and the mean.
    void token(int64_t b, int64_t i, float* to) {
        const int64_t kept = caption_.kept(), heads = in_.heads, width = in_.width, t = caption_.place(i);
        const float* pooled = grad_.pooled + b * (heads + kRows) * width;
        for (int64_t h = 0; h < heads; ++h) {
            sources_[2 * h] = pooled + h * width;
            shares_[2 * h] = factor(b, h, t) * attention(b, h, t);
            sources_[2 * h + 1] = in_.keys + h * width;
            shares_[2 * h + 1] = to_scores_[h * kept + i];
        }
        sources_[2 * heads] = pooled + (heads + kMean) * width;
        shares_[2 * heads] = 1.0f / static_cast<float>(kept);
        const int64_t n = 2 * heads + 1;
        if (!in_.norm_weight) {
            kernels_.combine(sources_.data(), n, shares_.data(), n, 1, width, false, to);
            return;
        }
        kernels_.combine(sources_.data(), n, shares_.data(), n, 1, width, false, row_.data());
        through_norm(in_.peak, b, t, to);
    }

    void add_end(const Batch& batch, int64_t b, int64_t t, const float* grad, float* to) {
        if (!in_.norm_weight) {
            kernels_.axpy(1.0f, grad, to, in_.width);
            return;
        }
        std::copy_n(grad, in_.width, row_.data());
        through_norm(batch, b, t, to);
    }

    // Adds the gradient of the token to `to`, given that of its norm in row_.
    void through_norm(const Batch& batch, int64_t b, int64_t t, float* to) {
        const int64_t width = in_.width;
        float *x = standard_.data(), *grad = row_.data(), mean, scale, along;
        kernels_.widen(batch.dtype, batch.row(b, t), x, width);
        caption_.statistics(x, &mean, &scale);
        kernels_.affine(x, mean, scale, nullptr, nullptr, x, width);
        kernels_.multiply(grad, in_.norm_weight, grad, width);
        kernels_.dots(x, grad, 1, width, width, &along);
        const float n = static_cast<float>(width), level = kernels_.sum(grad, width) / n;
        kernels_.affine(grad, level, 1.0f, nullptr, nullptr, grad, width);
        kernels_.axpy(-along / n, x, grad, width);
        kernels_.axpy(scale, grad, to, width);
    }

    const PoolInputs& in_;
    const PoolIncoming& grad_;
    const VectorKernels& kernels_;
    Caption caption_;
    std::vector<float> of_token_, to_scores_;
    std::vector<const float*> sources_;
    std::vector<float> shares_, row_, standard_;
};

double work(const PoolInputs& in) {
    return 2.0 * static_cast<double>(in.n) * static_cast<double>(in.length * in.width) *
           static_cast<double>(in.heads + 1);
}

}  // namespace

void peak_patch_pool(const PoolInputs& in, float* pooled, float* attention, const char* isa, int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    threads = useful_threads(work(in), threads);
    std::vector<Forward> workers;
    for (int i = 0; i < threads; ++i) workers.emplace_back(in, kernels);
    parallel_for(in.n, threads, [&](int64_t b, int worker) {
        workers[static_cast<size_t>(worker)].run(b, pooled + b * (in.heads + kRows) * in.width,
                                                 attention ? attention + b * in.heads * in.length : nullptr);
    });
}

void peak_patch_pool_backward(const PoolInputs& in, const PoolIncoming& grad, float* keys, float* peak, float* anchor,
                              const char* isa, int threads) {
    const VectorKernels& kernels = vector_kernels(isa);
    threads = useful_threads(work(in) * (peak ? 3 : 1), threads);
    std::vector<Backward> workers;
    for (int i = 0; i < threads; ++i) workers.emplace_back(in, grad, kernels);
    const int64_t chunks = (in.n + kChunk - 1) / kChunk, size = in.heads * in.width;
    std::vector<float> parts(static_cast<size_t>(chunks * size), 0.0f);
    parallel_for(chunks, threads, [&](int64_t chunk, int worker) {
        const int64_t last = std::min(in.n, (chunk + 1) * kChunk);
        for (int64_t b = chunk * kChunk; b < last; ++b) {
            const int64_t to = b * in.length * in.width;
            workers[static_cast<size_t>(worker)].run(
                b, parts.data() + chunk * size, peak ? peak + to : nullptr,
                peak ? anchor + (in.anchor_is_single ? b * in.width : to) : nullptr);
        }
    });
    std::fill_n(keys, size, 0.0f);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) kernels.axpy(1.0f, parts.data() + chunk * size, keys, size);
}

}  // namespace peaksim
