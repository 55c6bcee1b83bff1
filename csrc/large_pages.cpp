#include "large_pages.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace peaksim {

void prefer_large_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // Below some pages the first and the last, which stay small, would be most of it.
    constexpr uintptr_t kPage = uintptr_t{1} << 21;
    if (bytes < static_cast<int64_t>(4 * kPage)) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = (address + kPage - 1) & ~(kPage - 1);
    const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) & ~(kPage - 1);
    // A refusal leaves things as they are.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

}  // namespace peaksim
