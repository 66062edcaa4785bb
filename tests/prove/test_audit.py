"""The audit against cards' results, against kernels that lie at a known rate, and inside running trainings."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ottava
from command import ended
from kernels.test_accumulate import MMA_SIM, simulated
from ottava.kernels import accumulate, reference
from ottava.numerics.accumulator import ACCUMULATORS
from ottava.numerics.formats import E4M3, E5M2, Format
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops import dispatch
from ottava.ops.gemm import plan_gemm, tap
from ottava.prove.audit import Audit, taken
from ottava.recipe import RECIPES
from ottava.record.reader import Run

CARDS = np.load(Path(__file__).parents[1] / "kernels" / "tensor_core_fp8.npz")
PROFILE_OF = {"H200": "hopper", "Ada": "ada", "B200": "blackwell_mma"}


def operands(m: int, n: int, k: int, spec: QuantizationSpec | None = None) -> tuple[QuantizedTensor, QuantizedTensor]:
    spec = spec or QuantizationSpec(E4M3)
    return ottava.quantize(torch.randn(m, k), spec), ottava.quantize(torch.randn(n, k), spec)


def coded(codes: Tensor, fmt: Format) -> QuantizedTensor:
    codes = codes.to(torch.uint8).view(fmt.storage_dtype)
    return QuantizedTensor(codes, torch.ones(1, 1), QuantizationSpec(fmt), torch.float32)


def lying(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]) -> None:
    """Plants a kernel in place of the native and the plain one: its result is that of the plain one, made wrong."""

    class Liar:
        NAME, NATIVE = "liar", False
        supports_accumulate = staticmethod(accumulate.supports_accumulate)

        @staticmethod
        def plan_accumulate(*settings: Any) -> Callable[..., Tensor]:
            run = accumulate.plan_accumulate(*settings)
            return lambda a, b, bias, c=None: wrong(run(a, b, bias, c))

    monkeypatch.setattr(dispatch, "ACCUMULATING_KERNELS", (Liar,))


def flipped(y: Tensor, chosen: Tensor, bit: int) -> Tensor:
    """One bit of the chosen elements is the other one."""
    kind = torch.int32 if y.element_size() == 4 else torch.int16
    return torch.where(chosen, y.view(kind) ^ (1 << bit), y.view(kind)).view(y.dtype)


@pytest.mark.parametrize("card", PROFILE_OF)
def test_no_alarm_on_results_of_real_cards(card: str) -> None:
    """Every witness, as if its card had computed a GEMM just now; and an alarm for each single flipped bit."""
    rule, looked = ACCUMULATORS[PROFILE_OF[card]], 0
    for fmt in (E4M3, E5M2):
        a, b, c, d = (torch.from_numpy(CARDS[f"{card}_{fmt.name}_{side}"].astype(np.int64)) for side in "abcd")
        for row in range(len(a)):
            sides = coded(a[row : row + 1], fmt), coded(b[row : row + 1], fmt)
            start, y = (x[row].to(torch.int32).view(torch.float32).reshape(1, 1) for x in (c, d))
            plan = plan_gemm(sides[0], sides[1], torch.float32, accumulator=rule)
            with Audit() as audit:
                tap().see(plan, *sides, None, start, y, None, "fprop")  # type: ignore[misc]
                assert audit.findings == [], (card, fmt, row)
                tap().see(plan, *sides, None, start, flipped(y, torch.ones(1, 1) > 0, row % 32), None, "fprop")  # type: ignore[misc]
            assert [finding.guess for finding in audit.findings] == [f"one bit differs: {row % 32}"] or not y.isfinite()
            looked += 1
    assert looked >= 500


def test_no_alarm_on_results_of_mma_sim() -> None:
    """The second witness: whole tiles of tcgen05.mma in all its kinds, with scales of blocks and a start."""
    for kind in sorted({name.rsplit("_", 1)[0] for name in MMA_SIM}):
        a, b, c, d = simulated(kind)
        y = torch.from_numpy(d.view(np.float32).copy())
        plan = plan_gemm(a, b, torch.float32, accumulator=ACCUMULATORS["tcgen05"])
        with Audit() as audit:
            for _ in range(4):
                tap().see(plan, a, b, None, c, y, None, "fprop")  # type: ignore[misc]
            assert audit.findings == [], kind
            tap().see(plan, a, b, None, c, flipped(y, torch.ones(y.shape) > 0, 3), None, "fprop")  # type: ignore[misc]
        assert [one.wrong for one in audit.findings] == [64], kind


def test_flips_are_found_at_the_computed_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 - (1 - p)**(64 n) for n GEMMs: 250 trials at each rate, within four standard deviations."""
    draw = torch.Generator().manual_seed(3)
    a, b = operands(24, 16, 32)
    for rate, gemms in ((0.0, 1), (0.002, 1), (0.01, 1), (0.01, 3), (0.05, 1)):
        lying(monkeypatch, lambda y, rate=rate: flipped(y, torch.rand(y.shape, generator=draw) < rate, 5))  # type: ignore[misc]
        trials = 250 if rate else 20
        found = 0
        for trial in range(trials):
            with Audit(seed=trial) as audit:
                for _ in range(gemms):
                    ottava.gemm(a, b, out_dtype=torch.float32, accumulator="hopper")
            assert (audit.gemms, audit.elements_seen) == (gemms, 64 * gemms)
            found += bool(audit.findings)
        expected = 1 - (1 - rate) ** (64 * gemms)
        assert abs(found - trials * expected) <= 4 * math.sqrt(trials * expected * (1 - expected)), (rate, found)


