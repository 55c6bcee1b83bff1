// PeakPatch's kernels for Python: numpy arrays in and out, all checked; the GIL is released while kernels run.

#include "bindings.hpp"
#include "peak_patch.hpp"

namespace py = pybind11;
using namespace peaksim::arrays;
using peaksim::Batch;

namespace {

// (n, length, dim) with any strides but a dense last axis; (n, dim) where `length` is 0.
Batch batch_of(const Array& array, const char* name, const std::string& dtype_name, int64_t n, int64_t length,
               int64_t dim) {
    const peaksim::DType dtype = dtype_of(dtype_name);
    const int64_t size = peaksim::size_of(dtype);
    const bool single = array.ndim() == 2;
    const bool type = array.dtype().kind() == kind_of(dtype) && array.itemsize() == size;
    if (!type || array.ndim() != (length < 0 ? 2 : 3) || array.shape(0) != n ||
        (!single && array.shape(1) != length) || array.shape(array.ndim() - 1) != dim) {
        refuse(name, "an array of the dtype and the documented shape");
    }
    // An empty array's strides say nothing.
    const py::ssize_t last = array.ndim() - 1;
    const int64_t token_stride = single ? 0 : array.strides(1);
    const bool dense_last = array.size() == 0 || dim == 1 || array.strides(last) == size;
    if (!dense_last || array.strides(0) % size != 0 || token_stride % size != 0) refuse(name, "dense in its last axis");
    return {dtype, array.data(), array.strides(0) / size, token_stride / size};
}

// Keeps what the arrays of a call point at.
peaksim::PoolInputs pool_inputs(const Array& peak, const Array& anchor, const std::string& dtype, const Array& keys,
                                const Array& mask, const Array& end, const MaybeArray& factors,
                                const MaybeArray& norm_weight, const MaybeArray& norm_bias, float eps) {
    if (peak.ndim() != 3 || keys.ndim() != 2) refuse("peak and keys", "3- and 2-dimensional");
    if (norm_weight.has_value() != norm_bias.has_value()) refuse("norm_bias", "given with norm_weight");
    peaksim::PoolInputs in{};
    in.n = peak.shape(0), in.length = peak.shape(1), in.width = peak.shape(2), in.heads = keys.shape(0);
    in.anchor_is_single = anchor.ndim() == 2;
    in.peak = batch_of(peak, "peak", dtype, in.n, in.length, in.width);
    in.anchor = batch_of(anchor, "anchor", dtype, in.n, in.anchor_is_single ? -1 : in.length, in.width);
    in.keys = dense<float>(keys, "keys", 'f', {in.heads, in.width}, false);
    in.mask = dense<uint8_t>(mask, "mask", 'b', {in.n, in.length}, false);
    in.end = dense<int64_t>(end, "end", 'i', {in.n}, false);
    in.factors = dense<float>(factors, "factors", 'f', {in.n, in.heads, in.length}, false);
    in.norm_weight = dense<float>(norm_weight, "norm_weight", 'f', {in.width}, false);
    in.norm_bias = dense<float>(norm_bias, "norm_bias", 'f', {in.width}, false);
    in.eps = eps;
    return in;
}

void pool(const Array& peak, const Array& anchor, const std::string& dtype, const Array& keys, const Array& mask,
          const Array& end, const MaybeArray& factors, const MaybeArray& norm_weight, const MaybeArray& norm_bias,
          float eps, const Array& pooled, const MaybeArray& attention, const std::string& isa, int threads) {
    const peaksim::PoolInputs in =
        pool_inputs(peak, anchor, dtype, keys, mask, end, factors, norm_weight, norm_bias, eps);
    float* to = result<float>(pooled, "pooled", {in.n, in.heads + 3, in.width});
    float* weights = result<float>(attention, "attention", {in.n, in.heads, in.length});
    py::gil_scoped_release release;
    peaksim::peak_patch_pool(in, to, weights, isa.c_str(), threads);
}

void pool_backward(const Array& peak, const Array& anchor, const std::string& dtype, const Array& keys,
                   const Array& mask, const Array& end, const MaybeArray& factors, const MaybeArray& norm_weight,
                   const MaybeArray& norm_bias, float eps, const Array& grad_pooled, const MaybeArray& grad_attention,
                   const Array& attention, const Array& grad_keys, const MaybeArray& grad_peak,
                   const MaybeArray& grad_anchor, const std::string& isa, int threads) {
    const peaksim::PoolInputs in =
        pool_inputs(peak, anchor, dtype, keys, mask, end, factors, norm_weight, norm_bias, eps);
    if (grad_peak.has_value() != grad_anchor.has_value()) refuse("grad_anchor", "given with grad_peak");
    const peaksim::PoolIncoming grad = {
        dense<float>(grad_pooled, "gradient of pooled", 'f', {in.n, in.heads + 3, in.width}, false),
        dense<float>(grad_attention, "gradient of attention", 'f', {in.n, in.heads, in.length}, false),
        dense<float>(attention, "attention", 'f', {in.n, in.heads, in.length}, false)};
    float* to_keys = result<float>(grad_keys, "grad_keys", {in.heads, in.width});
    float* to_peak = result<float>(grad_peak, "grad_peak", {in.n, in.length, in.width});
    float* to_anchor = in.anchor_is_single ? result<float>(grad_anchor, "grad_anchor", {in.n, in.width})
                                           : result<float>(grad_anchor, "grad_anchor", {in.n, in.length, in.width});
    py::gil_scoped_release release;
    peaksim::peak_patch_pool_backward(in, grad, to_keys, to_peak, to_anchor, isa.c_str(), threads);
}

void check_rows(const Array& array, const char* name) {
    if (array.ndim() != 2) refuse(name, "2-dimensional");
}

void correct(const Array& f, const std::string& f_dtype, const Array& delta, const std::string& delta_dtype,
             float alpha, const Array& out, const std::string& isa, int threads) {
    check_rows(f, "f");
    const int64_t n = f.shape(0), dim = f.shape(1);
    const Batch left = batch_of(f, "f", f_dtype, n, -1, dim), right = batch_of(delta, "delta", delta_dtype, n, -1, dim);
    float* to = result<float>(out, "out", {n, dim});
    py::gil_scoped_release release;
    peaksim::peak_patch_correct(left, right, alpha, n, dim, to, isa.c_str(), threads);
}

void correct_backward(const Array& f, const std::string& f_dtype, const Array& delta, const std::string& delta_dtype,
                      float alpha, const Array& grad, const Array& grad_f, const Array& grad_delta,
                      const Array& grad_alpha, const std::string& isa, int threads) {
    check_rows(f, "f");
    const int64_t n = f.shape(0), dim = f.shape(1);
    const Batch left = batch_of(f, "f", f_dtype, n, -1, dim), right = batch_of(delta, "delta", delta_dtype, n, -1, dim);
    const float* from = dense<float>(grad, "grad", 'f', {n, dim}, false);
    float* to_f = result<float>(grad_f, "grad_f", {n, dim});
    float* to_delta = result<float>(grad_delta, "grad_delta", {n, dim});
    float* to_alpha = result<float>(grad_alpha, "grad_alpha", {n});
    py::gil_scoped_release release;
    peaksim::peak_patch_correct_backward(left, right, alpha, from, n, dim, to_f, to_delta, to_alpha, isa.c_str(),
                                         threads);
}

peaksim::PairInputs pair_inputs(const Array& image, const Array& text, const Array& low, const std::string& dtype) {
    check_rows(image, "image");
    if (text.ndim() != 3) refuse("text", "3-dimensional");
    const int64_t n = image.shape(0), count = text.shape(1), dim = image.shape(1);
    return {n,
            count,
            dim,
            batch_of(image, "image", dtype, n, -1, dim),
            batch_of(text, "text", dtype, n, count, dim),
            batch_of(low, "low", dtype, n, count, dim)};
}

void pairs(const Array& image, const Array& text, const Array& low, const std::string& dtype, const Array& sims,
           const Array& cross, const std::string& isa, int threads) {
    const peaksim::PairInputs in = pair_inputs(image, text, low, dtype);
    float* to_sims = result<float>(sims, "sims", {in.n, in.count, 2});
    float* to_cross = result<float>(cross, "cross", {in.n, in.count, in.dim});
    py::gil_scoped_release release;
    peaksim::peak_patch_pairs(in, to_sims, to_cross, isa.c_str(), threads);
}

void pairs_backward(const Array& image, const Array& text, const Array& low, const std::string& dtype,
                    const Array& sims, const Array& cross, const Array& grad_image, const Array& grad_text,
                    const Array& grad_low, const std::string& isa, int threads) {
    const peaksim::PairInputs in = pair_inputs(image, text, low, dtype);
    const float* of_sims = dense<float>(sims, "gradient of sims", 'f', {in.n, in.count, 2}, false);
    const float* of_cross = dense<float>(cross, "gradient of cross", 'f', {in.n, in.count, in.dim}, false);
    float* to_image = result<float>(grad_image, "grad_image", {in.n, in.dim});
    float* to_text = result<float>(grad_text, "grad_text", {in.n, in.count, in.dim});
    float* to_low = result<float>(grad_low, "grad_low", {in.n, in.count, in.dim});
    py::gil_scoped_release release;
    peaksim::peak_patch_pairs_backward(in, of_sims, of_cross, to_image, to_text, to_low, isa.c_str(), threads);
}

}  // namespace

