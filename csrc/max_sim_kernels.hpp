// What an instruction set contributes to max-sim. A unit that offers one defines the function for it below.
//
// Units with instruction-set flags must hold no function that another unit could be linked to: no standard
// containers, no inline functions with external linkage. The linker keeps one copy of such a function, and a
// processor without the instructions would run it.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace peaksim {

// Tokens of a query block on vector lanes: `vectors` vectors of lanes / split tokens each, packed as
// [dim / g][tokens][g] with g = group * split; the last groups are filled up with zeros. A token that has several
// lanes to itself keeps vectors full where there are few tokens.
struct Panel {
    const void* data;
    int vectors;  // 1 where split > 1
    int split;    // lanes of one token
};

// Rows of documents, one after the other across the documents' borders.
struct RowRun {
    const void* const* rows;
    const int32_t* document;  // which results the row belongs to: ascending
    const int32_t* token;     // index of the row within its document
    int64_t n;
    int64_t known;  // at least n; rows [n, known) come next and are worth fetching ahead
};

struct MaxSimKernels {
    const char* isa;
    int lanes;        // tokens in one vector
    int max_vectors;  // vectors in one panel
    int max_split;    // greatest `split` of a panel, a power of two
    int group;        // neighbouring elements of a token that are packed together: 1 float32 or 2 bfloat16
    bool as_stored;   // document rows are read in their own dtype; otherwise they are widened to float32 first

    // Greatest similarity so far, best[document * stride + token of the panel], and at the same place of index (or
    // null) the row's `token`. best starts at -inf.
    void (*fold)(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* best, int32_t* index);
    // All similarities: out[row * stride + token of the panel]. Needs the rows of `run` alone.
    void (*tile)(const RowRun& run, int64_t dim, const Panel& panel, int64_t stride, float* out);

    // The same maxima from a tile of similarities s[r * stride + token], r < n, token < width.
    void (*columns)(const float* s, int64_t n, int64_t stride, int64_t width, int32_t first, float* best,
                    int32_t* index);
    // total[token] = Σ_r exp((s - shift[token]) / temperature), added to what total holds.
    void (*column_sums)(const float* s, int64_t n, int64_t stride, int64_t width, const float* shift,
                        float temperature, float* total);
    // Maximum of n numbers as the contract has it, and its place; Σ exp((s - shift) / temperature) of them.
    float (*row_max)(const float* s, int64_t n, int32_t* place);
    float (*row_sum)(const float* s, int64_t n, float shift, float temperature);

    void (*widen)(DType dtype, const void* from, float* to, int64_t n);
};

// Null where the unit was compiled without its instructions or has nothing for the dtype.
const MaxSimKernels* max_sim_generic(DType dtype);
const MaxSimKernels* max_sim_avx2(DType dtype);
const MaxSimKernels* max_sim_avx512(DType dtype);
const MaxSimKernels* max_sim_avx512_bf16(DType dtype);
const MaxSimKernels* max_sim_amx(DType dtype);
const MaxSimKernels* max_sim_amx_emulated(DType dtype);

// The best kernels for the dtype on this processor, or those of `isa` and what comes after it; throws
// std::invalid_argument. "amx_emulated" comes before all others, but only if it is named: it is for tests.
const MaxSimKernels& max_sim_kernels(DType dtype, const char* isa);

// Names that `isa` may have here, best first, separated by spaces.
const char* max_sim_isas();

}  // namespace peaksim
