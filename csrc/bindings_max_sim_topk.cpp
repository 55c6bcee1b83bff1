// The best documents of each query for Python: numpy arrays in and out, all checked; the GIL is released meanwhile.

#include "bindings_max_sim.hpp"
#include "max_sim_topk.hpp"

namespace py = pybind11;
using namespace peaksim::arrays;

namespace {

void max_sim_topk(const Array& q, const Array& d, const std::string& dtype, const MaybeArray& q_offsets,
                  const MaybeArray& d_offsets, const MaybeArray& q_mask, const MaybeArray& d_mask,
                  const MaybeArray& q_weights, float temperature, const Array& scores, const Array& indices,
                  const std::string& isa, int threads) {
    const peaksim::MaxSimInputs in =
        inputs_of(q, d, dtype, q_offsets, d_offsets, q_mask, d_mask, q_weights, std::nullopt, temperature, false);
    if (scores.ndim() != 2) refuse("scores", "2-dimensional");
    const int64_t k = scores.shape(1);
    float* to = result<float>(scores, "scores", {in.q.n, k});
    int64_t* places = result<int64_t>(indices, "indices", {in.q.n, k});
    py::gil_scoped_release release;
    peaksim::max_sim_topk(in, k, to, places, isa.c_str(), threads);
}

}  // namespace

void bind_max_sim_topk(py::module_& m) {
    m.def("max_sim_topk", &max_sim_topk, py::arg("q").noconvert(), py::arg("d").noconvert(), py::arg("dtype"),
          py::arg("q_offsets").noconvert().none(true), py::arg("d_offsets").noconvert().none(true),
          py::arg("q_mask").noconvert().none(true), py::arg("d_mask").noconvert().none(true),
          py::arg("q_weights").noconvert().none(true), py::arg("temperature"), py::arg("scores").noconvert(),
          py::arg("indices").noconvert(), py::arg("isa"), py::arg("threads"),
          "The best documents of each query, best first; temperature 0 is the hard maximum.");
}