@pytest.mark.parametrize("recipe", [*RECIPES, "tensorwise/hopper", "blockwise/ada", "mxfp8/tcgen05", "nvfp4/tcgen05"])
def test_no_alarm_in_trainings(recipe: str) -> None:
    """Every recipe, biases, ragged widths; weights keep every bit; what is not judged is said."""

    def train(audited: bool) -> tuple[list[Tensor], Audit]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).bfloat16()
        ottava.convert(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        audit = Audit(model)
        for step in range(3):
            if audited and step == 0:
                audit.__enter__()
            model(torch.randn(32, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if audited:
            audit.__exit__(None, None, None)
        return [p.detach().clone() for p in model.parameters()], audit

    (plain, _), (watched, audit) = train(False), train(True)
    assert all(map(torch.equal, plain, watched))
    assert audit.findings == [], str(audit)
    assert audit.steps == 3
    assert audit.gemms + sum(audit.skipped.values()) == (15 if recipe != "bf16" else 0) or recipe == "bf16"
    if "/" in recipe:
        assert set(audit.judged) == {f"bits under {recipe.partition('/')[2]}"}


def test_a_lie_in_a_training_is_placed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One layer's results have bad elements: step, layer, GEMM and place are named, and the run has the event."""

    def bad(y: Tensor) -> Tensor:
        odd = torch.arange(y.numel()).reshape(y.shape) % 2 == 1
        return flipped(y, odd, 15) if tuple(y.shape) == (32, 96) else y

    lying(monkeypatch, bad)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48)).bfloat16()
    ottava.convert(model, "tensorwise/hopper")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = ottava.watch(model, tmp_path / "run", shadow=0)
    with watch, Audit(model, every=2, event=watch.writer.event) as audit:
        for _ in range(4):
            model(torch.randn(32, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {(one.step, one.layer, one.gemm, one.kernel) for one in audit.findings} >= {(1, "0", "fprop", "liar")}
    assert {one.step for one in audit.findings} == {1, 3}
    first = audit.findings[0]
    assert (first.shape, first.judged, first.guess) == ("32 x 96 x 64", "bits under hopper", "one bit differs: 15")
    assert (first.row * 96 + first.column) % 2 == 1
    assert first.got == -first.expected
    events = [event for event in Run.open(watch.folder).events if event["kind"] == "audit"]
    assert len(events) == len(audit.findings)
    assert (events[0]["step"], events[0]["layer"], events[0]["wrong"]) == (1, "0", first.wrong)
    assert json.loads(json.dumps(audit.to_dict()))["findings"][0]["guess"] == first.guess
    assert f"step 1, 0 fprop (32 x 96 x 64, liar): {first.wrong} of 64 elements wrong" in str(audit)


def test_another_accumulation_mode_is_named() -> None:
    """A card that claims promotions and runs one chain: bits differ, and are those of the other profile."""
    a, b = (ottava.quantize(torch.rand(16, 512), QuantizationSpec(E4M3)) for _ in "ab")
    y = ottava.gemm(a, b, out_dtype=torch.float32, accumulator="hopper")
    plan = plan_gemm(a, b, torch.float32)
    with Audit(accumulator="hopper_promoted") as audit:
        tap().see(plan, a, b, None, None, y, None, "fprop")  # type: ignore[misc]
    assert [(one.judged, one.guess) for one in audit.findings] == [
        ("bits under hopper_promoted", "these are the bits of hopper")
    ]


def test_the_bound_where_nothing_is_known() -> None:
    """FP32 sums in any order pass; errors beyond the bound do not; the bound of short sums holds every profile."""
    for spec in (QuantizationSpec(E4M3), QuantizationSpec(E4M3, BLOCK_1X128), QuantizationSpec(E5M2)):
        a, b = operands(40, 24, 640, spec)
        other = E4M3 if spec.format == E5M2 else spec.format
        b = ottava.quantize(torch.randn(24, 640), QuantizationSpec(other, spec.granularity))
        plan, bias = plan_gemm(a, b, torch.float32), torch.randn(24)
        for y in (reference.gemm(a, b, torch.float32, bias), ottava.gemm(a, b, out_dtype=torch.float32, bias=bias)):
            with Audit() as audit:
                tap().see(plan, a, b, bias, None, y, None, "fprop")  # type: ignore[misc]
                tap().see(plan, a, b, bias, None, y.bfloat16(), None, "fprop")  # type: ignore[misc]
                assert audit.findings == []
                tap().see(plan, a, b, bias, None, y + 2e-3 * y.abs().max(), None, "fprop")  # type: ignore[misc]
            assert [one.judged for one in audit.findings] == ["the bound of FP32 sums"]
            assert audit.findings[0].bound > 0
    from ottava.prove.audit import _Call

    for spec in (QuantizationSpec(E4M3), QuantizationSpec(E4M3, BLOCK_1X128)):
        a, b = (ottava.quantize(torch.rand(8, 640), spec) for _ in "ab")
        exact, terms, _ = (call := _Call(a, b, None, None, torch.zeros(8, 8))).exact()
        limit = call.shortened(ACCUMULATORS["ada"])
        assert bool((limit < terms).all())
        for name, profile in ACCUMULATORS.items():
            if profile.emulated and profile.dot == 1:
                y = ottava.gemm(a, b, out_dtype=torch.float32, accumulator=name)
                assert bool(((y.double() - exact).abs() <= limit + 1e-4 * terms).all()), name


def test_rows_of_blocks() -> None:
    """Rows from anywhere keep their numbers, and so do NVFP4's, whose scale of the tensor is found from the largest."""
    x = torch.randn(300, 256) * torch.logspace(-3, 3, 300)[:, None]
    rows = torch.tensor([299, 0, 130, 7])
    specs = {gemm.lhs for recipe in RECIPES.values() for gemm in (recipe.fprop, recipe.wgrad) if gemm.lhs is not None}
    for spec in [*specs, QuantizationSpec(E4M3, BLOCK_128X128)]:
        if spec.transform is None:
            whole = ottava.quantize(x, spec)
            some = taken(whole, rows).dequantize(torch.float32)[:4]
            assert torch.equal(some, whole.dequantize(torch.float32)[rows]), spec


def test_it_is_gone_afterwards_and_says_what_it_cannot() -> None:
    """No tap, no hook; BF16 and empty results are counted with a reason; wrong settings are refused."""
    a, b = operands(16, 16, 32)
    with Audit() as audit:
        ottava.gemm(a, b, out_dtype=torch.bfloat16, compute="bf16")
        ottava.gemm(torch.randn(4, 4), torch.randn(4, 4), out_dtype=torch.float32)
        with pytest.raises(ValueError, match="another audit"):
            Audit().__enter__()
    assert tap().see is None
    assert audit.gemms == 0
    assert dict(audit.skipped) == {"codes were decoded before the GEMM": 1, "operands in high precision": 1}
    assert "nothing was judged" in str(audit)
    for wrong in ({"every": 0}, {"elements": 0}, {"accumulator": "hoper"}):
        with pytest.raises(ValueError, match=r"audit|accumulator"):
            Audit(**wrong)


def test_compiled_code_is_audited() -> None:
    """A GEMM inside torch.compile is an operator that calls the same function."""
    torch._dynamo.reset()
    a, b = operands(16, 16, 32)

    def multiply(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return ottava.gemm(a, b, out_dtype=torch.float32, accumulator="hopper")

    compiled = torch.compile(multiply, backend="eager")
    with Audit() as audit:
        compiled(a, b)
    assert audit.gemms == 1


SCRIPT = """
import torch, ottava
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
ottava.convert(model, "tensorwise/hopper")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(32, 64, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


EXACT = """
import math, torch
def dot(a, b):
    return torch.tensor([[math.fsum((a * b)[0].tolist())]])
"""


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`ottava audit` of a script, clean and with a liar, with a run folder; `ottava order` of kernels."""
    monkeypatch.chdir(tmp_path)
    for owner, name, value in ((sys, "path", list(sys.path)), (sys, "argv", sys.argv)):
        monkeypatch.setattr(owner, name, value)  # a script gets its own
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    Path("train.py").write_text(SCRIPT)
    assert ended("audit", "--every", "2", "--json", "--", "train.py") == 0
    clean = json.loads(capsys.readouterr().out)
    assert (clean["steps"], clean["gemms"], clean["findings"]) == (4, 10, [])
    with monkeypatch.context() as patch:
        lying(patch, lambda y: flipped(y, torch.ones(y.shape) > 0, 0))
        assert ended("audit", "--every", "3", "--out", "run", "--", "train.py") == 1
    assert "bits under hopper" in capsys.readouterr().err
    assert {event["step"] for event in Run.open(Path("run")).events if event["kind"] == "audit"} == {1, 4}
    assert ended("audit") == 2
    assert ended("audit", "--", "no.py") == 2
    assert "audit: there is no file" in capsys.readouterr().err
    assert ended("order", "ada", "-k", "40", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fused"]["aligned"], found["confirmed"], len(found["additions"])) == (13, 1.0, 3)
    for kernel in ("torch.sum", "torch.mm", "linear", "gemm"):
        assert ended("order", kernel, "-k", "20") == 0
    Path("mine.py").write_text(EXACT)
    assert ended("order", "mine:dot", "--shape", "1x1") == 1
    for words in ("hoper", "mine:dot --shape 2x2", "torch.mm -k -3", "mine:no", "ada --dtype FP32", "linear --shape 3"):
        assert ended("order", *words.split()) == 2, words
    assert "hopper" in capsys.readouterr().err
