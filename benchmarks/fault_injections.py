"""Every fault that `diagnose` should name and that fits into a small model; see faults.py."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from fault_lab import STEPS, Fault, Lab
from torch import Tensor

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.numerics.tensor import QuantizedTensor
from ottava.recipe import GemmRecipe, Recipe, get_recipe
from ottava.watching.checks import check_master

NOT_INJECTED: Mapping[str, str] = {
    "B8": "two models sharing state: ours cannot share; the rule asks a person",
    "C5": "FP32 inputs are slow: an answer about speed is needed",
    "C6": "odd dimensions are slow: an answer about speed is needed",
    "C7": "downstream scores: an answer is needed",
    "N12b": "which GEMM a bisection named: an answer is needed",
    "N15": "accumulation inside a tensor core: bisect --accumulator hopper measures it, diagnose takes its answer",
    "T4": "downstream scores: an answer is needed",
    **dict.fromkeys(
        (
            *("D1", "D2", "D3", "D4", "D5", "D6", "D7", "M1", "M2", "M3", "M4", "M5", "N19", "N20", "O1", "TW", "W1"),
            *(f"L{i}" for i in range(1, 61)),
        ),
        "the second lab has it (second_faults.py)",
    ),
    "G1": "the general case behind the others; fires only where no cause is known",
}


def _rows_times(factor: float, every: int = 32) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scale = torch.ones(flat.shape[0], 1, dtype=x.dtype)
        scale[::every] = factor
        return (flat * scale).reshape(x.shape)

    return change


def massive_tokens(lab: Lab, factor: float) -> None:
    lab.change_input(lab.fc2(1), _rows_times(factor))


def growing_activations(lab: Lab, octaves: float) -> None:
    lab.change_input(lab.fc1(1), lambda x: x * 2.0 ** (octaves * lab.step / STEPS))


def unequal_rows(lab: Lab, factor: float) -> None:
    lab.change_input(lab.layer(1, "attention.o_proj"), _rows_times(factor))


def wide_gradient(lab: Lab, sigma: float) -> None:
    generator = lab.generator()

    def change(g: Tensor) -> Tensor:
        return g * torch.exp(sigma * torch.randn(g.shape, generator=generator)).to(g.dtype)

    lab.change_gradient(lab.fc1(1), change)


def unequal_gradient_rows(lab: Lab, sigma: float) -> None:
    generator = lab.generator()

    def change(g: Tensor) -> Tensor:
        rows = torch.exp(sigma * torch.randn(*g.shape[:-1], 1, generator=generator))
        return g * rows.to(g.dtype)

    for block in range(lab.blocks):
        lab.change_gradient(lab.fc1(block), change)


def amax_jump(lab: Lab, factor: float) -> None:
    lab.change_input(lab.fc1(1), lambda x: x * (factor if lab.step == 12 else 1.0))


def old_spike(lab: Lab, factor: float) -> None:
    lab.change_input(lab.fc1(1), lambda x: x * (factor if lab.step == 3 else 1.0))  # step 3 is not looked at


def no_history(lab: Lab, _: float) -> None:
    pass  # the recipe is the fault: bootstrap=False


def bad_boundary(lab: Lab, factor: float) -> None:
    for block in (0, lab.blocks - 1):
        lab.change_input(lab.layer(block, "attention.o_proj"), _rows_times(factor))


def rising_kurtosis(lab: Lab, sigma: float) -> None:
    pattern: dict[torch.Size, Tensor] = {}

    def change(x: Tensor) -> Tensor:
        noise = pattern.setdefault(x.shape, torch.randn(x.shape, generator=lab.generator()))
        return x * torch.exp(sigma * lab.step / STEPS * noise).to(x.dtype)

    lab.change_input(lab.layer(1, "attention.o_proj"), change)


def clustered_weights(lab: Lab, value: float) -> None:
    weight = lab.fc1(1).weight

    def cluster(_: int) -> None:
        with torch.no_grad():
            weight.copy_(weight.sign() * value * (1 + 0.003 * torch.rand_like(weight)))

    lab.before_step.append(cluster)


def growing_outputs(lab: Lab, factor: float) -> None:
    weight = lab.layer(1, "attention.o_proj", "fc2").weight

    def grow(_: int) -> None:
        with torch.no_grad():
            weight.mul_(factor)

    lab.before_step.append(grow)


def infinity(lab: Lab, step: float) -> None:
    def change(x: Tensor) -> Tensor:
        if lab.step < step:
            return x
        x = x.clone()
        x.view(-1)[5] = math.inf
        return x

    lab.change_input(lab.fc1(1), change)


def zero_rows(lab: Lab, rows: float) -> None:
    def zero(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).clone()
        flat[: int(rows)] = 0
        return flat.reshape(x.shape)

    def divide(x: Tensor, row: Any, col: Any) -> tuple[Any, Any]:
        return _without_zero_rule(x, row), _without_zero_rule(x.t(), col)

    lab.change_input(lab.fc1(1), zero)
    lab.change_operands(lab.fc1(1).quantizers.input, divide)


def _without_zero_rule(x: Tensor, x_q: Any) -> Any:
    """As a cast with scale = max / amax and no floor: 0 / 0."""
    if not isinstance(x_q, QuantizedTensor):
        return x_q
    empty = x.abs().amax(1, keepdim=True) == 0
    return replace(x_q, scale_inv=torch.where(empty, math.nan, x_q.scale_inv))


def stale_weight(lab: Lab, lag: float) -> None:
    kept: deque[tuple[Any, Any]] = deque(maxlen=int(lag) + 1)

    def change(_: Tensor, row: Any, col: Any) -> tuple[Any, Any]:
        kept.append((row, col))
        return kept[0]

    lab.change_operands(lab.fc1(1).quantizers.weight, change)


def rounded_scale(tensor: str) -> Callable[[Lab, float], None]:
    def inject(lab: Lab, factor: float) -> None:
        def rounded(x_q: Any) -> Any:
            if not isinstance(x_q, QuantizedTensor):
                return x_q
            # factor 0: to a power of two, as UE8M0 stores it, without casting again
            scale_inv = torch.exp2(x_q.scale_inv.log2().ceil()) if factor == 0 else x_q.scale_inv * factor
            return replace(x_q, scale_inv=scale_inv)

        door = getattr(lab.fc1(1).quantizers, tensor)
        lab.change_operands(door, lambda _, row, col: (rounded(row), rounded(col)))

    return inject


def wrong_column(tensor: str) -> Callable[[Lab, float], None]:
    def inject(lab: Lab, noise: float) -> None:
        def change(x: Tensor, row: Any, col: Any) -> tuple[Any, Any]:
            if not isinstance(col, QuantizedTensor):
                return row, col
            other = x * (1 + noise * torch.randn(1, x.shape[1], generator=lab.generator()).to(x.dtype))
            return row, ottava.quantize(other.t(), replace(col.spec, scaling="current"))

        lab.change_operands(getattr(lab.fc1(1).quantizers, tensor), change)

    return inject


def pushed_twice(lab: Lab, _: float) -> None:
    def push(_: int) -> None:
        for module in lab.model.modules():
            if isinstance(module, Quantizer) and module.spec is not None:
                history = module.amax_history
                history.copy_(torch.cat([history[:1], history[:-1]]))

    lab.after_step.append(push)


def master_from_fp8(lab: Lab, noise: float) -> None:
    def look(step: int) -> None:
        layer = lab.fc1(1)
        parameter = ottava.quantize(layer.weight.detach(), ottava.QuantizationSpec(ottava.E4M3))
        master = parameter.dequantize(torch.float32) if noise == 0 else layer.weight.detach() * (1 + noise)
        if noise == 0:  # initialized from FP8 of a coarser format
            master = ottava.quantize(layer.weight.detach(), ottava.QuantizationSpec(ottava.E5M2)).dequantize(
                torch.float32
            )
        facts = check_master(master, parameter)
        if step == 1 and facts is not None and lab.report is not None:
            lab.report({"layer": layer.name, "tensor": "weight", **facts})

    lab.before_step.append(look)


def resumed_wrongly(lab: Lab, noise: float) -> None:
    def forget(step: int) -> None:
        if step != 57:
            return
        with torch.no_grad():
            for parameter in lab.model.parameters():
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
        assert lab.report is not None
        lab.report({}, kind="resumed", step=56)

    lab.before_step.append(forget)


def too_high_lr(lab: Lab, lr: float) -> None:
    """From step 16 on, when the loss has come down: what diverges from the start never shows a lowest loss."""

    def rise(step: int) -> None:
        if step == 16:
            assert lab.optimizer is not None
            for group in lab.optimizer.param_groups:
                group["lr"] = lr

    lab.before_step.append(rise)


def logs(**columns: Callable[[int, float, float], float]) -> Callable[[Lab, float], None]:
    def inject(lab: Lab, strength: float) -> None:
        lab.logged = lambda step, loss: {name: of(step, loss, strength) for name, of in columns.items()}

    return inject


def lagging_second_moment(lab: Lab, factor: float) -> None:
    """The update's RMS is Adam's own; its second moment is as far behind as after a surge late in a run."""

    def lag(step: int) -> None:
        assert lab.optimizer is not None
        for state in lab.optimizer.state.values():
            state["exp_avg_sq"].mul_(1 / factor if step == 12 else 1.0)

    lab.before_step.append(lag)

    def rms(step: int, loss: float) -> dict[str, float]:
        assert lab.optimizer is not None
        largest = 0.0
        for state in lab.optimizer.state.values():
            if "exp_avg" in state:
                done = float(state["step"])
                m, v = state["exp_avg"] / (1 - 0.9**done), state["exp_avg_sq"] / (1 - 0.999**done)
                used = v > 0
                largest = max(largest, float((m[used] / v[used].sqrt()).square().mean().sqrt()) if used.any() else 0.0)
        return {"update_rms": largest}

    lab.logged = rms


def _without_bootstrap() -> Recipe:
    recipe = get_recipe("delayed")

    def start_at_one(gemm: GemmRecipe) -> GemmRecipe:
        assert gemm.lhs is not None
        assert gemm.rhs is not None
        return replace(gemm, lhs=replace(gemm.lhs, bootstrap=False), rhs=replace(gemm.rhs, bootstrap=False))

    gemms = {name: start_at_one(getattr(recipe, name)) for name in ("fprop", "dgrad", "wgrad")}
    return replace(recipe, name="delayed_from_1", **gemms)


def _coarse_gradients() -> Recipe:
    recipe = get_recipe("blockwise")
    x, w = recipe.fprop.lhs, recipe.fprop.rhs
    return replace(recipe, name="blockwise_128", dgrad=GemmRecipe(w, x), wgrad=GemmRecipe(w, x))


FAULTS: tuple[Fault, ...] = (
    Fault("scales differ over ranks", "B1", lambda lab, _: None, (1,), "delayed", ranks=2),
    Fault("stale FP8 weight", "B2", stale_weight, (1, 4)),
    Fault("stale FP8 weight, blocks", "B2", stale_weight, (2,), "blockwise"),
    Fault("amax pushed twice a step", "B3", pushed_twice, (1,), "delayed"),
    Fault("master weight from FP8", "B4", master_from_fp8, (0, 0.1)),
    Fault("resumed without its state", "B5", resumed_wrongly, (1.0, 2.0), steps=64, settings={"every": 32}),
    Fault("scale of X rounded alone", "B6", rounded_scale("input"), (0, 1.5)),
    Fault("scale of W rounded alone", "B6", rounded_scale("weight"), (0, 2.0), "blockwise_fp32"),
    Fault("scale of dY rounded alone", "B6", rounded_scale("grad_output"), (0, 0.5)),
    Fault("X.T cast from another tensor", "B7", wrong_column("input"), (0.3, 1.0), "blockwise"),
    Fault("dY.T cast from another tensor", "B7", wrong_column("grad_output"), (0.3, 1.0), "mxfp8"),
    Fault("W.T cast from another tensor", "B7", wrong_column("weight"), (0.3, 1.0), "mxfp8"),
    *(
        Fault(f"diverges with {key}", rule, too_high_lr, (1, 3), recipe, {key: value}, {"every": 16}, steps=48)
        for key, value, rule, recipe in (
            ("cpu_offload", True, "C1", "tensorwise"),
            ("fp8_param_gather", True, "C2", "tensorwise"),
            ("weight_caching", True, "C3", "tensorwise"),
            ("amax_reduction", "tp_only", "C4", "delayed"),
        )
    ),
    Fault("infinity in an activation", "F1", infinity, (5, 11)),
    Fault("massive tokens in FC2's input", "N1", massive_tokens, (1e4, 3e4, 1e5)),
    Fault("massive tokens, delayed", "N1", massive_tokens, (1e5,), "delayed"),
    Fault("activations grow", "N2", growing_activations, (10, 16)),
    Fault("a few huge rows", "N3", unequal_rows, (3e4, 1e5)),
    Fault("wide gradient in E4M3", "N4", wide_gradient, (2, 3), "tensorwise_e4m3"),
    Fault("amax jumps under delayed scales", "N5", amax_jump, (3, 16, 256), "delayed"),
    Fault("an old spike holds the scale down", "N6", old_spike, (256, 4096), "delayed"),
    Fault("delayed scales start at 1", "N7", no_history, (1,), _without_bootstrap()),
    Fault("first and last block worst", "N8", bad_boundary, (3e4, 1e5)),
    Fault("kurtosis rises", "N10", rising_kurtosis, (1.5, 1.8)),
    Fault("clustered values, floor scales", "N11", clustered_weights, (0.1171875, 0.114), "mxfp8_floor"),
    Fault("clustered values, rounded up", "N11", clustered_weights, (0.1215, 0.1218), "mxfp8"),
    Fault("outputs grow", "N14", growing_outputs, (1.4, 1.7), "bf16", settings={"tensors": ("X", "W", "dY", "Y")}),
    Fault("blocks of 128x128 for dY", "N16", unequal_gradient_rows, (4, 6), _coarse_gradients()),
    Fault("zero rows without a floor under amax", "N17", zero_rows, (1, 16), "rowwise"),
    Fault("Adam's second moment lags", "N13", lagging_second_moment, (100, 1000)),
    Fault("attention logits", "N9", logs(max_logit=lambda s, _, k: k * 2.0 ** (s / 4)), (30, 3e3), logged=True),
    Fault(
        "noisy dW", "N12", logs(dw_angle=lambda s, _, k: k, dx_angle=lambda s, _, k: 1.5), (8, 40), logged=True
    ),
    Fault("constant gap", "N18", logs(loss=lambda s, x, k: x * (1 + k)), (0.012, 0.03), twin=True, logged=True),
    Fault(
        "growing gap", "T2", logs(loss=lambda s, x, k: x * (1 + k * (s / STEPS) ** 3)), (0.05, 0.2), twin=True,
        logged=True,
    ),
    Fault(
        "spikes that the twin has not", "T1", logs(loss=lambda s, x, k: x + k * (s in (36, 42))), (3, 10), twin=True,
        logged=True, steps=48, settings={"every": 16},
    ),
)  # fmt: skip
