// What an instruction set contributes to crop_batch. Units with instruction-set flags must hold no function that
// another unit could be linked to (see max_sim_kernels.hpp).
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// Rows that the first pass filters at once, and bytes or pixels that every kernel handles at a time.
constexpr int64_t kCropLanes = 16;
// Weights are fixed-point numbers with so many bits of fraction, as in Pillow's resampling of bytes.
constexpr int kCropBits = 22;

// For each of `size` outputs along an axis: the places it reads and their weights.
struct CropTaps {
    const int32_t* first;
    const int32_t* count;
    const int32_t* weights;  // (size, width)
    int64_t width;
};

// Filtering along kCropLanes rows: a stretch of interleaved pixels becomes filtered bytes in three planes.
struct CropRows {
    const uint8_t* rows;   // kCropLanes rows of `row_bytes` bytes
    int64_t row_bytes;     // multiple of kCropLanes
    int64_t first_column;  // of the stretch
    CropTaps taps;
    int64_t begin, end;    // outputs wanted
    uint8_t* columns;      // scratch: row_bytes * kCropLanes
    uint8_t* filtered;     // scratch: 3 * plane_width * kCropLanes
    uint8_t* planes;       // result: kCropLanes rows of 3 planes
    int64_t plane_width;   // end - begin or more, multiple of kCropLanes
};

// Filtering down the columns before the rows: one row of interleaved bytes from `count` of them.
struct CropColumns {
    const uint8_t* rows;
    int64_t row_bytes;  // multiple of kCropLanes
    const int32_t* weights;
    int32_t count;
    uint8_t* out;
};

// The end of the work: one row of each output plane from `count` rows of three planes.
struct CropRow {
    const uint8_t* planes;
    int64_t plane_width;
    const int32_t* weights;
    int32_t count;
    const float* scale;  // per plane
    const float* shift;
    int64_t n;           // pixels wanted
    void* out[3];
};

struct CropBatchKernels {
    void (*filter_rows)(const CropRows& in);
    void (*filter_columns)(const CropColumns& in);
    void (*finish_row)(DType dtype, const CropRow& in);
};

// Null where the unit was compiled without its instructions.
const CropBatchKernels* crop_batch_generic();
const CropBatchKernels* crop_batch_avx2();
const CropBatchKernels* crop_batch_avx512();

}  // namespace peaksim
