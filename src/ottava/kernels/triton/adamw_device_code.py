"""Device code of AdamW's step: the operations of torch's foreach kernels on a GPU, one after the other in fp32.

Those kernels have three fused multiply-adds: in lerp, addcmul and addcdiv. They stand here by name, and the launch lets
the compiler fuse no other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    weight_ptr,
    extra_ptr,
    gradient_ptr,
    mean_ptr,
    square_ptr,
    count,
    decay,
    share1,
    beta2,
    share2,
    correction,
    eps,
    size,
    BLOCK: tl.constexpr,
):
    """A step of `count` elements. extra: None, an fp32 master of the weight, or the remainder of int16 weight bits.

    share1, share2: 1 - beta; correction: sqrt(1 - beta2**t); size: -lr / (1 - beta1**t).
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + place, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + place, mask=inside, other=0.0).to(tl.float32)
    split: tl.constexpr = weight_ptr.dtype.element_ty == tl.int16
    if split:
        upper = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.int32) << 16
        lower = tl.load(extra_ptr + place, mask=inside, other=0).to(tl.int32)
        w = (upper + lower).to(tl.float32, bitcast=True)
        w = tl.where(w == w, w, upper.to(tl.float32, bitcast=True))  # a zero written over a negative remainder
    elif extra_ptr is not None:
        w = tl.load(extra_ptr + place, mask=inside, other=0.0)
        stored = tl.load(weight_ptr + place, mask=inside, other=0.0)
        w = tl.where(stored == w.to(stored.dtype), w, stored.to(tl.float32))  # else somebody has written the weight
    else:
        w = tl.load(weight_ptr + place, mask=inside, other=0.0)

    w = w * decay
    zeros = tl.zeros_like(w)
    near = zeros + share1 < 0.5  # torch's lerp starts from the nearer end
    mean = tl.fma(tl.where(near, share1, share1 - 1.0), gradient - mean, tl.where(near, mean, gradient))
    square = tl.fma(zeros + share2, gradient * gradient, square * beta2)
    denominator = tl.math.div_rn(tl.sqrt_rn(square), zeros + correction) + eps
    w = tl.fma(zeros + size, tl.math.div_rn(mean, denominator), w)

    tl.store(mean_ptr + place, mean.to(mean_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr + place, square.to(square_ptr.dtype.element_ty), mask=inside)
    if split:
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)  # the sum below would wrap with some NaNs
        upper = (bits + 0x8000) >> 16
        tl.store(weight_ptr + place, upper.to(tl.int16), mask=inside)
        tl.store(extra_ptr + place, (bits - (upper << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(weight_ptr + place, w.to(weight_ptr.dtype.element_ty), mask=inside)
        if extra_ptr is not None:
            tl.store(extra_ptr + place, w, mask=inside)
