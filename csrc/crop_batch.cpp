// crop_batch: where each crop lies on its picture, which outputs see it, and how the work is dealt out.
//
// A picture here is what gets resized: the crop itself, or a canvas of the image's size with the crop on it. All
// of it but the pasted rectangle has the fill colour, which resizing keeps; only outputs that read the rectangle
// are computed.

#include "crop_batch.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu_features.hpp"
#include "crop_batch_kernels.hpp"
#include "crop_batch_taps.hpp"
#include "large_pages.hpp"
#include "parallel.hpp"

namespace peaksim {
namespace {

const CropBatchKernels& kernels_for(const std::string& isa) {
    const CpuFeatures& cpu = cpu_features();
    const struct {
        const char* name;
        bool here;
        const CropBatchKernels* kernels;
    } choices[] = {
        {"avx512_bf16", cpu.avx512_bf16, crop_batch_avx512()},
        {"avx512", cpu.avx512, crop_batch_avx512()},
        {"avx2", cpu.avx2, crop_batch_avx2()},
        {"generic", true, crop_batch_generic()},
    };
    bool allowed = isa.empty();
    for (const auto& choice : choices) {
        const bool here = choice.here && choice.kernels;
        allowed = allowed || (here && isa == choice.name);
        if (allowed && here) return *choice.kernels;
    }
    throw std::invalid_argument("crop_batch: the instruction set must be one that this processor has, got " + isa);
}

constexpr int32_t kOne = 1 << kCropBits;  // as a weight

int64_t padded(int64_t n) { return (n + kCropLanes - 1) / kCropLanes * kCropLanes; }

// A crop on its picture.
struct Placed {
    const uint8_t* pixels;  // of the pasted rectangle
    int64_t row_stride;
    const uint8_t* fill;
    const CropAxis *x, *y;
    Span pasted_x, pasted_y;  // places on the picture
    Span outputs_x, outputs_y;
    Span columns;  // places that outputs_x read
    bool columns_first;

    int64_t row_bytes() const { return padded(3 * (columns.end - columns.begin)); }
    int64_t plane_width() const { return padded(outputs_x.end - outputs_x.begin); }
    double work() const {
        const double width = static_cast<double>(outputs_x.end - outputs_x.begin);
        const double rows = static_cast<double>(pasted_y.end - pasted_y.begin);
        const double height = static_cast<double>(outputs_y.end - outputs_y.begin);
        return 3 * width * (rows * static_cast<double>(x->taps().width) + height * static_cast<double>(y->taps().width));
    }
};

// The axes of one call: one per distinct length and output size.
class Axes {
public:
    explicit Axes(Filter filter) : filter_(filter) {}

    const CropAxis* get(int64_t length, int64_t size) {
        std::unique_ptr<CropAxis>& axis = axes_[{length, size}];
        if (!axis) axis = std::make_unique<CropAxis>(length, size, filter_);
        return axis.get();
    }

private:
    Filter filter_;
    std::map<std::pair<int64_t, int64_t>, std::unique_ptr<CropAxis>> axes_;
};

// What of [begin, end) lies inside [0, limit), shifted by `shift`.
Span inside(int64_t begin, int64_t end, int64_t limit, int64_t shift) {
    return {std::max<int64_t>(begin, 0) + shift, std::min(end, limit) + shift};
}

Placed place(const CropBatchInputs& in, const CropBatchOutput& out, int64_t i, Axes& axes) {
    const int64_t* box = in.boxes + 5 * i;
    const Picture& image = in.images[static_cast<size_t>(box[0])];
    const int64_t x0 = box[1], y0 = box[2], x1 = box[3], y1 = box[4];
    const int64_t left = in.native ? (image.width - (x1 - x0)) / 2 : 0;
    const int64_t top = in.native ? (image.height - (y1 - y0)) / 2 : 0;
    Placed placed;
    placed.row_stride = image.row_stride;
    placed.pixels = image.data + std::max<int64_t>(y0, 0) * image.row_stride + 3 * std::max<int64_t>(x0, 0);
    placed.fill = in.fill + 3 * i;
    placed.x = axes.get(in.native ? image.width : x1 - x0, out.width);
    placed.y = axes.get(in.native ? image.height : y1 - y0, out.height);
    placed.pasted_x = inside(x0, x1, image.width, left - x0);
    placed.pasted_y = inside(y0, y1, image.height, top - y0);
    const bool nothing = placed.pasted_x.empty() || placed.pasted_y.empty();
    placed.outputs_x = nothing ? Span{0, 0} : placed.x->readers(placed.pasted_x);
    placed.outputs_y = nothing ? Span{0, 0} : placed.y->readers(placed.pasted_y);
    if (placed.outputs_x.empty() || placed.outputs_y.empty()) placed.outputs_x = placed.outputs_y = {0, 0};
    placed.columns_first = placed.y->length() - out.height > 2 * std::max<int64_t>(placed.x->length() - out.width, 0);
    placed.columns = placed.outputs_x.empty() ? Span{0, 0} : placed.x->read_by(placed.outputs_x);
    return placed;
}

// Output rows come in blocks of kCropLanes, counted from the first row of the result.
// The part of y's block from y on, of `rows`; empty at their end.
Span block_from(int64_t y, Span rows) { return {y, std::min((y / kCropLanes + 1) * kCropLanes, rows.end)}; }

struct Scratch {
    std::vector<uint8_t> stretch, rows, columns, filtered, planes;

