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
    int64_t panels() const { return (width_ + panel_width_ - 1) / panel_width_; }
    int64_t panel_begin(int64_t p) const { return p * panel_width_; }
    Panel panel(int64_t p) const;

    static int64_t bytes(const MaxSimInputs& in, const MaxSimKernels& kernels, int64_t tokens);

private:
    void pack_token(char* panel, int64_t panel_lanes, int64_t lane, const char* row) const;

    const MaxSimInputs& in_;
    const MaxSimKernels& kernels_;
    int64_t panel_width_;
    int64_t width_;
    std::vector<Segment> segments_;
    std::vector<int32_t> tokens_;
    std::vector<char> data_;
};

}  // namespace peaksim
