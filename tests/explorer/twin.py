"""The training of engine.js in Python: ottava.quantize for every cast, and FP32 sums in the order that the page has.

Sums along k run from 0 up, an operation of torch for each product and each sum, so nothing is fused. Compared with the
page bit for bit: every loss, and every master weight at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

import ottava
from ottava.kernels.reference import block_columns, scale_of_block
from ottava.numerics.rounding import decode, random_bits
from ottava.numerics.tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.recipe import Recipe, get_recipe

WIDTH, BATCH, LAYERS = 64, 32, 3


def normals(low: int, high: int, count: int, start: int = 0) -> Tensor:
    """A sum of four even numbers for a normal one."""
    bits = random_bits(torch.tensor(high << 32 | low), 4 * count, 4 * start).view(count, 4)
    return (((bits >> 8).double() * 2.0**-24).sum(1) - 2).mul(math.sqrt(3)).float()


def ordered(a: Tensor, b: Tensor) -> Tensor:
    """(M, K), (N, K) -> (M, N) in FP32, along k from 0 up."""
    y = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        y = y + a[:, k : k + 1] * b[:, k]
    return y


def multiply(a: Operand, b: Operand) -> Tensor:
    """kernels.reference.gemm before its rounding, with ordered sums."""
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return ordered(*(t.dequantize(torch.float32) if isinstance(t, QuantizedTensor) else t.float() for t in (a, b)))
    k, one = a.shape[1], a.scale_inv.shape[1] == b.scale_inv.shape[1] == 1
    if not one and "fp32" not in (a.spec.scale_format, b.spec.scale_format):
        return ordered(a.dequantize(torch.float32), b.dequantize(torch.float32))
    step = k if one else block_columns(a.spec.granularity, b.spec.granularity, k)
    codes, y = (decode(a.data, a.spec.format), decode(b.data, b.spec.format)), torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, k, step):
        part = ordered(*(c[:, start : start + step] for c in codes))
        y = y + part * scale_of_block(a, start) * scale_of_block(b, start).t()
    return y


def gemm(a: Operand, b: Operand) -> Tensor:
    """BF16; the means that Averis sets aside are added in FP32."""
    y = multiply(a, b)
    kinds = [getattr(t.spec.transform, "tokens", "") if isinstance(t, QuantizedTensor) else "" for t in (a, b)]
    if kinds == ["columns", "columns"]:
        y = y + a.aside * a.shape[1] * b.aside.t()
    elif kinds[0] == "rows":
        y = y + multiply(a.aside, b.dequantize(torch.float32))
    return y.to(torch.bfloat16)


def folded(x: Tensor) -> Tensor:
    """The last half is added to the first until one number is left."""
    while x.numel() > 1:
        half = x.numel() // 2
        x = torch.cat([x[:half] + x[x.numel() - half :], x[half : x.numel() - half]])
    return x[0]


class Training:
    """Three layers with ReLU learn what a teacher of two does, by SGD with momentum."""

    def __init__(self, recipe: str, lr: float, octaves: int = 0, seed: int = 0) -> None:
        self.recipe, self.lr, self.octaves, self.seed = get_recipe(recipe), torch.tensor(lr), octaves, seed
        size, scale = WIDTH * WIDTH, torch.tensor(math.sqrt(2 / WIDTH))

        def weights(word: int, layers: int) -> list[Tensor]:
            return [normals(seed, word, size, i * size).view(WIDTH, WIDTH) * scale for i in range(layers)]

        self.teacher = [w.bfloat16() for w in weights(1, 2)]
        self.masters, self.steps = weights(2, LAYERS), 0
        self.momenta = [torch.zeros_like(w) for w in self.masters]
        self.histories: list[dict[str, Tensor]] = [{} for _ in self.masters]

    def stretched(self, x: Tensor, sign: int) -> Tensor:
        x = x.clone()
        x[:, 0] *= 2.0 ** (sign * self.octaves)
        return x

    def cast(
        self, layer: int, tensor: str, x: Tensor, spec: QuantizationSpec | None, beside: Operand | None
    ) -> Operand:
        if spec is None:
            return x
        scale, history = None, self.histories[layer].get(tensor)
        if spec.predicted and history is not None:
            scale = spec.from_window(history)[0]
        return ottava.quantize(x, spec, scale=scale, beside=beside)

    def remember(self, layer: int, tensors: Mapping[str, Tensor], recipe: Recipe) -> None:
        """The rule of engine.state.roll_windows, for amaxes that are above 0 and finite."""
        specs = {"input": recipe.fprop.lhs, "weight": recipe.fprop.rhs, "grad_output": recipe.dgrad.lhs}
        for name, x in tensors.items():
            spec, amax = specs[name], x.float().abs().amax()
            if spec is not None and spec.predicted and 0 < amax < torch.inf:
                history = self.histories[layer].setdefault(name, torch.zeros(spec.amax_history_len))
                self.histories[layer][name] = torch.cat([amax[None], history[:-1]])

    def step(self) -> float:
        """One step; its loss."""
        recipe, first = self.recipe, 2 * WIDTH * WIDTH + self.steps * BATCH * WIDTH
        self.steps += 1
        h = normals(self.seed, 1, BATCH * WIDTH, first).view(BATCH, WIDTH).bfloat16()
        target = gemm(gemm(h, self.teacher[0]).relu(), self.teacher[1])
        saved = []
        for i, master in enumerate(self.masters):
            x, w = self.stretched(h, 1), self.stretched(master.bfloat16(), -1)
            x_row = self.cast(i, "input", x, recipe.fprop.lhs, None)
            x_col = self.cast(i, "input", x.t(), recipe.wgrad.rhs, None)
            w_row = self.cast(i, "weight", w, recipe.fprop.rhs, x_row)
            w_col = self.cast(i, "weight", w.t(), recipe.dgrad.rhs, None)
            y = gemm(x_row, w_row)
            saved.append((x, w, x_col, w_col, y))
            h = y.relu() if i < LAYERS - 1 else y
        rest = h.float() - target.float()
        loss = folded((rest * rest).flatten()) / rest.numel()
        dy = (rest * torch.tensor(2 / rest.numel())).bfloat16()
        for i in reversed(range(LAYERS)):
            x, w, x_col, w_col, _ = saved[i]
            dy_row = self.cast(i, "grad_output", dy, recipe.dgrad.lhs, w_col)
            dy_col = self.cast(i, "grad_output", dy.t(), recipe.wgrad.lhs, x_col)
            dw = self.stretched(gemm(dy_col, x_col), -1)
            self.remember(i, {"input": x, "weight": w, "grad_output": dy}, recipe)
            if i > 0:
                below = saved[i - 1][4]
                dy = torch.where(below > 0, self.stretched(gemm(dy_row, w_col), 1), 0)
            self.momenta[i] = self.momenta[i] * torch.tensor(0.9) + dw.float()
            self.masters[i] = self.masters[i] - self.lr * self.momenta[i]
        return float(loss)
