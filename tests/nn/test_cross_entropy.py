"""Cross-entropy in chunks against torch's, which makes all logits: loss and every gradient, in every setting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.nn import Linear, LinearCrossEntropy, linear_cross_entropy
from ottava.recipe import Recipe

TOKENS, WIDTH, CLASSES = 264, 64, 300
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2, "softcap": 3.0},
    {"reduction": "sum", "ignore_index": 7},
    {"reduction": "none", "label_smoothing": 0.2, "z_loss": 1e-3},
)


def torchs(logits: Tensor, target: Tensor, **settings: Any) -> Tensor:
    """The definition, in torch's own operations."""
    z_loss, softcap = settings.pop("z_loss", 0.0), settings.pop("softcap", None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    own = F.cross_entropy(logits, target, **settings)
    counts = target != settings.get("ignore_index", -100)
    extra = torch.where(counts, z_loss * logits.logsumexp(-1).square(), 0.0)
    reduction = settings.get("reduction", "mean")
    return own + (extra if reduction == "none" else extra.sum() / (counts.sum() if reduction == "mean" else 1))


def sample(ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, CLASSES, (2, TOKENS // 2), generator=generator)
    target[0, :8] = ignored
    return torch.randn(2, TOKENS // 2, WIDTH, generator=generator), target


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    dy = torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape).to(loss.dtype)
    return list(torch.autograd.grad(loss, leaves, dy))


def test_in_fp32_it_is_fp64s_loss_and_gradients() -> None:
    """Chunks of all sizes, also of one token; bias; every setting."""
    for settings in SETTINGS:
        for chunk in (None, 1, 100, 10**6):
            x, target = sample(settings.get("ignore_index", -100))
            torch.manual_seed(0)
            head = LinearCrossEntropy(WIDTH, CLASSES, bias=True, chunk=chunk, **settings)
            leaves = x.requires_grad_(), head.weight, head.bias
            exact = [t.detach().double().requires_grad_() for t in leaves]
            loss = head(x, target)
            want = torchs(F.linear(*exact).flatten(0, 1), target.flatten(), **settings)
            assert loss.dtype == torch.float32
            assert loss.shape == (target.shape if settings.get("reduction") == "none" else ())
            assert torch.allclose(loss.double().flatten(), want.flatten(), rtol=1e-5, atol=1e-6)
            for got, other in zip(gradients(loss, *leaves), gradients(want.view(loss.shape), *exact), strict=True):
                # sums of at most TOKENS * CLASSES fp32 products
                assert float((got.double() - other).norm() / other.norm()) < 1e-5


def test_one_chunk_is_a_linear_and_torchs_loss(recipe: Recipe) -> None:
    """Under every recipe, 256 tokens of which all count: loss but for fp32 roundings; gradients are cast elsewhere."""
    x, target = sample(3)
    x, target = x.flatten(0, 1)[:256].bfloat16(), target.flatten()[:256]
    torch.manual_seed(0)
    head = LinearCrossEntropy(WIDTH, CLASSES, bias=True, recipe=recipe, chunk=256, dtype=torch.bfloat16)
    plain = Linear(WIDTH, CLASSES, recipe=recipe, dtype=torch.bfloat16)
    plain.load_state_dict(head.state_dict())
    leaves = [x.clone().requires_grad_() for _ in "ab"]
    torch.manual_seed(3)
    got = head(leaves[0], target)
    got.backward()
    want = F.cross_entropy(plain(leaves[1]).float(), target)
    torch.manual_seed(3)
    want.backward()
    assert abs(float(got) - float(want)) <= 2.0**-20 * float(want)  # the same logits; lse and its sum in fp32
    narrow = "E2M1" in str(recipe.fprop)
    wide = 0.3 if narrow else 0.06  # gradients are cast at another magnitude: 256 times larger
    for a, b in zip((leaves[0], head.weight, head.bias), (leaves[1], plain.weight, plain.bias), strict=True):
        assert float((a.grad.double() - b.grad.double()).norm() / b.grad.double().norm()) < wide
    chunked = LinearCrossEntropy(WIDTH, CLASSES, bias=True, recipe=recipe, chunk=128, dtype=torch.bfloat16)
    chunked.load_state_dict(head.state_dict())
    loss = chunked(x.clone().requires_grad_(), target)
    loss.backward()
    assert abs(float(loss) - float(want)) < (0.2 if narrow else 0.02)
    if recipe.casts:
        assert ottava.receipt(chunked).rows[0].shape == f"128 x {CLASSES} x {WIDTH}"
        assert ottava.receipt(chunked).fp8_fraction == ottava.receipt(plain).fp8_fraction


def test_the_logits_of_all_tokens_never_exist() -> None:
    """No tensor of their size is made, and two gradients are kept; for "none" the input."""
    tokens, classes = 2048, 1000
    x = torch.randn(tokens, WIDTH).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (tokens,))
    for recipe in ("bf16", "tensorwise"):
        for reduction in ("mean", "none"):
            head = LinearCrossEntropy(WIDTH, classes, recipe=recipe, reduction=reduction, dtype=torch.bfloat16)  # type: ignore[arg-type]
            largest: list[int] = [0]
            kept: list[Tensor] = []

            class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
                def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    out = func(*args, **(kwargs or {}))
                    if isinstance(out, Tensor):
                        largest[0] = max(largest[0], out.numel())  # noqa: B023
                    return out

            with Sizes(), torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t) or t, lambda t: t):
                loss = head(x, target)
                loss.sum().backward()
            assert largest[0] < tokens * classes / 4
            size = sum(t.nbytes for t in kept if t is not head.weight and t.dtype != torch.int64)
            assert size == x.nbytes + (head.weight.nbytes if reduction == "mean" else 0)


