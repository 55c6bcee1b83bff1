// Centroids for Python: numpy arrays in and out, all checked; the GIL is released while kernels run.

#include "bindings.hpp"
#include "centroid.hpp"

namespace py = pybind11;
using namespace peaksim::arrays;

namespace {

// `tokens` may be strided in its first axis; `classes` None makes every set a class.
peaksim::CentroidInputs inputs_of(const std::string& dtype_name, int64_t total, int64_t dim, const Array& cu_seqlens,
                                  const MaybeArray& classes, int64_t n_classes) {
    if (cu_seqlens.ndim() != 1 || cu_seqlens.shape(0) < 1) refuse("cu_seqlens", "1-dimensional and not empty");
    const int64_t n_sets = cu_seqlens.shape(0) - 1;
    return {dtype_of(dtype_name), nullptr, total, dim, dim,
            dense<int64_t>(cu_seqlens, "cu_seqlens", 'i', {n_sets + 1}, false),
            dense<int64_t>(classes, "classes", 'i', {n_sets}, false), n_sets, n_classes};
}

void centroids(const Array& tokens, const std::string& dtype, const Array& cu_seqlens, const MaybeArray& classes,
               const Array& direction, const Array& length, const Array& count, const std::string& isa, int threads) {
    if (tokens.ndim() != 2 || direction.ndim() != 2) refuse("tokens and direction", "2-dimensional");
    peaksim::CentroidInputs in =
        inputs_of(dtype, tokens.shape(0), tokens.shape(1), cu_seqlens, classes, direction.shape(0));
    const int64_t size = peaksim::size_of(in.dtype);
    const bool type = tokens.dtype().kind() == kind_of(in.dtype) && tokens.itemsize() == size;
    const bool last = tokens.size() == 0 || in.dim == 1 || tokens.strides(1) == size;
    if (!type || !last || tokens.strides(0) % size != 0) refuse("tokens", "of the dtype and dense in its last axis");
    in.tokens = tokens.data();
    in.stride = tokens.strides(0) / size;
    float* to = result<float>(direction, "direction", {in.n_classes, in.dim});
    float* lengths = result<float>(length, "length", {in.n_classes});
    float* counts = result<float>(count, "count", {in.n_classes});
    py::gil_scoped_release release;
    peaksim::centroids(in, to, lengths, counts, isa.c_str(), threads);
}

void centroids_spread(const Array& rows, const Array& cu_seqlens, const MaybeArray& classes, const Array& tokens,
                      const std::string& isa, int threads) {
    if (rows.ndim() != 2 || tokens.ndim() != 2) refuse("rows and tokens", "2-dimensional");
    const peaksim::CentroidInputs in =
        inputs_of("float32", tokens.shape(0), tokens.shape(1), cu_seqlens, classes, rows.shape(0));
    const float* from = dense<float>(rows, "rows", 'f', {in.n_classes, in.dim}, false);
    float* to = result<float>(tokens, "tokens", {in.total, in.dim});
    py::gil_scoped_release release;
    peaksim::centroids_spread(in, from, to, isa.c_str(), threads);
}

}  // namespace

void bind_centroid(py::module_& m) {
    m.def("centroids", &centroids, py::arg("tokens").noconvert(), py::arg("dtype"), py::arg("cu_seqlens").noconvert(),
          py::arg("classes").noconvert().none(true), py::arg("direction").noconvert(), py::arg("length").noconvert(),
          py::arg("count").noconvert(), py::arg("isa"), py::arg("threads"), "Unit centroids of classes of token sets.");
    m.def("centroids_spread", &centroids_spread, py::arg("rows").noconvert(), py::arg("cu_seqlens").noconvert(),
          py::arg("classes").noconvert().none(true), py::arg("tokens").noconvert(), py::arg("isa"), py::arg("threads"),
          "Every token's class row: the backward of a mean.");
}
