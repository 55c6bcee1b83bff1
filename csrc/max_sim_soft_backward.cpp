// Max-sim, backward of the soft form: the similarities of a block of queries and a document are computed again, become
// the gradient of the similarities in place, and go into two small matrix products.
//
// A gradient row is summed by one thread at a time and in one order, whatever the number of threads: the grid of
// (queries, documents) is cut into blocks, and work goes in rounds whose blocks share neither queries nor documents.

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "max_sim.hpp"
#include "max_sim_block.hpp"
#include "max_sim_gradient_kernels.hpp"
#include "max_sim_kernels.hpp"
#include "parallel.hpp"

namespace peaksim {
namespace {

// Tokens of a query block and its similarities to one document: each should stay in the second-level cache.
constexpr int64_t kTokenBytes = 256 << 10;
constexpr int64_t kTileBytes = 256 << 10;
// Document rows that are widened or packed at once.
constexpr int64_t kRows = 64;
// Blocks along a side of the grid, and members of a block below which more blocks cost more than they bring.
constexpr int64_t kBlocks = 32;
constexpr int64_t kMembers = 8;

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Members of one block of a side with n of them.
int64_t block_size(int64_t n) {
    const int64_t blocks = std::clamp<int64_t>(n / kMembers, std::clamp<int64_t>(n, 1, kMembers), kBlocks);
    return std::max<int64_t>(1, divide_up(n, blocks));
}

// One thread's memory, sized before the threads start.
struct Scratch {
    std::vector<const void*> rows, widened_rows;
    std::vector<int32_t> kept;
    std::vector<float*> to_q, to_d;
    std::vector<float> widened, packed_q, packed_d, tile, reverse, c, most, total;
};

class SoftBackward {
public:
    SoftBackward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse, float* grad_q,
                 float* grad_d, const char* isa)
        : in_(in), forward_(forward), reverse_(reverse), grad_q_(grad_q), grad_d_(grad_d),
          kernels_(max_sim_kernels(in.dtype, isa)), gradient_(max_sim_gradient_kernels(in.dtype, isa)) {
        const int64_t token_bytes = std::max<int64_t>(1, in.q.length * in.dim * int64_t(sizeof(float)));
        const int64_t tile_bytes = std::max<int64_t>(1, in.q.length * in.d.length * int64_t(sizeof(float)));
        const int64_t most = in.pairs ? 1 : block_size(in.q.n);
        together_ = std::clamp<int64_t>(std::min(kTokenBytes / token_bytes, kTileBytes / tile_bytes), 1, most);
    }

    void run(int threads) {
        std::vector<Scratch> scratch(static_cast<size_t>(std::max(threads, 1)));
        for (Scratch& s : scratch) prepare(s);
        clear(grad_q_, in_.q.total, threads);
        clear(grad_d_, in_.d.total, threads);
        if (in_.pairs) {
            parallel_for(in_.q.n, threads,
                         [&](int64_t i, int worker) { guarded({i, i + 1, i, i + 1}, scratch[size_t(worker)]); });
        } else {
            rounds(threads, scratch);
        }
        if (failed_) throw std::bad_alloc();
    }

private:
    // Queries [q, q_end) and documents [d, d_end).
    struct Cells {
        int64_t q, q_end, d, d_end;
    };

    void rounds(int threads, std::vector<Scratch>& scratch) {
        const int64_t q_size = block_size(in_.q.n), d_size = block_size(in_.d.n);
        const int64_t q_blocks = divide_up(in_.q.n, q_size), d_blocks = divide_up(in_.d.n, d_size);
        const int64_t many = std::max(q_blocks, d_blocks), few = std::min(q_blocks, d_blocks);
        for (int64_t round = 0; round < many; ++round) {
            parallel_for(few, threads, [&](int64_t task, int worker) {
                const int64_t other = (task + round) % many;
                const int64_t a = (q_blocks == many ? other : task) * q_size;
                const int64_t b = (q_blocks == many ? task : other) * d_size;
                const Cells cells = {a, std::min(a + q_size, in_.q.n), b, std::min(b + d_size, in_.d.n)};
                guarded(cells, scratch[size_t(worker)]);
            });
        }
    }

