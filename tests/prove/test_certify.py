"""`ottava certify`: planted faults are found and named, healthy kernels raise no alarm, nothing ends in a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.numerics import rounding
from ottava.numerics.formats import FORMATS, get_format
from ottava.prove import adapter, codes, hypotheses, judge, matrix
from ottava.prove.adapters import KINDS, KernelAdapter
from ottava.prove.certificate import KernelCertificate, certify
from ottava.prove.explain import Failure, Part, explain, part_of
from ottava.prove.page import page
from ottava.prove.ready import load, ready
from planted_faults import planted

CASES = 64


def run(kind: str, function: Any, count: int = CASES, **what: Any) -> KernelCertificate:
    return certify(KernelAdapter("here", function, kind, MappingProxyType(what)), count=count)


@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_wrong_and_named(kind: str) -> None:
    """51 faults: each is found, and the hypothesis that it was planted as explains it."""
    named = {}
    for its_kind, what, name, function in planted():
        if its_kind == kind:
            found = run(kind, function, **what)
            assert found.verdict == "wrong", (name, str(found))
            assert found.first is not None
            assert found.explained is not None
            named[name] = found.explained["hypothesis"]
    assert named == {name: name for name in named}
    assert named


@pytest.mark.parametrize("part", ("torch.", "ml_dtypes.", "gfloat.", "torchao.", "ottava."))
def test_healthy_kernels_raise_no_alarm(part: str) -> None:
    """Every ready adapter whose package is there; Triton's casts are interpreted, which takes a second a case."""
    if part == "ottava." and not torch.cuda.is_available():
        pytest.importorskip("triton", reason="Triton has no build for this machine")
        from kernels.triton import interpreter

        interpreter.install()
    tried = 0
    for name in ready():
        chosen = part != "ottava." or any(word in name for word in ("tensorwise", "cast.nvfp4", "linear.nvfp4", "fp8"))
        if name.startswith(part) and chosen and "triton.cast.tensorwise.g" not in name:
            found = certify(load(name), count=4 if ".triton." in name else 12 if part == "ottava." else 30)
            assert found.good, str(found)
            tried += found.verdict != "not tried"
    if not tried:
        pytest.skip(f"no kernel of {part} runs here")


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.bits <= 8], ids=str)
def test_the_two_references_agree_on_all_bf16_numbers(fmt: Any) -> None:
    """The table of codes, in float64, against `rounding.encode` and `rounding.decode`."""
    found = run("encode", lambda x: rounding.encode(x, fmt), 3, format=fmt.name)
    assert found.verdict in ("exact", "within the proved bound"), str(found)
    assert run("decode", lambda codes: rounding.decode(codes, fmt), 3, format=fmt.name).verdict == "exact"


@pytest.mark.parametrize(
    "recipe", ("tensorwise", "rowwise", "blockwise", "blockwise_fp32", "mxfp8", "mxfp8_floor", "mxfp4")
)
def test_the_two_references_agree_on_casts(recipe: str) -> None:
    """Float64 and the definition of each scale, against `kernels.reference`: the same bits."""
    for operand in ("x", "weight", "grad"):
        spec = judge.cast_spec({"recipe": recipe, "operand": operand})
        assert spec is not None

        def cast(x: Tensor, data: Tensor, scale_inv: Tensor, spec: Any = spec) -> tuple[Tensor, Tensor]:
            made = reference.quantize(x, spec)
            return made.data, judge.stored(made.scale_inv, spec)

        assert run("cast", cast, recipe=recipe, operand=operand).verdict == "exact"


def test_a_bound_is_tight_where_sums_are_exact() -> None:
    """Whole numbers: one answer. Others: K + 4 units of the magnitudes."""
    whole = torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.float64)
    allowed = judge.product(whole, whole, torch.float32)
    assert allowed.low.item() == allowed.high.item() == 14.0
    third = whole / 3
    allowed = judge.product(third, third, torch.float32)
    assert 0 < (allowed.high - allowed.low).item() <= 2 * (3 + 4 + 2) * 2.0**-24 * 14 / 9
    infinite = judge.product(
        torch.tensor([[torch.inf, 1.0]]).double(), torch.tensor([[0.0, 1.0]]).double(), torch.float32
    )
    assert infinite.low.isnan().all()


