#include "crop_batch_taps.hpp"

#include <algorithm>
#include <cmath>

namespace peaksim {
namespace {

double weight(Filter filter, double x) {
    x = std::fabs(x);
    if (filter == Filter::bilinear) return x < 1.0 ? 1.0 - x : 0.0;
    constexpr double a = -0.5;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    return x < 2.0 ? (((x - 5.0) * x + 8.0) * x - 4.0) * a : 0.0;
}

int32_t fixed_point(double x) {
    const double scaled = x * (1 << kCropBits);
    return static_cast<int32_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
}

}  // namespace

CropAxis::CropAxis(int64_t length, int64_t size, Filter filter) : length_(length) {
    const double scale = static_cast<double>(length) / static_cast<double>(size);
    const double stretch = std::max(scale, 1.0);
    const double support = (filter == Filter::bicubic ? 2.0 : 1.0) * stretch;
    width_ = std::min(static_cast<int64_t>(std::ceil(support)) * 2 + 1, length);
    first_.resize(static_cast<size_t>(size));
    count_.resize(static_cast<size_t>(size));
    weights_.resize(static_cast<size_t>(size * width_));
    std::vector<double> exact(static_cast<size_t>(width_));
    for (int64_t i = 0; i < size; ++i) {
        const double centre = (static_cast<double>(i) + 0.5) * scale;
        const int64_t begin = std::max(static_cast<int64_t>(centre - support + 0.5), int64_t{0});
        const int64_t end = std::min(static_cast<int64_t>(centre + support + 0.5), length);
        double total = 0.0;
        for (int64_t k = begin; k < end; ++k) {
            const double w = weight(filter, (static_cast<double>(k) - centre + 0.5) * (1.0 / stretch));
            exact[static_cast<size_t>(k - begin)] = w;
            total += w;
        }
        int32_t* to = &weights_[static_cast<size_t>(i * width_)];
        int64_t lead = 0, count = end - begin;
        for (int64_t k = 0; k < count; ++k) to[k] = fixed_point(exact[static_cast<size_t>(k)] / total);
        // Zeros at the ends are common (an axis that keeps its length has one tap): they need no reading.
        while (count > 1 && to[count - 1] == 0) --count;
        while (lead < count - 1 && to[lead] == 0) ++lead;
        std::move(to + lead, to + count, to);
        first_[static_cast<size_t>(i)] = static_cast<int32_t>(begin + lead);
        count_[static_cast<size_t>(i)] = static_cast<int32_t>(count - lead);
    }
}

Span CropAxis::readers(Span places) const {
    Span found{0, 0};
    for (size_t i = 0; i < first_.size(); ++i) {
        if (places.empty() || first_[i] >= places.end || first_[i] + count_[i] <= places.begin) continue;
        if (found.empty()) found.begin = static_cast<int64_t>(i);
        found.end = static_cast<int64_t>(i) + 1;
    }
    return found;
}

Span CropAxis::read_by(Span outputs) const {
    Span found{length_, 0};
    for (int64_t i = outputs.begin; i < outputs.end; ++i) {
        const int64_t first = first_[static_cast<size_t>(i)];
        found.begin = std::min(found.begin, first);
        found.end = std::max(found.end, first + count_[static_cast<size_t>(i)]);
    }
    return found;
}

}  // namespace peaksim
