"""Casts that a script writes itself: seen, tried, and told from those outside of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.experiments.handmade import Exact
from ottava.experiments.trace import Trace
from ottava.record.reader import Run


class Rounded(torch.autograd.Function):
    """A cast to E4M3 and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Handmade(nn.Linear):
    """Casts both operands. Powers of two: what is left of a scale without its cast changes no bit."""

    scale = 16.0

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(Rounded.apply(input, self.scale), Rounded.apply(self.weight, 64.0), self.bias)


def trained(folder: Path, scale: float, *, wire: bool = False, linear: type[nn.Linear] = Handmade) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), linear(64, 128), nn.GELU(), linear(128, 32))
    for layer in (model[1], model[3]):
        layer.scale = scale  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    with ottava.watch(model, folder):
        for _ in range(24):
            x = torch.randint(0, 32, (64,), generator=data)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (5 * x + 3) % 32).backward()
            for p in model.parameters() if wire else ():
                assert p.grad is not None
                p.grad.copy_(p.grad.to(torch.float8_e5m2).float())
            optimizer.step()
    return Run.open(folder)


@pytest.mark.parametrize(
    ("scale", "wire", "part", "said"),
    [
        (16.0, False, "innocent", "with casts the gradient differs by at most"),
        (2.0**14, False, "guilty", "the gradient with casts differs by"),
        (16.0, True, "innocent", "with casts the gradient differs by at most"),  # E5M2 without a scale: 12 % here
    ],
)
def test_a_scripts_own_casts_are_tried(scale: float, wire: bool, part: str, said: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", scale, wire=wire)
    shadows = [e for e in run.experiments if e["kind"] == "shadow"]
    assert {e["mode"] for e in shadows} == {"real"}
    assert all("test_handmade.py:" in e["recipe"] for e in shadows)
    assert wire or all(e["reproduces"] for e in shadows)
    assert [e["where"].split(":")[0] for e in run.experiments if e["kind"] == "conversion"] == (
        ["test_handmade.py"] if wire else []
    )
    if scale > 16:  # a clamp belongs to its cast: what it loses counts, and a backward around it is that of both
        assert max(site["clipped"] for e in shadows for site in e["sites"].values()) > 0.5
        assert all(e["derivative"] < 1e-6 for e in shadows if "derivative" in e)
    answer = diagnose(run)
    assert (answer.fp8, said in answer.tried[0]) == (part, True), answer.tried


def test_without_its_casts_a_layer_is_torchs_own(tmp_path: Path) -> None:
    layer, x = Handmade(64, 32), torch.randn(8, 64, generator=torch.Generator().manual_seed(2)) * 100
    with Exact():
        exact = layer(x)
    assert torch.equal(exact, nn.functional.linear(x, layer.weight, layer.bias))
    assert not torch.equal(layer(x), exact)
    run = trained(tmp_path / "run", 1.0, linear=nn.Linear)
    assert not [e for e in run.experiments if e["kind"] == "conversion"]
    assert diagnose(run).fp8 == "none"


def test_a_scaled_product_of_uncast_operands_is_their_product() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, 32, generator=generator) for n in (16, 48))
    scales = torch.tensor(2.0), torch.tensor(0.25)

    def product() -> Tensor:
        codes = [(x / s).to(torch.float8_e4m3fn) for x, s in zip((a, b), scales, strict=True)]
        return torch._scaled_mm(codes[0], codes[1].t(), *scales, out_dtype=torch.float32)

    with Exact():
        exact = product()
    assert torch.equal(exact, a @ b.t())


def test_our_own_casts_are_no_conversions_of_the_script() -> None:
    layer = ottava.nn.Linear(32, 32, recipe="tensorwise")
    seen = Trace(lambda: True).enter()
    layer(torch.ones(4, 32)).sum().backward()
    seen.close()
    assert (seen.model, seen.outside) == (None, None)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_state_in_codes_is_held_against_the_change_that_it_should_take_along() -> None:
    """An average, in codes or decoded, moves by 3 % of the way to its weights; random rounding moves further."""
    torch.manual_seed(0)
    weight, noise = torch.randn(32, 32), torch.rand(32, 32)

    def to_codes(x: Tensor) -> Tensor:
        return (8 * x).to(torch.float8_e4m3fn)

    def told(kind: str) -> float:
        with torch.no_grad():
            codes = to_codes(weight)
            held, master = codes.float() / 8, weight.clone()
            trace = Trace().enter()
            if kind == "average":
                to_codes(codes.float() / 8 * 0.97 + 0.03 * (weight + 0.2))
            elif kind == "at random":
                to_codes(codes.float() / 8 * (1.0 + 0.12 * (noise - 0.5)) + 1e-3)
            elif kind == "decoded":
                held.lerp_(weight + 0.2, 0.03)
                held.copy_(to_codes(held).float() / 8)
            else:
                held.copy_(master.add_(1e-3))
                held.add_(1e-3)
                held.copy_(to_codes(held).float() / 8)
            trace.close()
        return max(trace.kept().values(), default=9.0)

    assert max(told("average"), told("decoded")) < 0.5
    assert min(told("at random"), told("master")) > 0.8


