// Which kernels of max-sim's backward run: the best that the processor has, or no better than the caller allows.

#include <sstream>
#include <stdexcept>
#include <string>

#include "max_sim_gradient_kernels.hpp"
#include "max_sim_kernels.hpp"

namespace peaksim {
namespace {

const MaxSimGradientKernels* named(const std::string& isa, DType dtype) {
    if (isa == "avx512_bf16") return max_sim_gradient_avx512_bf16(dtype);
    if (isa == "avx512") return max_sim_gradient_avx512(dtype);
    if (isa == "avx2") return max_sim_gradient_avx2(dtype);
    return isa == "generic" ? max_sim_gradient_generic(dtype) : nullptr;
}

}  // namespace

const MaxSimGradientKernels& max_sim_gradient_kernels(DType dtype, const char* isa) {
    // All that any op can use here, best first; a limit that has no table of its own leaves the next one.
    std::istringstream all(max_sim_isas());
    const std::string limit(isa);
    bool allowed = limit.empty() || limit == "amx_emulated";
    for (std::string name; all >> name;) {
        allowed = allowed || name == limit;
        const MaxSimGradientKernels* kernels = allowed ? named(name, dtype) : nullptr;
        if (kernels) return *kernels;
    }
    throw std::invalid_argument(std::string("max_sim: the instruction set must be one of ") + max_sim_isas() +
                                ", got " + isa);
}

}  // namespace peaksim
