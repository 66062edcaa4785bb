"""What several processes do with ottava's own blocks under tensor and sequence parallelism; run by test_styles.

Fused weights (q, k and v; gate and up) are split piece by piece. The witness is one process, as in parallel_scenarios.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel_scenarios import EPS, close, ends, gathered, mesh_of, mlp, nearest
from state_scenarios import World, same_everywhere
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import ottava
from ottava.distributed import (
    ColwiseParallel,
    PrepareInput,
    RowwiseParallel,
    SequenceParallel,
    tensor_parallel_plan,
    verify,
)
from ottava.nn import sharding

WIDTH = 128


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def grads(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients, pieces of a fused weight joined, by the names that one process has."""
    joined: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        parameters = module._parameters.items()
        own = {n: gathered(p.grad) for n, p in parameters if p is not None and p.grad is not None}
        split = [] if "weight" in module._parameters else [piece.name for piece in getattr(module, "projections", ())]
        for kind in ("weight", "bias") if split else ():
            parts = [own.pop(f"{name}_{kind}") for name in split if f"{name}_{kind}" in own]
            if parts:
                own[kind] = torch.cat(parts)
        joined |= {f"{path}.{name}": grad for name, grad in own.items()}
    return joined


def step(model: nn.Module, x: Tensor, dy: Tensor, **more: Any) -> dict[str, Tensor]:
    """y, dx and all gradients."""
    y, dx = ends(model, x, dy, **more)
    return {"y": y, "dx": dx, **grads(model)}


def batch(world: World, tokens_first: bool = False) -> tuple[Tensor, Tensor]:
    """x and dy of all tokens."""
    shape = (128 * world.size, 2, WIDTH) if tokens_first else (2, 128 * world.size, WIDTH)
    return noise(*shape), noise(*shape, seed=2)


def compare(
    world: World,
    model: nn.Module,
    wanted: dict[str, Tensor],
    *,
    dim: int | None,
    tokens_first: bool = False,
    exact: Any,
    said: Any,
    terms: int = 4,
    **more: Any,
) -> None:
    """One step of the split model, and that of one process; dim: of the tokens, where these are split."""
    x, dy = batch(world, tokens_first)
    own = (x, dy) if dim is None else tuple(t.chunk(world.size, dim)[world.rank] for t in (x, dy))
    got = step(model, *own, **more)
    assert got.keys() == wanted.keys(), (said, got.keys() ^ wanted.keys())
    for name, one in got.items():
        other = wanted[name]
        if dim is not None and name in ("y", "dx"):
            other = other.chunk(world.size, dim)[world.rank]
        same = torch.equal(one, other) if exact(name) else close(one, other, terms * world.size)
        assert same, (said, name, (one - other).abs().max(), other.abs().max())


def fused_weights_have_the_gradients_of_one_process(world: World) -> None:
    """NormMLP with a gate, MultiheadAttention with grouped heads: bits of one process, also with split tokens.

    Two processes take every recipe, four every other one: what more ranks change is the order of sums.
    """
    heads = {"heads": 2 * world.size, "kv_heads": world.size, "head_dim": 128}
    makers: dict[str, Any] = {
        "mlp": lambda r: ottava.nn.NormMLP(
            WIDTH, 128 * world.size, activation="swiglu", recipe=r, dtype=torch.bfloat16
        ),
        "attention": lambda r: ottava.nn.MultiheadAttention(
            WIDTH, **heads, norm="rmsnorm", recipe=r, dtype=torch.bfloat16
        ),
    }
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8", "bf16")[:: world.size // 2]:
        for kind, maker in makers.items():
            torch.manual_seed(0)
            whole = maker(nearest(recipe))
            models = [copy.deepcopy(whole) for _ in range(2)]
            wanted = world.once(lambda whole=whole: step(whole, *batch(world)))
            for sequence, model in enumerate(models):
                parallelize_module(model, mesh_of(world), tensor_parallel_plan(model, sequence_parallel=bool(sequence)))
                behind = {"out.bias", "fc2.bias"} if sequence else set()

                def exact(
                    name: str, behind: set[str] = behind
                ) -> bool:  # y, dx and what the norm gets are sums over ranks
                    return name not in ("y", "dx") and ".norm." not in name and name not in behind

                compare(world, model, wanted, dim=1 if sequence else None, exact=exact, said=(recipe, kind, sequence))


