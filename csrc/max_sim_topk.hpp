// The best documents of each query, without all scores. The contract stands in engine/reference/max_sim_topk.py.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "max_sim.hpp"

namespace peaksim {

// The best `k` of the scores shown so far, of each query: greater first, NaN before all, of equals the lower index.
class Selection {
public:
    Selection(int64_t queries, int64_t documents, int64_t k);

    // Scores (queries, count) of documents first, first + 1, ...; calls come in ascending order of `first`.
    void take(const float* scores, int64_t first, int64_t count, int threads);
    // Writes scores and indices (queries, k), best first; where there are fewer, -inf and -1.
    void write(float* scores, int64_t* indices);

private:
    struct Entry {
        float score;
        int64_t index;
    };
    static bool above(float a, float b) { return a > b || (a != a && b == b); }
    static bool before(const Entry& a, const Entry& b) {
        return above(a.score, b.score) || (!above(b.score, a.score) && a.index < b.index);
    }
    void take_row(std::vector<Entry>& best, const float* scores, int64_t first, int64_t count) const;

    size_t k_;
    int64_t k_asked_;
    std::vector<std::vector<Entry>> best_;  // heaps, the worst on top
};

// Calls score(first, last, scratch) for blocks of documents, which writes scores (queries, last - first), and keeps
// the best k. Scratch holds at most kScratchScores scores, or one per query.
void select_blocks(int64_t queries, int64_t documents, int64_t k, int threads,
                   const std::function<void(int64_t first, int64_t last, float* scratch)>& score, float* scores,
                   int64_t* indices);

// Documents [first, last) alone; `size` is that of an element in bytes.
Tokens part_of(const Tokens& documents, int64_t size, int64_t first, int64_t last);

// Writes the best k documents of each query: scores and indices (q.n, k).
void max_sim_topk(const MaxSimInputs& in, int64_t k, float* scores, int64_t* indices, const char* isa, int threads);

}  // namespace peaksim