    explicit Scratch(const std::vector<Placed>& crops) {
        int64_t row = 0, width = 0, height = 0, bytes = 0;
        for (const Placed& crop : crops) {
            if (crop.outputs_y.empty()) continue;
            row = std::max(row, crop.row_bytes());
            width = std::max(width, crop.plane_width());
            if (!crop.columns_first) {
                const Span read = crop.y->read_by(crop.outputs_y);
                height = std::max(height, padded(read.end - read.begin) * crop.plane_width());
                continue;
            }
            height = std::max(height, kCropLanes * crop.plane_width());
            for (Span block = block_from(crop.outputs_y.begin, crop.outputs_y); !block.empty();
                 block = block_from(block.end, crop.outputs_y)) {
                const Span read = crop.y->read_by(block);
                bytes = std::max(bytes, (read.end - read.begin) * crop.row_bytes());
            }
        }
        stretch.resize(static_cast<size_t>(bytes));
        rows.resize(static_cast<size_t>(kCropLanes * row));
        columns.resize(rows.size());
        filtered.resize(static_cast<size_t>(3 * kCropLanes * width));
        planes.resize(static_cast<size_t>(3 * height));
    }
};

void paint(uint8_t* to, int64_t pixels, const uint8_t* colour) {
    for (int64_t i = 0; i < pixels; ++i, to += 3) std::memcpy(to, colour, 3);
}

// Columns `crop.columns` of row y of the picture.
void copy_row(const Placed& crop, int64_t y, uint8_t* to) {
    const int64_t n = crop.columns.end - crop.columns.begin;
    if (y < crop.pasted_y.begin || y >= crop.pasted_y.end) return paint(to, n, crop.fill);
    const int64_t begin = std::max(crop.columns.begin, crop.pasted_x.begin);
    const int64_t end = std::min(crop.columns.end, crop.pasted_x.end);
    const int64_t before = begin - crop.columns.begin, here = end - begin;
    const uint8_t* from = crop.pixels + (y - crop.pasted_y.begin) * crop.row_stride + 3 * (begin - crop.pasted_x.begin);
    paint(to, before, crop.fill);
    std::memcpy(to + 3 * before, from, static_cast<size_t>(3 * here));
    paint(to + 3 * (before + here), n - before - here, crop.fill);
}

template <class T>
void constant(T* to, int64_t begin, int64_t end, const void* value) {
    T x;
    std::memcpy(&x, value, sizeof x);
    std::fill(to + begin, to + end, x);
}

class Writer {
public:
    Writer(const CropBatchInputs& in, const CropBatchOutput& out, const CropBatchKernels& kernels)
        : in_(in), out_(out), kernels_(kernels), size_(size_of(out.dtype)) {}

    // Output rows `span` of crop i.
    void write(int64_t i, const Placed& crop, Span span, Scratch& scratch) const {
        const Span seen{std::max(span.begin, crop.outputs_y.begin), std::min(span.end, crop.outputs_y.end)};
        char colour[3][4];
        fill_value(crop, colour);
        for (int64_t y = span.begin; y < span.end; ++y) {
            const bool plain = y < seen.begin || y >= seen.end;
            for (int c = 0; c < 3; ++c) {
                paint_row(i, c, y, 0, plain ? out_.width : crop.outputs_x.begin, colour[c]);
                if (!plain) paint_row(i, c, y, crop.outputs_x.end, out_.width, colour[c]);
            }
        }
        if (seen.empty()) return;
        if (crop.columns_first) {
            for (Span block = block_from(seen.begin, seen); !block.empty(); block = block_from(block.end, seen)) {
                columns_then_rows(i, crop, block, scratch);
            }
        } else {
            rows_then_columns(i, crop, seen, scratch);
        }
    }

private:
    char* at(int64_t i, int64_t c, int64_t y, int64_t x) const {
        return static_cast<char*>(out_.data) + (((i * 3 + c) * out_.height + y) * out_.width + x) * size_;
    }

    void rows_then_columns(int64_t i, const Placed& crop, Span outputs, Scratch& scratch) const {
        const Span read = crop.y->read_by(outputs);
        for (int64_t first = read.begin; first < read.end; first += kCropLanes) {
            const int64_t n = std::min(kCropLanes, read.end - first);
            for (int64_t r = 0; r < n; ++r) copy_row(crop, first + r, scratch.rows.data() + r * crop.row_bytes());
            filter_rows(crop, scratch, first - read.begin);
        }
        const CropTaps taps = crop.y->taps();
        for (int64_t y = outputs.begin; y < outputs.end; ++y) {
            finish(i, crop, y, scratch, taps.first[y] - read.begin, taps.weights + y * taps.width, taps.count[y]);
        }
    }

