"""The prediction of many processes by hand; tests/distributed/train_scenarios.py counts the bytes of real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ottava
from ottava.plan.fleet import Fabric, Fleet, Mesh, predict

TOKENS, WIDTH, WIDE, BLOCKS = 1024, 256, 512, 4


def planned(mesh: Mesh, recipe: str = "tensorwise") -> Fleet:
    blocks = [nn.ModuleDict({"up": _layer(WIDTH, WIDE), "down": _layer(WIDE, WIDTH)}) for _ in range(BLOCKS)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
    ottava.convert(model, recipe)
    whole = ottava.memory(model, ottava.optim.AdamW(model.parameters(), master="fp32"), tokens=TOKENS)
    return predict(model, whole, mesh, tokens=TOKENS)


def _layer(k: int, n: int) -> nn.Linear:
    return nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16)


def test_bytes_are_those_of_the_formulas() -> None:
    weights = BLOCKS * 2 * WIDTH * WIDE
    assert planned(Mesh(dp=4)).wires["dp"].summed == 2 * weights
    shard = planned(Mesh(shard=4)).wires["shard"]
    assert (shard.gathered, shard.summed) == (2 * weights / 4, 2 * weights)  # codes, twice; gradients in BF16
    assert planned(Mesh(shard=4), "bf16").wires["shard"].gathered == 2 * shard.gathered
    tp = planned(Mesh(tp=2)).wires["tp"]
    assert tp.gathered == BLOCKS * 2 * 2 * (TOKENS // 2) * WIDTH  # x of up and dy of down, each for two GEMMs
    assert tp.summed == BLOCKS * 2 * 2 * TOKENS * WIDTH  # dx of up and y of down, 2 bytes
    pp = planned(Mesh(pp=4, microbatches=4)).wires["pp"]
    assert pp.sent == 2 * TOKENS * WIDTH * 2  # the stream forward and its gradient back
    assert planned(Mesh()).wires["dp"].total == 0


def test_states_and_work_are_shared() -> None:
    alone = planned(Mesh())
    expected = BLOCKS * 2 * WIDTH * WIDE * (2 + 2 + 4 + 8)
    assert expected <= alone.state <= 1.001 * expected  # and a step count for each parameter
    for mesh in (Mesh(shard=4), Mesh(tp=4), Mesh(pp=4, microbatches=4), Mesh(shard=2, tp=2)):
        assert planned(mesh).state == alone.state / 4, mesh
    assert planned(Mesh(dp=4)).state == alone.state
    bubble = planned(Mesh(pp=2, microbatches=2))
    assert bubble.step >= 1.5 * bubble.compute


def test_a_node_is_faster_than_the_network() -> None:
    near, far = planned(Mesh(shard=8)).wires["shard"], planned(Mesh(shard=16)).wires["shard"]
    assert near.seconds < far.seconds * Fabric().outside / Fabric().inside * 1.1


def test_meshes_are_read() -> None:
    assert Mesh.parse("dp=2, tp=4, shard=1,pp=3").world == 24
    for text in ("dp", "dp=0", "xp=2", "dp=a", ""):
        with pytest.raises(ValueError, match="--mesh has"):
            Mesh.parse(text)
    assert "predicted, not measured" in str(planned(Mesh(dp=2)))
