// crop_batch for AVX2 with FMA and F16C.

#include "crop_batch_kernels.hpp"

#if defined(__AVX2__) && (defined(_MSC_VER) || (defined(__FMA__) && defined(__F16C__)))

#include "crop_batch_passes.hpp"
#include "crop_batch_transpose.hpp"

namespace peaksim {
namespace {

struct Avx2Lanes {
    __m256i low, high;

    Avx2Lanes() : low(_mm256_set1_epi32(1 << (kCropBits - 1))), high(low) {}

    static __m256i widened(const uint8_t* bytes) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    }
    void add(const uint8_t* bytes, int32_t weight) {
        const __m256i w = _mm256_set1_epi32(weight);
        low = _mm256_add_epi32(low, _mm256_mullo_epi32(widened(bytes), w));
        high = _mm256_add_epi32(high, _mm256_mullo_epi32(widened(bytes + 8), w));
    }
    static __m256i limited(__m256i sum) {
        const __m256i x = _mm256_max_epi32(_mm256_srai_epi32(sum, kCropBits), _mm256_setzero_si256());
        return _mm256_min_epi32(x, _mm256_set1_epi32(255));
    }
    void store_bytes(uint8_t* to) const {
        const __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(low, kCropBits), _mm256_srai_epi32(high, kCropBits));
        const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    }
    template <DType dtype>
    static void put(void* to, __m256i sum, float scale, float shift) {
        const __m256 bytes = _mm256_cvtepi32_ps(limited(sum));
        const __m256 x = _mm256_fmadd_ps(bytes, _mm256_set1_ps(scale), _mm256_set1_ps(shift));
        if (dtype == DType::float32) {
            _mm256_storeu_ps(static_cast<float*>(to), x);
        } else if (dtype == DType::float16) {
            _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        } else {
            const __m256i bits = _mm256_castps_si256(x);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
            const __m256i halves = _mm256_srli_epi32(rounded, 16);
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0xD8);
            _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
        }
    }
    template <DType dtype>
    void store(void* to, float scale, float shift) const {
        put<dtype>(to, low, scale, shift);
        put<dtype>(static_cast<char*>(to) + (dtype == DType::float32 ? 32 : 16), high, scale, shift);
    }
    static void transpose(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
        transpose_16x16(from, from_stride, to, to_stride);
    }
};

constexpr CropBatchKernels kKernels = {filter_rows<Avx2Lanes>, filter_columns<Avx2Lanes>, finish_row<Avx2Lanes>};

}  // namespace

const CropBatchKernels* crop_batch_avx2() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const CropBatchKernels* crop_batch_avx2() { return nullptr; }
}  // namespace peaksim

#endif
