"""Refit: what an engine gets is what `export` writes, and rollouts equal training, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.serving.conftest import plain
from torch import Tensor, nn

import ottava
from ottava.nn import KVCache, RotaryEmbedding, TransformerLayer
from ottava.serving.export import ExportError, export
from ottava.serving.refit import checksum, missing, refit
from ottava.serving.rollout import Rollout, certify
from ottava.serving.sides import under
from ottava.weights.layouts import LAYOUTS
from ottava.weights.parameter import QuantizedWeight

RECIPES = {"fp8-block-ue8m0": "blockwise", "mxfp8": "mxfp8", "modelopt": "delayed", "bf16": "rowwise"}
RECIPES |= {
    "compressed-tensors-channel": "rowwise_fp32",
    "compressed-tensors-tensor": "tensorwise",
    "compressed-tensors-mxfp8": "mxfp8",
}
RECIPES |= {"compressed-tensors-mxfp4": "mxfp4"} | dict.fromkeys(
    ("compressed-tensors-nvfp4", "modelopt-nvfp4"), "nvfp4"
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refit_sends_what_export_writes(layout: str, pair: Callable[..., Any], tmp_path: Path) -> None:
    recipe = RECIPES.get(layout, "blockwise_fp32")
    joined = layout.endswith("nvfp4")  # q, k, v get one scale there, which this training has not
    if joined:
        source = under(plain("llama"), ottava.RECIPES[recipe])
        export(source, tmp_path / "out", layout=layout, recast=True)
        tensors = load_file(tmp_path / "out/model.safetensors")
    else:
        one = pair("llama", recipe, layout)
        source, tensors = one.source, one.tensors
    sent = list(refit(source, layout, recast=joined))
    assert {got.name for got in sent} == set(tensors)
    assert missing(tensors, sent) == []
    for got in sent:
        assert got.tensor.dtype == tensors[got.name].dtype
        assert checksum(got.tensor) == got.sha256


def test_what_does_not_arrive_is_named() -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).bfloat16()
    ottava.convert(model, "blockwise_fp32")

    def send(into: dict[str, Tensor] | None = None) -> list[Any]:
        return list(refit(model, "fp8-block", config={"model_type": "mine"}, into=into))

    engine = {one.name: torch.zeros_like(one.tensor) for one in send()}
    places = {name: tensor.data_ptr() for name, tensor in engine.items()}
    assert len(missing(engine, send())) == 4
    assert missing(engine, send(engine)) == []
    assert {name: tensor.data_ptr() for name, tensor in engine.items()} == places
    with torch.no_grad():
        model[1].weight.add_(1.0)
    assert missing(engine, send()) == ["1.weight", "1.weight_scale_inv"]
    with pytest.raises(ExportError, match=r"the engine has no 1\.weight_scale_inv"):
        send({name: tensor for name, tensor in engine.items() if name != "1.weight_scale_inv"})
    with pytest.raises(ExportError, match=r"still has old numbers in extra"):
        send({**engine, "extra": torch.ones(1)})
    with pytest.raises(ExportError, match=r"0\.weight is torch\.bfloat16 \(128, 128\) in the engine"):
        send({**engine, "0.weight": torch.zeros(128, 128).bfloat16()})
    with pytest.raises(ExportError, match="unknown layout"):
        refit(model, "fp9", config={"model_type": "mine"})  # at once


class Policy(nn.Module):
    """A small decoder: with a cache it sees one token, without one the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
        self.layer = TransformerLayer(128, 256, 4, kv_heads=2, activation="swiglu", dtype=torch.bfloat16)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """ids (B, T) -> log-probabilities of the next token (B, T, 64)."""
        size, rope = ids.shape[1], RotaryEmbedding(32)
        table = rope(torch.arange(size)) if cache is None else rope(cache.positions(size))
        x = self.layer(self.embed(ids), rotary=table, cache=None if cache is None else cache.of(0))
        if cache is not None:
            cache.advance(size)
        rows = x.float().reshape(-1, 128)  # one at a time: a GEMM of torch's sums by the number of rows
        return torch.stack([F.log_softmax(self.head.weight.float() @ row, -1) for row in rows]).view(*ids.shape, 64)


@pytest.mark.parametrize(("recipe", "layout"), [("blockwise_fp32", "fp8-block"), ("mxfp8", "mxfp8")])
def test_rollouts_are_training_bit_for_bit(recipe: str, layout: str, tmp_path: Path) -> None:
    """GRPO: generate with the codes that the engine was sent, recompute, take a step, refit; three times."""
    torch.manual_seed(0)
    trainer, engine = Policy().bfloat16(), Policy().bfloat16()
    ottava.convert(trainer, recipe)
    export(trainer, tmp_path / "start", layout=layout, config={"model_type": "mine"})
    ottava.load_fp8(engine, tmp_path / "start", recipe=recipe, weights="frozen")
    into: dict[str, Tensor] = {}
    for name, parameter in engine.named_parameters():
        own: Any = parameter
        coded = isinstance(parameter, QuantizedWeight)
        into |= {name: own.codes, f"{name}_scale_inv": own.scales} if coded else {name: own}
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    for _ in range(3):
        assert missing(into, refit(trainer, layout, into=into, config={"model_type": "mine"})) == []
        with torch.no_grad(), ottava.autocast(batch_invariant=True):
            cache = KVCache(layers=1, batch=4, length=12, heads=2, head_dim=32, dtype=torch.bfloat16)
            ids, told = torch.randint(0, 64, (4, 1)), list[Tensor]()
            for _ in range(11):
                p = engine(ids[:, -1:], cache)[:, -1]
                ids = torch.cat((ids, torch.multinomial(p.exp(), 1)), 1)
                told.append(p.gather(-1, ids[:, -1:]))
        with ottava.autocast(batch_invariant=True):
            own_p = trainer(ids[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0]
        again = own_p.detach()
        at = torch.arange(1, 12)
        dump = Rollout("plain", tuple(ids), (at,) * 4, torch.cat(told, 1).flatten(), again.flatten(), again.flatten())
        assert certify(dump).equal
        reward = (ids[:, 1:] % 2).float().mean(1)
        ((own_p - again).exp() * (reward.mean() - reward)[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        stale = missing(into, refit(trainer, layout, config={"model_type": "mine"}))
        assert any("layer" in name for name in stale)  # the step has changed codes, and nobody has sent them
