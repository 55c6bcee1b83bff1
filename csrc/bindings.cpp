// The only unit that knows Python: numpy arrays in and out, all checked; the GIL is released while kernels run.
// Results are written into arrays of the caller. bfloat16 crosses as int16.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "bindings_max_sim.hpp"
#include "max_sim.hpp"
#include "max_sim_kernels.hpp"

namespace py = pybind11;
using peaksim::DType;
using namespace peaksim::arrays;

namespace {

// A gradient of the tokens: (n, length, dim), or packed (total, dim).
float* gradient(const Array& array, const char* name, const peaksim::Tokens& own, int64_t dim) {
    if (own.offsets) return result<float>(array, name, {own.total, dim});
    return result<float>(array, name, {own.n, own.length, dim});
}

void max_sim(const Array& q, const Array& d, const std::string& dtype, const MaybeArray& q_offsets,
             const MaybeArray& d_offsets, const MaybeArray& q_mask, const MaybeArray& d_mask,
             const MaybeArray& q_weights, const MaybeArray& d_weights, float temperature, bool pairs,
             const Array& scores, const MaybeArray& reverse_scores, const MaybeArray& argmax, const MaybeArray& values,
             const MaybeArray& reverse_argmax, const MaybeArray& reverse_values, const std::string& isa, int threads) {
    const peaksim::MaxSimInputs in =
        inputs_of(q, d, dtype, q_offsets, d_offsets, q_mask, d_mask, q_weights, d_weights, temperature, pairs);
    const int64_t columns = pairs ? 1 : in.d.n;
    const peaksim::MaxSimOutputs out = {
        result<float>(scores, "scores", {in.q.n, columns}),
        result<float>(reverse_scores, "reverse_scores", {in.q.n, columns}),
        per_token<int32_t>(argmax, "argmax", in, in.q, in.d.n, true),
        per_token<float>(values, "values", in, in.q, in.d.n, true),
        per_token<int32_t>(reverse_argmax, "reverse_argmax", in, in.d, in.q.n, true),
        per_token<float>(reverse_values, "reverse_values", in, in.d, in.q.n, true),
    };
    py::gil_scoped_release release;
    peaksim::max_sim(in, out, isa.c_str(), threads);
}

// The same scores from addresses of memory, which engine.ops.direct has checked: making arrays of tensors takes longer
// than a small call. 0 is no mask and no weights. The environment is read here for the same reason.
void max_sim_scores(const std::string& dtype, uintptr_t q, int64_t n_q, int64_t l_q, int64_t q_item, int64_t q_token,
                    uintptr_t d, int64_t n_d, int64_t l_d, int64_t d_item, int64_t d_token, int64_t dim,
                    uintptr_t q_mask, uintptr_t d_mask, uintptr_t q_weights, float temperature, bool pairs,
                    uintptr_t scores, int threads) {
    const auto side = [](uintptr_t data, int64_t n, int64_t length, int64_t item, int64_t token, uintptr_t mask,
                         uintptr_t weights) {
        return peaksim::Tokens{reinterpret_cast<const void*>(data), n, length, item, token,
                               reinterpret_cast<const uint8_t*>(mask), reinterpret_cast<const float*>(weights), nullptr,
                               n * length};
    };
    const peaksim::MaxSimInputs in{peaksim::arrays::dtype_of(dtype), dim,
                                   side(q, n_q, l_q, q_item, q_token, q_mask, q_weights),
                                   side(d, n_d, l_d, d_item, d_token, d_mask, 0), pairs, temperature};
    peaksim::MaxSimOutputs out{};
    out.scores = reinterpret_cast<float*>(scores);
    const char* isa = std::getenv("PEAKSIM_CPU_ISA");
    const std::string forced = isa ? isa : "";
    py::gil_scoped_release release;
    peaksim::max_sim(in, out, forced.c_str(), threads);
}

// Gradients of scores and values and the winners of one direction; None where there are none.
peaksim::MaxSimIncoming incoming_of(const peaksim::MaxSimInputs& in, const peaksim::Tokens& own, int64_t others,
                                    const MaybeArray& scores, const MaybeArray& values, const MaybeArray& argmax) {
    const int64_t columns = in.pairs ? 1 : in.d.n, size = argmax ? argmax->itemsize() : 4;
    const void* winners = nullptr;
    if (size == 1) winners = per_token<int8_t>(argmax, "argmax", in, own, others, false);
    if (size == 2) winners = per_token<int16_t>(argmax, "argmax", in, own, others, false);
    if (size == 4) winners = per_token<int32_t>(argmax, "argmax", in, own, others, false);
    if (argmax && !winners) refuse("argmax", "int8, int16 or int32");
    return {dense<float>(scores, "gradient of scores", 'f', {in.q.n, columns}, false),
            per_token<float>(values, "gradient of values", in, own, others, false), winners, size};
}

void max_sim_backward(const Array& q, const Array& d, const std::string& dtype, const MaybeArray& q_offsets,
                      const MaybeArray& d_offsets, const MaybeArray& q_weights, const MaybeArray& d_weights, bool pairs,
                      const MaybeArray& scores, const MaybeArray& values, const MaybeArray& argmax,
                      const MaybeArray& reverse_scores, const MaybeArray& reverse_values,
                      const MaybeArray& reverse_argmax, const Array& grad_q, const Array& grad_d,
                      const std::string& isa, int threads) {
    const peaksim::MaxSimInputs in = inputs_of(q, d, dtype, q_offsets, d_offsets, std::nullopt, std::nullopt, q_weights,
                                               d_weights, 0.0f, pairs);
    const peaksim::MaxSimIncoming forward = incoming_of(in, in.q, in.d.n, scores, values, argmax);
    const peaksim::MaxSimIncoming reverse =
        incoming_of(in, in.d, in.q.n, reverse_scores, reverse_values, reverse_argmax);
    if ((scores && !argmax) || (reverse_scores && !reverse_argmax)) {
        refuse("argmax", "given with the gradient of its scores");
    }
    float* to_q = gradient(grad_q, "grad_q", in.q, in.dim);
    float* to_d = gradient(grad_d, "grad_d", in.d, in.dim);
    py::gil_scoped_release release;
    peaksim::max_sim_backward(in, forward, reverse, to_q, to_d, isa.c_str(), threads);
}

void max_sim_soft_backward(const Array& q, const Array& d, const std::string& dtype, const MaybeArray& q_offsets,
                           const MaybeArray& d_offsets, const MaybeArray& q_mask, const MaybeArray& d_mask,
                           const MaybeArray& q_weights, const MaybeArray& d_weights, float temperature, bool pairs,
                           const MaybeArray& scores, const MaybeArray& values, const MaybeArray& reverse_scores,
                           const MaybeArray& reverse_values, const Array& grad_q, const Array& grad_d,
                           const std::string& isa, int threads) {
    const peaksim::MaxSimInputs in =
        inputs_of(q, d, dtype, q_offsets, d_offsets, q_mask, d_mask, q_weights, d_weights, temperature, pairs);
    if (!(temperature > 0.0f)) refuse("temperature", "positive");
    const peaksim::MaxSimIncoming forward = incoming_of(in, in.q, in.d.n, scores, values, std::nullopt);
    const peaksim::MaxSimIncoming reverse =
        incoming_of(in, in.d, in.q.n, reverse_scores, reverse_values, std::nullopt);
    float* to_q = gradient(grad_q, "grad_q", in.q, in.dim);
    float* to_d = gradient(grad_d, "grad_d", in.d, in.dim);
    py::gil_scoped_release release;
    peaksim::max_sim_soft_backward(in, forward, reverse, to_q, to_d, isa.c_str(), threads);
}

}  // namespace