def test_operands_lie_among_nan() -> None:
    """A kernel that reads past a row, a slice or the end finds NaN; the numbers are the same."""
    x = torch.randn(3, 5)
    for layout in matrix.LAYOUTS:
        view = matrix.placed(x, layout)
        assert torch.equal(view, x[:1].expand(3, 5) if layout == "broadcast" else x)
        storage = torch.empty(0).set_(view.untyped_storage())
        assert storage[-matrix.GUARD :].isnan().all()


def test_what_cannot_be_tried_says_why() -> None:
    """No verdict without a reference; refusals of a kernel are not its faults."""

    def refuses(*tensors: Tensor) -> None:
        raise NotImplementedError("only on Thursdays")

    for what, kind in (
        ({"recipe": "nvfp4_rht"}, "gemm"),
        ({"rule": "sgd"}, "optimizer"),
        ({"recipe": "delayed"}, "cast"),
    ):
        found = run(kind, refuses, **what)
        assert found.verdict == "not tried"
        assert found.reason
    assert run("gemm", refuses, 5).reason == "only on Thursdays"


def test_an_adapter_that_raises_is_a_verdict() -> None:
    """Nothing ends in a traceback."""

    def raises(x: Tensor) -> Tensor:
        raise KeyError("boom")

    found = run("encode", raises, 5, format="e4m3")
    assert found.verdict == "raises"
    assert "boom" in str(found)
    assert run("encode", lambda x: (x, x), 5, format="e4m3").verdict == "wrong"
    assert run("encode", lambda x: None, 5, format="e4m3").verdict == "wrong"


def test_a_fault_without_a_name_is_placed() -> None:
    """Where the wrong numbers lie, if no hypothesis gives them."""
    wrong = torch.zeros(8, 8, dtype=torch.bool)
    wrong[5:] = True
    got = torch.randn(8, 8).double()
    got[5:] = torch.nan
    case = matrix.KernelCase("here", {"x": torch.randn(8, 8)})
    failure = Failure(case, {"codes": got}, {"codes": wrong})
    said = explain("encode", {"format": "e4m3"}, [failure], [], lambda case, **change: {"codes": wrong})
    assert said is not None
    assert said["hypothesis"] == "tail not written"
    assert explain("encode", {}, [], [], lambda case, **change: {}) is None


def test_a_scale_without_dimensions_has_no_rows_to_name() -> None:
    """Nothing tells two cases apart: no place, and no traceback."""
    yes, no, case = torch.tensor(True), torch.tensor(False), matrix.KernelCase("", {"x": torch.ones(4, 4)})
    parts = [Part(case, {}, "scale_inv", *masks) for masks in ((yes, no), (no, yes))]
    assert part_of("cast", parts) == ""


def test_no_layer_is_without_features() -> None:
    """`reshape(-1, 0)` raises: a case without columns would be an alarm on a right layer, of no use to anybody."""
    made = matrix.cases("linear", {"recipe": "tensorwise"}, 300, matrix.Draws(0, torch.device("cpu")))
    sizes = [case.inputs["weight"].shape for case in made]
    assert all(min(size) > 0 for size in sizes)
    assert len(set(sizes)) > 30


def test_a_bias_of_stochastic_rounding_is_seen() -> None:
    """Each code is a neighbour, and yet the mean is wrong; fair coins raise no alarm."""

    def drawn(x: Tensor, fair: bool) -> Tensor:
        fmt = get_format("e4m3")
        low, high = (codes.on_grid(x, fmt, way) for way in ("down", "up"))
        chance = torch.where(high > low, (x.double() - low) / torch.where(high > low, high - low, 1.0), 0.0)
        up = torch.rand(x.shape) < (chance if fair else chance / 2)
        return rounding.encode(torch.where(x.isfinite(), torch.where(up, high, low), x.double()).float(), fmt)

    for fair in (True, False):
        found = run("encode", lambda x, fair=fair: drawn(x, fair), 30, format="e4m3", rounding="stochastic")
        assert found.good is fair, str(found)


