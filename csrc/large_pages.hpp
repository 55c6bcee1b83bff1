// Large pages for large results: writing fresh memory costs more in page faults than in bandwidth.
#pragma once

#include <cstdint>

namespace peaksim {

// Asks the system to back `data` by large pages, where it can and there is enough of it. Changes no content.
void prefer_large_pages(void* data, int64_t bytes);

}  // namespace peaksim