def test_numbers_go_along_with_codes() -> None:
    """Viewed as bytes, copied, joined, written into, saved for a backward: what comes back is what was cast."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(4)) * 100
    with Exact() as exact:
        codes = x.t().to(torch.float8_e4m3fn)
        joined = torch.cat([codes.view(torch.uint8)[:8].clone(), codes.view(torch.uint8)[8:]]).view(codes.dtype)
        buffer = torch.zeros(16, 8, dtype=torch.float8_e5m2)
        buffer[:, 2:4].copy_(x.t()[:, 2:4])
        back = joined.to(torch.float8_e5m2).float()
    assert torch.equal(back, x.t())
    with exact:
        assert torch.equal(buffer.float()[:, 2:4], x.t()[:, 2:4])
        assert not buffer.float()[:, :2].any()
    assert not torch.equal(buffer.float()[:, 2:4], x.t()[:, 2:4])  # the codes themselves are as they were
    assert len(exact.sites) == 2
    exact.forget()
    assert len(exact._cast) == 3  # codes, joined and buffer still live


def test_one_site_runs_exact_and_the_next_one_casts() -> None:
    def cast(x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn).float()

    x = torch.full((4,), 0.3)
    with Exact(()) as seen:
        one = cast(x)
        other = cast(x)
    assert torch.equal(one, other)
    first, second = seen.sites
    with Exact([second]):
        one, other = cast(x), x
    with Exact([first.partition(",")[0]]):  # the line alone: whoever called it
        both = cast(x), cast(x)
    assert not torch.equal(one, x)
    assert all(torch.equal(y, x) for y in (*both, other))


class Backwards(torch.autograd.Function):
    """A product with codes, whose backward may take the matrix in the wrong order."""

    turned = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        codes = (w * 64).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, codes)
        return x @ (codes.float() / 64).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, codes = ctx.saved_tensors
        w = codes.float() / 64
        w = w.t().reshape(w.shape) if Backwards.turned else w
        return gradients[0] @ w, gradients[0].t() @ x


class ByHand(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return Backwards.apply(input, self.weight) + self.bias  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("turned", [False, True])
def test_a_handwritten_backward_is_held_against_its_forward(turned: bool, tmp_path: Path) -> None:
    Backwards.turned = turned
    answer = diagnose(trained(tmp_path / "run", 1.0, linear=ByHand))
    assert answer.fp8 == ("unknown" if turned else "innocent"), answer.sentence  # nothing happened to the loss
    assert ("handwritten backward of `Backwards` is not the derivative" in answer.sentence) == turned


@pytest.mark.parametrize("scale", [1.0, 448e4])
def test_casts_of_what_is_saved_are_tried(scale: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = {p.data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Any:
        if x.data_ptr() in own or x.numel() < 4096:
            return x
        s = min(scale, 448.0 / float(x.abs().max()))
        return (x * s).to(torch.float8_e4m3fn), s

    def unpack(kept: Any) -> Tensor:
        return kept[0].float() / kept[1] if isinstance(kept, tuple) else kept  # type: ignore[no-any-return]

    with ottava.watch(model, tmp_path / "run"):
        for _ in range(12):
            x = 1e-5 * torch.randn(64, 64)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = nn.functional.mse_loss(model(x), 1e5 * x[:, :8])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    answer = diagnose(Run.open(tmp_path / "run"))
    assert answer.fp8 == ("guilty" if scale == 1.0 else "innocent"), answer.sentence
    if scale == 1.0:  # of a scale that another tensor left, too: without casts nobody packs
        assert answer.findings[0].title.startswith("FP8 casts hurt the gradient: the cast at test_handmade.py:")
        assert answer.findings[0].remedies[0]["trial"]["sites"][0].startswith("test_handmade.py:")


def test_a_scale_of_another_saved_tensor_is_the_casts_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer, scales = torch.optim.AdamW(model.parameters(), lr=1e-3), {}

    def pack(x: Tensor) -> Any:
        if isinstance(x, nn.Parameter) or x.shape != (128, 64):
            return x
        scales["last"] = 448 / x.detach().abs().max()
        return ((x * scales["last"]).to(torch.float8_e4m3fn),)

    with ottava.watch(model, tmp_path / "run"):
        for _ in range(12):
            x = torch.randn(128, 64)
            with torch.autograd.graph.saved_tensors_hooks(
                pack, lambda kept: kept[0].float() / scales["last"] if isinstance(kept, tuple) else kept
            ):
                loss = nn.functional.mse_loss(model(4 * x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert diagnose(Run.open(tmp_path / "run")).fp8 == "guilty"
