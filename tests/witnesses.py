"""The registered formats in packages that know nothing of ottava: a format without a witness fails its tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

ML_DTYPES: Mapping[str, Any] = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E8M0": ml_dtypes.float8_e8m0fnu,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "FP32": np.float32,
}


def gfloat_info(name: str) -> Any:
    """What gfloat says of a format; imported here, as machines with a GPU may lack gfloat."""
    import gfloat.formats

    if name in _FNUZ:  # gfloat names no FNUZ format, but knows the rule: without a -0 its code is NaN
        precision, bias = _FNUZ[name]
        rules = {"has_nz": False, "num_high_nans": 0, "has_subnormals": True, "is_twos_complement": False}
        return gfloat.FormatInfo("fnuz", 8, precision, bias=bias, is_signed=True, domain=gfloat.Domain.Finite, **rules)
    return getattr(gfloat.formats, f"format_info_{_GFLOAT[name]}")


_FNUZ = {"E4M3FNUZ": (4, 8), "E5M2FNUZ": (3, 16)}
_GFLOAT = {"BF16": "bfloat16", "FP16": "binary16", "FP32": "binary32"}
_GFLOAT |= {name: f"ocp_{name.lower()}" for name in ("E4M3", "E5M2", "E8M0", "E2M1", "E2M3", "E3M2")}


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of fp32 numbers, rounded once.

    The product is exact in fp64. The sum is rounded to odd there: what that loses cannot change the rounding to fp32
    (Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008).
    """
    with np.errstate(all="ignore"):
        product, addend = np.multiply(x, y, dtype=np.float64), np.asarray(z, dtype=np.float64)
        total = np.asarray(product + addend)
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        even = total.view(np.int64) & 1 == 0
        odd = np.nextafter(total, np.copysign(np.inf, lost))
        return np.where(np.isfinite(total) & (lost != 0) & even, odd, total).astype(np.float32)