void bind_centroid(py::module_& m);
void bind_crop_batch(py::module_& m);
void bind_max_sim_int8(py::module_& m);
void bind_max_sim_topk(py::module_& m);
void bind_peak_patch(py::module_& m);
void bind_window_attention(py::module_& m);

PYBIND11_MODULE(_C, m) {
    m.doc() = "CPU kernels on numpy arrays; use them through engine.ops, which checks and documents.";
    // Equal to INTERFACE of engine/ops/native.py, which refuses a library built from older sources.
    m.attr("INTERFACE") = 1;
    m.def("cpu_features", [] { return py::str(peaksim::max_sim_isas()).attr("split")(); },
          "Names of the instruction sets that kernels can use here, best first.");
    m.def("max_sim", &max_sim, py::arg("q").noconvert(), py::arg("d").noconvert(), py::arg("dtype"),
          py::arg("q_offsets").noconvert().none(true), py::arg("d_offsets").noconvert().none(true),
          py::arg("q_mask").noconvert().none(true), py::arg("d_mask").noconvert().none(true),
          py::arg("q_weights").noconvert().none(true), py::arg("d_weights").noconvert().none(true),
          py::arg("temperature"), py::arg("pairs"), py::arg("scores").noconvert(),
          py::arg("reverse_scores").noconvert().none(true), py::arg("argmax").noconvert().none(true),
          py::arg("values").noconvert().none(true), py::arg("reverse_argmax").noconvert().none(true),
          py::arg("reverse_values").noconvert().none(true), py::arg("isa"), py::arg("threads"),
          "Forward of max-sim; temperature 0 is the hard maximum.");
    m.def("max_sim_scores", &max_sim_scores, "Scores alone, from checked addresses and sizes.");
    m.def("max_sim_backward", &max_sim_backward, py::arg("q").noconvert(), py::arg("d").noconvert(), py::arg("dtype"),
          py::arg("q_offsets").noconvert().none(true), py::arg("d_offsets").noconvert().none(true),
          py::arg("q_weights").noconvert().none(true), py::arg("d_weights").noconvert().none(true), py::arg("pairs"),
          py::arg("scores").noconvert().none(true), py::arg("values").noconvert().none(true),
          py::arg("argmax").noconvert().none(true), py::arg("reverse_scores").noconvert().none(true),
          py::arg("reverse_values").noconvert().none(true), py::arg("reverse_argmax").noconvert().none(true),
          py::arg("grad_q").noconvert(), py::arg("grad_d").noconvert(), py::arg("isa"), py::arg("threads"),
          "Backward of the hard form of max-sim.");
    m.def("max_sim_soft_backward", &max_sim_soft_backward, py::arg("q").noconvert(), py::arg("d").noconvert(),
          py::arg("dtype"), py::arg("q_offsets").noconvert().none(true), py::arg("d_offsets").noconvert().none(true),
          py::arg("q_mask").noconvert().none(true), py::arg("d_mask").noconvert().none(true),
          py::arg("q_weights").noconvert().none(true), py::arg("d_weights").noconvert().none(true),
          py::arg("temperature"), py::arg("pairs"), py::arg("scores").noconvert().none(true),
          py::arg("values").noconvert().none(true), py::arg("reverse_scores").noconvert().none(true),
          py::arg("reverse_values").noconvert().none(true), py::arg("grad_q").noconvert(),
          py::arg("grad_d").noconvert(), py::arg("isa"), py::arg("threads"),
          "Backward of the soft form of max-sim.");
    bind_centroid(m);
    bind_crop_batch(m);
    bind_max_sim_int8(m);
    bind_max_sim_topk(m);
    bind_peak_patch(m);
    bind_window_attention(m);
}