    // At most kCropLanes outputs.
    void columns_then_rows(int64_t i, const Placed& crop, Span outputs, Scratch& scratch) const {
        const Span read = crop.y->read_by(outputs);
        const int64_t row_bytes = crop.row_bytes();
        for (int64_t y = read.begin; y < read.end; ++y) {
            copy_row(crop, y, scratch.stretch.data() + (y - read.begin) * row_bytes);
        }
        const CropTaps taps = crop.y->taps();
        for (int64_t y = outputs.begin; y < outputs.end; ++y) {
            kernels_.filter_columns({scratch.stretch.data() + (taps.first[y] - read.begin) * row_bytes, row_bytes,
                                     taps.weights + y * taps.width, taps.count[y],
                                     scratch.rows.data() + (y - outputs.begin) * row_bytes});
        }
        filter_rows(crop, scratch, 0);
        for (int64_t y = outputs.begin; y < outputs.end; ++y) {
            finish(i, crop, y, scratch, y - outputs.begin, &kOne, 1);
        }
    }

    // scratch.rows into the rows `to` and following of scratch.planes.
    void filter_rows(const Placed& crop, Scratch& scratch, int64_t to) const {
        kernels_.filter_rows({scratch.rows.data(), crop.row_bytes(), crop.columns.begin, crop.x->taps(),
                              crop.outputs_x.begin, crop.outputs_x.end, scratch.columns.data(),
                              scratch.filtered.data(), scratch.planes.data() + to * 3 * crop.plane_width(),
                              crop.plane_width()});
    }

    // Output row y from the rows `from` and following of scratch.planes.
    void finish(int64_t i, const Placed& crop, int64_t y, const Scratch& scratch, int64_t from,
                const int32_t* weights, int32_t count) const {
        const int64_t x = crop.outputs_x.begin;
        kernels_.finish_row(out_.dtype, {scratch.planes.data() + from * 3 * crop.plane_width(), crop.plane_width(),
                                         weights, count, in_.scale, in_.shift, crop.outputs_x.end - x,
                                         {at(i, 0, y, x), at(i, 1, y, x), at(i, 2, y, x)}});
    }

    // The fill colour as results, by the same kernel as every other pixel.
    void fill_value(const Placed& crop, char (&colour)[3][4]) const {
        uint8_t planes[3 * kCropLanes];
        for (int64_t j = 0; j < 3 * kCropLanes; ++j) planes[j] = crop.fill[j / kCropLanes];
        kernels_.finish_row(out_.dtype, {planes, kCropLanes, &kOne, 1, in_.scale, in_.shift, 1,
                                         {colour[0], colour[1], colour[2]}});
    }

    void paint_row(int64_t i, int64_t c, int64_t y, int64_t begin, int64_t end, const char* value) const {
        char* row = at(i, c, y, 0);
        if (size_ == 4) return constant(reinterpret_cast<uint32_t*>(row), begin, end, value);
        constant(reinterpret_cast<uint16_t*>(row), begin, end, value);
    }

    const CropBatchInputs& in_;
    const CropBatchOutput& out_;
    const CropBatchKernels& kernels_;
    const int64_t size_;
};

}  // namespace

void crop_batch(const CropBatchInputs& in, const CropBatchOutput& out, const char* isa, int threads) {
    const CropBatchKernels& kernels = kernels_for(isa);
    Axes axes(in.filter);
    std::vector<Placed> crops;
    double work = 0;
    for (int64_t i = 0; i < in.n; ++i) {
        crops.push_back(place(in, out, i, axes));
        // Writing a pixel costs as much as some multiply-adds.
        work += crops.back().work() + 8.0 * 3 * static_cast<double>(out.height * out.width);
    }
    threads = useful_threads(work, threads);
    // Few crops are split into bands of whole blocks of rows, so that every thread has a share.
    const int64_t blocks = padded(out.height) / kCropLanes;
    int64_t bands = 1;
    if (threads > 1 && in.n < 4 * threads) bands = std::min((4 * threads + in.n - 1) / in.n, blocks);
    std::vector<Scratch> scratch(static_cast<size_t>(std::max(threads, 1)), Scratch(crops));
    prefer_large_pages(out.data, in.n * 3 * out.height * out.width * size_of(out.dtype));
    const Writer writer(in, out, kernels);
    parallel_for(in.n * bands, threads, [&](int64_t task, int worker) {
        const int64_t i = task / bands, band = task % bands;
        const Span span{blocks * band / bands * kCropLanes,
                        std::min(blocks * (band + 1) / bands * kCropLanes, out.height)};
        writer.write(i, crops[static_cast<size_t>(i)], span, scratch[static_cast<size_t>(worker)]);
    });
}

}  // namespace peaksim
