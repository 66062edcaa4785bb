"""Casts of a shard with the scales of the whole: what the group would answer is computed here from the other shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ottava
from ottava.numerics.scaling import PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.agreed import AgreedCast
from ottava.ops.quantize import quantize

GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32", "1x16", "*x16")
GROUP: Any = None


def answer(monkeypatch: pytest.MonkeyPatch, whole: Tensor) -> list[int]:
    """all_reduce(MAX) as all ranks together would have it: amaxes of the whole, whatever the shape asked for."""
    asked: list[int] = []

    def all_reduce(own: Tensor, op: Any, group: Any) -> None:
        asked.append(own.numel())
        assert op == dist.ReduceOp.MAX
        magnitude = whole.abs().float().nan_to_num(torch.inf, torch.inf)
        for x in (magnitude, magnitude.t()):
            for blocks in (x.amax().view(1, 1), x.amax(1, keepdim=True), x.amax(0, keepdim=True), _of_sixteen(x)):
                if blocks.shape == own.shape:
                    own.copy_(blocks)
                    return
        raise AssertionError(f"nobody has amaxes {tuple(own.shape)}")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return asked


def _of_sixteen(x: Tensor) -> Tensor:
    """Of each 16 columns."""
    return x.view(x.shape[0], -1, 16).amax((0, 2)).view(1, -1) if x.shape[1] % 16 == 0 else x[:0]


def test_shards_are_cast_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every granularity, scale format and dtype, x and x.T, split by rows and by columns, extremes included."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.randn(256, 512).to(dtype) * 3
        whole[0, 0], whole[-1, -1], whole[5] = 1e4, -3e-6, 0.0
        answer(monkeypatch, whole)
        for text in GRANULARITIES:
            for scale_format in ("fp32", "pow2", "e8m0", "e8m0_floor"):
                spec = QuantizationSpec(ottava.E4M3, Granularity.parse(text), scale_format=scale_format)
                for dim in (0, 1):
                    shard = whole.chunk(2, dim)[1].contiguous()
                    wanted, wanted_t = quantize(whole, spec), quantize(whole.t(), spec)
                    row, col, _ = AgreedCast(GROUP, dim)(shard, spec, spec)
                    for got, x_q, along in ((row, wanted, dim), (col, wanted_t, 1 - dim)):
                        said = dtype, text, scale_format, dim
                        assert got is not None
                        codes = x_q.data.view(torch.uint8).chunk(2, along)[1]
                        assert torch.equal(got.data.view(torch.uint8), codes), said
                        shared = x_q.scale_inv.shape[along] == 1
                        scales = x_q.scale_inv if shared else x_q.scale_inv.chunk(2, along)[1]
                        assert torch.equal(got.scale_inv, scales), said


def test_a_block_on_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, torch.ones(64, 64))
    AgreedCast(GROUP, 0)(torch.ones(32, 64), QuantizationSpec(ottava.E4M3, Granularity.parse("row")), None)
    AgreedCast(GROUP, 0)(torch.ones(32, 64), QuantizationSpec(ottava.E4M3, Granularity.parse("1x32")), None)
    assert asked == []
    AgreedCast(GROUP, 1)(torch.ones(64, 32), QuantizationSpec(ottava.E4M3, Granularity.parse("row")), None)
    assert asked == [64]


def test_predicted_scales_ask_only_without_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history is alike on all ranks. The guard looks at the amax of all ranks, and a NaN counts as no scale."""
    whole = torch.tensor([[1.0, 2.0], [4.0, 1000.0]])
    asked = answer(monkeypatch, whole)
    spec = QuantizationSpec(ottava.E4M3, PER_TENSOR, scaling="delayed")
    shard = whole[:1]
    first = AgreedCast(GROUP, 0)(shard, spec, None, scale=torch.zeros(())).row
    assert first is not None
    assert torch.equal(first.scale_inv, quantize(whole, replace(spec, scaling="current")).scale_inv)
    assert asked == [1]
    later = AgreedCast(GROUP, 0)(shard, spec, None, scale=torch.tensor(0.5)).row
    assert later is not None
    assert (later.scale_inv.item(), asked) == (2.0, [1])
    guarded = AgreedCast(GROUP, 0)(shard, replace(spec, scaling="guarded"), None, scale=torch.tensor(64.0)).row
    assert guarded is not None
    assert torch.equal(guarded.scale_inv, first.scale_inv)  # this rank's 2 would fit, 1000 on another one does not
    assert guarded.spec.scaling == "guarded"
    answer(monkeypatch, torch.tensor([[1.0, torch.nan]]))
    broken = AgreedCast(GROUP, 1)(torch.tensor([[1.0]]), QuantizationSpec(ottava.E4M3), None).row
    assert broken is not None
    assert broken.scale_inv.item() == 1.0


def test_transforms_and_rules_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation inside of a rank asks nobody; NVFP4's rules ask for the tensor's amax, factors for columns'."""
    torch.manual_seed(0)
    whole = torch.randn(64, 128).bfloat16()
    whole[0, 0] = 1e4
    for dim, text in ((0, "hadamard"), (1, "hadamard"), (0, "smooth"), (1, "smooth")):
        spec = QuantizationSpec(ottava.E4M3, Granularity.parse("1x16"), transform=text)  # type: ignore[arg-type]
        asked, wanted = answer(monkeypatch, whole), quantize(whole, spec)
        got = AgreedCast(GROUP, dim)(whole.chunk(2, dim)[0].contiguous(), spec, None).row
        assert got is not None
        assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8).chunk(2, dim)[0])
        assert torch.equal(got.scale_inv, wanted.scale_inv.chunk(2, dim)[0])
        assert asked == ([128] if (dim, text) == (0, "smooth") else [])
    for rule in ("unclipped", "four_over_six"):
        for dim in (0, 1):
            spec = QuantizationSpec(ottava.E2M1, Granularity.parse("1x16"), "e4m3", block_scale=rule)
            asked, wanted = answer(monkeypatch, whole), quantize(whole, spec)
            got = AgreedCast(GROUP, dim)(whole.chunk(2, dim)[1].contiguous(), spec, None).row
            assert got is not None
            assert torch.equal(got.data, wanted.data.chunk(2, dim)[1]), (rule, dim)
            assert torch.equal(got.scale_inv, wanted.scale_inv.chunk(2, dim)[1])
            assert asked == [1]
