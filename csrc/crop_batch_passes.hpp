// The passes of crop_batch, written once over an instruction set's `Lanes`: kCropLanes sums of 32 bits.
//
//   Lanes()                        sums that start with half a unit, so that cutting the fraction off rounds
//   add(bytes, weight)             sum[i] += weight * bytes[i]
//   store_bytes(to)                sums as bytes: fraction cut off, limited to 0..255
//   store<dtype>(to, scale, shift) those bytes * scale + shift
//   transpose(from, stride, to, stride)   16 x 16 bytes
//
// Included by one unit per instruction set; everything here must stay inside the unit.
#pragma once

#include <cstring>

#include "crop_batch_kernels.hpp"

namespace peaksim {
namespace {

// Rows lie along the lanes here, so that each output is a weighted sum of neighbouring vectors, as it is down
// the columns. The bytes are transposed on the way in and on the way out.
template <class Lanes>
void filter_rows(const CropRows& in) {
    for (int64_t j = 0; j < in.row_bytes; j += kCropLanes) {
        Lanes::transpose(in.rows + j, in.row_bytes, in.columns + j * kCropLanes, kCropLanes);
    }
    const int64_t plane = in.plane_width * kCropLanes;
    for (int64_t x = in.begin; x < in.end; ++x) {
        const uint8_t* from = in.columns + (in.taps.first[x] - in.first_column) * 3 * kCropLanes;
        const int32_t* weights = in.taps.weights + x * in.taps.width;
        const int32_t count = in.taps.count[x];
        Lanes red, green, blue;
        for (int32_t k = 0; k < count; ++k, from += 3 * kCropLanes) {
            red.add(from, weights[k]);
            green.add(from + kCropLanes, weights[k]);
            blue.add(from + 2 * kCropLanes, weights[k]);
        }
        uint8_t* to = in.filtered + (x - in.begin) * kCropLanes;
        red.store_bytes(to);
        green.store_bytes(to + plane);
        blue.store_bytes(to + 2 * plane);
    }
    const int64_t width = in.plane_width;
    for (int64_t j = 0; j < 3 * width; j += kCropLanes) {
        Lanes::transpose(in.filtered + j * kCropLanes, kCropLanes, in.planes + j, 3 * width);
    }
}

template <class Lanes>
void filter_columns(const CropColumns& in) {
    for (int64_t j = 0; j < in.row_bytes; j += kCropLanes) {
        Lanes sums;
        const uint8_t* bytes = in.rows + j;
        for (int32_t k = 0; k < in.count; ++k, bytes += in.row_bytes) sums.add(bytes, in.weights[k]);
        sums.store_bytes(in.out + j);
    }
}

template <class Lanes, DType dtype>
void finish_plane(const CropRow& in, int plane) {
    constexpr int64_t size = dtype == DType::float32 ? 4 : 2;
    constexpr int kUnroll = 4;
    const uint8_t* from = in.planes + plane * in.plane_width;
    char* out = static_cast<char*>(in.out[plane]);
    const int64_t row = 3 * in.plane_width;
    const float scale = in.scale[plane], shift = in.shift[plane];
    int64_t j = 0;
    for (; j + kUnroll * kCropLanes <= in.n; j += kUnroll * kCropLanes) {
        Lanes sums[kUnroll];
        const uint8_t* bytes = from + j;
        for (int32_t k = 0; k < in.count; ++k, bytes += row) {
            for (int u = 0; u < kUnroll; ++u) sums[u].add(bytes + u * kCropLanes, in.weights[k]);
        }
        for (int u = 0; u < kUnroll; ++u) {
            sums[u].template store<dtype>(out + (j + u * kCropLanes) * size, scale, shift);
        }
    }
    for (; j < in.n; j += kCropLanes) {
        Lanes sums;
        const uint8_t* bytes = from + j;
        for (int32_t k = 0; k < in.count; ++k, bytes += row) sums.add(bytes, in.weights[k]);
        const int64_t left = in.n - j;
        if (left >= kCropLanes) {
            sums.template store<dtype>(out + j * size, scale, shift);
            continue;
        }
        char last[kCropLanes * size];
        sums.template store<dtype>(last, scale, shift);
        std::memcpy(out + j * size, last, static_cast<size_t>(left * size));
    }
}

template <class Lanes>
void finish_row(DType dtype, const CropRow& in) {
    for (int plane = 0; plane < 3; ++plane) {
        if (dtype == DType::float32) finish_plane<Lanes, DType::float32>(in, plane);
        if (dtype == DType::float16) finish_plane<Lanes, DType::float16>(in, plane);
        if (dtype == DType::bfloat16) finish_plane<Lanes, DType::bfloat16>(in, plane);
    }
}

}  // namespace
}  // namespace peaksim