    // A task of parallel_for must not throw; blocks of queries allocate.
    void guarded(const Cells& cells, Scratch& s) {
        try {
            for (int64_t i = cells.q; i < cells.q_end; i += together_) {
                QueryBlock block(in_, kernels_, i, std::min(i + together_, cells.q_end));
                if (block.tokens().empty()) continue;
                block.pack();
                load(block, s);
                for (int64_t j = cells.d; j < cells.d_end; ++j) add(block, j, s);
            }
        } catch (const std::bad_alloc&) {
            failed_ = true;
        }
    }

    void prepare(Scratch& s) const {
        const int64_t lanes = kernels_.lanes, length = in_.d.length;
        const int64_t tokens = together_ * in_.q.length, width = divide_up(tokens, lanes) * lanes;
        s.rows.resize(size_t(std::max(tokens, length)));
        s.kept.resize(size_t(length));
        s.to_q.resize(size_t(tokens));
        s.to_d.resize(size_t(length));
        s.packed_q.resize(size_t(gradient_.packed_floats(tokens, in_.dim)));
        s.packed_d.resize(size_t(gradient_.packed_floats(std::min(kRows, length), in_.dim)));
        s.tile.resize(size_t(length * width));
        if (forward_.scores && reverse_.scores) s.reverse.resize(size_t(length * width));
        if (widens()) {
            s.widened.resize(size_t(std::min(kRows, length) * in_.dim));
            s.widened_rows.resize(size_t(kRows));
        }
        for (std::vector<float>* x : {&s.c, &s.most, &s.total}) x->resize(size_t(width));
    }

    bool widens() const { return !kernels_.as_stored && in_.dtype != DType::float32; }

    void clear(float* gradient, int64_t rows, int threads) const {
        const int64_t tasks = divide_up(rows, kRows);
        parallel_for(tasks, useful_threads(static_cast<double>(rows * in_.dim), threads), [&](int64_t task, int) {
            const int64_t n = std::min(kRows, rows - task * kRows);
            std::fill_n(gradient + task * kRows * in_.dim, n * in_.dim, 0.0f);
        });
    }

    // The block's tokens as the gradients of documents take them, and where their own gradients lie.
    void load(const QueryBlock& block, Scratch& s) const {
        size_t x = 0;
        for (const Segment& segment : block.segments()) {
            for (int64_t end = segment.begin + segment.count; int64_t(x) < end; ++x) {
                const int64_t u = block.tokens()[x];
                s.rows[x] = in_.q.row(in_.dtype, segment.query, u);
                s.to_q[x] = grad_q_ + (in_.q.first(segment.query) + u) * in_.dim;
            }
        }
        gradient_.pack(in_.dtype, s.rows.data(), int64_t(x), in_.dim, s.packed_q.data());
    }

    // What the block's queries and document j give each other.
    void add(const QueryBlock& block, int64_t j, Scratch& s) const {
        int64_t n = 0;
        for (int64_t t = 0, length = in_.d.length_of(j); t < length; ++t) {
            if (!in_.d.kept(j, t)) continue;
            s.rows[size_t(n)] = in_.d.row(in_.dtype, j, t);
            s.to_d[size_t(n)] = grad_d_ + (in_.d.first(j) + t) * in_.dim;
            s.kept[size_t(n++)] = static_cast<int32_t>(t);
        }
        if (n == 0) return;
        const int64_t width = block.width(), tokens = int64_t(block.tokens().size());
        const int64_t chunk = divide_up(n, divide_up(n, kRows));
        for (int64_t first = 0; first < n; first += chunk) {
            similarities(block, first, std::min(chunk, n - first), n, s);
        }
        spread(block, j, n, s);
        for (int64_t first = 0; first < n; first += chunk) {
            const int64_t rows = std::min(chunk, n - first);
            gradient_.pack(in_.dtype, s.rows.data() + first, rows, in_.dim, s.packed_d.data());
            gradient_.combine(s.packed_d.data(), rows, in_.dim, s.tile.data() + first * width, 1, width, tokens,
                              s.to_q.data());
        }
        gradient_.combine(s.packed_q.data(), tokens, in_.dim, s.tile.data(), width, 1, n, s.to_d.data());
    }

