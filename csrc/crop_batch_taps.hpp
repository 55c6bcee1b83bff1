// Places and weights that antialiased resizing reads along one axis, in Pillow's fixed-point arithmetic.
#pragma once

#include <vector>

#include "crop_batch.hpp"
#include "crop_batch_kernels.hpp"

namespace peaksim {

struct Span {
    int64_t begin, end;

    bool empty() const { return begin >= end; }
};

class CropAxis {
public:
    CropAxis(int64_t length, int64_t size, Filter filter);

    int64_t length() const { return length_; }
    CropTaps taps() const { return {first_.data(), count_.data(), weights_.data(), width_}; }

    // Outputs between the first and the last that reads one of `places`.
    Span readers(Span places) const;
    // Places between the first and the last that one of `outputs` reads.
    Span read_by(Span outputs) const;

private:
    int64_t length_;
    int64_t width_;
    std::vector<int32_t> first_, count_, weights_;
};

}  // namespace peaksim
