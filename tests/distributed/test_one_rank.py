"""FSDP2 on one rank, where torch hands over the first gathered tensor alone: the bits of the model without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ottava
from ottava.distributed import fully_shard, verify


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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
