// crop_batch in plain C++.

#include "crop_batch_kernels.hpp"
#include "crop_batch_passes.hpp"

namespace peaksim {
namespace {

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Finite numbers only, as pixels are; what is too large becomes infinite.
uint16_t to_float16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (rest < 0x38800000u) {
        // Subnormal: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded by the addition.
        return static_cast<uint16_t>(sign | (bits_of(float_of_bits(rest) + 0.5f) - 0x3F000000u));
    }
    return static_cast<uint16_t>(sign | ((rest - (112u << 23) + 0xFFFu + ((rest >> 13) & 1u)) >> 13));
}

struct PlainLanes {
    int32_t sum[kCropLanes];

    PlainLanes() {
        for (int32_t& x : sum) x = 1 << (kCropBits - 1);
    }
    void add(const uint8_t* bytes, int32_t weight) {
        for (int64_t i = 0; i < kCropLanes; ++i) sum[i] += weight * bytes[i];
    }
    int32_t byte(int64_t i) const {
        const int32_t x = sum[i] >> kCropBits;
        return x < 0 ? 0 : x > 255 ? 255 : x;
    }
    void store_bytes(uint8_t* to) const {
        for (int64_t i = 0; i < kCropLanes; ++i) to[i] = static_cast<uint8_t>(byte(i));
    }
    template <DType dtype>
    void store(void* to, float scale, float shift) const {
        for (int64_t i = 0; i < kCropLanes; ++i) {
            const float x = static_cast<float>(byte(i)) * scale + shift;
            if (dtype == DType::float32) static_cast<float*>(to)[i] = x;
            if (dtype == DType::float16) static_cast<uint16_t*>(to)[i] = to_float16(x);
            if (dtype == DType::bfloat16) static_cast<uint16_t*>(to)[i] = to_bfloat16(x);
        }
    }
    static void transpose(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
        for (int64_t i = 0; i < kCropLanes; ++i) {
            for (int64_t j = 0; j < kCropLanes; ++j) to[j * to_stride + i] = from[i * from_stride + j];
        }
    }
};

constexpr CropBatchKernels kKernels = {filter_rows<PlainLanes>, filter_columns<PlainLanes>, finish_row<PlainLanes>};

}  // namespace

const CropBatchKernels* crop_batch_generic() { return &kKernels; }

}  // namespace peaksim
