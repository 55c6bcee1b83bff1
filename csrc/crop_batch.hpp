// Crops to network input on the CPU: what bindings_crop_batch.cpp calls. The contract stands in
// engine/reference/crop_batch.py.
#pragma once

#include <cstdint>
#include <vector>

#include "dtype.hpp"

namespace peaksim {

enum class Filter { bilinear, bicubic };

// (height, width, 3) bytes, pixels dense within a row.
struct Picture {
    const uint8_t* data;
    int64_t height;
    int64_t width;
    int64_t row_stride;  // bytes
};

struct CropBatchInputs {
    std::vector<Picture> images;
    const int64_t* boxes;  // dense (n, 5): image, x0, y0, x1, y1; checked by the caller
    const uint8_t* fill;   // dense (n, 3)
    int64_t n;
    Filter filter;
    bool native;
    float scale[3];  // result = byte * scale + shift
    float shift[3];
};

// Dense (n, 3, height, width). Every element is written.
struct CropBatchOutput {
    void* data;
    DType dtype;
    int64_t height;
    int64_t width;
};

// Throws std::invalid_argument for an `isa` that is unknown or not to be had here; "" takes the best.
void crop_batch(const CropBatchInputs& in, const CropBatchOutput& out, const char* isa, int threads);

}  // namespace peaksim
