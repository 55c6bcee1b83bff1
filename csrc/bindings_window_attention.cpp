// Window attention for Python: see bindings.cpp.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>

#include "window_attention.hpp"

namespace py = pybind11;
using peaksim::DType;

namespace {

using Array = py::array;
using MaybeArray = std::optional<py::array>;

[[noreturn]] void refuse(const std::string& what, const char* wanted) {
    throw std::invalid_argument("engine._C: window_attention: " + what + " must be " + wanted);
}

DType dtype_of(const std::string& name) {
    if (name == "float32") return DType::float32;
    if (name == "float16") return DType::float16;
    if (name == "bfloat16") return DType::bfloat16;
    refuse("dtype", "float32, float16 or bfloat16");
}

bool holds(const Array& array, DType dtype) {
    return array.dtype().kind() == (dtype == DType::bfloat16 ? 'i' : 'f') &&
           array.itemsize() == static_cast<py::ssize_t>(peaksim::size_of(dtype));
}

bool has_shape(const Array& array, std::initializer_list<int64_t> shape) {
    bool fits = array.ndim() == static_cast<py::ssize_t>(shape.size());
    py::ssize_t axis = 0;
    for (const int64_t n : shape) fits = fits && array.shape(axis++) == n;
    return fits;
}

peaksim::HeadRows rows_of(const MaybeArray& array, const char* name, DType dtype,
                          std::initializer_list<int64_t> shape) {
    if (!array) return {nullptr, 0, 0, 0};
    const int64_t size = peaksim::size_of(dtype);
    if (!holds(*array, dtype) || !has_shape(*array, shape)) refuse(name, "of the documented dtype and shape");
    // An empty array's strides say nothing.
    if (array->size() == 0) return {array->data(), 0, 0, 0};
    bool fits = array->shape(3) == 1 || array->strides(3) == size;
    for (py::ssize_t axis = 0; axis < 3; ++axis) fits = fits && array->strides(axis) % size == 0;
    if (!fits) refuse(name, "dense in its last axis");
    return {array->data(), array->strides(0) / size, array->strides(1) / size, array->strides(2) / size};
}

peaksim::WindowAttentionInputs inputs_of(const Array& q, const Array& k, const Array& v, const MaybeArray& own_k,
                                         const MaybeArray& own_v, const Array& windows, const std::string& dtype_name,
                                         int64_t rows, int64_t columns, float scale) {
    if (q.ndim() != 4) refuse("q", "4-dimensional");
    if (rows < 0 || columns < 0 || (columns > 0 && rows >= std::numeric_limits<int32_t>::max() / columns)) {
        refuse("the grid", "of fewer than 2^31 - 1 cells");
    }
    peaksim::WindowAttentionInputs in{};
    in.dtype = dtype_of(dtype_name);
    in.batch = q.shape(0), in.windows = q.shape(1), in.heads = q.shape(2), in.dim = q.shape(3);
    in.grid_rows = rows, in.grid_columns = columns, in.scale = scale;
    in.q = rows_of(q, "q", in.dtype, {in.batch, in.windows, in.heads, in.dim});
    in.k = rows_of(k, "k", in.dtype, {in.batch, in.cells(), in.heads, in.dim});
    in.v = rows_of(v, "v", in.dtype, {in.batch, in.cells(), in.heads, in.dim});
    in.own_k = rows_of(own_k, "own_k", in.dtype, {in.batch, in.windows, in.heads, in.dim});
    in.own_v = rows_of(own_v, "own_v", in.dtype, {in.batch, in.windows, in.heads, in.dim});
    if (own_k.has_value() != own_v.has_value()) refuse("own_v", "given with own_k");
    const bool shared = has_shape(windows, {in.windows, 4});
    const bool integers = windows.dtype().kind() == 'i' && windows.itemsize() == 4;
    if (!(shared || has_shape(windows, {in.batch, in.windows, 4})) || !integers ||
        (windows.flags() & py::array::c_style) == 0) {
        refuse("windows", "dense int32 of shape (W, 4) or (B, W, 4)");
    }
    in.boxes = static_cast<const int32_t*>(windows.data());
    in.boxes_batch_stride = shared ? 0 : 4 * in.windows;
    return in;
}

template <class T>
T* result(const MaybeArray& array, const char* name, std::initializer_list<int64_t> shape) {
    if (!array) return nullptr;
    const bool fits = array->itemsize() == static_cast<py::ssize_t>(sizeof(T)) && has_shape(*array, shape);
    if (!fits || (array->flags() & py::array::c_style) == 0 || !array->writeable()) {
        refuse(name, "a dense array of the documented dtype and shape");
    }
    return static_cast<T*>(const_cast<void*>(array->data()));
}

void forward(const Array& q, const Array& k, const Array& v, const MaybeArray& own_k, const MaybeArray& own_v,
             const Array& windows, const std::string& dtype, int64_t rows, int64_t columns, float scale,
             const Array& out, const std::string& isa, int threads) {
    const peaksim::WindowAttentionInputs in = inputs_of(q, k, v, own_k, own_v, windows, dtype, rows, columns, scale);
    if (!holds(out, in.dtype)) refuse("out", "of the inputs' dtype");
    const auto shape = {in.batch, in.windows, in.heads, in.dim};
    void* to = in.dtype == DType::float32 ? static_cast<void*>(result<float>(out, "out", shape))
                                          : static_cast<void*>(result<uint16_t>(out, "out", shape));
    py::gil_scoped_release release;
    peaksim::window_attention(in, to, isa.c_str(), threads);
}

void backward(const Array& grad, const Array& q, const Array& k, const Array& v, const MaybeArray& own_k,
              const MaybeArray& own_v, const Array& windows, const std::string& dtype, int64_t rows, int64_t columns,
              float scale, const Array& grad_q, const Array& grad_k, const Array& grad_v, const MaybeArray& grad_own_k,
              const MaybeArray& grad_own_v, const std::string& isa, int threads) {
    const peaksim::WindowAttentionInputs in = inputs_of(q, k, v, own_k, own_v, windows, dtype, rows, columns, scale);
    const auto of_windows = {in.batch, in.windows, in.heads, in.dim};
    const auto of_cells = {in.batch, in.cells(), in.heads, in.dim};
    const peaksim::HeadRows incoming = rows_of(grad, "grad", in.dtype, of_windows);
    const peaksim::WindowAttentionGradients to = {
        result<float>(grad_q, "grad_q", of_windows),         result<float>(grad_k, "grad_k", of_cells),
        result<float>(grad_v, "grad_v", of_cells),           result<float>(grad_own_k, "grad_own_k", of_windows),
        result<float>(grad_own_v, "grad_own_v", of_windows),
    };
    const bool own = in.own_k.data != nullptr;
    if ((to.own_k != nullptr) != own || (to.own_v != nullptr) != own) refuse("grad_own_k", "given with own_k");
    py::gil_scoped_release release;
    peaksim::window_attention_backward(in, incoming, to, isa.c_str(), threads);
}

}  // namespace

void bind_window_attention(py::module_& m) {
    m.def("window_attention", &forward, py::arg("q").noconvert(), py::arg("k").noconvert(), py::arg("v").noconvert(),
          py::arg("own_k").noconvert().none(true), py::arg("own_v").noconvert().none(true),
          py::arg("windows").noconvert(), py::arg("dtype"), py::arg("rows"), py::arg("columns"), py::arg("scale"),
          py::arg("out").noconvert(), py::arg("isa"), py::arg("threads"), "Forward of window attention.");
    m.def("window_attention_backward", &backward, py::arg("grad").noconvert(), py::arg("q").noconvert(),
          py::arg("k").noconvert(), py::arg("v").noconvert(), py::arg("own_k").noconvert().none(true),
          py::arg("own_v").noconvert().none(true), py::arg("windows").noconvert(), py::arg("dtype"), py::arg("rows"),
          py::arg("columns"), py::arg("scale"), py::arg("grad_q").noconvert(), py::arg("grad_k").noconvert(),
          py::arg("grad_v").noconvert(), py::arg("grad_own_k").noconvert().none(true),
          py::arg("grad_own_v").noconvert().none(true), py::arg("isa"), py::arg("threads"),
          "Backward of window attention.");
}
