#include "max_sim_topk.hpp"

#include <algorithm>
#include <limits>

#include "parallel.hpp"

namespace peaksim {
namespace {

// Scores of a block of documents: few enough for a cache, enough for a block to be worth starting threads for.
constexpr int64_t kScratchScores = 1 << 20;

}  // namespace

Selection::Selection(int64_t queries, int64_t documents, int64_t k)
    : k_(static_cast<size_t>(std::min(k, documents))), k_asked_(k), best_(static_cast<size_t>(queries)) {
    for (std::vector<Entry>& best : best_) best.reserve(k_);
}

void Selection::take_row(std::vector<Entry>& best, const float* scores, int64_t first, int64_t count) const {
    int64_t j = 0;
    for (; j < count && best.size() < k_; ++j) {
        best.push_back({scores[j], first + j});
        if (best.size() == k_) std::make_heap(best.begin(), best.end(), before);
    }
    if (k_ == 0) return;
    for (; j < count; ++j) {
        // Indices ascend: an equal score comes too late.
        if (!above(scores[j], best.front().score)) continue;
        std::pop_heap(best.begin(), best.end(), before);
        best.back() = {scores[j], first + j};
        std::push_heap(best.begin(), best.end(), before);
    }
}

void Selection::take(const float* scores, int64_t first, int64_t count, int threads) {
    const int64_t queries = static_cast<int64_t>(best_.size());
    const double work = static_cast<double>(queries) * static_cast<double>(count);
    parallel_for(queries, useful_threads(work, threads), [&](int64_t i, int) {
        take_row(best_[static_cast<size_t>(i)], scores + i * count, first, count);
    });
}

void Selection::write(float* scores, int64_t* indices) {
    for (std::vector<Entry>& best : best_) {
        std::sort(best.begin(), best.end(), before);
        for (int64_t r = 0; r < k_asked_; ++r) {
            const bool there = r < static_cast<int64_t>(best.size());
            *scores++ = there ? best[size_t(r)].score : -std::numeric_limits<float>::infinity();
            *indices++ = there ? best[size_t(r)].index : -1;
        }
    }
}

void select_blocks(int64_t queries, int64_t documents, int64_t k, int threads,
                   const std::function<void(int64_t first, int64_t last, float* scratch)>& score, float* scores,
                   int64_t* indices) {
    Selection selection(queries, documents, k);
    const int64_t step = std::clamp<int64_t>(kScratchScores / std::max<int64_t>(queries, 1), 1,
                                             std::max<int64_t>(documents, 1));
    std::vector<float> scratch(static_cast<size_t>(queries * std::min(step, documents)));
    for (int64_t first = 0; first < documents && queries > 0; first += step) {
        const int64_t last = std::min(documents, first + step);
        score(first, last, scratch.data());
        selection.take(scratch.data(), first, last - first, threads);
    }
    selection.write(scores, indices);
}

Tokens part_of(const Tokens& documents, int64_t size, int64_t first, int64_t last) {
    Tokens part = documents;
    part.n = last - first;
    if (documents.offsets) {
        // Offsets count from the beginning of all rows, and so do mask and weights.
        part.offsets = documents.offsets + first;
        part.total = documents.offsets[last] - documents.offsets[first];
        part.length = 0;
        for (int64_t j = 0; j < part.n; ++j) part.length = std::max(part.length, part.length_of(j));
        return part;
    }
    part.data = static_cast<const char*>(documents.data) + documents.place(first, 0) * size;
    part.total = part.n * part.length;
    if (part.mask) part.mask += first * part.length;
    if (part.weights) part.weights += first * part.length;
    return part;
}

void max_sim_topk(const MaxSimInputs& in, int64_t k, float* scores, int64_t* indices, const char* isa, int threads) {
    const auto score = [&](int64_t first, int64_t last, float* scratch) {
        MaxSimInputs block = in;
        block.d = part_of(in.d, size_of(in.dtype), first, last);
        MaxSimOutputs out{};
        out.scores = scratch;
        max_sim(block, out, isa, threads);
    };
    select_blocks(in.q.n, in.d.n, k, threads, score, scores, indices);
}

}  // namespace peaksim