def whole_layers(world: World) -> None:
    """Every arrangement of a TransformerLayer, with norms over heads, sinks, cross attention and other layouts."""
    heads: dict[str, Any] = {"heads": 2 * world.size, "kv_heads": world.size, "head_dim": 32, "dtype": torch.bfloat16}
    llama: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "bias": False}
    memory = noise(2, 48, WIDTH, seed=3)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({**llama, "qk_norm": "rmsnorm", "sink": "learned"}, {}),
        ({**llama, "save": "recompute", "layout": "sbhd"}, {}),
        ({"arrangement": "post", "cross": True, "mask": "no_mask"}, {"memory": memory}),
        ({"arrangement": "parallel"}, {}),
        ({"arrangement": "parallel_one_norm", "save": "fp8"}, {}),
    ]
    for settings, given in cases:
        torch.manual_seed(0)
        whole = ottava.nn.TransformerLayer(WIDTH, 64 * world.size, **heads, **settings, recipe="bf16")
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                if name.endswith("sink"):
                    parameter.copy_(noise(*parameter.shape))
        models, first = [copy.deepcopy(whole) for _ in range(2)], settings.get("layout") == "sbhd"
        wanted = world.once(lambda whole=whole, given=given, first=first: step(whole, *batch(world, first), **given))
        for sequence, model in enumerate(models):
            plan = tensor_parallel_plan(model, sequence_parallel=bool(sequence))
            parallelize_module(model, mesh_of(world), plan)
            dim = (0 if first else 1) if sequence else None
            # the memory of a cross attention is whole on each rank
            if sequence and "memory" in given:
                own = [t.chunk(world.size, 1)[world.rank] for t in (*batch(world), memory)]
                got = step(model, *own[:2], memory=own[2])
                for name in wanted.keys() - {"y", "dx"}:
                    assert close(got[name], wanted[name], 8 * world.size), name
                continue
            own_terms = {"tokens_first": first, "exact": lambda name: False, "terms": 8}
            compare(world, model, wanted, dim=dim, said=(settings, sequence), **own_terms, **given)


def training_goes_on_at_another_size(world: World) -> None:
    """Two steps of AdamW in FP8; checkpoint of model and optimizer; a mesh of one rank goes on with the same bits."""
    heads: dict[str, Any] = {"heads": 2 * world.size, "kv_heads": world.size, "head_dim": 32, "dtype": torch.bfloat16}

    def layer(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = ottava.nn.TransformerLayer(
            WIDTH, 64 * world.size, **heads, norm="rmsnorm", activation="swiglu", bias=False, recipe="delayed"
        )
        ottava.convert(model, "delayed")
        parallelize_module(model, mesh, tensor_parallel_plan(model))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    x, dy = noise(2, 32, WIDTH), noise(2, 32, WIDTH, seed=2)
    model, optimizer = layer(mesh_of(world))
    for _ in range(2):
        step(model, x, dy)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    same_everywhere(world, model)
    assert verify(model)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{world.folder}/layer")
    alone, other = layer(DeviceMesh("cpu", [world.rank]))
    step(alone, x, dy)  # an optimizer has no moments before its first step
    other.step()
    read = {"model": get_model_state_dict(alone), "optim": get_optimizer_state_dict(alone, other)}
    dcp.load(read, checkpoint_id=f"{world.folder}/layer", no_dist=True)
    for one, two in zip(_leaves(state), _leaves(read), strict=True):
        assert torch.equal(one, two)
    # a layer in one piece takes either form
    plain = ottava.nn.TransformerLayer(
        WIDTH, 64 * world.size, **heads, norm="rmsnorm", activation="swiglu", bias=False, recipe="delayed"
    )
    ottava.convert(plain, "delayed")
    plain.load_state_dict({name: gathered(t) for name, t in state["model"].items()})
    q = state["model"]["attention.qkv.q_weight"].full_tensor()
    assert torch.equal(plain.attention.qkv.weight[: len(q)], q)
    fresh, _ = layer(mesh_of(world))
    fused = {name: t for name, t in plain.state_dict().items() if name.endswith(("qkv.weight", "fc1.weight"))}
    fresh.load_state_dict(fused, strict=False)
    for name in ("attention.qkv.q_weight", "attention.qkv.v_weight", "mlp.fc1.gate_weight", "mlp.fc1.up_weight"):
        assert torch.equal(gathered(fresh.state_dict()[name]), gathered(state["model"][name])), name


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]
    return [gathered(tree)] if isinstance(tree, Tensor) else []


