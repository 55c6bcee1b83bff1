// Which row operations run: the best that the processor has, or no better than the caller allows.

#include "vector_kernels.hpp"

#include <sstream>
#include <stdexcept>
#include <string>

#include "max_sim_kernels.hpp"

namespace peaksim {
namespace {

const VectorKernels* named(const std::string& isa) {
    if (isa == "avx512") return vector_kernels_avx512();
    if (isa == "avx2") return vector_kernels_avx2();
    return isa == "generic" ? vector_kernels_generic() : nullptr;
}

}  // namespace

const VectorKernels& vector_kernels(const char* isa) {
    // All that any op can use here, best first; a limit that has no table of its own leaves the next one.
    std::istringstream all(max_sim_isas());
    const std::string limit(isa);
    bool allowed = limit.empty();
    for (std::string name; all >> name;) {
        allowed = allowed || name == limit;
        const VectorKernels* kernels = allowed ? named(name) : nullptr;
        if (kernels) return *kernels;
    }
    throw std::invalid_argument("engine._C: the instruction set must be one of " + std::string(max_sim_isas()) +
                                ", got " + isa);
}

}  // namespace peaksim
