"""E8M0 scales in a byte, all of them."""

from __future__ import annotations

import torch

from ottava.distributed.wire import exponent_bytes, from_exponent_bytes


def test_every_exponent_comes_back() -> None:
    """2**-127, a subnormal of fp32, too; torch's own E8M0 is the witness."""
    codes = torch.arange(255, dtype=torch.uint8)
    scales = from_exponent_bytes(codes)
    assert torch.equal(scales, codes.view(torch.float8_e8m0fnu).to(torch.float32))
    assert torch.equal(exponent_bytes(scales.reshape(5, 51)), codes.reshape(5, 51))
