// Max-sim of int8 codes for Python: numpy arrays in and out, all checked; the GIL is released while kernels run.

#include "bindings_max_sim.hpp"
#include "max_sim_int8.hpp"

namespace py = pybind11;
using namespace peaksim::arrays;

namespace {

// One scale a token: (n, length), or (total).
const float* scales_of(const Array& scales, const char* name, const peaksim::Tokens& tokens) {
    if (tokens.offsets) return dense<float>(scales, name, 'f', {tokens.total}, false);
    return dense<float>(scales, name, 'f', {tokens.n, tokens.length}, false);
}

peaksim::MaxSimInt8Inputs codes_of(const Array& q, const Array& d, const Array& q_scales, const Array& d_scales,
                                   const MaybeArray& q_offsets, const MaybeArray& d_offsets, const MaybeArray& q_mask,
                                   const MaybeArray& d_mask, const MaybeArray& q_weights, bool pairs) {
    const peaksim::Tokens left = tokens_of(q, "q", 'i', 1, q_offsets, q_mask, q_weights);
    const peaksim::Tokens right = tokens_of(d, "d", 'i', 1, d_offsets, d_mask, std::nullopt);
    const int64_t dim = q.shape(q.ndim() - 1);
    if (dim != d.shape(d.ndim() - 1)) refuse("d", "of q's last dimension");
    // Beyond, a product of 255 and 127 for each code would pass int32.
    if (dim > 65536) refuse("q", "of 65536 codes a token at most");
    if (pairs && (q_offsets || d_offsets || left.n != right.n)) refuse("d", "dense and as many as q in pairs");
    return {dim, left, right, scales_of(q_scales, "q_scales", left), scales_of(d_scales, "d_scales", right), pairs};
}

void max_sim_int8(const Array& q, const Array& d, const Array& q_scales, const Array& d_scales,
                  const MaybeArray& q_offsets, const MaybeArray& d_offsets, const MaybeArray& q_mask,
                  const MaybeArray& d_mask, const MaybeArray& q_weights, bool pairs, const Array& scores,
                  const MaybeArray& argmax, const MaybeArray& values, const std::string& isa, int threads) {
    const peaksim::MaxSimInt8Inputs in =
        codes_of(q, d, q_scales, d_scales, q_offsets, d_offsets, q_mask, d_mask, q_weights, pairs);
    const peaksim::MaxSimInputs shapes{peaksim::DType::float32, in.dim, in.q, in.d, pairs, 0.0f};
    peaksim::MaxSimOutputs out{};
    out.scores = result<float>(scores, "scores", {in.q.n, pairs ? 1 : in.d.n});
    out.argmax = per_token<int32_t>(argmax, "argmax", shapes, in.q, in.d.n, true);
    out.values = per_token<float>(values, "values", shapes, in.q, in.d.n, true);
    py::gil_scoped_release release;
    peaksim::max_sim_int8(in, out, isa.c_str(), threads);
}

void max_sim_int8_topk(const Array& q, const Array& d, const Array& q_scales, const Array& d_scales,
                       const MaybeArray& q_offsets, const MaybeArray& d_offsets, const MaybeArray& q_mask,
                       const MaybeArray& d_mask, const MaybeArray& q_weights, const Array& scores, const Array& indices,
                       const std::string& isa, int threads) {
    const peaksim::MaxSimInt8Inputs in =
        codes_of(q, d, q_scales, d_scales, q_offsets, d_offsets, q_mask, d_mask, q_weights, false);
    if (scores.ndim() != 2) refuse("scores", "2-dimensional");
    const int64_t k = scores.shape(1);
    float* to = result<float>(scores, "scores", {in.q.n, k});
    int64_t* places = result<int64_t>(indices, "indices", {in.q.n, k});
    py::gil_scoped_release release;
    peaksim::max_sim_int8_topk(in, k, to, places, isa.c_str(), threads);
}

}  // namespace

void bind_max_sim_int8(py::module_& m) {
    m.def("max_sim_int8", &max_sim_int8, py::arg("q").noconvert(), py::arg("d").noconvert(),
          py::arg("q_scales").noconvert(), py::arg("d_scales").noconvert(), py::arg("q_offsets").noconvert().none(true),
          py::arg("d_offsets").noconvert().none(true), py::arg("q_mask").noconvert().none(true),
          py::arg("d_mask").noconvert().none(true), py::arg("q_weights").noconvert().none(true), py::arg("pairs"),
          py::arg("scores").noconvert(), py::arg("argmax").noconvert().none(true),
          py::arg("values").noconvert().none(true), py::arg("isa"), py::arg("threads"),
          "Forward of max-sim of int8 codes.");
    m.def("max_sim_int8_topk", &max_sim_int8_topk, py::arg("q").noconvert(), py::arg("d").noconvert(),
          py::arg("q_scales").noconvert(), py::arg("d_scales").noconvert(), py::arg("q_offsets").noconvert().none(true),
          py::arg("d_offsets").noconvert().none(true), py::arg("q_mask").noconvert().none(true),
          py::arg("d_mask").noconvert().none(true), py::arg("q_weights").noconvert().none(true),
          py::arg("scores").noconvert(), py::arg("indices").noconvert(), py::arg("isa"), py::arg("threads"),
          "The best documents of each query by int8 codes, best first.");
}
