"""How far two tensors may lie apart in a test: one pair of numbers per dtype, the same everywhere."""

from __future__ import annotations

import numpy as np
import torch

# dtype of the *inputs* -> (rtol, atol). Results are float32 or wider, so for the narrow types the numbers
# bound what rounding the inputs costs, not the arithmetic.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}


def assert_close(
    actual: torch.Tensor | np.ndarray,
    expected: torch.Tensor | np.ndarray,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    what: str = "",
) -> None:
    """Raise AssertionError unless both agree in shape and, within the dtype's tolerance, in every value.

    NaN agrees with NaN and infinities with infinities of the same sign. Values are compared as float64, so
    the dtypes themselves may differ.

    Args:
        actual, expected: tensors or arrays of one shape.
        dtype: row of `TOLERANCES`; by default the narrower one of the two dtypes. Integers and bools must
            be equal.
        scale: factor on both tolerances, for sums that are long or gradients that are large.
        what: name put before the message.
    """
    got, wanted = torch.as_tensor(actual).detach().cpu(), torch.as_tensor(expected).detach().cpu()
    if dtype is None:
        floating = [t.dtype for t in (got, wanted) if t.dtype.is_floating_point]
        dtype = max(floating, key=lambda d: torch.finfo(d).eps) if floating else None
    rtol, atol = (0.0, 0.0) if dtype is None else (scale * x for x in TOLERANCES[dtype])
    torch.testing.assert_close(
        got.double(),
        wanted.double(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}" if what else text,
    )
