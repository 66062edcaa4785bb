"""Rows sorted by expert and back; each group gives the bits of a Linear of its own, for any split and recipe."""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.engine.functional import quantized_layers
from ottava.nn import GroupedLinear, Linear, permute, sort_by_expert, unpermute
from ottava.nn.convert import plan_model
from ottava.ops.quantize import refuse_turn
from ottava.recipe import RECIPES, Recipe

SIZES = ((0, 3, 2), (1, 1, 1), (7, 4, 2), (64, 8, 3), (33, 5, 5))


def test_rows_are_sorted_by_expert_and_in_the_order_of_tokens() -> None:
    """For index tensors with and without a sentinel, against sorting pairs in Python."""
    for tokens, experts, k in SIZES:
        for sentinel in (0, 1):
            index = torch.stack([torch.randperm(experts + sentinel)[:k] for _ in range(tokens)] or [torch.empty(0, k)])
            index = index.reshape(tokens, k).long()
            plan = sort_by_expert(index, experts)
            pairs = sorted((e, t, j) for t, own in enumerate(index.tolist()) for j, e in enumerate(own) if e < experts)
            assert plan.rows.tolist() == [t for _, t, _ in pairs]
            assert plan.slots.tolist() == [t * k + j for _, t, j in pairs]
            assert plan.counts.tolist() == [sum(e == expert for e, _, _ in pairs) for expert in range(experts)]
            wanted = [sorted(i for i, (_, t, _) in enumerate(pairs) if t == token) for token in range(tokens)]
            assert [[p for p in own if p < len(pairs)] for own in plan.places.tolist()] == wanted


def test_a_full_expert_drops_its_least_likely_rows() -> None:
    """With probabilities by them, without by order; the sum of a token leaves out what was dropped."""
    for tokens, experts, k in SIZES[1:]:
        index = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
        probs = torch.rand(tokens, k)
        for capacity in (1, 3):
            for given in (None, probs):
                plan = sort_by_expert(index, experts, capacity=capacity, probs=given)
                kept = set(plan.slots.tolist())
                for expert in range(experts):
                    own = [
                        (t * k + j, float(probs[t, j]))
                        for t in range(tokens)
                        for j in range(k)
                        if index[t, j] == expert
                    ]
                    own = own if given is None else sorted(own, key=lambda item: -item[1])
                    assert {slot for slot, _ in own[:capacity]} == kept & {slot for slot, _ in own}
                x = torch.randn(tokens, 6)
                y = unpermute(permute(x, plan), plan, probs)
                mask = torch.tensor([[t * k + j in kept for j in range(k)] for t in range(tokens)])
                torch.testing.assert_close(y, x * (probs * mask).sum(1, keepdim=True))


def test_gradients_are_those_of_plain_torch() -> None:
    """x, y and probs, in fp64 by numbers and in BF16 bit for bit against a sum in the order of experts."""
    index = torch.tensor([[2, 0, 3], [1, 2, 0], [3, 1, 2], [0, 3, 1]])
    plan = sort_by_expert(index, 4, capacity=2, probs=torch.rand(4, 3))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, p: unpermute(permute(a, plan).sin(), plan, p), (x, probs))
    assert torch.autograd.gradcheck(lambda a: unpermute(permute(a, plan).sin(), plan), (x,))
    plan = sort_by_expert(index, 4)
    y, p = torch.randn(12, 5).bfloat16(), torch.rand(4, 3)
    weights = p.flatten()[plan.slots]
    loop = torch.zeros(4, 5)
    for row, token in enumerate(plan.rows.tolist()):  # rows lie in the order of experts
        loop[token] = loop[token] + y[row].float() * weights[row]
    assert torch.equal(unpermute(y, plan, p), loop.bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got index \(3,\); needs \(tokens, k\)"):
        sort_by_expert(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"probs \(3, 2\)"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 2, probs=torch.ones(3, 2))
    with pytest.raises(ValueError, match="capacity is 0"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 2, capacity=0)


K, N = 48, 40
DTYPES = {"bf16": torch.float32}  # torch's own GEMM in BF16 is compiled anew for every shape


def pair(groups: int, recipe: Recipe | str, bias: bool = True) -> tuple[GroupedLinear, list[Linear]]:
    """A grouped linear and one Linear a group, with the same weights, trained by nothing."""
    dtype = DTYPES.get(recipe if isinstance(recipe, str) else recipe.name, torch.bfloat16)
    grouped = GroupedLinear(groups, K, N, bias=bias, recipe=recipe, dtype=dtype)
    singles = []
    for group in range(groups):
        single = Linear(K, N, bias=bias, recipe=recipe, dtype=dtype)
        with torch.no_grad():
            single.weight.copy_(grouped.weight[group])
            if bias:
                single.bias.copy_(grouped.bias[group])
        singles.append(single)
    return grouped, singles


def random_splits(draw: random.Random, groups: int) -> list[int]:
    """Nothing, one row, an odd number, more than a block of 32 and of 128."""
    return [draw.choice((0, 0, 1, draw.randrange(2, 31), 32, draw.randrange(33, 70), 129)) for _ in range(groups)]


def both(
    grouped: GroupedLinear, singles: Sequence[Linear], splits: Sequence[int], x: Tensor, dy: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """(y, dx, dw, db) of the grouped linear, and of one Linear a group."""
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    grouped.zero_grad()
    torch.manual_seed(1)  # stochastic rounding
    y = grouped(own, splits)
    y.backward(dy)
    torch.manual_seed(1)
    parts = []
    for single, rows in zip(singles, theirs.split(list(splits)), strict=True):
        single.zero_grad()
        parts.append(single(rows) if len(rows) else rows.new_empty(0, N) + 0 * rows.sum())
    torch.cat(parts).backward(dy)

    def stacked(name: str) -> Tensor:
        parameters = [getattr(single, name) for single in singles]
        return torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])

    assert own.grad is not None
    assert theirs.grad is not None
    assert grouped.weight.grad is not None
    assert grouped.bias.grad is not None
    return (
        [y, own.grad, grouped.weight.grad, grouped.bias.grad],
        [torch.cat(parts), theirs.grad, stacked("weight"), stacked("bias")],
    )