    // Rows [first, first + rows) of the tile, of n.
    void similarities(const QueryBlock& block, int64_t first, int64_t rows, int64_t n, Scratch& s) const {
        RowRun run = {s.rows.data() + first, nullptr, nullptr, rows, n - first};
        if (widens()) {
            for (int64_t r = 0; r < rows; ++r) {
                float* to = s.widened.data() + r * in_.dim;
                kernels_.widen(in_.dtype, run.rows[r], to, in_.dim);
                s.widened_rows[size_t(r)] = to;
            }
            run = {s.widened_rows.data(), nullptr, nullptr, rows, rows};
        }
        float* to = s.tile.data() + first * block.width();
        for (int64_t p = 0; p < block.panels(); ++p) {
            kernels_.tile(run, in_.dim, block.panel(p), block.width(), to + block.panel_begin(p));
        }
    }

    // Gradient of the value of a token whose results begin at `at`.
    static float coefficient(const Tokens& seekers, const MaxSimIncoming& incoming, int64_t cell, int64_t at,
                             int64_t item, int64_t token) {
        const float c = incoming.scores[cell] * seekers.weight(item, token);
        return incoming.values ? c + incoming.values[at + token] : c;
    }

    // The tile's similarities become their gradients: each token's coefficient spread by its softmax.
    void spread(const QueryBlock& block, int64_t j, int64_t n, Scratch& s) const {
        const int64_t width = block.width(), tokens = int64_t(block.tokens().size());
        const bool both = forward_.scores && reverse_.scores;
        if (reverse_.scores) spread_rows(block, j, n, s, both ? s.reverse.data() : s.tile.data());
        if (!forward_.scores) return;
        for (const Segment& segment : block.segments()) {
            const int64_t cell = in_.cell(segment.query, j), at = in_.q_cell(segment.query, j);
            for (int64_t x = segment.begin; x < segment.begin + segment.count; ++x) {
                const int64_t u = block.tokens()[size_t(x)];
                s.c[size_t(x)] = coefficient(in_.q, forward_, cell, at, segment.query, u);
            }
        }
        gradient_.softmax_columns(s.tile.data(), n, width, tokens, in_.temperature, s.c.data(), s.most.data(),
                                  s.total.data());
        if (!both) return;
        for (int64_t r = 0; r < n; ++r) {
            float* to = s.tile.data() + r * width;
            const float* more = s.reverse.data() + r * width;
            for (int64_t x = 0; x < tokens; ++x) to[x] += more[x];
        }
    }

    // The reverse direction: along the rows of the tile, over the tokens of each query.
    void spread_rows(const QueryBlock& block, int64_t j, int64_t n, const Scratch& s, float* to) const {
        for (const Segment& segment : block.segments()) {
            if (segment.count == 0) continue;
            const int64_t cell = in_.cell(segment.query, j), at = in_.d_cell(segment.query, j);
            for (int64_t r = 0; r < n; ++r) {
                const float c = coefficient(in_.d, reverse_, cell, at, j, s.kept[size_t(r)]);
                const int64_t begin = r * block.width() + segment.begin;
                gradient_.softmax_row(s.tile.data() + begin, segment.count, in_.temperature, c, to + begin);
            }
        }
    }

    const MaxSimInputs& in_;
    const MaxSimIncoming& forward_;
    const MaxSimIncoming& reverse_;
    float* grad_q_;
    float* grad_d_;
    const MaxSimKernels& kernels_;
    const MaxSimGradientKernels& gradient_;
    int64_t together_;  // queries of one block of tokens
    std::atomic<bool> failed_{false};
};

}  // namespace

void max_sim_soft_backward(const MaxSimInputs& in, const MaxSimIncoming& forward, const MaxSimIncoming& reverse,
                           float* grad_q, float* grad_d, const char* isa, int threads) {
    SoftBackward backward(in, forward, reverse, grad_q, grad_d, isa);
    const double documents = static_cast<double>(in.pairs ? in.d.length : in.d.total);
    const double work = 3.0 * static_cast<double>(in.q.total) * documents * static_cast<double>(in.dim);
    // A round is what threads are started for.
    const int64_t rounds = in.pairs ? 1 : std::max(divide_up(in.q.n, block_size(in.q.n)),
                                                   divide_up(in.d.n, block_size(in.d.n)));
    backward.run(useful_threads(work / static_cast<double>(std::max<int64_t>(1, rounds)), threads));
}

}  // namespace peaksim
