"""How the numbers of a weight lie in memory that is stored only in FP8: which spec, which dtypes, which shapes.

codes   spec.format.storage_dtype, the shape of the weight
scales  fp32, one a block; where they are powers of two in E8M0's range by definition (MX), their exponents in uint8
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.quantized_tensor import QuantizationSpec
from ottava.scaling import exponent_bytes, read_scales

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What a stored weight may look like from outside."""


def stored_spec(spec: QuantizationSpec) -> QuantizationSpec:
    """The spec to store a weight of that cell with: the amax of the numbers is known, so it predicts no scale.

    A cell with a transform cannot be stored; its rule for block scales may need the transform.

    Example:
        >>> from ottava.formats import E4M3
        >>> str(stored_spec(QuantizationSpec(E4M3, scaling="delayed", amax_history_len=4)))
        'E4M3[tensor]'
    """
    rule = spec.block_scale if spec.transform is None else "amax"
    return QuantizationSpec(spec.format, spec.granularity, spec.scale_format, margin=spec.margin, block_scale=rule)


def scale_dtype(spec: QuantizationSpec) -> torch.dtype:
    """What the scales of a stored weight are kept in.

    Example:
        >>> from ottava.formats import E4M3
        >>> from ottava.scaling import BLOCK_1X32
        >>> scale_dtype(QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0"))
        torch.uint8
    """
    return torch.uint8 if spec.scale_format in ("e8m0", "e8m0_floor") else torch.float32


def store_scales(scale_inv: Tensor, spec: QuantizationSpec) -> Tensor:
    """fp32 scales as a stored weight keeps them; E8M0's bytes are the exponent fields of the fp32 numbers.

    Example:
        >>> from ottava.formats import E4M3
        >>> from ottava.scaling import BLOCK_1X32
        >>> store_scales(torch.tensor([[0.5, 1.0]]), QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0"))
        tensor([[126, 127]], dtype=torch.uint8)
    """
    if scale_dtype(spec) == torch.float32:
        return scale_inv
    return exponent_bytes(scale_inv)


def adopt_scales(found: Tensor, spec: QuantizationSpec) -> Tensor:
    """Scales of a state dict, in fp32 or in E8M0's bytes, as a weight of this spec keeps them.

    Raises:
        ValueError: the spec has powers of two, and these are none, or too large or small for a byte.
    """
    found = found.view(torch.uint8) if found.dtype == torch.float8_e8m0fnu else found
    scale_inv = read_scales(found) if found.dtype == torch.uint8 else found.to(torch.float32)
    fits = {"pow2": powers_only, "e8m0": fit_bytes, "e8m0_floor": fit_bytes}.get(spec.scale_format)
    # NaN decodes a block that has become NaN
    if fits is not None and not found.is_meta and not fits(torch.where(scale_inv.isnan(), 1.0, scale_inv)):
        raise ValueError(f"got scales that are no powers of two; this model stores {spec}")
    return store_scales(scale_inv, spec)


def powers_only(scale_inv: Tensor) -> bool:
    """Whether all scales are powers of two; False where they cannot be read."""
    mantissas, _ = torch.frexp(scale_inv.float())
    return not scale_inv.is_meta and bool((mantissas == 0.5).all())


def fit_bytes(scale_inv: Tensor) -> bool:
    """Whether all fp32 scales are powers of two from 2**-127 to 2**127, those of E8M0.

    Example:
        >>> fit_bytes(torch.tensor([[2.0**-127, 1.0]])), fit_bytes(torch.tensor([[2.0**-128, 1.0]]))
        (True, False)
    """
    return torch.equal(read_scales(exponent_bytes(scale_inv)), scale_inv) and bool(scale_inv.isfinite().all())


def check_storage(
    codes: Tensor, scales: Tensor, spec: QuantizationSpec, dtype: torch.dtype, matrix: tuple[int, ...]
) -> None:
    """Refuses codes and scales that are no weight.

    Raises:
        TypeError: their dtypes, or the outer one.  ValueError: their shapes.
    """
    if dtype not in FLOATS:
        raise TypeError(f"QuantizedWeight: got outer dtype {dtype}; needs float32, bfloat16 or float16")
    wanted = spec.format.storage_dtype, scale_dtype(spec)
    if (codes.dtype, scales.dtype) != wanted:
        raise TypeError(
            f"QuantizedWeight: got {codes.dtype} codes and {scales.dtype} scales; {spec} has {wanted[0]} codes and "
            f"{wanted[1]} scales (weight_storage.store_scales makes them of fp32)"
        )
    if len(matrix) not in (2, 3):
        raise ValueError(f"QuantizedWeight: got codes {matrix}; needs (N, K) or (G, N, K)")
    grid = (*matrix[:-2], *spec.granularity.grid_shape((matrix[-2], matrix[-1])))
    if tuple(scales.shape) != grid:
        raise ValueError(f"QuantizedWeight: got scales {tuple(scales.shape)} for codes {matrix}; {spec} has {grid}")
