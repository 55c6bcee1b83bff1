// Which kernels run: the best that the processor has, or no better than the caller allows.

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_features.hpp"
#include "max_sim_kernels.hpp"

namespace peaksim {
namespace {

struct Choice {
    const char* isa;
    bool here;  // the processor has it
    const MaxSimKernels* (*kernels)(DType);
};

constexpr int kChoices = 5;

// Best first. A unit that offers nothing for float32 and bfloat16 was compiled without its instructions.
void list(Choice (&choices)[kChoices]) {
    const CpuFeatures& cpu = cpu_features();
    choices[0] = {"amx_bf16", cpu.amx_bf16 && max_sim_amx(DType::bfloat16), max_sim_amx};
    choices[1] = {"avx512_bf16", cpu.avx512_bf16 && max_sim_avx512_bf16(DType::bfloat16), max_sim_avx512_bf16};
    choices[2] = {"avx512", cpu.avx512 && max_sim_avx512(DType::float32), max_sim_avx512};
    choices[3] = {"avx2", cpu.avx2 && max_sim_avx2(DType::float32), max_sim_avx2};
    choices[4] = {"generic", true, max_sim_generic};
}

std::string names() {
    Choice choices[kChoices];
    list(choices);
    std::string all;
    for (const Choice& choice : choices) {
        if (choice.here) all += all.empty() ? choice.isa : std::string(" ") + choice.isa;
    }
    return all;
}

}  // namespace

const char* max_sim_isas() {
    static const std::string all = names();
    return all.c_str();
}

const MaxSimKernels& max_sim_kernels(DType dtype, const char* isa) {
    Choice choices[kChoices];
    list(choices);
    const bool emulated = std::strcmp(isa, "amx_emulated") == 0;
    if (emulated && max_sim_amx_emulated(dtype)) return *max_sim_amx_emulated(dtype);
    bool allowed = emulated || *isa == '\0';
    for (const Choice& choice : choices) {
        allowed = allowed || (choice.here && std::strcmp(choice.isa, isa) == 0);
        const MaxSimKernels* kernels = allowed && choice.here ? choice.kernels(dtype) : nullptr;
        if (kernels) return *kernels;
    }
    throw std::invalid_argument(std::string("max_sim: the instruction set must be one of ") + max_sim_isas() +
                                ", got " + isa);
}

}  // namespace peaksim