@pytest.mark.parametrize("index", range(len(RECIPES)), ids=list(RECIPES))
def test_each_group_gives_the_bits_of_a_linear_of_its_own(index: int) -> None:
    """200 random splits, shared out among the recipes; where scales are predicted each is a step of training."""
    recipe = list(RECIPES.values())[index]
    draw, groups = random.Random(index), 5
    grouped, singles = pair(groups, recipe)
    states = [ottava.ScalingState(module) for module in (grouped, *singles)]
    dtype, used = grouped.weight.dtype, set()
    for _ in range(-(-200 // len(RECIPES))):
        splits = random_splits(draw, groups)
        used |= set(splits)
        x = torch.randn(sum(splits), K, dtype=dtype) * 2.0 ** draw.randrange(-6, 6)
        mine, theirs = both(grouped, singles, splits, x, torch.randn(sum(splits), N, dtype=dtype))
        for what, a, b in zip(("y", "dx", "dw", "db"), mine, theirs, strict=True):
            assert torch.equal(a, b), f"{what} of splits {splits}"
        for state in states if recipe.predicted else ():
            state.update()
    assert {0, 1, 32, 129} <= used
    for part, single in zip(grouped.groups, singles, strict=True):
        for a, b in zip(part.quantizers.buffers(), single.quantizers.buffers(), strict=True):
            assert torch.equal(a, b)
    assert any(True for _ in grouped.buffers()) == recipe.predicted


def test_without_gradients_and_bias_bits_are_the_same_and_rows_are_cast_once(recipe: Recipe) -> None:
    """Inference: where scales run along K one cast serves all groups, unless somebody watches the doors."""
    grouped, singles = pair(4, recipe, bias=False)
    splits = torch.tensor([3, 0, 40, 1])
    x = torch.randn(44, K, dtype=grouped.weight.dtype)
    with torch.no_grad():
        y = grouped(x, splits)
        rows = x.split(splits.tolist())
        assert torch.equal(y, torch.cat([one(own) for one, own in zip(singles, rows, strict=True) if len(own)]))
        seen: list[int] = []
        for part in grouped.groups:
            part.quantizers.input.register_forward_hook(lambda door, args, out: seen.append(len(args[0])))
        assert torch.equal(grouped(x, splits), y)
    assert seen == ([3, 40, 1] if recipe.casts else [])


def test_one_cast_of_x_changes_the_weights_gradient_alone(recipe: Recipe) -> None:
    """y, dx and db keep their bits, and dw is that of rows which have been through the forward's cast before."""
    once, singles = pair(4, recipe)
    once.cast_once = True
    splits, dtype = [30, 0, 129, 7], once.weight.dtype
    x, dy = torch.randn(166, K, dtype=dtype), torch.randn(166, N, dtype=dtype)
    mine, theirs = both(once, singles, splits, x, dy)
    drawn = recipe.name == "mxfp4"  # its groups draw in another order where one backward runs them all
    same = zip((mine[0], mine[3], mine[1]), (theirs[0], theirs[3], theirs[1]), strict=True)
    assert [torch.equal(a, b) for a, b in same] == [True, True, not drawn]
    row, col = recipe.cells("input")
    (casts,) = {part.last_call.casts for part in once.groups if part.last_call is not None}
    (remark,) = {part.last_call.remark for part in once.groups if part.last_call is not None}
    if row is None or col is None or (row == col and row.granularity.transposes):
        assert (casts, remark) == (0 if row is None else 1, "")
    elif refuse_turn(row, col) is not None:
        assert casts == 2
        assert re.fullmatch(r"input cast twice: \w+ scales are no powers of two, so that codes .*", remark)
    else:
        assert (casts, remark) == (1, "x.T made from the codes of x")
        _, theirs = both(once, singles, splits, ottava.quantize(x, row).dequantize(), dy)
    assert torch.equal(mine[2], theirs[2]) != drawn


def test_the_contract_of_layers_holds_for_each_group() -> None:
    """Names, overrides, receipt, calibration, plan, an optimizer's boundary, copies, pickles and state dicts."""
    recipe = ottava.get_recipe("delayed").override("*.groups.2", "bf16")
    model = nn.ModuleDict({"experts": GroupedLinear(3, K, N, recipe="tensorwise", dtype=torch.bfloat16)})
    report = ottava.convert(model, recipe)
    names = [f"experts.groups.{i}" for i in range(3)]
    assert list(report.converted) == names == [layer.name for layer in quantized_layers(model)]
    assert not report.outside
    layer, x = model["experts"], torch.randn(9, K, dtype=torch.bfloat16)
    found = ottava.calibrate(model, [x], loss=lambda m, batch: m["experts"](batch, [4, 5, 0]).float().sum())
    assert [(row.layer, row.tensor) for row in found.rows if row.amax] == [
        (name, tensor) for name in names[:2] for tensor in ("input", "weight", "grad_output")
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        layer(3 * x, [4, 0, 5]).float().square().sum().backward()
        optimizer.step()
    filled = [int((part.quantizers.input.amax_history > 0).sum()) for part in layer.groups if part.name != names[2]]
    assert filled == [3, 1]  # group 1 was idle in both steps
    rows = ottava.receipt(model).rows
    assert {(row.layer, row.fp8) for row in rows if row.gemm == "wgrad"} == {
        (names[0], True),
        (names[1], False),
        (names[2], False),
    }
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    loaded = nn.ModuleDict({"experts": GroupedLinear(3, K, N, recipe="tensorwise", dtype=torch.bfloat16)})
    ottava.convert(loaded, recipe)
    loaded.load_state_dict(model.state_dict())
    for twin in (*twins, loaded):
        assert torch.equal(twin["experts"](x, [4, 3, 2]), layer(x, [4, 3, 2]))
        part = twin["experts"].groups[1]
        assert part.parameter is twin["experts"].weight
        assert part.parameter is not layer.weight
    planned = plan_model(model, recipe, tokens=999).layers
    assert [(one.name, one.shape) for one in planned] == [(name, (333, K, N)) for name in names]


def test_a_watch_sees_each_group_and_changes_no_bit(tmp_path: Path) -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        layer = GroupedLinear(3, K, N, recipe="mxfp8", cast_once=True, dtype=torch.bfloat16)
        x = torch.randn(50, K, dtype=torch.bfloat16, requires_grad=True)
        with ottava.watch(layer, tmp_path / "run", every=1) if watched else nullcontext():
            y = layer(x, [20, 0, 30])
            y.float().square().sum().backward()
        results.append((y, x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nobody_came() -> None:
    """No token at all: an empty result, and zeros as gradients."""
    for name in ("bf16", "blockwise", "delayed"):
        layer, _ = pair(2, name)
        x = torch.empty(0, K, dtype=layer.weight.dtype, requires_grad=True)
        y = layer(x, [0, 0])
        y.sum().backward()
        assert y.shape == (0, N)
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        assert not layer.weight.grad.any()
        assert not layer.bias.grad.any()


def test_what_does_not_fit_is_refused_grouped() -> None:
    layer, _ = pair(2, "mxfp8")
    x = torch.ones(4, K, dtype=torch.bfloat16)
    for splits, said in (([4], "got splits [4] for 4 rows"), ([5, -1], "none negative"), ([1, 2], "add up to 4")):
        with pytest.raises(ValueError, match=re.escape(said)):
            layer(x, splits)
    with pytest.raises(ValueError, match=rf"needs \(tokens, {K}\)"):
        layer(x[:, 1:], [2, 2])
    with (
        pytest.raises(TypeError, match=r"groups\.0: got torch.float32 input for a torch.bfloat16 weight"),
        torch.no_grad(),
    ):
        layer(x.float(), [2, 2])
    with pytest.raises(ValueError, match="num_groups is 0"):
        GroupedLinear(0, K, N)
    layer.cast_once = True
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(layer(x, [2, 2]).sum(), x, create_graph=True)
