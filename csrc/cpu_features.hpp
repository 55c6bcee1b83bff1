// Which instruction sets this processor and operating system offer.
#pragma once

namespace peaksim {

struct CpuFeatures {
    bool avx2;         // with FMA and F16C
    bool avx512;       // F, BW, DQ, VL
    bool avx512_vnni;
    bool avx512_bf16;
};

// Asked once, then remembered.
const CpuFeatures& cpu_features();

}  // namespace peaksim
