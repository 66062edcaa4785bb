"""torch.compile in one graph, torch.utils.checkpoint and DistributedDataParallel around each module of ottava.nn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from sweep import sweep

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
ROPE = ottava.nn.RotaryEmbedding(8)


class Head(nn.Module):
    """A loss of 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = ottava.nn.LinearCrossEntropy(32, 48, recipe="tensorwise", **BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(0, 1), torch.arange(16))


class Heads(nn.Module):
    """Attention proper, of heads that a rotation has turned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.rope = ottava.nn.DotProductAttention(sink="learned", heads=2), ROPE

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (4, 8)).split([2, 1, 1], -2)
        return self.attention(ottava.nn.rope.rotate(q, self.rope(torch.arange(x.shape[1]))), k, v)


class Routed(nn.Module):
    """Scores of a router, whose auxiliary losses are in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = ottava.nn.Router(32, 4, 2, aux_loss=0.1, z_loss=0.1, **BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x.flatten(0, 1)).probs


class Grouped(nn.Module):
    """Rows of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ottava.nn.GroupedLinear(2, 32, 48, **BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1), [5, 11])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "ActivatedLinear": lambda: ottava.nn.ActivatedLinear(16, 48, activation="swiglu", **BF16),
    "DotProductAttention": Heads,
    "GroupedLinear": Grouped,
    "LayerNorm": lambda: ottava.nn.LayerNorm(32, **BF16),
    "Linear": lambda: ottava.nn.Linear(32, 48, **BF16),
    "LinearCrossEntropy": Head,
    "MoE": lambda: ottava.nn.MoE(32, 48, 4, 2, recipe="mxfp8", **BF16),
    "MultiheadAttention": lambda: ottava.nn.MultiheadAttention(32, 4, norm="rmsnorm", qk_norm="rmsnorm", **BF16),
    "NormLinear": lambda: ottava.nn.NormLinear(32, 48, **BF16),
    "NormMLP": lambda: ottava.nn.NormMLP(32, 48, activation="swiglu", save="fp8", **BF16),
    "RMSNorm": lambda: ottava.nn.RMSNorm(32, **BF16),
    "RotaryEmbedding": Heads,
    "Router": Routed,
    "TransformerLayer": lambda: ottava.nn.TransformerLayer(32, 48, 4, activation="swiglu", norm="rmsnorm", **BF16),
}
"""Name -> a module that takes (2, 8, 32) in bf16."""
SPLITS_BY_NUMBERS = ("MoE", "Router")
"""How many rows an expert gets is read on the host: they break the graph."""


def module_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def bits(module: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """y and every gradient, of two steps without a change of weights."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    for _ in range(2):
        module.zero_grad()
        x.grad = None
        y = run(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_no_module_is_missing_here() -> None:
    public = {name: getattr(ottava.nn, name) for name in ottava.nn.__all__}
    assert set(MODULES) == {name for name, one in public.items() if inspect.isclass(one) and issubclass(one, nn.Module)}


@sweep(name=[*MODULES])
def test_a_recomputed_module_has_the_same_bits(name: str) -> None:
    """Both ways of torch.utils.checkpoint. The reentrant one runs its first forward without grad, where a learned sink
    takes another kernel of torch's."""
    expected = bits(one := module_of(name), one)
    for reentrant in (False, True)[: 1 if MODULES[name] is Heads else 2]:
        module = module_of(name)
        assert same(bits(module, lambda x, m=module: checkpoint(m, x, use_reentrant=reentrant)), expected)  # noqa: B023


@pytest.mark.filterwarnings("ignore:ottava.convert")
@sweep(recipe=[*ottava.RECIPES], weights=["bf16", "fp8"])
def test_validation_leaves_no_trace_in_a_training_step(recipe: str, weights: Any) -> None:
    """A forward under inference_mode and one under no_grad, then a step: its bits are those of the step alone."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name in MODULES:
        plain, validated = module_of(name), module_of(name)
        try:
            ottava.convert(plain, recipe, weights=weights, filter=lambda *_: True)
        except ValueError as error:
            assert "has no FP8 weights" in str(error)  # noqa: PT017  # not every recipe has them
            continue
        ottava.convert(validated, recipe, weights=weights, filter=lambda *_: True)
        for context in (torch.inference_mode, torch.no_grad):
            with context():
                validated(x)
        runs = []
        for module in (plain, validated):
            torch.manual_seed(2)  # transforms draw signs
            runs.append(bits(module, module))
        assert same(*runs), name


@sweep(name=[name for name in MODULES if name not in SPLITS_BY_NUMBERS])
def test_a_module_is_one_graph(name: str) -> None:
    """fullgraph says so. torch traces norms and products of BF16 in fp32, so a number may be rounded elsewhere; the
    modules' own tests compare bits where there is no such thing."""
    torch.compiler.reset()
    expected, module = bits(one := module_of(name), one), module_of(name)
    found = bits(module, torch.compile(module, fullgraph=True, backend="aot_eager"))
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).float().norm() <= 2**-7 * wanted.float().norm()


def test_a_module_under_ddp_has_the_same_bits(tmp_path: Any) -> None:
    """One rank, whose gradients are its own; several: tests/distributed."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for name in MODULES:
            expected, module = bits(one := module_of(name), one), module_of(name)
            wrapped = nn.parallel.DistributedDataParallel(module)
            assert same(bits(module, wrapped), expected), name
    finally:
        torch.distributed.destroy_process_group()
