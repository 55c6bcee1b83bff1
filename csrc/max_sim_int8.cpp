// Max-sim of int8 codes: query blocks × documents, the same for every instruction set.

#include "max_sim_int8.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "max_sim_int8_kernels.hpp"
#include "max_sim_topk.hpp"
#include "parallel.hpp"

namespace peaksim {
namespace {

// A block's packed tokens stay in the second-level cache while documents stream past.
constexpr int64_t kBlockBytes = 256 << 10;
// Document rows handled at once.
constexpr int64_t kChunk = 256;
// Packed blocks held at a time, so that memory does not grow with the number of queries.
constexpr int64_t kGroupBlocks = 256;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

const int8_t* codes_of(const Tokens& tokens, int64_t i, int64_t u) {
    return static_cast<const int8_t*>(tokens.data) + tokens.place(i, u);
}

// The kept tokens of one query: lanes [begin, begin + count) of the block.
struct Segment {
    int64_t query;
    int64_t begin;
    int64_t count;
};

// Kept tokens of several queries side by side on vector lanes.
class Block {
public:
    Block(const MaxSimInt8Inputs& in, const MaxSimInt8Kernels& kernels, int64_t first, int64_t last)
        : in_(in), kernels_(kernels), panel_width_(kernels.lanes * kernels.max_vectors) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t begin = static_cast<int64_t>(tokens.size());
            for (int64_t u = 0; u < in.q.length_of(i); ++u) {
                if (in.q.kept(i, u)) tokens.push_back(static_cast<int32_t>(u));
            }
            segments.push_back({i, begin, static_cast<int64_t>(tokens.size()) - begin});
        }
        const int64_t count = static_cast<int64_t>(tokens.size());
        width = round_up(count, kernels.lanes);
        for (const int64_t split : {16, 4, 2}) {
            if (kernels.splits && split_ == 1 && count > 0 && count * split <= kernels.lanes) split_ = split;
        }
        data_.resize(static_cast<size_t>(width * round_up(in.dim, kernels.group * split_) * element()));
    }

    // Of a token on one lane.
    static int64_t lane_bytes(const MaxSimInt8Inputs& in, const MaxSimInt8Kernels& kernels) {
        return round_up(in.dim, kernels.group) * (kernels.wide ? 2 : 1);
    }

    int64_t panels() const { return (width + panel_width_ - 1) / panel_width_; }
    int64_t panel_begin(int64_t p) const { return p * panel_width_; }
    Int8Panel panel(int64_t p) const {
        const int64_t lanes = std::min(panel_width_, width - panel_begin(p));
        return {data_.data() + panel_begin(p) * lane_bytes(in_, kernels_), static_cast<int>(lanes / kernels_.lanes),
                static_cast<int>(split_)};
    }

    // Copies the codes into the panels.
    void pack() {
        const int64_t group = kernels_.group, run = group * split_;
        for (const Segment& segment : segments) {
            for (int64_t x = segment.begin; x < segment.begin + segment.count; ++x) {
                const int64_t p = x / panel_width_, lane = x - panel_begin(p);
                const int64_t lanes = panel(p).vectors * static_cast<int64_t>(kernels_.lanes);
                const int8_t* row = codes_of(in_.q, segment.query, tokens[size_t(x)]);
                char* to = data_.data() + panel_begin(p) * lane_bytes(in_, kernels_);
                for (int64_t k = 0; k < in_.dim; ++k) {
                    const int64_t at = k / run * lanes * group + lane * run + k % run;
                    if (kernels_.wide) {
                        reinterpret_cast<int16_t*>(to)[at] = row[k];
                    } else {
                        reinterpret_cast<uint8_t*>(to)[at] = static_cast<uint8_t>(row[k] + 128);
                    }
                }
            }
        }
    }

    std::vector<Segment> segments;
    std::vector<int32_t> tokens;  // index within the query, per lane
    int64_t width;

private:
    int64_t element() const { return kernels_.wide ? 2 : 1; }

    const MaxSimInt8Inputs& in_;
    const MaxSimInt8Kernels& kernels_;
    int64_t panel_width_;
    int64_t split_ = 1;
    std::vector<char> data_;
};

// One thread's memory, sized before the threads start.
struct Scratch {
    std::vector<const void*> rows;
    std::vector<float> scales, best;
    std::vector<int32_t> kept, index;
    std::vector<int16_t> widened;
};

class Forward {
public:
    Forward(const MaxSimInt8Inputs& in, const MaxSimOutputs& out, const MaxSimInt8Kernels& kernels, int threads)
        : in_(in), out_(out), kernels_(kernels) {
        const double work = static_cast<double>(in.q.total) * static_cast<double>(in.pairs ? in.d.length : in.d.total);
        // A product of codes is a quarter of the work that useful_threads counts.
        threads_ = useful_threads(work * static_cast<double>(in.dim) / 4, threads);
    }

    void run() {
        const int64_t bytes = round_up(in_.q.length, kernels_.lanes) * Block::lane_bytes(in_, kernels_);
        const int64_t per_block = in_.pairs ? 1 : std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, bytes));
        std::vector<Block> group;
        group.reserve(static_cast<size_t>(std::min(kGroupBlocks, in_.q.n / per_block + 1)));
        for (int64_t first = 0; first < in_.q.n; first += per_block * kGroupBlocks) {
            const int64_t last = std::min(in_.q.n, first + per_block * kGroupBlocks);
            group.clear();
            for (int64_t i = first; i < last; i += per_block) {
                group.emplace_back(in_, kernels_, i, std::min(last, i + per_block));
            }
            score_group(group);
        }
    }

