"""`verify` without a process group; with one, see `parallel_scenarios.ranks_that_differ_are_named`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ottava
from ottava.distributed import verify


def test_the_hash_sees_weights_scales_recipes_and_mode() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).bfloat16()
        ottava.convert(net, "delayed")
        return net

    same = verify(model())
    assert verify(model()) == same
    hashes = {same}
    for change in (
        lambda net: net[0].weight.data.view(torch.int16)[3].bitwise_xor_(1),
        lambda net: net[0].quantizers.weight.amax_history.fill_(1),
        lambda net: ottava.convert(net, "mxfp8"),
        lambda net: net.eval(),
        lambda net: net[1].running_mean.add_(1),
    ):
        changed = model()
        change(changed)
        hashes.add(verify(changed))
    assert len(hashes) == 6
    stored = model()
    ottava.convert(stored, "delayed", weights="fp8")
    before = verify(stored)
    assert verify(stored) == before
    stored[0].weight.codes.view(torch.uint8)[3] ^= 1
    hashes |= {before, verify(stored)}
    stored[0].weight.scale_inv.mul_(2)
    assert len(hashes | {verify(stored)}) == 9
    with pytest.raises(TypeError, match=r"verify: got None; needs a torch\.nn\.Module"):
        verify(None)  # type: ignore[arg-type]