def fused_layers_of_others(world: World) -> None:
    """A fused linear of another package, by `pieces`; heads that the ranks cannot share are refused."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, 3 * 64)).bfloat16()
    model = copy.deepcopy(whole)
    for one in (whole, model):
        ottava.convert(one, "tensorwise")
    pieces = {"gate": 96, "up": 96}
    parallelize_module(model, mesh_of(world), {"0": ColwiseParallel(pieces=pieces, output_layouts=Shard(-1))})
    x, dy = noise(2, 64, WIDTH), noise(2, 64, 192, seed=2)

    def own(t: Tensor) -> Tensor:
        return torch.cat([part.chunk(world.size, -1)[world.rank] for part in t.split(96, -1)], -1)

    got, wanted = step(model, x, own(dy)), step(whole, x, dy)
    assert torch.equal(got["y"], own(wanted["y"]))
    assert torch.equal(got["0.weight"], wanted["0.weight"])
    assert torch.equal(got["0.bias"], wanted["0.bias"])
    for settings, said in (({"pieces": {"a": 7}}, "in all"), ({}, "cannot share")):
        odd = ottava.nn.MultiheadAttention(WIDTH, 2 * world.size, kv_heads=1, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=said):
            parallelize_module(odd, mesh_of(world), {"qkv": ColwiseParallel(**settings)})


class Model(nn.Module):
    """Vocabulary, norm, layer, norm, head."""

    def __init__(self, recipe: str, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, WIDTH, dtype=torch.bfloat16)
        self.layer = ottava.nn.TransformerLayer(
            WIDTH, 256, 4, norm="rmsnorm", activation="swiglu", bias=False, recipe=recipe, dtype=torch.bfloat16
        )
        self.norm = ottava.nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        self.head = ottava.nn.LinearCrossEntropy(
            WIDTH,
            vocabulary,
            recipe=recipe,
            label_smoothing=0.1,
            z_loss=1e-3,
            softcap=20.0,
            chunk=128,
            bias=True,
            dtype=torch.bfloat16,
        )

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embedding(ids))), target)  # type: ignore[no-any-return]


def a_model_with_its_vocabulary_split(world: World) -> None:
    """Embedding, norms, blocks and the loss in chunks; no rank has logits of all classes."""
    sizes = 600, 2, 128 * world.size
    ids = torch.randint(600, sizes[1:], generator=torch.Generator().manual_seed(5))
    target = ids.roll(1, 1).masked_fill(ids % 7 == 0, -100)
    own = [t.chunk(world.size, 1)[world.rank] for t in (ids, target)]

    def of_one_process(recipe: str) -> tuple[Tensor, dict[str, Tensor]]:
        whole = Model(recipe, 600)
        loss = whole(ids, target)
        loss.backward()
        return loss.detach(), grads(whole)

    for recipe in ("bf16", "rowwise", "tensorwise", "delayed"):
        bound = (8 * world.size * EPS) if recipe == "bf16" else 0.11  # of E5M2, as in with_sharded_data_parallelism
        wanted_loss, wanted = world.once(lambda recipe=recipe: of_one_process(recipe))
        for sequence in (False, True):
            model = Model(recipe, 600)
            place: Any = Shard(1) if sequence else Replicate()
            plan = tensor_parallel_plan(model, sequence_parallel=sequence) | {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=place),
                "head": ColwiseParallel(input_layouts=place),
            }
            if sequence:
                plan["norm"] = SequenceParallel(use_local_output=True)
            parallelize_module(model, mesh_of(world), plan)
            loss = model(ids, own[1] if sequence else target)
            loss.backward()
            assert (loss - wanted_loss).abs() <= bound * wanted_loss, (recipe, sequence, loss, wanted_loss)
            got = grads(model)
            assert wanted.keys() == got.keys(), wanted.keys() ^ got.keys()
            for name, one in got.items():
                off = (one.float() - wanted[name].float()).norm() / wanted[name].float().norm()
                assert off <= bound, (recipe, sequence, name, off)
            if recipe == "delayed":
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                same_everywhere(world, model)


def losses_of_split_classes(world: World) -> None:
    """Every setting of the loss, with the numbers of one process; a class out of range is refused on each rank."""
    x = noise(2, 64 * world.size, WIDTH)
    target = torch.randint(99, (2, 64 * world.size), generator=torch.Generator().manual_seed(1))
    target[0, :5] = -100
    cases: list[dict[str, Any]] = [
        {},
        {"reduction": "sum", "bias": True, "label_smoothing": 0.1},
        {"reduction": "none", "z_loss": 1e-2, "softcap": 5.0},
        {"chunk": 64},
    ]
    for settings in cases:
        for split in (False, True):
            torch.manual_seed(0)
            whole = ottava.nn.LinearCrossEntropy(WIDTH, 99, dtype=torch.bfloat16, **settings)
            model = copy.deepcopy(whole)
            place: Any = Shard(1) if split else Replicate()
            parallelize_module(model, mesh_of(world), ColwiseParallel(input_layouts=place))
            shares = noise(*target.shape, seed=4).float()
            own = [t.chunk(world.size, 1)[world.rank] if split else t for t in (x, target, shares)]
            results = []
            for one, (rows, classes, share) in ((whole, (x, target, shares)), (model, own)):
                rows = rows.clone().requires_grad_()
                loss = one(rows, classes)
                (loss * share if settings.get("reduction") == "none" else loss).sum().backward()
                results.append((loss.detach(), rows.grad, grads(one)))
            (wanted, dx, gradients), (got, own_dx, own_gradients) = results
            if split:
                dx = dx.chunk(world.size, 1)[world.rank]
                wanted = wanted.chunk(world.size, 1)[world.rank] if wanted.dim() else wanted
            assert torch.allclose(got, wanted, rtol=1e-5), (settings, split, got, wanted)
            assert close(own_dx, dx, 2 * world.size), (settings, split)
            assert gradients.keys() == own_gradients.keys()
            assert all(close(own_gradients[name], gradients[name], 4) for name in gradients), (settings, split)
            with torch.no_grad(), ottava.autocast("delayed", calibrating=True):
                assert torch.allclose(model(own[0], own[1]), got, rtol=1e-4), settings
            with pytest.raises(ValueError, match="needs 0 to 98"):
                model(own[0], own[1].clamp(max=0) + 99)
    with pytest.raises(ValueError, match="without one"):
        parallelize_module(ottava.nn.LinearCrossEntropy(8, 1), mesh_of(world), ColwiseParallel())


def logits_of_split_classes(world: World) -> None:
    """torch's loss_parallel behind a head that keeps its logits split."""
    torch.manual_seed(0)
    whole = ottava.nn.Linear(WIDTH, 99, recipe="bf16", dtype=torch.bfloat16)
    model = copy.deepcopy(whole)
    parallelize_module(model, mesh_of(world), ColwiseParallel(use_local_output=False))
    x, target = noise(2, 64, WIDTH), torch.randint(99, (128,), generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(whole(x).flatten(0, 1).float(), target).backward()
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), target)
        loss.backward()
    for name, grad in grads(model).items():
        assert close(grad, grads(whole)[name], 8), name


