// Checks of numpy arrays that the units of bindings share. bfloat16 crosses as int16.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "dtype.hpp"

namespace peaksim::arrays {

namespace py = pybind11;

using Array = py::array;
using MaybeArray = std::optional<py::array>;

[[noreturn]] inline void refuse(const std::string& what, const char* wanted) {
    throw std::invalid_argument("engine._C: " + what + " must be " + wanted);
}

inline DType dtype_of(const std::string& name) {
    if (name == "float32") return DType::float32;
    if (name == "float16") return DType::float16;
    if (name == "bfloat16") return DType::bfloat16;
    refuse("dtype", "float32, float16 or bfloat16");
}

inline char kind_of(DType dtype) { return dtype == DType::bfloat16 ? 'i' : 'f'; }

// The array's data if it is dense, of the element type and the shape; null for None.
template <class T>
T* dense(const MaybeArray& array, const char* name, char kind, std::initializer_list<int64_t> shape, bool write) {
    if (!array) return nullptr;
    const bool type = array->dtype().kind() == kind && array->itemsize() == static_cast<py::ssize_t>(sizeof(T));
    bool fits = array->ndim() == static_cast<py::ssize_t>(shape.size());
    py::ssize_t axis = 0;
    for (const int64_t n : shape) fits = fits && array->shape(axis++) == n;
    const bool packed = (array->flags() & py::array::c_style) != 0;
    if (!type || !fits || !packed || (write && !array->writeable())) {
        refuse(name, "a dense array of the documented dtype and shape");
    }
    return static_cast<T*>(const_cast<void*>(array->data()));
}

template <class T>
T* result(const MaybeArray& array, const char* name, std::initializer_list<int64_t> shape) {
    return dense<T>(array, name, std::is_integral_v<T> ? 'i' : 'f', shape, true);
}

}  // namespace peaksim::arrays
