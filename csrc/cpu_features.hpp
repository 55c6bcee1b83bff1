// Which instruction sets this processor and operating system offer.
#pragma once

namespace peaksim {

struct CpuFeatures {
    bool avx2;         // with FMA and F16C
    bool avx512;       // F, BW, DQ, VL
    bool avx512_vnni;
    bool avx512_bf16;
    bool amx_bf16;     // tiles, with the system's leave to use them
    bool amx_int8;
};

// Asked once, then remembered.
const CpuFeatures& cpu_features();

}  // namespace peaksim
