"""A piece of a parameter as a layer: it follows its owner's parameter through whatever replaces, moves or copies it."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor, nn

import ottava
from ottava.nn.part import Part, PartOwner, rows_of, unstacked


class Pair(PartOwner):
    """Two matrices in one parameter, the second kept as (K, N), and one bias for three."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.randn(2, 32, 48, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.randn(96, dtype=torch.bfloat16))
        self.first = Part(self, "pair", None, 0)
        self.second = Part(self, "pair", "bias", 1, turned=True)
        self.third = Part(self, "pair", "bias", 1, of_bias=2)
        for name, part in self.named_children():
            part.adopt(ottava.get_recipe("delayed"), name)

    def forward(self, x: Tensor) -> Tensor:
        self.bind(self.children())  # type: ignore[arg-type]
        one, other = unstacked(self.pair, 2)
        return self.second.run(self.first.run(x, one, None), other.t(), None)


def test_a_part_is_a_view_of_what_its_owner_holds() -> None:
    owner = Pair()
    assert (owner.first.in_features, owner.first.out_features, owner.first.bias) == (48, 32, None)
    assert (owner.second.in_features, owner.second.out_features) == (32, 48)
    assert torch.equal(owner.second.weight, owner.pair[1].T)
    assert torch.equal(owner.third.bias, owner.bias[64:])
    assert all(part.parameter is owner.pair for part in owner.children())
    assert [name for name, _ in owner.named_parameters()] == ["pair", "bias"]
    owner.pair = nn.Parameter(torch.zeros(2, 32, 48, dtype=torch.bfloat16))
    assert owner.first.parameter is owner.pair
    owner.load_state_dict({n: t.clone() for n, t in owner.state_dict().items()}, assign=True)
    assert owner.first.parameter is owner.pair
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert twin.first.parameter is twin.pair is not owner.pair
    assert "48 -> 32 of pair, recipe=delayed" in repr(owner)


def test_parts_made_by_hand_share_one_state_that_an_optimizer_moves() -> None:
    """Also once unpickled, when no state knows them."""
    for owner in (Pair(), pickle.loads(pickle.dumps(Pair()))):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        owner(torch.ones(4, 48, dtype=torch.bfloat16)).sum().backward()
        assert owner.first.scaling_state is owner.second.scaling_state
        optimizer.step()
        assert float(owner.first.quantizers.input.scale) == 448.0
        assert owner.pair.grad is not None
        assert owner.pair.grad.abs().amax(dim=(1, 2)).min() > 0


def test_rows_that_a_layer_can_expect() -> None:
    owner = Pair()
    owner.first.share = 0.25
    assert (rows_of(owner.first, 1000), rows_of(owner.first, 1), rows_of(nn.Linear(2, 2), 1000)) == (250, 1, 1000)
    assert unstacked(None, 2) == [None, None]
