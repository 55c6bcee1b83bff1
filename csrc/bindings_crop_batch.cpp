// crop_batch for Python: see bindings.cpp.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "crop_batch.hpp"

namespace py = pybind11;
using peaksim::DType;

namespace {

[[noreturn]] void refuse(const std::string& what, const char* wanted) {
    throw std::invalid_argument("engine._C: crop_batch: " + what + " must be " + wanted);
}

DType dtype_of(const std::string& name) {
    if (name == "float32") return DType::float32;
    if (name == "float16") return DType::float16;
    if (name == "bfloat16") return DType::bfloat16;
    refuse("dtype", "float32, float16 or bfloat16");
}

peaksim::Filter filter_of(const std::string& name) {
    if (name == "bicubic") return peaksim::Filter::bicubic;
    if (name == "bilinear") return peaksim::Filter::bilinear;
    refuse("interpolation", "bicubic or bilinear");
}

void check(const py::array& array, const char* name, char kind, int64_t item, std::initializer_list<int64_t> shape) {
    bool fits = array.dtype().kind() == kind && array.itemsize() == item &&
                array.ndim() == static_cast<py::ssize_t>(shape.size()) && (array.flags() & py::array::c_style) != 0;
    py::ssize_t axis = 0;
    for (const int64_t n : shape) fits = fits && array.shape(axis++) == n;
    if (!fits) refuse(name, "a dense array of the documented dtype and shape");
}

peaksim::Picture picture_of(const py::array& array) {
    const bool type = array.dtype().kind() == 'u' && array.itemsize() == 1;
    if (!type || array.ndim() != 3 || array.shape(2) != 3) refuse("images", "uint8 of the shape (H, W, 3)");
    const bool empty = array.size() == 0;
    if (!empty && (array.strides(2) != 1 || (array.shape(1) > 1 && array.strides(1) != 3))) {
        refuse("images", "dense within their rows");
    }
    return {static_cast<const uint8_t*>(array.data()), array.shape(0), array.shape(1), array.strides(0)};
}

// Kernels trust the boxes: they must read no byte outside the images.
void check_boxes(const peaksim::CropBatchInputs& in) {
    constexpr int64_t kLongest = int64_t{1} << 24, kFar = int64_t{1} << 40;
    const int64_t n_images = static_cast<int64_t>(in.images.size());
    for (int64_t i = 0; i < in.n; ++i) {
        const int64_t* box = in.boxes + 5 * i;
        if (box[0] < 0 || box[0] >= n_images) refuse("boxes", "of images that are there");
        for (int k = 1; k < 5; ++k) {
            if (box[k] < -kFar || box[k] > kFar) refuse("boxes", "near the image");
        }
        const int64_t width = box[3] - box[1], height = box[4] - box[2];
        if (width < 1 || height < 1 || width > kLongest || height > kLongest) refuse("boxes", "1 to 2^24 pixels long");
        const peaksim::Picture& image = in.images[static_cast<size_t>(box[0])];
        if (in.native && (width > image.width || height > image.height)) refuse("boxes", "no larger than the image");
    }
}

void crop_batch(const std::vector<py::array>& images, const py::array& boxes, const py::array& fill,
                const std::array<float, 3>& scale, const std::array<float, 3>& shift, const std::string& interpolation,
                bool native, const std::string& dtype_name, py::array& out, const std::string& isa, int threads) {
    peaksim::CropBatchInputs in;
    for (const py::array& image : images) in.images.push_back(picture_of(image));
    in.n = boxes.ndim() == 2 ? boxes.shape(0) : -1;
    check(boxes, "boxes", 'i', 8, {in.n, 5});
    check(fill, "fill", 'u', 1, {in.n, 3});
    in.boxes = static_cast<const int64_t*>(boxes.data());
    in.fill = static_cast<const uint8_t*>(fill.data());
    in.filter = filter_of(interpolation);
    in.native = native;
    check_boxes(in);
    for (size_t c = 0; c < 3; ++c) in.scale[c] = scale[c], in.shift[c] = shift[c];
    const DType dtype = dtype_of(dtype_name);
    if (out.ndim() != 4 || !out.writeable()) refuse("out", "a writeable array of 4 dimensions");
    check(out, "out", dtype == DType::bfloat16 ? 'i' : 'f', peaksim::size_of(dtype),
          {in.n, 3, out.shape(2), out.shape(3)});
    const peaksim::CropBatchOutput to = {out.mutable_data(), dtype, out.shape(2), out.shape(3)};
    py::gil_scoped_release release;
    peaksim::crop_batch(in, to, isa.c_str(), threads);
}

}  // namespace

void bind_crop_batch(py::module_& m) {
    m.def("crop_batch", &crop_batch, py::arg("images"), py::arg("boxes").noconvert(), py::arg("fill").noconvert(),
          py::arg("scale"), py::arg("shift"), py::arg("interpolation"), py::arg("native"), py::arg("dtype"),
          py::arg("out").noconvert(), py::arg("isa"), py::arg("threads"),
          "Crops of images, resized and normalised into `out`.");
}
