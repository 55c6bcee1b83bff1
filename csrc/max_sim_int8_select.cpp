// Which int8 kernels run: the best that the processor has, or no better than the caller allows.

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_features.hpp"
#include "max_sim_int8_kernels.hpp"
#include "max_sim_kernels.hpp"

namespace peaksim {
namespace {

bool is_name(const char* isa) {
    const std::string all = std::string(" ") + max_sim_isas() + " ";
    return *isa == '\0' || all.find(std::string(" ") + isa + " ") != std::string::npos;
}

// Whether the limit `isa` leaves out instructions that this set needs. Processors with BF16 have VNNI.
bool forbidden(const char* isa, const MaxSimInt8Kernels& kernels) {
    const bool lesser = std::strcmp(isa, "avx2") == 0 || std::strcmp(isa, "generic") == 0;
    if (std::strcmp(kernels.isa, "avx512_vnni") == 0) return lesser || std::strcmp(isa, "avx512") == 0;
    return std::strcmp(kernels.isa, "avx2") == 0 && std::strcmp(isa, "generic") == 0;
}

}  // namespace

const MaxSimInt8Kernels& max_sim_int8_kernels(const char* isa) {
    if (std::strcmp(isa, "amx_emulated") == 0) return *max_sim_int8_amx_emulated();
    if (!is_name(isa)) {
        throw std::invalid_argument(std::string("max_sim_int8: the instruction set must be one of ") + max_sim_isas() +
                                    ", got " + isa);
    }
    const CpuFeatures& cpu = cpu_features();
    // The limit names bfloat16's tiles: processors with those have these too.
    const bool all = *isa == '\0' || std::strcmp(isa, "amx_bf16") == 0;
    if (cpu.amx_int8 && all && max_sim_int8_amx()) return *max_sim_int8_amx();
    const MaxSimInt8Kernels* vnni = cpu.avx512_vnni ? max_sim_int8_avx512_vnni() : nullptr;
    if (vnni && !forbidden(isa, *vnni)) return *vnni;
    const MaxSimInt8Kernels* avx2 = cpu.avx2 ? max_sim_int8_avx2() : nullptr;
    if (avx2 && !forbidden(isa, *avx2)) return *avx2;
    return *max_sim_int8_generic();
}

}  // namespace peaksim
