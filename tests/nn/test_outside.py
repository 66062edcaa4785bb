"""What is multiplied outside nn.Linear is counted and named; what is added, looked up or folded in is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ottava
from ottava.nn.outside import weights_outside


class Other(nn.Module):
    """A linear layer with a weight of (in, out), under a name that nobody knows."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 8), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


class Experts(nn.Module):
    """A stack of matrices, with biases in a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 96))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 96))


def names(model: nn.Module) -> list[str]:
    return [weight.name for weight in weights_outside(model)]


class OwnAttention(nn.MultiheadAttention):
    """A subclass, of whose forward nobody knows anything."""


def test_a_transformer_layer_of_unknown_attention_is_two_thirds_fp8_not_nine_tenths() -> None:
    """linear1 and linear2 hold 8 of 12 d^2; in_proj holds 3 and out_proj, a class of its own, 1."""
    layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
    layer.self_attn = OwnAttention(64, 2, batch_first=True)
    model = nn.Sequential(layer).bfloat16()
    report = ottava.convert(model, "tensorwise")
    reason = "multiplied by OwnAttention itself, a class that convert does not know"
    assert dict(report.outside) == {"0.self_attn.in_proj_weight": reason}
    assert f"multiplied outside layers, in high precision:\n  0.self_attn.in_proj_weight: {reason}" in str(report)
    assert report.to_dict()["outside"] == dict(report.outside)
    model(torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert ottava.receipt(model).fp8_fraction == pytest.approx(2 / 3, abs=1e-15)
    with pytest.raises(
        AssertionError, match=r"66\.7% .*at least 70\.0%[\s\S]*0\.self_attn\.in_proj_weight\.all: multiplied"
    ):
        ottava.assert_fp8(model, 0.7)


def test_layers_of_an_unknown_class_are_seen() -> None:
    """A model without any layer that convert takes: its receipt is not empty, and convert's warning says why."""
    model = nn.ModuleDict({"h": nn.ModuleList(nn.ModuleDict({"c_attn": Other(96, 64)}) for _ in range(2))})
    with pytest.warns(UserWarning, match=r"nothing will run in FP8[\s\S]*h\.0\.c_attn\.weight: multiplied by Other"):
        ottava.convert(model)
    (row, _), text = ottava.receipt(model).rows, str(ottava.receipt(model))
    assert (row.layer, row.gemm, row.weight, row.fp8) == ("h.0.c_attn.weight", "all", 3 * 64 * 96, False)
    assert "h.0-1.c_attn.weight" in text


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Experts(), ["gate_up_proj"]),
        (lambda: nn.MultiheadAttention(64, 2, kdim=32, vdim=32), [f"{n}_proj_weight" for n in "qkv"]),
        (lambda: nn.LSTM(8, 16), ["weight_ih_l0", "weight_hh_l0"]),
        (lambda: nn.Bilinear(4, 5, 6), ["weight"]),
        (lambda: nn.ParameterDict({"up": nn.Parameter(torch.ones(8, 4))}), ["up"]),
    ],
)
def test_weights_that_are_multiplied(make: object, found: list[str]) -> None:
    assert names(make()) == found  # type: ignore[operator]


def test_what_is_no_weight_of_a_gemm() -> None:
    """Layers, lookups, norms, convolutions; what is added; a tied weight; one that a parametrization computes."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.wte = nn.Linear(64, 48, bias=False), nn.Embedding(48, 64)
            self.tied = self.wte.weight
            self.pos_embed, self.cls_token = nn.Parameter(torch.ones(1, 9, 64)), nn.Parameter(torch.ones(1, 1, 64))
            self.relative_position_bias_table = nn.Parameter(torch.ones(9, 4))
            self.A_log, self.codes = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4, 4).char(), False)
            self.parts = nn.ModuleList(
                [
                    nn.LayerNorm((4, 8)),
                    nn.Conv1d(4, 4, 3),
                    nn.Conv2d(4, 4, 3),
                    nn.BatchNorm1d(4),
                    nn.LazyLinear(4),
                    parametrizations.weight_norm(nn.Linear(64, 64)),
                    nn.ParameterDict({"lora_embedding_A": nn.Parameter(torch.ones(8, 4))}),
                ]
            )

    assert names(Odd()) == []
    assert names(nn.Sequential()) == []
