// Which window attention kernels run: the best that the processor has, or no better than the caller allows.

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_features.hpp"
#include "max_sim_kernels.hpp"
#include "window_attention_kernels.hpp"

namespace peaksim {
namespace {

// One knob limits all ops, so every name that max-sim knows is known here.
bool is_known(const std::string& isa) {
    return (" " + std::string(max_sim_isas()) + " ").find(" " + isa + " ") != std::string::npos;
}

}  // namespace

const WindowAttentionKernels& window_attention_kernels(const char* isa) {
    if (*isa != '\0' && !is_known(isa)) {
        throw std::invalid_argument(std::string("window_attention: the instruction set must be one of ") +
                                    max_sim_isas() + ", got " + isa);
    }
    const CpuFeatures& cpu = cpu_features();
    const bool only_generic = std::strcmp(isa, "generic") == 0;
    const bool at_most_avx2 = only_generic || std::strcmp(isa, "avx2") == 0;
    const WindowAttentionKernels* kernels = nullptr;
    if (cpu.avx512 && !at_most_avx2) kernels = window_attention_avx512();
    if (!kernels && cpu.avx2 && !only_generic) kernels = window_attention_avx2();
    return kernels ? *kernels : *window_attention_generic();
}

}  // namespace peaksim