private:
    void score_group(std::vector<Block>& group) {
        int64_t width = 0;
        for (const Block& block : group) width = std::max(width, block.width);
        std::vector<Scratch> scratch(static_cast<size_t>(threads_));
        for (Scratch& s : scratch) {
            s.rows.resize(size_t(in_.d.length));
            s.scales.resize(size_t(in_.d.length));
            s.kept.resize(size_t(in_.d.length));
            s.best.resize(size_t(width));
            s.index.resize(size_t(width));
            if (kernels_.wide) s.widened.resize(size_t(std::min(kChunk, in_.d.length) * in_.dim));
        }
        const int64_t blocks = static_cast<int64_t>(group.size());
        if (in_.pairs) {
            parallel_for(blocks, threads_, [&](int64_t b, int worker) {
                Block& block = group[size_t(b)];
                block.pack();
                score(block, block.segments[0].query, scratch[size_t(worker)]);
            });
            return;
        }
        parallel_for(blocks, blocks > 1 ? threads_ : 1, [&](int64_t b, int) { group[size_t(b)].pack(); });
        // Neighbouring tasks share their documents. Few enough in a task that all threads have work to the end.
        const int64_t step = std::clamp<int64_t>(in_.d.n * blocks / (8 * threads_), 1, 16);
        parallel_for((in_.d.n + step - 1) / step * blocks, threads_, [&](int64_t task, int worker) {
            const int64_t j = task / blocks * step;
            for (int64_t end = std::min(in_.d.n, j + step), k = j; k < end; ++k) {
                score(group[size_t(task % blocks)], k, scratch[size_t(worker)]);
            }
        });
    }

    // All queries of the block against document j.
    void score(const Block& block, int64_t j, Scratch& s) const {
        int64_t n = 0;
        for (int64_t t = 0, length = in_.d.length_of(j), first = in_.d.first(j); t < length; ++t) {
            if (!in_.d.kept(j, t)) continue;
            s.rows[size_t(n)] = codes_of(in_.d, j, t);
            s.scales[size_t(n)] = in_.d_scales[first + t];
            s.kept[size_t(n++)] = static_cast<int32_t>(t);
        }
        std::fill(s.best.begin(), s.best.end(), -std::numeric_limits<float>::infinity());
        std::fill(s.index.begin(), s.index.end(), 0);
        for (int64_t first = 0; first < n; first += kChunk) {
            const int64_t rows = std::min(kChunk, n - first);
            for (int64_t r = 0; kernels_.wide && r < rows; ++r) {
                int16_t* to = s.widened.data() + r * in_.dim;
                kernels_.widen(static_cast<const int8_t*>(s.rows[size_t(first + r)]), to, in_.dim);
                s.rows[size_t(first + r)] = to;
            }
            for (int64_t p = 0; p < block.panels(); ++p) {
                const int64_t begin = block.panel_begin(p);
                kernels_.fold(s.rows.data() + first, s.scales.data() + first, rows, in_.dim, block.panel(p),
                              static_cast<int32_t>(first), s.best.data() + begin,
                              out_.argmax ? s.index.data() + begin : nullptr);
            }
        }
        finish(block, j, n, s);
    }

    void finish(const Block& block, int64_t j, int64_t n, const Scratch& s) const {
        for (const Segment& segment : block.segments) {
            const int64_t i = segment.query, length = in_.q.length_of(i), cell = in_.cell(i, j);
            const int64_t at = in_.q.offsets ? j * in_.q.total + in_.q.offsets[i] : cell * in_.q.length;
            if (out_.argmax) std::fill_n(out_.argmax + at, length, -1);
            if (out_.values) std::fill_n(out_.values + at, length, 0.0f);
            double sum = 0.0;
            for (int64_t x = segment.begin; n > 0 && x < segment.begin + segment.count; ++x) {
                const int64_t u = block.tokens[size_t(x)];
                const float value = in_.q_scales[in_.q.first(i) + u] * s.best[size_t(x)];
                sum += static_cast<double>(in_.q.weight(i, u)) * value;
                if (out_.argmax) out_.argmax[at + u] = s.kept[size_t(s.index[size_t(x)])];
                if (out_.values) out_.values[at + u] = value;
            }
            out_.scores[cell] = static_cast<float>(sum);
        }
    }

    const MaxSimInt8Inputs& in_;
    const MaxSimOutputs& out_;
    const MaxSimInt8Kernels& kernels_;
    int threads_;
};

}  // namespace

void max_sim_int8(const MaxSimInt8Inputs& in, const MaxSimOutputs& out, const char* isa, int threads) {
    Forward(in, out, max_sim_int8_kernels(isa), threads).run();
}

void max_sim_int8_topk(const MaxSimInt8Inputs& in, int64_t k, float* scores, int64_t* indices, const char* isa,
                       int threads) {
    const auto score = [&](int64_t first, int64_t last, float* scratch) {
        MaxSimInt8Inputs block = in;
        block.d = part_of(in.d, 1, first, last);
        if (!in.d.offsets) block.d_scales += first * in.d.length;
        MaxSimOutputs out{};
        out.scores = scratch;
        max_sim_int8(block, out, isa, threads);
    };
    select_blocks(in.q.n, in.d.n, k, threads, score, scores, indices);
}

}  // namespace peaksim