void bind_peak_patch(py::module_& m) {
    const auto array = [](const char* name) { return py::arg(name).noconvert(); };
    const auto none = [](const char* name) { return py::arg(name).noconvert().none(true); };
    m.def("peak_patch_pool", &pool, array("peak"), array("anchor"), py::arg("dtype"), array("keys"), array("mask"),
          array("end"), none("factors"), none("norm_weight"), none("norm_bias"), py::arg("eps"), array("pooled"),
          none("attention"), py::arg("isa"), py::arg("threads"), "Forward of PeakPatch's attention pooling.");
    m.def("peak_patch_pool_backward", &pool_backward, array("peak"), array("anchor"), py::arg("dtype"), array("keys"),
          array("mask"), array("end"), none("factors"), none("norm_weight"), none("norm_bias"), py::arg("eps"),
          array("grad_pooled"), none("grad_attention"), array("attention"), array("grad_keys"), none("grad_peak"),
          none("grad_anchor"), py::arg("isa"), py::arg("threads"), "Backward of PeakPatch's attention pooling.");
    m.def("peak_patch_correct", &correct, array("f"), py::arg("f_dtype"), array("delta"), py::arg("delta_dtype"),
          py::arg("alpha"), array("out"), py::arg("isa"), py::arg("threads"), "Rows of unit(f + alpha * delta).");
    m.def("peak_patch_correct_backward", &correct_backward, array("f"), py::arg("f_dtype"), array("delta"),
          py::arg("delta_dtype"), py::arg("alpha"), array("grad"), array("grad_f"), array("grad_delta"),
          array("grad_alpha"), py::arg("isa"), py::arg("threads"), "Its backward; alpha's gradient row by row.");
    m.def("peak_patch_pairs", &pairs, array("image"), array("text"), array("low"), py::arg("dtype"), array("sims"),
          array("cross"), py::arg("isa"), py::arg("threads"), "Similarities and products of images and captions.");
    m.def("peak_patch_pairs_backward", &pairs_backward, array("image"), array("text"), array("low"), py::arg("dtype"),
          array("sims"), array("cross"), array("grad_image"), array("grad_text"), array("grad_low"), py::arg("isa"),
          py::arg("threads"), "Its backward, from gradients of sims and cross.");
}
