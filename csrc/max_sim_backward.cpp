// Max-sim, backward of the hard form: each gradient row is summed by its owner in a fixed order.
//
// What a row receives is listed first (who gives, and how much), sorted by row, then added up in registers: the row
// itself is read and written once a list, not once a summand.

#include <algorithm>
#include <vector>

#include "max_sim.hpp"
#include "max_sim_gradient_kernels.hpp"
#include "parallel.hpp"

namespace peaksim {
namespace {

// Summands listed at a time, so that a list stays in the second-level cache.
constexpr int64_t kListed = 16 << 10;

// One thread's memory, sized before the threads start.
struct Scratch {
    std::vector<int64_t> ends;  // per row: where its summands end; before they are placed, where the next one goes
    std::vector<const void*> rows;
    std::vector<float> c;
};

class Backward {
public:
    Backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
             const MaxSimGradientKernels& kernels)
        : in_(in), forward_(forward), reverse_(reverse), kernels_(kernels) {
        const int64_t most = (forward.scores ? in.q.length : 0) + (reverse.scores ? in.d.length : 0);
        others_ = std::max<int64_t>(1, kListed / std::max<int64_t>(1, most));
        listed_ = std::min(others_, std::max(in.q.n, in.d.n)) * most;
    }

    void prepare(Scratch& s) const {
        s.ends.resize(size_t(std::max(in_.q.length, in_.d.length)));
        s.rows.resize(size_t(listed_));
        s.c.resize(size_t(listed_));
    }

    // Gradient of query i, (its length, dim) at `to`.
    void query(int64_t i, float* to, Scratch& s) const {
        const int64_t begin = in_.pairs ? i : 0, end = in_.pairs ? i + 1 : in_.d.n;
        const auto give = [&](int64_t j, auto&& take) {
            own(in_.q, forward_, in_.d, in_.cell(i, j), in_.q_cell(i, j), i, j, take);
            other(in_.d, reverse_, in_.d, in_.cell(i, j), in_.d_cell(i, j), j, j, take);
        };
        collect(in_.q.length_of(i), begin, end, give, to, s);
    }

    // Gradient of document j.
    void document(int64_t j, float* to, Scratch& s) const {
        const int64_t begin = in_.pairs ? j : 0, end = in_.pairs ? j + 1 : in_.q.n;
        const auto give = [&](int64_t i, auto&& take) {
            other(in_.q, forward_, in_.q, in_.cell(i, j), in_.q_cell(i, j), i, i, take);
            own(in_.d, reverse_, in_.q, in_.cell(i, j), in_.d_cell(i, j), j, i, take);
        };
        collect(in_.d.length_of(j), begin, end, give, to, s);
    }

private:
    // Adds up what items [begin, end) of the other side give to the rows of one item.
    template <class Give>
    void collect(int64_t length, int64_t begin, int64_t end, const Give& give, float* to, Scratch& s) const {
        std::fill_n(to, length * in_.dim, 0.0f);
        for (int64_t first = begin; first < end; first += others_) {
            const int64_t last = std::min(end, first + others_);
            std::fill_n(s.ends.begin(), length, 0);
            for (int64_t x = first; x < last; ++x) {
                give(x, [&](int64_t row, const auto&) { ++s.ends[size_t(row)]; });
            }
            int64_t sum = 0;
            for (int64_t row = 0; row < length; ++row) {
                const int64_t count = s.ends[size_t(row)];
                s.ends[size_t(row)] = sum;
                sum += count;
            }
            for (int64_t x = first; x < last; ++x) {
                give(x, [&](int64_t row, const auto& summand) {
                    const size_t at = size_t(s.ends[size_t(row)]++);
                    s.rows[at] = summand.vector();
                    s.c[at] = summand.coefficient();
                });
            }
            for (int64_t row = 0, at = 0; row < length; at = s.ends[size_t(row++)]) {
                const int64_t n = s.ends[size_t(row)] - at;
                if (n == 0) continue;
                kernels_.gather(in_.dtype, s.rows.data() + at, s.c.data() + at, n, in_.dim, to + row * in_.dim);
            }
        }
    }

    // Token u of seeker s, whose results begin at `at`, gives or gets token t of item f.
    struct Summand {
        const Backward& backward;
        const Tokens& seekers;
        const MaxSimIncoming& incoming;
        const Tokens& from;
        int64_t cell, at, s, u, f, t;

        const void* vector() const { return from.row(backward.in_.dtype, f, t); }
        // Gradient of the seeking token's value.
        float coefficient() const {
            const float c = incoming.scores[cell] * seekers.weight(s, u);
            return incoming.values ? c + incoming.values[at + u] : c;
        }
    };

    // To each token of seeker s its winner's vector; winners are tokens of `from`, item f.
    template <class Take>
    void own(const Tokens& seekers, const MaxSimIncoming& incoming, const Tokens& from, int64_t cell, int64_t at,
             int64_t s, int64_t f, const Take& take) const {
        if (!incoming.scores) return;
        for (int64_t u = 0, length = seekers.length_of(s); u < length; ++u) {
            const int64_t winner = incoming.winner(at + u);
            if (winner >= 0) take(u, Summand{*this, seekers, incoming, from, cell, at, s, u, f, winner});
        }
    }

    // To each winner the vectors of the tokens that chose it; `from` are the seekers, item f.
    template <class Take>
    void other(const Tokens& seekers, const MaxSimIncoming& incoming, const Tokens& from, int64_t cell, int64_t at,
               int64_t s, int64_t f, const Take& take) const {
        if (!incoming.scores) return;
        for (int64_t u = 0, length = seekers.length_of(s); u < length; ++u) {
            const int64_t winner = incoming.winner(at + u);
            if (winner >= 0) take(winner, Summand{*this, seekers, incoming, from, cell, at, s, u, f, u});
        }
    }

    const MaxSimInputs& in_;
    const MaxSimIncoming& forward_;
    const MaxSimIncoming& reverse_;
    const MaxSimGradientKernels& kernels_;
    int64_t others_;  // items of the other side whose summands are listed at a time
    int64_t listed_;
};

}  // namespace

void max_sim_backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
                      float* grad_q, float* grad_d, const char* isa, int threads) {
    const Backward backward(in, forward, reverse, max_sim_gradient_kernels(in.dtype, isa));
    const double of_q = static_cast<double>(in.q.total) * static_cast<double>(in.pairs ? 1 : in.d.n);
    const double of_d = static_cast<double>(in.d.total) * static_cast<double>(in.pairs ? 1 : in.q.n);
    threads = useful_threads(2.0 * (of_q + (reverse.scores ? of_d : 0.0)) * static_cast<double>(in.dim), threads);
    std::vector<Scratch> scratch(static_cast<size_t>(std::max(threads, 1)));
    for (Scratch& s : scratch) backward.prepare(s);
    // Queries first, then documents, in one queue.
    parallel_for(in.q.n + in.d.n, threads, [&](int64_t task, int worker) {
        if (task < in.q.n) {
            backward.query(task, grad_q + in.q.first(task) * in.dim, scratch[size_t(worker)]);
        } else {
            const int64_t j = task - in.q.n;
            backward.document(j, grad_d + in.d.first(j) * in.dim, scratch[size_t(worker)]);
        }
    });
}

}  // namespace peaksim
