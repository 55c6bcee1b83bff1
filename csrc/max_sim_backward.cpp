// Max-sim, backward of the hard form: each gradient row is summed by its owner in a fixed order.

#include <algorithm>

#include "max_sim.hpp"
#include "max_sim_kernels.hpp"
#include "parallel.hpp"

namespace peaksim {
namespace {

class Backward {
public:
    Backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
             const MaxSimKernels& kernels)
        : in_(in), forward_(forward), reverse_(reverse), kernels_(kernels) {}

    // Gradient of query i, (its length, dim) at `to`.
    void query(int64_t i, float* to) const {
        std::fill_n(to, in_.q.length_of(i) * in_.dim, 0.0f);
        for (int64_t j = in_.pairs ? i : 0, end = in_.pairs ? i + 1 : in_.d.n; j < end; ++j) {
            const int64_t cell = in_.cell(i, j);
            own(in_.q, forward_, in_.d, cell, in_.q_cell(i, j), i, j, to);
            other(in_.d, reverse_, in_.d, cell, in_.d_cell(i, j), j, j, to);
        }
    }

    // Gradient of document j.
    void document(int64_t j, float* to) const {
        std::fill_n(to, in_.d.length_of(j) * in_.dim, 0.0f);
        for (int64_t i = in_.pairs ? j : 0, end = in_.pairs ? j + 1 : in_.q.n; i < end; ++i) {
            const int64_t cell = in_.cell(i, j);
            other(in_.q, forward_, in_.q, cell, in_.q_cell(i, j), i, i, to);
            own(in_.d, reverse_, in_.q, cell, in_.d_cell(i, j), j, i, to);
        }
    }

private:
    // Gradient of the pooled value of a seeker's token, whose results lie at `at`.
    float coefficient(const Tokens& seekers, const MaxSimIncoming& incoming, int64_t cell, int64_t at, int64_t s,
                      int64_t token) const {
        const float c = incoming.scores[cell] * seekers.weight(s, token);
        return incoming.values ? c + incoming.values[at + token] : c;
    }

    // To each token of seeker s its winner's vector; winners are tokens of `from`, item f.
    void own(const Tokens& seekers, const MaxSimIncoming& incoming, const Tokens& from, int64_t cell, int64_t at,
             int64_t s, int64_t f, float* to) const {
        if (!incoming.scores) return;
        const int32_t* argmax = incoming.argmax + at;
        for (int64_t u = 0, length = seekers.length_of(s); u < length; ++u) {
            if (argmax[u] < 0) continue;
            const float c = coefficient(seekers, incoming, cell, at, s, u);
            kernels_.axpy(in_.dtype, c, from.row(in_.dtype, f, argmax[u]), to + u * in_.dim, in_.dim);
        }
    }

    // To each winner the vectors of the tokens that chose it; `from` are the seekers, item f.
    void other(const Tokens& seekers, const MaxSimIncoming& incoming, const Tokens& from, int64_t cell, int64_t at,
               int64_t s, int64_t f, float* to) const {
        if (!incoming.scores) return;
        const int32_t* argmax = incoming.argmax + at;
        for (int64_t u = 0, length = seekers.length_of(s); u < length; ++u) {
            if (argmax[u] < 0) continue;
            const float c = coefficient(seekers, incoming, cell, at, s, u);
            kernels_.axpy(in_.dtype, c, from.row(in_.dtype, f, u), to + argmax[u] * in_.dim, in_.dim);
        }
    }

    const MaxSimInputs& in_;
    const MaxSimIncoming& forward_;
    const MaxSimIncoming& reverse_;
    const MaxSimKernels& kernels_;
};

}  // namespace

void max_sim_backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
                      float* grad_q, float* grad_d, const char* isa, int threads) {
    const Backward backward(in, forward, reverse, max_sim_kernels(in.dtype, isa));
    const double of_q = static_cast<double>(in.q.total) * static_cast<double>(in.pairs ? 1 : in.d.n);
    const double of_d = static_cast<double>(in.d.total) * static_cast<double>(in.pairs ? 1 : in.q.n);
    threads = useful_threads(2.0 * (of_q + (reverse.scores ? of_d : 0.0)) * static_cast<double>(in.dim), threads);
    // Queries first, then documents, in one queue.
    parallel_for(in.q.n + in.d.n, threads, [&](int64_t task, int) {
        if (task < in.q.n) {
            backward.query(task, grad_q + in.q.first(task) * in.dim);
        } else {
            const int64_t j = task - in.q.n;
            backward.document(j, grad_d + in.d.first(j) * in.dim);
        }
    });
}

}  // namespace peaksim
