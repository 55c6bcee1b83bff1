// Query tokens packed for the kernels: kept tokens of several queries side by side on vector lanes.
#pragma once

#include <cstdint>
#include <vector>

#include "max_sim.hpp"
#include "max_sim_kernels.hpp"

namespace peaksim {

// The kept tokens of one query: lanes [begin, begin + count) of the block.
struct Segment {
    int64_t query;
    int64_t begin;
    int64_t count;
};

class QueryBlock {
public:
    // Takes queries [first, last). Allocates; pack() then does not.
    QueryBlock(const MaxSimInputs& in, const MaxSimKernels& kernels, int64_t first, int64_t last);

    // Copies the tokens into the panels.
    void pack();

    const std::vector<Segment>& segments() const { return segments_; }
    // Index of the token within its query, per lane.
    const std::vector<int32_t>& tokens() const { return tokens_; }
    // All lanes, the unused ones of the last panel included.
    int64_t width() const { return width_; }
    int64_t panels() const { return static_cast<int64_t>(places_.size()); }
    int64_t panel_begin(int64_t p) const { return places_[size_t(p)].begin; }
    Panel panel(int64_t p) const;

    static int64_t bytes(const MaxSimInputs& in, const MaxSimKernels& kernels, int64_t tokens);

private:
    // Where a panel lies: its lanes [begin, begin + tokens) of the block, its bytes from data().
    struct Place {
        int64_t begin, tokens, offset;
        int vectors, split;
    };

    void plan();
    void add_panel(int vectors, int split);
    int64_t packed_depth(int split) const;
    char* data() const;
    void pack_token(const Place& place, int64_t lane, const char* row) const;

    const MaxSimInputs& in_;
    const MaxSimKernels& kernels_;
    int64_t width_ = 0, size_ = 0;
    std::vector<Place> places_;
    std::vector<Segment> segments_;
    std::vector<int32_t> tokens_;
    std::vector<char> data_;
};

}  // namespace peaksim
