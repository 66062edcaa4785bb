"""A norm in front of a cast: the bits of the two layers that it replaces, in every way that a layer is run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.engine.layer import quantized_layers
from ottava.nn import ActivatedLinear, Linear, NormLinear
from ottava.recipe import Recipe

NORMS = ("layernorm", "rmsnorm")


def layers(recipe: Recipe | str, norm: str, dtype: torch.dtype = torch.bfloat16) -> tuple[NormLinear, nn.Sequential]:
    """(fused, the norm and a Linear with the same numbers)."""
    torch.manual_seed(0)
    fused = NormLinear(66, 48, norm=norm, recipe=recipe, dtype=dtype, zero_centered_gamma=norm == "rmsnorm")  # type: ignore[arg-type]
    with torch.no_grad():
        fused.norm.weight.normal_()
    linear = Linear(66, 48, recipe=recipe, dtype=dtype)
    linear.load_state_dict(fused.state_dict(), strict=False)
    return fused, nn.Sequential(copy.deepcopy(fused.norm), linear)


def bits(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, *, input_too: bool = True) -> dict[str, Tensor]:
    """Output and every gradient, parameters by their last two names."""
    leaf = x.detach().clone().requires_grad_(input_too)
    model.zero_grad()
    torch.manual_seed(3)
    y = run(leaf)
    y.float().square().sum().backward()
    found = {"y": y.detach()} | ({"dx": leaf.grad} if input_too else {})
    for name, parameter in model.named_parameters():
        kind = "norm" if "norm" in name or name.startswith("0.") else "linear"
        found[f"{kind} {name.rpartition('.')[2]}"] = parameter.grad.clone()
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype] == []
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_fused_and_unfused_are_the_same_bits(recipe: Recipe) -> None:
    """Both norms; 16 bits, fp32, torch.autocast over fp32; odd, flat, 3-D and empty inputs; input without gradient."""
    for norm in NORMS:
        for dtype, low in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
            fused, plain = layers(recipe, norm, dtype)
            for shape in ((2, 24, 66), (5, 66), (66,), (0, 66)):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                for input_too in (True, False):
                    with torch.autocast("cpu", torch.bfloat16, enabled=low):
                        got = bits(fused, fused, x, input_too=input_too)
                        want = bits(plain, plain, x, input_too=input_too)
                    assert_same(got, want)
                with torch.no_grad():
                    assert torch.equal(fused(x), plain(x))
    assert ottava.receipt(fused).fp8_fraction == ottava.receipt(plain[1]).fp8_fraction


@pytest.mark.slow
def test_compiled_recomputed_copied_and_under_another_recipe() -> None:
    """One graph; checkpoints of both kinds; deepcopy and pickle; autocast; DDP: always the bits of the two layers."""
    # traced, a LayerNorm of 16 bits is one of fp32, where sums have another order: see test_norms
    compiled = (("bf16", "rmsnorm"), ("tensorwise", "rmsnorm"), ("delayed", "rmsnorm"))
    for name in ("bf16", "tensorwise", "rowwise_with_gw_hp", "delayed"):
        for norm in NORMS:
            fused, plain = layers(name, norm)
            x = torch.randn(6, 66, generator=torch.Generator().manual_seed(1)).bfloat16()
            want = bits(plain, plain, x)
            assert_same(bits(fused, fused, x), want)
            torch._dynamo.reset()
            ways: dict[str, tuple[nn.Module, Callable[[Tensor], Any]]] = {
                "checkpoint": (fused, lambda x, m=fused: checkpoint(m, x, use_reentrant=False)),
                "reentrant": (fused, lambda x, m=fused: checkpoint(m, x, use_reentrant=True)),
            }
            if (name, norm) in compiled:
                ways["compiled"] = fused, torch.compile(fused, fullgraph=True, backend="aot_eager")
            for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
                ways[f"copy {len(ways)}"] = other, other
            for model, run in ways.values():
                assert_same(bits(model, run, x), want)
            with ottava.autocast("mxfp8"):
                assert_same(bits(fused, fused, x), bits(plain, plain, x))
            with ottava.autocast(enabled=False):
                assert_same(bits(fused, fused, x), bits(plain, plain, x))


def test_under_ddp(tmp_path: Path) -> None:
    """One process is enough for its hooks on parameters: those of the norm arrive through the linear's backward."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fused, plain = layers("delayed", "rmsnorm")
        x = torch.randn(6, 66).bfloat16()
        want = bits(plain, plain, x)
        got = bits(wrapped := nn.parallel.DistributedDataParallel(fused), wrapped, x)
        assert_same(got, want)
    finally:
        torch.distributed.destroy_process_group()


