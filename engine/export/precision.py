"""The two narrower precisions of an export: towers in float16, and matrix products of 8 bits for CPUs."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

from engine.encoders.base import Encoder
from engine.encoders.registry import load_encoder
from engine.encoders.scenes import ScenesEncoder
from engine.export.graphs import Traced, onnx_package


def half_precision(encoder: Encoder) -> Encoder:
    """The same encoder with weights and arithmetic in float16, for tracing; what it gives is float32 all the same.

    Such a graph says itself what is computed in which type, as TensorRT wants it. Raises ValueError where the encoder's
    name loads something else by now.
    """
    if isinstance(encoder, ScenesEncoder):
        made = ScenesEncoder(
            deepcopy(encoder._model), encoder.tokenizer.words, name=encoder.spec.name, device=encoder.device
        )
        made._model.half()
        return made
    again = load_encoder(encoder.spec.name, device="cpu", dtype="float16")
    if again.spec.fingerprint != encoder.spec.fingerprint:
        raise ValueError(
            f"{encoder.spec.name}: export in fp16 reads the weights once more, and they must be "
            f"{encoder.spec.fingerprint}, got {again.spec.fingerprint}"
        )
    return again


def quantised(traced: Traced) -> Traced:
    """The same graph with weights of matrix products as int8, one scale a column; activations are rounded as they come.

    ONNX Runtime's dynamic quantisation: it needs no pictures to calibrate on. Convolutions and what two activations are
    multiplied in (attention) stay as they are.
    """
    onnx = onnx_package("export")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.ModelProto()
    model.CopyFrom(traced.model)
    # What ONNX Runtime would otherwise warn of: shapes are known, the exporter has folded constants.
    _state(model, "onnx.quant.pre_process", "onnxruntime.quant")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "int8.onnx"
        quantize_dynamic(
            model, path, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return Traced(traced.name, onnx.load(str(path)), traced.signature)


def _state(model: Any, key: str, value: str) -> None:
    entry = model.metadata_props.add()
    entry.key, entry.value = key, value
