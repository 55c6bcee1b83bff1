// Max-sim, forward: query blocks × documents, the same for every instruction set.

#include "max_sim.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "max_sim_block.hpp"
#include "max_sim_kernels.hpp"
#include "parallel.hpp"

namespace peaksim {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// A block's packed tokens stay in the second-level cache while documents stream past.
constexpr int64_t kBlockBytes = 384 << 10;
// Document rows handled at once: widened, or their similarities kept, within the same cache.
constexpr int64_t kRowsBytes = 128 << 10;
// Rows in a table, so that blocks of rows seldom end with a document; and the results they may fill.
constexpr int64_t kTableRows = 512;
constexpr int64_t kBestBytes = 128 << 10;
// Rows of a document up to which its maximum is taken from similarities written down.
constexpr int64_t kFewRows = 4;
// Packed blocks held at a time, so that memory does not grow with the number of queries.
constexpr int64_t kGroupBytes = 64 << 20;
constexpr int64_t kGroupBlocks = 4096;

// log-sum-exp subtracts the maximum, except an infinite one: inf - inf would be NaN.
float shift_of(float best) { return std::isinf(best) ? 0.0f : best; }

// In four parts, for additions wait for each other.
double sum_of(const float* x, int64_t n) {
    double sums[4] = {};
    int64_t k = 0;
    for (; k + 4 <= n; k += 4) {
        for (int part = 0; part < 4; ++part) sums[part] += static_cast<double>(x[k + part]);
    }
    for (; k < n; ++k) sums[0] += static_cast<double>(x[k]);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// One thread's memory, sized before the threads start.
struct Scratch {
    // A table of document rows: where they lie, their document within the task, their place within it.
    std::vector<const void*> rows;
    std::vector<int32_t> document, kept;
    // First kept token of each of the task's documents, -1 where there is none.
    std::vector<int32_t> found;
    std::vector<float> best, shift, total, widened, tile;
    std::vector<int32_t> index;
    std::vector<double> reverse;
};

class Forward {
public:
    Forward(const MaxSimInputs& in, const MaxSimOutputs& out, const MaxSimKernels& kernels, int threads)
        : in_(in), out_(out), kernels_(kernels) {
        const double documents = static_cast<double>(in.pairs ? in.d.length : in.d.total);
        const double work = static_cast<double>(in.q.total) * documents * static_cast<double>(in.dim);
        threads_ = useful_threads(work, threads);
        tiled_ = in.temperature > 0.0f || out.reverse();
        plain_ = !tiled_ && !in.q.weights && !out.argmax && !out.values;
    }

    void run() {
        const int64_t per_query = std::max<int64_t>(1, QueryBlock::bytes(in_, kernels_, in_.q.length));
        const int64_t per_block = in_.pairs ? 1 : std::max<int64_t>(1, kBlockBytes / per_query);
        const int64_t blocks = std::clamp<int64_t>(kGroupBytes / (per_block * per_query), 1, kGroupBlocks);
        std::vector<QueryBlock> group;
        group.reserve(static_cast<size_t>(std::min(blocks, in_.q.n / per_block + 1)));
        for (int64_t first = 0; first < in_.q.n; first += per_block * blocks) {
            const int64_t last = std::min(in_.q.n, first + per_block * blocks);
            group.clear();
            for (int64_t i = first; i < last; i += per_block) {
                group.emplace_back(in_, kernels_, i, std::min(last, i + per_block));
            }
            score_group(group);
        }
    }

private:
    void score_group(std::vector<QueryBlock>& group) {
        int64_t width = 0;
        size_t queries = 0;
        for (const QueryBlock& block : group) {
            width = std::max(width, block.width());
            queries = std::max(queries, block.segments().size());
        }
        // Never 0, also where tokens have no width and no query token is kept.
        const int64_t row_bytes = std::max({in_.dim * (widens() ? int64_t(sizeof(float)) : int64_t(size_of(in_.dtype))),
                                            tiled_ ? width * int64_t(sizeof(float)) : 0, int64_t(1)});
        chunk_ = std::clamp<int64_t>(kRowsBytes / row_bytes, 24, kTableRows);
        table_ = tiled_ ? std::max<int64_t>(1, in_.d.length) : kTableRows;
        const int64_t length = in_.d.total / std::max<int64_t>(1, in_.d.n);
        documents_ = std::max<int64_t>(1, std::min(2 * kTableRows / std::max<int64_t>(1, length),
                                                   kBestBytes / std::max<int64_t>(1, width * int64_t(sizeof(float)))));
        std::vector<Scratch> scratch(static_cast<size_t>(threads_));
        for (Scratch& s : scratch) prepare(s, width, queries);
        const int64_t blocks = static_cast<int64_t>(group.size());
        if (in_.pairs) {
            parallel_for(blocks, threads_, [&](int64_t b, int worker) {
                QueryBlock& block = group[size_t(b)];
                block.pack();
                const int64_t i = block.segments()[0].query;
                score(block, i, i + 1, scratch[size_t(worker)]);
            });
            return;
        }
        parallel_for(blocks, blocks > 1 ? threads_ : 1, [&](int64_t b, int) { group[size_t(b)].pack(); });
        // Neighbouring tasks share their documents. Few enough in a task that all threads have work to the end.
        const int64_t step = std::clamp<int64_t>(in_.d.n * blocks / (8 * threads_), 1, documents_);
        parallel_for((in_.d.n + step - 1) / step * blocks, threads_, [&](int64_t task, int worker) {
            const int64_t first = task / blocks * step, last = std::min(in_.d.n, first + step);
            score(group[size_t(task % blocks)], first, last, scratch[size_t(worker)]);
        });
    }

    void prepare(Scratch& s, int64_t width, size_t queries) const {
        const size_t rows = size_t(table_), cells = size_t(tiled_ ? width : width * documents_);
        s.rows.resize(rows);
        s.document.assign(rows, 0);
        s.kept.resize(rows);
        s.found.resize(size_t(tiled_ ? 1 : documents_));
        s.best.resize(cells);
        s.index.resize(out_.argmax ? cells : 0);
        s.shift.resize(size_t(width));
        s.total.resize(size_t(width));
        s.reverse.resize(queries);
        if (widens()) s.widened.resize(size_t(chunk_ * in_.dim));
        s.tile.resize(size_t(tiled_ ? chunk_ * width : table_));
    }

    bool widens() const { return !kernels_.as_stored && in_.dtype != DType::float32; }

    // All queries of the block against documents [first, last).
    void score(const QueryBlock& block, int64_t first, int64_t last, Scratch& s) const {
        if (tiled_) {
            for (int64_t j = first; j < last; ++j) score_by_tiles(block, j, s);
            return;
        }
        const int64_t width = block.width();
        const bool few = in_.d.length >= 1 && in_.d.length <= kFewRows && !in_.d.offsets && !in_.d.mask;
        if (few && plain_ && width == 1 && block.segments().size() == 1) return score_token(block, first, last, s);
        std::fill_n(s.best.begin(), width * (last - first), kLowest);
        std::fill_n(s.found.begin(), last - first, -1);
        int64_t n = 0;
        for (int64_t j = first; j < last; ++j) {
            for (int64_t t = 0, left = in_.d.length_of(j); left > 0;) {
                if (n == table_) take_rows(block, std::exchange(n, 0), s);
                const int64_t some = std::min(left, table_ - n);
                n += list_rows(j, t, t + some, n, j - first, width, s);
                t += some, left -= some;
            }
        }
        take_rows(block, n, s);
        if (plain_ && block.segments().size() == 1) return finish_plain(block.segments()[0], width, first, last, s);
        for (int64_t j = first; j < last; ++j) finish(block, first, j, s);
    }

    // A single token against documents of very few rows: their similarities, then each document's greatest.
    void score_token(const QueryBlock& block, int64_t first, int64_t last, Scratch& s) const {
        const int64_t length = in_.d.length, step = in_.d.token_stride * size_of(in_.dtype);
        float* to = out_.scores + in_.cell(block.segments()[0].query, first);
        for (int64_t j = first; j < last;) {
            const int64_t some = std::min(last - j, table_ / length), n = some * length;
            for (int64_t k = 0; k < some; ++k) {
                const char* row = in_.d.row(in_.dtype, j + k, 0);
                for (int64_t t = 0; t < length; ++t, row += step) s.rows[size_t(k * length + t)] = row;
            }
            for (int64_t at = 0; at < n; at += chunk_) {
                const RowRun run = part(at, std::min(chunk_, n - at), n, s);
                kernels_.tile(run, in_.dim, block.panel(0), 1, s.tile.data() + at);
            }
            for (int64_t k = 0; k < some; ++k, ++to) {
                int32_t place;
                const float* own = s.tile.data() + k * length;
                *to = length == 1 ? *own : kernels_.row_max(own, length, &place);
            }
            j += some;
        }
    }

    // Scores of a single query.
    void finish_plain(const Segment& segment, int64_t width, int64_t first, int64_t last, const Scratch& s) const {
        float* to = out_.scores + in_.cell(segment.query, first);
        for (int64_t k = 0; k < last - first; ++k) {
            to[k] = s.found[size_t(k)] < 0 ? 0.0f : static_cast<float>(sum_of(s.best.data() + k * width, segment.count));
        }
    }

    // Appends the kept tokens of document j among [from, to) to the table, which holds n rows; returns their number.
    int64_t list_rows(int64_t j, int64_t from, int64_t to, int64_t n, int64_t document, int64_t width,
                      Scratch& s) const {
        const int64_t before = n, step = in_.d.token_stride * size_of(in_.dtype);
        const uint8_t* mask = in_.d.mask ? in_.d.mask + in_.d.first(j) : nullptr;
        const char* row = in_.d.row(in_.dtype, j, from);
        for (int64_t t = from; t < to; ++t, row += step) {
            if (mask && !mask[t]) continue;
            s.rows[size_t(n)] = row;
            s.document[size_t(n)] = static_cast<int32_t>(document);
            s.kept[size_t(n++)] = static_cast<int32_t>(t);
        }
        int32_t& found = s.found[size_t(document)];
        if (n > before && found < 0) {
            found = s.kept[size_t(before)];
            // What nothing exceeds is found at the first kept token.
            if (out_.argmax) std::fill_n(s.index.begin() + document * width, width, found);
        }
        return n - before;
    }

    // The part of the table from `first` on, `n` rows long, of `known`; widened if need be.
    RowRun part(int64_t first, int64_t n, int64_t known, Scratch& s) const {
        for (int64_t r = 0; widens() && r < n; ++r) {
            float* to = s.widened.data() + r * in_.dim;
            kernels_.widen(in_.dtype, s.rows[size_t(first + r)], to, in_.dim);
            s.rows[size_t(first + r)] = to;
        }
        return {s.rows.data() + first, s.document.data() + first, s.kept.data() + first, n, known - first};
    }

    // Folds the table's rows into the maxima.
    void take_rows(const QueryBlock& block, int64_t n, Scratch& s) const {
        for (int64_t first = 0; first < n; first += chunk_) {
            const RowRun run = part(first, std::min(chunk_, n - first), n, s);
            for (int64_t p = 0; p < block.panels(); ++p) {
                const int64_t begin = block.panel_begin(p);
                kernels_.fold(run, in_.dim, block.panel(p), block.width(), s.best.data() + begin,
                              out_.argmax ? s.index.data() + begin : nullptr);
            }
        }
    }

    // Where sums of exponentials or maxima of the other direction are wanted: one document at a time.
    void score_by_tiles(const QueryBlock& block, int64_t j, Scratch& s) const {
        s.found[0] = -1;
        const int64_t n = list_rows(j, 0, in_.d.length_of(j), 0, 0, block.width(), s);
        std::fill(s.best.begin(), s.best.end(), kLowest);
        std::fill(s.index.begin(), s.index.end(), 0);
        std::fill(s.total.begin(), s.total.end(), 0.0f);
        if (out_.reverse()) begin_reverse(block, j, s);
        for (int64_t first = 0; first < n; first += chunk_) {
            const int64_t rows = std::min(chunk_, n - first);
            take_tile(block, j, first, part(first, rows, n, s), s);
        }
        for (int32_t& x : s.index) x = n > 0 ? s.kept[size_t(x)] : -1;
        finish(block, j, j, s);
    }

    void take_tile(const QueryBlock& block, int64_t j, int64_t first, const RowRun& run, Scratch& s) const {
        const int64_t width = block.width(), rows = run.n;
        for (int64_t p = 0; p < block.panels(); ++p) {
            kernels_.tile(run, in_.dim, block.panel(p), width, s.tile.data() + block.panel_begin(p));
        }
        const float temperature = in_.temperature;
        // Where the maximum rises, what was summed so far is scaled down to it.
        std::copy_n(s.best.data(), width, s.shift.data());
        kernels_.columns(s.tile.data(), rows, width, width, static_cast<int32_t>(first), s.best.data(),
                         out_.argmax ? s.index.data() : nullptr);
        if (temperature > 0.0f) {
            for (int64_t x = 0; x < width; ++x) {
                const float before = s.shift[size_t(x)], now = shift_of(s.best[size_t(x)]);
                s.shift[size_t(x)] = now;
                if (first == 0 || before == kLowest) {
                    s.total[size_t(x)] = 0.0f;
                } else if (now != shift_of(before)) {
                    s.total[size_t(x)] *= std::exp((shift_of(before) - now) / temperature);
                }
            }
            kernels_.column_sums(s.tile.data(), rows, width, width, s.shift.data(), temperature, s.total.data());
        }
        if (out_.reverse()) take_reverse(block, j, first, rows, s);
    }

    void begin_reverse(const QueryBlock& block, int64_t j, Scratch& s) const {
        std::fill_n(s.reverse.begin(), block.segments().size(), 0.0);
        for (const Segment& segment : block.segments()) {
            const int64_t at = in_.d_cell(segment.query, j), length = in_.d.length_of(j);
            if (out_.reverse_argmax) std::fill_n(out_.reverse_argmax + at, length, -1);
            if (out_.reverse_values) std::fill_n(out_.reverse_values + at, length, 0.0f);
        }
    }

    // Maxima along the rows of the tile: what each document token finds in each query.
    void take_reverse(const QueryBlock& block, int64_t j, int64_t first, int64_t rows, Scratch& s) const {
        for (int64_t r = 0; r < rows; ++r) {
            const float* row = s.tile.data() + r * block.width();
            const int64_t t = s.kept[size_t(first + r)];
            for (size_t k = 0; k < block.segments().size(); ++k) {
                const Segment& segment = block.segments()[k];
                if (segment.count == 0) continue;
                int32_t winner;
                float value = kernels_.row_max(row + segment.begin, segment.count, &winner);
                if (in_.temperature > 0.0f) {
                    const float shift = shift_of(value);
                    const float sum = kernels_.row_sum(row + segment.begin, segment.count, shift, in_.temperature);
                    value = shift + in_.temperature * std::log(sum);
                }
                s.reverse[k] += static_cast<double>(in_.d.weight(j, t)) * value;
                const int64_t at = in_.d_cell(segment.query, j) + t;
                if (out_.reverse_argmax) out_.reverse_argmax[at] = block.tokens()[size_t(segment.begin + winner)];
                if (out_.reverse_values) out_.reverse_values[at] = value;
            }
        }
    }

    // Results of document j of the task that begins with `first`.
    void finish(const QueryBlock& block, int64_t first, int64_t j, const Scratch& s) const {
        const bool found = s.found[size_t(j - first)] >= 0;
        const int64_t begin = (j - first) * block.width();
        for (size_t k = 0; k < block.segments().size(); ++k) {
            const Segment& segment = block.segments()[k];
            const int64_t cell = in_.cell(segment.query, j), at = in_.q_cell(segment.query, j);
            const int64_t length = in_.q.length_of(segment.query);
            if (out_.argmax) std::fill_n(out_.argmax + at, length, -1);
            if (out_.values) std::fill_n(out_.values + at, length, 0.0f);
            double sum = plain_ && found ? sum_of(s.best.data() + begin + segment.begin, segment.count) : 0.0;
            for (int64_t x = segment.begin; !plain_ && found && x < segment.begin + segment.count; ++x) {
                const int64_t u = block.tokens()[size_t(x)];
                float value = s.best[size_t(begin + x)];
                if (in_.temperature > 0.0f) value = s.shift[size_t(x)] + in_.temperature * std::log(s.total[size_t(x)]);
                sum += static_cast<double>(in_.q.weight(segment.query, u)) * value;
                if (out_.argmax) out_.argmax[at + u] = s.index[size_t(begin + x)];
                if (out_.values) out_.values[at + u] = value;
            }
            out_.scores[cell] = static_cast<float>(sum);
            if (out_.reverse_scores) out_.reverse_scores[cell] = static_cast<float>(s.reverse[k]);
        }
    }

    const MaxSimInputs& in_;
    const MaxSimOutputs& out_;
    const MaxSimKernels& kernels_;
    int threads_;
    bool tiled_;
    bool plain_;  // scores alone, of weights that are all one
    int64_t chunk_ = 1, table_ = 1, documents_ = 1;
};

}  // namespace

void max_sim(const MaxSimInputs& in, const MaxSimOutputs& out, const char* isa, int threads) {
    Forward(in, out, max_sim_kernels(in.dtype, isa), threads).run();
}

}  // namespace peaksim
