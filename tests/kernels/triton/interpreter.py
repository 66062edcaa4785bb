"""Makes Triton's interpreter (TRITON_INTERPRET=1) compute what a GPU computes; imported by tests before a kernel runs.

Triton's own, 3.6 to 3.9, is wrong in some places, so that wrong kernels pass and right ones fail:

- fp32 to FP8 and to BF16 truncates instead of rounding, and NaN becomes a number: here sm_90's `cvt.rn.satfinite`;
- the dot of BF16 multiplies bit patterns: here the numbers;
- exp, erf and tanh of CUDA's library: here torch's;
- 3.6 rounds twice in a fused multiply-add;
- 3.6 takes no loop bound from a run-time value under numpy 2.4 and later.

BF16 arithmetic stays wrong: kernels go to fp32 right after each load. What an interpreter cannot show at all: races,
limits of registers and shared memory, and speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

from witnesses import fused_multiply_add

FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
KNOWN = {"fp32", "fp16", "bf16", *FP8}


def numbers(data: Any, name: str) -> np.ndarray:
    """What the interpreter holds as bits, as fp32."""
    data = np.ascontiguousarray(np.asarray(data))
    if name in FP8:
        return torch.from_numpy(data.view(np.uint8)).view(FP8[name]).float().numpy().reshape(data.shape)
    if name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view({"fp16": np.float16, "fp32": np.float32}[name]).astype(np.float32)


def bits(values: torch.Tensor, name: str) -> np.ndarray:
    """fp32 as the interpreter holds it in a type: rounded to nearest even, FP8 clamped first, NaN kept."""
    if name in FP8:
        top = torch.finfo(FP8[name]).max
        return values.clamp(-top, top).to(FP8[name]).view(torch.uint8).numpy()
    if name == "bf16":
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return values.half().numpy().view(np.uint16) if name == "fp16" else values.numpy().view(np.uint32)


def install() -> None:
    """Replaces the wrong parts; a second call changes nothing."""
    if getattr(interpreter, "_ottava_shim", False):
        return
    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        names = source.scalar.name, target.scalar.name
        if not set(names) <= KNOWN:
            return convert(data, source, target, rounding)
        values = torch.from_numpy(np.array(numbers(data, names[0])))
        return bits(values, names[1]).reshape(np.shape(data))

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(numbers(a.data, a.dtype.scalar.name), numbers(b.data, b.dtype.scalar.name))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    def of_cuda(function: Any) -> Any:
        def call(x: Any) -> Any:
            values = function(torch.from_numpy(np.array(x.handle.data))).numpy()
            return tl.core.tensor(interpreter.TensorHandle(values, x.handle.dtype), x.type)

        return call

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    if not hasattr(getattr(interpreter, "_interpreter", None), "fma_fp32"):
        interpreter.InterpreterBuilder.create_fma = create_fma
    for name in ("exp", "erf", "tanh"):
        setattr(libdevice, name, of_cuda(getattr(torch, name)))
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._ottava_shim = True