def test_an_infinity_must_not_pass_for_the_largest_of_its_block() -> None:
    """Under the scale of the other numbers it is hidden."""
    spec = judge.cast_spec({"recipe": "blockwise"})
    assert spec is not None

    def cast(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
        shown = torch.where(x.isinf(), 0.0, x)
        made = reference.quantize(shown, spec)
        top = judge.spread(judge.block_amax(shown, spec.granularity), spec, (x.shape[0], x.shape[1]))
        hidden = torch.where(x.isinf(), torch.copysign(top.to(x.dtype), x), x)
        return reference.quantize(hidden, spec).data, judge.stored(made.scale_inv, spec)

    found = run("cast", cast, recipe="blockwise")
    assert found.verdict == "wrong"
    assert found.explained is not None
    assert found.explained["hypothesis"] == "NaN hidden"


def test_a_hypothesis_that_the_right_numbers_meet_explains_nothing() -> None:
    """amax of 0 leaves every code free: a cast of zeros is not an amax without its tail."""

    def zeros(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
        spec = judge.cast_spec({"recipe": "mxfp8"})
        assert spec is not None
        made = reference.quantize(x, spec)
        return torch.zeros_like(made.data.view(torch.uint8)).view(made.data.dtype), judge.stored(made.scale_inv, spec)

    found = run("cast", zeros, recipe="mxfp8")
    assert found.explained is not None
    assert "amax" not in found.explained["hypothesis"]


def test_every_kind_has_hypotheses_and_no_other() -> None:
    assert {kind for one in hypotheses.all_hypotheses() for kind in one.kinds} == set(KINDS)


def test_a_kernel_that_keeps_something_between_calls_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Moments that are kept by shape, not in the given state: the first call is right, and no other."""
    text = (
        "import torch\nfrom ottava.prove import adapter\nfrom ottava.prove.expected import adamw\nKEPT = {}\n"
        "@adapter('optimizer')\ndef step(p, g, state, t):\n"
        "    m, v = KEPT.get(p.shape, [torch.zeros_like(p, dtype=torch.float64)] * 2)\n"
        "    after, m, v, _ = adamw(p.double(), g.double(), m, v, t, {})\n"
        "    KEPT[p.shape] = m, v\n    p.copy_(after)\n"
    )
    (tmp_path / "mine.py").write_text(text, "utf-8")
    found = certify(load(f"{tmp_path / 'mine.py'}:step"), count=24)
    assert found.explained is not None
    assert found.explained["hypothesis"] == "kept between calls"


def test_loading_refuses_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name, a function without a kind, a file that does not import."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from ottava.prove import adapter\n@adapter('decode', format='e4m3')\ndef f(c): return c.float()\n"
        "def g(c): return c\n"
    )
    Path("broken.py").write_text("1 / 0\n")
    assert load("mine.py:f", format="e5m2").what == {"format": "e5m2"}
    for name, error in (
        ("nothing", ValueError),
        ("mine.py:h", ValueError),
        ("mine.py:g", ValueError),
        ("gone.py:f", FileNotFoundError),
    ):
        with pytest.raises(error, match="certify"):
            load(name)
    with pytest.raises(ImportError, match="does not import"):
        load("broken.py:f")
    with pytest.raises(ValueError, match="unknown kind 'casts'"):
        adapter("casts")


def test_certificates_are_text_data_and_a_page() -> None:
    """The same facts three times."""
    found = run("encode", lambda x: x.to(get_format("e5m2").storage_dtype), 5, format="e5m2")
    assert found.verdict == "wrong"
    assert json.loads(json.dumps(found.to_dict()))["explained"]["hypothesis"] == "overflow is infinity"
    html = page([found], {"cases": 5, "seed": 0, "device": "cpu"})
    assert "1 of 1 adapters are wrong" in html
    assert "overflow is infinity" in html