def test_calibration_conversion_state_and_plan_see_it_like_a_linear() -> None:
    """The input's history is that of normed rows; convert changes its recipe; state dicts load both ways."""
    from ottava.nn.plan import plan_model

    fused, plain = layers("delayed", "layernorm")
    batches = [torch.randn(8, 66).bfloat16() for _ in range(2)]
    fused_report, plain_report = (ottava.calibrate(model, batches) for model in (fused, plain))
    assert [row.amax for row in fused_report.rows] == [row.amax for row in plain_report.rows]
    other = nn.Sequential(NormLinear(66, 48, dtype=torch.bfloat16), ActivatedLinear(48, 64, dtype=torch.bfloat16))
    report = ottava.convert(other, "delayed")
    assert report.converted == ("0", "1")
    assert [layer.recipe.name for layer in quantized_layers(other)] == ["delayed"] * 2
    assert isinstance(other[0], NormLinear)
    other[0].load_state_dict(fused.state_dict())
    x = torch.randn(4, 66).bfloat16()
    assert torch.equal(other[0](x), fused(x))
    assert ottava.convert(other, "mxfp8", filter=lambda name, layer: name != "0").skipped["0"].endswith("'delayed'")
    assert [layer.shape for layer in plan_model(other, "tensorwise", tokens=8).layers] == [(8, 66, 48), (8, 48, 64)]
    assert not ottava.convert(other, "bf16").outside


def test_receipts_count_what_the_graph_keeps() -> None:
    """x, statistics and codes; no normed rows. What torch would keep: x and the rows."""
    for name in ("tensorwise", "mxfp8"):
        for norm, numbers in (("layernorm", 2), ("rmsnorm", 1)):
            layer = NormLinear(128, 64, norm=norm, bias=False, recipe=name, dtype=torch.bfloat16)  # type: ignore[arg-type]
            kept: dict[int, int] = {}
            x = torch.randn(32, 128).bfloat16().requires_grad_()

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = layer(x)
            for parameter in layer.parameters():
                kept.pop(parameter.untyped_storage().data_ptr(), None)
            y.sum().backward()
            row = ottava.receipt(layer).rows[0]
            assert row.saved_bytes == sum(kept.values())
            assert row.high_precision_bytes == 2 * x.nbytes
            codes = ottava.quantize(x.detach(), layer.resolved.fprop.lhs)
            assert row.saved_bytes >= x.nbytes + codes.data.nbytes + layer.weight.numel() + 4 * 32 * numbers
            assert row.saved_bytes < x.nbytes + 1.2 * (codes.data.nbytes + layer.weight.numel()) + 4 * 32 * numbers


def test_normed_rows_can_be_returned_too() -> None:
    """As the norm alone makes them; gradients of both arrive."""
    torch.manual_seed(0)
    both = NormLinear(64, 48, norm="rmsnorm", return_norm_output=True, dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    y, rows = both(x)
    assert torch.equal(rows, both.norm(x))
    alone = NormLinear(64, 48, norm="rmsnorm", dtype=torch.bfloat16)
    alone.load_state_dict(both.state_dict())
    assert torch.equal(y, alone(x))
    (y.sum() + rows.sum()).backward()
    assert both.norm.weight.grad is not None


def test_what_is_wrong_is_named() -> None:
    """Widths, norms, second derivatives; a watch in high precision does not call the norm's input that of the GEMM."""
    layer = NormLinear(64, 48)
    with pytest.raises(ValueError, match=r"needs floats \(..., 64\)"):
        layer(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="made rows of 32 features"):
        ActivatedLinear(64, 48, activation="swiglu")(torch.zeros(2, 64))
    with pytest.raises(ValueError, match="rmsnorm"):
        NormLinear(64, 48, norm="rms")  # type: ignore[arg-type]
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert "recipe=tensorwise" in repr(layer)


def test_a_watch_does_not_take_the_norms_input_for_the_gemms(tmp_path: Path) -> None:
    """The largest input is that of the normed rows: from the door, or made once more where nothing is cast."""
    x = torch.randn(4, 64).bfloat16()
    largest = {}
    for name in ("bf16", "tensorwise"):
        model = nn.Sequential(NormLinear(64, 48, recipe=name, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ottava.watch(model, tmp_path / name) as watch:
            model(x).float().sum().backward()
            optimizer.step()
            watch.flush()
            run = ottava.debug.Run.open(watch.folder)
        tables = {slot.tensor: table for slot, table in run.table().where(direction="row").groups()}
        largest[name] = tables["input"].metric("amax")[0]
    normed = nn.functional.layer_norm(x.float(), (64,)).bfloat16()
    assert largest["bf16"] == largest["tensorwise"] == normed.abs().max()
    assert largest["bf16"] != x.abs().max()
