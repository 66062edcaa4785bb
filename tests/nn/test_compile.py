"""torch.compile: one graph, the bits of eager mode, and no stale recipe.

"aot_eager" runs the traced graphs without generating code, so every recipe can be tried; "inductor" (slow) generates
code. Both see `ottava::quantize` and `ottava::gemm` as opaque operators.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.bench.models import GPTBlock
from ottava.kernels import reference
from ottava.kernels.triton import quantize as triton_quantize
from ottava.ops import quantize as casts
from same_tensors import assert_same
from scaling_samples import two_linears, with_cells
from sweep import FIXED

KINDS = ("bf16", "rowwise_with_gw_hp", "blockwise", "delayed")
"""One recipe of each kind of graph: torch's own, mixed with high precision, blocks, with state."""
every_recipe = pytest.mark.parametrize("recipe", FIXED)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        self.graphs += 1
        return graph


network = partial(two_linears, hidden=96)


def data(seed: int, rows: int = 8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def train(model: nn.Module, forward: nn.Module, *, low: bool = False, steps: int = 2) -> list[Tensor]:
    """All bits of some steps: outputs, gradients, parameters, histories."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for seed in range(steps):
        x = data(seed, dtype=torch.float32 if low else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = forward(x)
        optimizer.zero_grad()
        torch.manual_seed(seed)
        y.float().square().mean().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        ottava.ScalingState(model).update()
    return [*seen, *model.parameters(), *model.buffers()]


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True, **options})  # type: ignore[call-overload,no-any-return]


@every_recipe
def test_one_graph_gives_the_bits_of_eager(recipe: str) -> None:
    """y, dx, dw, db, the trained parameters and the histories of delayed scaling; fullgraph: not one graph break."""
    eager, model = network(recipe), network(recipe)
    assert_same(train(model, compiled(model)), train(eager, eager))


def test_transforms_stay_in_the_graph() -> None:
    """Rotations, means and factors: the bits of eager, in one graph. Fresh signs are drawn in the order in which the
    compiled code runs, so those are other signs: the same from one seed, and gradients as good."""
    smooth = with_cells("tensorwise_e4m3", transform="smooth")
    for recipe in ("nvfp4_rht", "averis", "four_over_six", "averis/hopper", "averis/fp8_inputs_bf16_gemm", smooth):
        torch._dynamo.reset()
        eager, model = network(recipe), network(recipe)
        assert_same(train(model, compiled(model)), train(eager, eager))
    torch._dynamo.reset()
    steps = []
    for recipe in ("bf16", "ms_eden", "ms_eden"):
        model = network(recipe)
        steps.append(train(model, compiled(model), steps=1))
    exact, first, again = steps
    assert_same(first, again)
    for i in (1, 2, 4):  # dx, dw of both layers
        assert 0 < (first[i] - exact[i]).float().norm() < 0.6 * exact[i].float().norm()


@pytest.mark.parametrize("recipe", ["blockwise", "bf16", "delayed"])
def test_mixed_precision_gives_the_bits_of_eager(recipe: str, torch_first: None) -> None:
    """FP32 parameters under torch.autocast, entered outside of the compiled code."""
    eager, model = network(recipe, torch.float32), network(recipe, torch.float32)
    assert_same(train(model, compiled(model), low=True), train(eager, eager, low=True))


class Checkpointed(nn.Module):
    """The usual order: torch.compile around torch.utils.checkpoint around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", [*KINDS, "nvfp4_rht"])
def test_checkpointing_inside_compiled_code_stays_one_graph(recipe: str) -> None:
    """A side effect in forward would break the graph here, and the whole block would silently run eagerly."""
    eager, model = network(recipe), Checkpointed(network(recipe))
    assert_same(train(model, compiled(model)), train(eager, eager))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_generated_code_gives_the_bits_of_eager(recipe: str) -> None:
    """Inductor generates the code around the two operators; casts and sums are inside them."""
    eager, model = network(recipe), network(recipe)
    assert_same(train(model, compiled(model, backend="inductor")), train(eager, eager))


@pytest.mark.skipif("lite" not in torch._inductor.list_mode_options(), reason="this torch has no mode 'lite'")
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_whole_block_has_the_bits_of_eager_where_torch_runs_its_own_kernels(recipe: str) -> None:
    """Inductor's GELU and LayerNorm round otherwise than eager torch's, in BF16 too; mode "lite" generates neither."""

    def run(mode: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        block = GPTBlock(64, 4).bfloat16()
        ottava.convert(block, recipe)
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y = (block if mode is None else compiled(block, backend="inductor", mode=mode))(x)
        y.float().square().mean().backward()
        grads = [t.grad for t in (x, *block.parameters()) if t.grad is not None]
        return [y.detach(), *grads]

    assert_same(run("lite"), run(None))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_dynamic_rows_compile_once(recipe: str) -> None:
    """Batches of 8, 5, 33 and 130 rows through one graph, each with the bits of eager."""
    model, counter = network(recipe), Counter()
    forward, exact = compiled(model, backend=counter), compiled(copy.deepcopy(model))
    for rows in (8, 5, 33, 130):
        x, same = data(rows, rows), data(rows, rows)
        for tensor in (x, same):
            torch._dynamo.mark_dynamic(tensor, 0)
        forward(x)
        y, expected = exact(x), model(same)
        for result in (y, expected):
            torch.manual_seed(1)
            result.sum().backward()
        assert torch.equal(y, expected)
        assert torch.equal(x.grad, same.grad)  # type: ignore[arg-type]
    assert counter.graphs == 1


def test_no_stale_recipe() -> None:
    """Each change of what is to run recompiles; going back finds the old graph, and eager agrees every time."""
    model, counter = nn.Sequential(network()), Counter()
    ottava.convert(model, "tensorwise")  # names with a dot: "0.0" and "0.2"
    forward = compiled(model, backend=counter)
    one_gemm = ottava.RECIPES["rowwise"].override("0.0", wgrad=None)
    x, graphs = data(0), []

    def check() -> None:
        got, expected = forward(x), model(x)
        for y in (got, expected):
            assert torch.equal(y, expected)
        grads = [torch.autograd.grad(y.float().sum(), list(model.parameters()))[0] for y in (got, expected)]
        assert torch.equal(*grads)
        graphs.append(counter.graphs)

    for _ in range(2):
        check()
        with ottava.autocast("rowwise"):
            check()
        with ottava.autocast(one_gemm):
            check()
        with ottava.autocast(enabled=False):
            check()
    assert graphs == [1, 2, 3, 4, 4, 4, 4, 4]
    ottava.convert(model, "mxfp8")
    check()
    assert graphs[-1] == 5


def test_equal_recipes_share_a_graph() -> None:
    """A recipe made anew at every step, as `autocast(recipe.override(...))` has it, is no reason to recompile."""
    model, counter = network(), Counter()
    forward = compiled(model, backend=counter)
    for _ in range(3):
        with ottava.autocast(ottava.Recipe.from_dict(ottava.RECIPES["rowwise"].to_dict())):
            forward(data(0))
        with ottava.autocast(ottava.RECIPES["rowwise"].override("0", wgrad=None)):
            forward(data(0))
    assert counter.graphs == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_equal_blocks_share_a_graph(recipe: str) -> None:
    """Blocks compiled one by one, the way of large models: no layer's name, object or override is in the guards."""
    counter = Counter()
    blocks = nn.Sequential(*(network() for _ in range(12)))
    ottava.convert(blocks, ottava.get_recipe(recipe).override("*.2", wgrad=None))
    for i, block in enumerate(blocks):
        blocks[i] = compiled(block, backend=counter)
    with torch.no_grad():
        blocks(data(0).detach())
    assert counter.graphs == 1


def test_a_delayed_recipe_entered_for_the_first_time_is_refused_or_right() -> None:
    """Buffers cannot be born inside a graph: fullgraph says so; without it the first call runs eagerly and is right."""
    model, eager = network(), network()
    x = data(0)
    with ottava.autocast("delayed"):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="can neither make buffers for predicted scales"):
            compiled(model)(x)
        expected = eager(x)
        got = compiled(model, fullgraph=False)(x)
        assert torch.equal(got, expected)
        expected.sum().backward()
        got.sum().backward()
        for door in ("input", "weight", "grad_output"):
            staged = [m[0].get_submodule(f"quantizers.{door}").staged for m in (model, eager)]
            assert torch.equal(*staged)  # type: ignore[arg-type]
        assert torch.equal(compiled(model)(x), eager(x))  # now they are there


def test_an_autocast_inside_of_compiled_code_is_refused_or_right() -> None:
    """fullgraph: torch's message holds ottava's sentence, of a decorator too; without it the graph ends there."""
    model, x = network(), data(0)

    def inside(x: Tensor) -> Tensor:
        with ottava.autocast("rowwise"):
            return model(x)  # type: ignore[no-any-return]

    for function in (inside, ottava.autocast("rowwise")(model.forward)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Enter it around the call of the compiled function"):
            torch.compile(function, backend="eager", fullgraph=True)(x)
        assert torch.equal(torch.compile(function, backend="eager")(x), inside(x))
    assert not torch.equal(inside(x), model(x))


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "tensorwise", "rowwise"])
def test_compiled_code_for_a_gpu_reads_each_tensor_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator casts x and x.T, as eager code does there; the bits and the histories stay those of eager code."""
    monkeypatch.setattr(casts, "_casts_as", lambda x: "cuda")
    monkeypatch.setattr(casts, "_CPU_CASTS", (reference,))
    called: list[str] = []
    monkeypatch.setattr(triton_quantize, "supports_quantize", lambda *a: called.append("both") or "not on a CPU")
    eager, model = network(recipe), network(recipe)
    expected = train(eager, eager)
    called.clear()
    assert_same(train(model, compiled(model)), expected)
    assert called


@pytest.mark.parametrize("recipe, casts_of_x", [("tensorwise", ["quantize"]), ("mxfp8", ["quantize_both"])])
def test_compiled_code_for_a_cpu_casts_as_eager_code_does(recipe: str, casts_of_x: list[str]) -> None:
    """One operator for x and x.T; where one cast serves both, that one."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        for part in graph.modules():
            seen.extend(str(node.target) for node in part.graph.nodes)  # type: ignore[union-attr]
        return graph

    model = nn.Sequential(nn.Linear(64, 96)).bfloat16()
    ottava.convert(model, recipe)
    torch.compile(model, backend=backend, fullgraph=True)(data(0)).sum().backward()
    called = [name.split(".")[1] for name in seen if name.startswith("ottava.")]
    assert [name for name in called if name.startswith("quantize")] == 3 * casts_of_x  # x, the weight, dy
    assert sorted(set(called) - set(casts_of_x)) == ["column_sums", "gemm"]