def layers_of_one_input_share_its_gather(world: World) -> None:
    """Behind PrepareInput q, k and v gather codes once in the forward and once in the backward, with the same bits."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, 64 * world.size, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x).relu() + self.v(x).sigmoid()

    counted: list[int] = []
    real = sharding.all_gather

    def gather(out: Tensor, own: Tensor, group: Any) -> Any:
        counted.append(own.nbytes)
        return real(out, own, group=group)

    x, dy = noise(2, 128 * world.size, WIDTH), noise(2, 128 * world.size, 64, seed=2)
    own = x.chunk(world.size, 1)[world.rank]
    gathers = {"bf16": 1, "tensorwise": 1, "rowwise": 2, "blockwise": 2, "delayed": 3}  # codes, and scales of rows
    for recipe, count in gathers.items():
        results = []
        for style in (nn.Identity(), PrepareInput(input_layouts=Shard(1))):
            torch.manual_seed(0)
            model = Three().bfloat16()
            ottava.convert(model, nearest(recipe), filter=lambda name, layer: True)
            alone = isinstance(style, nn.Identity)
            plan: dict[str, Any] = {} if alone else {"": style}
            for name in "qkv":
                plan[name] = ColwiseParallel(input_layouts=Shard(1) if alone else None)
            parallelize_module(model, mesh_of(world), plan)
            counted.clear()
            sharding.all_gather = gather
            try:
                results.append(step(model, own, dy))
            finally:
                sharding.all_gather = real
            sent = len(counted)
            if alone:
                before = sent
        wgrads = 1 if recipe != "blockwise" else 2  # a row of x.T has the tokens of all ranks, and one agreed scale
        assert sent == (before if recipe == "delayed" else count + wgrads), (recipe, sent, before)
        for name, one in results[0].items():
            assert torch.equal(one, results[1][name]), (recipe, name)
        # a branch without a backward, and the next step after it
        model.zero_grad()
        model.q(own)
        again = step(model, own, dy)
        assert all(torch.equal(one, results[1][name]) for name, one in again.items()) or recipe == "delayed"


def weights_stored_as_codes(world: World) -> None:
    """Codes and scales are split: the bits of one process, also after steps of an optimizer; cuts are named."""
    x, dy = noise(2, 32, WIDTH), noise(2, 32, WIDTH, seed=2)
    for recipe in ("tensorwise", "blockwise", "delayed"):
        whole, model = mlp(recipe, WIDTH, 128 * world.size), mlp(recipe, WIDTH, 128 * world.size)
        for one in (whole, model):
            ottava.convert(one, recipe, weights="fp8", keep_high_precision=recipe == "tensorwise")
        parallelize_module(model, mesh_of(world), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizers = [ottava.optim.AdamW(m.parameters(), lr=1e-2, master="fp32") for m in (whole, model)]
        for _ in range(2):
            wanted, got = step(whole, x, dy), step(model, x, dy)
            for name in ("up.weight", "down.weight", "up.bias"):
                assert torch.equal(got[name], wanted[name]), (recipe, name)
            assert close(got["y"], wanted["y"], 2 * world.size)
            for optimizer in optimizers:
                optimizer.step()
            for name, tensor in model.state_dict().items():
                other = whole.state_dict()[name]
                whole_tensor = _whole_codes(tensor)
                assert torch.equal(whole_tensor, other.view(torch.uint8) if other.dtype.itemsize == 1 else other), name
    for recipe, style, said in (
        ("rowwise", RowwiseParallel(), "rows, each"),
        ("blockwise", ColwiseParallel(), "blocks of"),
    ):
        layer = nn.Sequential(ottava.nn.Linear(WIDTH, 128 * world.size + 128, dtype=torch.bfloat16))
        ottava.convert(layer, recipe, weights="fp8")
        with pytest.raises(ValueError, match=said):
            parallelize_module(layer, mesh_of(world), {"0": style})


def _whole_codes(tensor: Any) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    own = tensor.to_local()
    own = own.view(torch.uint8) if own.dtype.itemsize == 1 else own  # gloo knows no FP8
    made = DTensor.from_local(own, tensor.device_mesh, tensor.placements, run_check=False)
    return made.full_tensor()
