// What an instruction set contributes to max-sim of int8 codes. A unit that offers one defines the function below.
//
// Units with instruction-set flags must hold no function that another unit could be linked to; see
// max_sim_kernels.hpp.
#pragma once

#include <cstdint>

#include "inlining.hpp"

namespace peaksim {

// Codes of query tokens on vector lanes: `vectors` vectors of `lanes` tokens, packed as
// [dim / group][vectors * lanes][group], the last group filled up.
struct Int8Panel {
    const void* data;
    int vectors;
};

struct MaxSimInt8Kernels {
    const char* isa;
    int lanes;        // tokens in one vector
    int max_vectors;  // vectors in one panel
    int group;        // neighbouring codes of a token that are packed together
    bool wide;        // panels and document rows hold int16; otherwise panels hold code + 128, rows the codes
    // Greatest product so far times its row's scale, and the ordinal of the row, of each token in the panel over n
    // document rows whose ordinals begin with `first`. The products are exact; NaN counts as the greatest. best starts
    // at -inf, index at 0; index may be null.
    void (*fold)(const void* const* rows, const float* scales, int64_t n, int64_t dim, const Int8Panel& panel,
                 int32_t first, float* best, int32_t* index);
    void (*widen)(const int8_t* from, int16_t* to, int64_t n);
};

// Null where the unit was compiled without its instructions.
const MaxSimInt8Kernels* max_sim_int8_generic();
const MaxSimInt8Kernels* max_sim_int8_avx2();
const MaxSimInt8Kernels* max_sim_int8_avx512_vnni();
const MaxSimInt8Kernels* max_sim_int8_amx();
const MaxSimInt8Kernels* max_sim_int8_amx_emulated();  // for tests, only if it is named

// The best kernels on this processor, or those of `isa`; throws std::invalid_argument.
const MaxSimInt8Kernels& max_sim_int8_kernels(const char* isa);

namespace {

// Runs Kernel::block<MR, NR> over all rows: full blocks of MR, then of half as many, down to one. The unnamed
// namespace gives each unit its own copy, compiled with its own flags.
template <class Kernel, int MR, int NR, class Sink>
void for_code_rows(const void* const* rows, int64_t n, int64_t dim, const void* panel, int64_t done, const Sink& sink) {
    for (; done + MR <= n; done += MR) Kernel::template block<MR, NR>(rows + done, dim, panel, done, sink);
    if constexpr (MR > 1) {
        if (done < n) for_code_rows<Kernel, MR / 2, NR>(rows, n, dim, panel, done, sink);
    }
}

}  // namespace

}  // namespace peaksim
