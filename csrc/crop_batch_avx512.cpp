// crop_batch for AVX-512 (F, BW, DQ, VL).

#include "crop_batch_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include "crop_batch_passes.hpp"
#include "crop_batch_transpose.hpp"

namespace peaksim {
namespace {

struct Avx512Lanes {
    __m512i sum;

    Avx512Lanes() : sum(_mm512_set1_epi32(1 << (kCropBits - 1))) {}

    void add(const uint8_t* bytes, int32_t weight) {
        const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
        sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(x, _mm512_set1_epi32(weight)));
    }
    __m512i positive() const { return _mm512_max_epi32(_mm512_srai_epi32(sum, kCropBits), _mm512_setzero_si512()); }
    void store_bytes(uint8_t* to) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(positive()));
    }
    template <DType dtype>
    void store(void* to, float scale, float shift) const {
        const __m512 bytes = _mm512_cvtepi32_ps(_mm512_min_epi32(positive(), _mm512_set1_epi32(255)));
        const __m512 x = _mm512_fmadd_ps(bytes, _mm512_set1_ps(scale), _mm512_set1_ps(shift));
        if (dtype == DType::float32) {
            _mm512_storeu_ps(to, x);
        } else if (dtype == DType::float16) {
            _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        } else {
            const __m512i bits = _mm512_castps_si512(x);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
        }
    }
    static void transpose(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
        transpose_16x16(from, from_stride, to, to_stride);
    }
};

constexpr CropBatchKernels kKernels = {filter_rows<Avx512Lanes>, filter_columns<Avx512Lanes>, finish_row<Avx512Lanes>};

}  // namespace

const CropBatchKernels* crop_batch_avx512() { return &kKernels; }

}  // namespace peaksim

#else

namespace peaksim {
const CropBatchKernels* crop_batch_avx512() { return nullptr; }
}  // namespace peaksim

#endif