def test_compiled_calibrated_autocast_and_without_gradients() -> None:
    """One graph; histories of an unfused head; torch.autocast; no_grad and frozen weights make no gradients."""
    x, target = sample()
    x = x.bfloat16()
    for recipe in ("bf16", "tensorwise"):
        torch.manual_seed(0)
        head = LinearCrossEntropy(WIDTH, CLASSES, recipe=recipe, dtype=torch.bfloat16)
        results = []
        for run in (head, torch.compile(head, fullgraph=True, backend="aot_eager")):
            leaf = x.clone().requires_grad_()
            head.zero_grad()
            loss = run(leaf, target)
            loss.backward()
            results.append((loss, leaf.grad, head.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        with torch.no_grad():
            assert torch.equal(head(x, target), results[0][0])
        head.weight.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        head(leaf, target).backward()
        assert torch.equal(leaf.grad, results[0][1])
        assert not head(x, target).requires_grad
        low = LinearCrossEntropy(WIDTH, CLASSES, recipe=recipe)
        with torch.autocast("cpu", torch.bfloat16):
            loss = low(x.float().requires_grad_(), target)
        loss.backward()
        assert low.weight.grad.dtype == loss.dtype == torch.float32
    head = LinearCrossEntropy(WIDTH, CLASSES, recipe="delayed", reduction="sum", dtype=torch.bfloat16)
    plain = Linear(WIDTH, CLASSES, bias=False, recipe="delayed", dtype=torch.bfloat16)
    plain.load_state_dict(head.state_dict())
    ours = ottava.calibrate(head, [(x, target)], loss=lambda model, batch: model(*batch))
    theirs = ottava.calibrate(
        plain,
        [x],
        loss=lambda model, batch: F.cross_entropy(
            model(batch).float().flatten(0, 1), target.flatten(), reduction="sum"
        ),
    )
    assert [row.amax for row in ours.rows] == [row.amax for row in theirs.rows]
    head(x.requires_grad_(), target).backward()
    assert head.quantizers.grad_output.staged[0] > 0


def test_a_tied_weight_and_extremes() -> None:
    """The embedding's gradient is the sum of both; nothing counts: nan, as torch's; huge logits stay finite."""
    embedding = nn.Embedding(CLASSES, WIDTH)
    head = LinearCrossEntropy(WIDTH, CLASSES)
    head.weight = embedding.weight
    x, target = sample()
    head(embedding(target.clamp(min=0)), target).backward()
    assert embedding.weight.grad is not None
    assert torch.equal(embedding.weight.grad, head.weight.grad)
    assert math.isnan(float(head(x, torch.full_like(target, -100))))
    assert math.isfinite(float(head(x * 1e4, target)))
    assert float(linear_cross_entropy(x[:0], head.weight, target[:0], reduction="sum")) == 0.0
    assert float(
        linear_cross_entropy(torch.zeros(3, 8), torch.zeros(100, 8), torch.tensor([1, 2, 3]))
    ) == pytest.approx(math.log(100))


def test_what_is_wrong_is_named() -> None:
    """Shapes, dtypes, classes, settings, second derivatives."""
    head = LinearCrossEntropy(WIDTH, CLASSES)
    x, target = sample()
    for bad in ((x[..., 1:], target), (x, target[:1])):
        with pytest.raises(ValueError, match=r"needs \(..., 64\) and one class a token"):
            head(*bad)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        head(x, target.float())
    with pytest.raises(ValueError, match="class 300"):
        head(x, target.clamp(min=0) + CLASSES - int(target.max()))
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(head(x.requires_grad_(), target), x, create_graph=True)
    for wrong in ({"reduction": "max"}, {"label_smoothing": 2.0}, {"softcap": 0.0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LinearCrossEntropy(WIDTH, CLASSES, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use LinearCrossEntropy"):
        linear_cross_entropy(x, head.weight, target, recipe="delayed")
    assert "label_smoothing" in repr(head)
