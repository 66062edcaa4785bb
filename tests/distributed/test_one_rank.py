"""FSDP2 on one rank, where torch hands over the first gathered tensor alone: the bits of the model without it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

import ottava
from ottava.distributed import fully_shard, verify
from ottava.kernels.native import build as native_build
from test_calls import calls


@pytest.mark.filterwarnings("ignore:.*")
def test_one_rank_has_the_bits_of_a_plain_model(mesh: DeviceMesh) -> None:
    """Every kind of scale, cast before the gather or stored, over two steps: the second fills memory that exists."""
    x = torch.randn(16, 256).bfloat16()
    for recipe in ("tensorwise", "blockwise", "rowwise", "mxfp8", "delayed"):
        for weights in (None, "fp8"):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).bfloat16()
            ottava.convert(plain, recipe, weights=weights)
            model = copy.deepcopy(plain)
            fully_shard(model, mesh=mesh)
            losses = []
            for net in (plain, model):
                optimizer = ottava.optim.AdamW(net.parameters(), lr=0.01, master="fp32")
                losses.append([])
                for _ in range(3):
                    loss = net(x).float().square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[-1].append(loss.item())
            assert losses[0] == losses[1], (recipe, weights)
            assert losses[0][2] < losses[0][0]
            assert len(verify(model)) == 64


MOST_CALLS_OF_FSDP2 = {"tensorwise": (95, 445), "rowwise": (115, 475), "mxfp8": (110, 490), "delayed": (280, 620)}
"""Under torch's own fully_shard, and under ottava's, which sends codes; torch itself calls about 1,100."""


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.skipif(native_build.load("gemm").library is None, reason="the reference takes other ways")
@pytest.mark.usefixtures("native_first")
def test_a_step_of_fsdp2_calls_little_of_ours(mesh: DeviceMesh) -> None:
    """Two linear layers and their root, one rank; forward, backward, optimizer."""
    gc.collect()  # the models of other tests have steps, too
    for name, most in MOST_CALLS_OF_FSDP2.items():
        for shard, limit in zip((fsdp.fully_shard, fully_shard), most, strict=True):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).bfloat16()
            ottava.convert(model, name)
            for module in (*model, model):
                shard(module, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(64, 64).bfloat16()
            for _ in range(4):  # the last one counts
                with calls() as seen:
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            print(f"{name}, {shard.__module__}: {len(seen)} calls")
            assert 0 < len(seen) <= limit, (name, shard.__module__)
