"""A Linear is torch's own in every way but its three GEMMs: state, copies, dtypes, devices, autocast, threads."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.engine.functional import Call, build_ahead, linear
from ottava.nn.layer import Linear
from ottava.recipe import Recipe
from same_tensors import assert_same
from sweep import sweep

SHAPES = ((64,), (2, 3, 64), (0, 64), (2, 0, 2, 64))


def make(recipe: Recipe | str, dtype: torch.dtype = torch.bfloat16, bias: bool = True, k: int = 64) -> Linear:
    torch.manual_seed(0)
    return Linear(k, 40, bias=bias, dtype=dtype, recipe=recipe)


def data(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def step(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """y and all gradients of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(4)  # for rotations, which the forward draws
    y = layer(x)
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def plain(layer: Linear) -> nn.Linear:
    """torch's layer with the same parameters."""
    other = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype)
    other.load_state_dict(dict(layer.named_parameters()))
    return other


@sweep(shape=SHAPES, bias=[True, False])
def test_bf16_recipe_is_torchs_linear_bit_for_bit(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    """Also its gradients; in fp32 and fp16 too: high precision means whatever the input is."""
    layer = make("bf16", dtype, bias)
    assert_same(step(layer, data(*shape, dtype=dtype)), step(plain(layer), data(*shape, dtype=dtype)))


@pytest.mark.filterwarnings("ignore:recipe .* is running on float32")
@sweep(shape=SHAPES)
def test_leading_dimensions_are_rows(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """(..., K) gives what (M, K) gives, and y, dx, dw, db have torch's shapes and dtypes; with a bias and without."""
    bias = (SHAPES.index(shape) + (dtype == torch.bfloat16)) % 2 == 0
    layer, x = make(recipe, dtype, bias), data(*shape, dtype=dtype)
    got, expected = step(layer, x), step(plain(layer), x)
    assert {n: (t.shape, t.dtype) for n, t in got.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    flat = step(make(recipe, dtype, bias), x.reshape(-1, 64))
    assert_same(got, {n: t.reshape(got[n].shape) for n, t in flat.items()})


@sweep
def test_is_torchs_linear_to_everyone(recipe: Recipe) -> None:
    """isinstance, parameter names, init, extra attributes: optimizers, PEFT, FSDP see what they know."""
    layer = make(recipe)
    torch.manual_seed(0)
    other = nn.Linear(64, 40, dtype=torch.bfloat16)
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)
    assert repr(layer) == f"Linear(in_features=64, out_features=40, bias=True, recipe={recipe.name})"
    layer.reset_parameters()


# --- state dict -----------------------------------------------------------------------------------------------------


def test_a_passing_delayed_autocast_is_cleared_by_converting_again() -> None:
    """autocast("delayed") on a tensorwise layer grows buffers; converting to a stateless one gives torch's keys."""
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, "tensorwise")
    with ottava.autocast("delayed"):
        step(model, data(8, 64))
    assert len(model.state_dict()) == 2 + 15
    ottava.convert(model, "rowwise")
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


# --- copies, dtypes, devices ----------------------------------------------------------------------------------------


def through_torch_save(layer: Linear) -> Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Linear)
    return loaded


@sweep(clone=[copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save])
def test_a_clone_computes_the_same_bits(recipe: Recipe, clone: Callable[[Linear], Linear]) -> None:
    """Also after a step, when the layer remembers its last call: a clone has run nothing."""
    layer = make(recipe)
    step(layer, data(8, 64))
    twin = clone(layer)
    assert (twin.recipe, twin.resolved, twin.name, twin.last_call) == (layer.recipe, layer.resolved, layer.name, None)
    assert layer.last_call is not None
    assert twin.weight is not layer.weight
    x = data(8, 64)
    assert_same(step(twin, x), step(layer, x))


class Operations(TorchDispatchMode):
    """Writes down every operation that reaches torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@sweep
def test_a_clone_runs_the_same_operations(recipe: Recipe) -> None:
    """Its formats are other objects with the same facts: E4M3's fast decoding must not be lost to a copy."""
    layer, x = make(recipe), data(8, 64)
    ran = []
    for module in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with Operations() as operations:
            module(x)
        ran.append(operations.names)
    assert ran[0] == ran[1] == ran[2]


@pytest.mark.filterwarnings("ignore:recipe .* is running on float32")
@sweep(dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_a_change_of_dtype_equals_being_made_in_it(recipe: Recipe, dtype: torch.dtype) -> None:
    """fp32 -> .to(dtype): parameters follow, the state of delayed scaling stays fp32."""
    layer = make(recipe, torch.float32).to(dtype)
    other = Linear(64, 40, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        other.weight.copy_(make(recipe, torch.float32).weight)
        other.bias.copy_(make(recipe, torch.float32).bias)
    x = data(8, 64, dtype=dtype)
    for _ in range(2):
        assert_same(step(layer, x), step(other, x))
        ottava.ScalingState(layer).update()
        ottava.ScalingState(other).update()
    assert {b.dtype for n, b in layer.named_buffers() if not n.endswith("_count")} <= {torch.float32}


@sweep
def test_made_on_meta_and_filled_later(recipe: Recipe) -> None:
    """The way of large models: meta, to_empty, load; nothing uninitialized is left in a scale."""
    source = make(recipe)
    layer = Linear(64, 40, device="meta", dtype=torch.bfloat16, recipe=recipe)
    assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
    layer.to_empty(device="cpu")
    layer.load_state_dict(plain(source).state_dict(), strict=True)
    assert_same(step(layer, data(8, 64)), step(source, data(8, 64)))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 40, dtype=torch.bfloat16))
        ottava.convert(model, recipe)
    model.load_state_dict({f"0.{k}": v for k, v in source.state_dict().items()}, assign=True)
    fresh = make(recipe)
    assert_same(step(model[0], data(8, 64)), step(fresh, data(8, 64)))


def test_shared_modules_and_functional_call_work() -> None:
    """One layer called twice adds its gradients up; torch.func runs it on other parameters."""
    layer = Linear(64, 64, dtype=torch.bfloat16, recipe="tensorwise")
    x = data(8, 64)
    layer(layer(x)).sum().backward()
    assert layer.weight.grad is not None
    doubled = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    got = torch.func.functional_call(layer, doubled, (x,))
    other = copy.deepcopy(layer)
    other.load_state_dict(doubled)
    assert torch.equal(got, other(x))


# --- torch.autocast and float32 -------------------------------------------------------------------------------------


@sweep(low=[torch.bfloat16, torch.float16])
def test_mixed_precision_follows_torch(recipe: Recipe, low: torch.dtype) -> None:
    """FP32 parameters under torch.autocast: y in the low dtype, dx, dw, db in FP32, also with backward outside."""
    layer, x = make(recipe, torch.float32), data(8, 64, dtype=torch.float32).requires_grad_()
    other, x2 = plain(layer), x.detach().clone().requires_grad_()
    with warnings.catch_warnings(), torch.autocast("cpu", low):
        warnings.simplefilter("error")  # this is the remedy, nobody should be warned
        y, expected = layer(x), other(x2)
    y.sum().backward()
    expected.sum().backward()
    assert (y.dtype, x.grad.dtype) == (expected.dtype, x2.grad.dtype) == (low, torch.float32)  # type: ignore[union-attr]
    for name, p in layer.named_parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32, name
    if recipe.name == "bf16":
        assert torch.equal(y, expected)
        assert torch.equal(layer.weight.grad, other.weight.grad)  # type: ignore[arg-type]


@sweep
def test_mixed_precision_is_casting_by_hand(recipe: Recipe) -> None:
    """Under torch.autocast the layer does what the formulas do on x.bfloat16(), and no GEMM inside is cast again."""
    layer, x = make(recipe, torch.float32), data(8, 64, dtype=torch.float32)
    by_hand = copy.deepcopy(layer)
    results = []
    for module, around in ((layer, True), (by_hand, False)):
        torch.manual_seed(4)
        leaf = x.clone().requires_grad_()
        if recipe.name == "bf16" and not around:  # torch's own linear takes one dtype only
            module = copy.deepcopy(module).bfloat16()
        if around:
            with torch.autocast("cpu", torch.bfloat16):
                y = module(leaf)
        else:
            y = linear(leaf.bfloat16(), module.weight, module.bias, Call(module.quantizers, module.resolved))
        torch.manual_seed(5)
        y.backward(torch.ones_like(y) / 3)
        results.append([y.detach(), leaf.grad, module.weight.grad.float(), module.bias.grad.float()])
    assert [torch.equal(a, b) for a, b in zip(*results, strict=True)][:3] == [True] * 3


@pytest.mark.parametrize("recipe", ["bf16", "averis", "rowwise"])
def test_what_has_no_rows_is_refused(recipe: str) -> None:
    """A number, also of a vmap, and a sparse matrix where it would be cast."""
    layer = ottava.nn.Linear(16, 8, recipe=recipe).bfloat16()
    number = torch.tensor(1.0, dtype=torch.bfloat16)
    for call in (lambda: layer(number), lambda: torch.func.vmap(layer)(number.expand(3))):
        with pytest.raises(ValueError, match=r"got an input of shape \(\) .*; needs a dense one of \(\.\.\., 16\)"):
            call()
    if recipe != "bf16":
        with pytest.raises(ValueError, match=r"torch\.sparse_coo; needs a dense one"):
            layer(torch.eye(16, dtype=torch.bfloat16).to_sparse())


@pytest.mark.filterwarnings("ignore:recipe .* is running on float32")
def test_dtypes_that_torch_does_not_mix_are_refused() -> None:
    """Outside torch.autocast, whichever of the three has the other dtype; both dtypes are named."""
    half, full = torch.bfloat16, torch.float32
    for input, weight, bias in itertools.product((half, full), repeat=3):
        layer = make("tensorwise")
        layer.weight.data, layer.bias.data = layer.weight.data.to(weight), layer.bias.data.to(bias)
        x = data(8, 64, dtype=input)
        if input == weight == bias:
            assert layer(x).dtype == input
            continue
        with pytest.raises(TypeError, match=r"got torch.* input for a torch.*torch\.autocast") as refused:
            layer(x)
        assert all(str(dtype) in str(refused.value) for dtype in (half, full))
        with pytest.raises(RuntimeError, match="same dtype"):
            nn.functional.linear(x, layer.weight, layer.bias)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16


@sweep
def test_backward_inside_torch_autocast_changes_nothing(recipe: Recipe) -> None:
    """torch warns against it, people do it: the FP32 sums of the emulation must not become BF16."""
    grads = []
    for inside in (True, False):
        layer, x = make(recipe, torch.float32), data(8, 64, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y.backward(torch.ones_like(y) / 3)
        grads.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]


@sweep
def test_float32_inputs_are_warned_of_once_with_the_remedy(recipe: Recipe) -> None:
    """Seed of the rule: TransformerEngine #1119, 104 ms against 44.6 ms. High precision has nothing to warn of."""
    layer, x = make(recipe, torch.float32), data(8, 64, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            layer(x)
    texts = [str(w.message) for w in caught]
    if recipe.quantized:
        assert len(texts) == 1
        assert "torch.autocast(device_type, torch.bfloat16)" in texts[0]
        assert "float32" in texts[0]
    else:
        assert texts == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(recipe)(data(8, 64))
        make(recipe, torch.float32).half()(data(8, 64, dtype=torch.float16))


# --- hooks, threads, gradients --------------------------------------------------------------------------------------


def test_the_record_of_the_last_call_keeps_no_tensor_alive() -> None:
    """A graph that is dropped, with or without its backward, is gone, while the receipt stays."""
    layer = make("tensorwise")
    for backward in (True, False):
        x = data(8, 64).requires_grad_()
        alive = weakref.ref(x)
        y = layer(x)
        if backward:
            y.sum().backward()
        del x, y
        assert alive() is None
        assert layer.last_call is not None
        assert set(layer.last_call.records) == ({"fprop", "dgrad", "wgrad"} if backward else {"fprop"})


def test_kernels_are_built_while_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment a layer on a CPU gets a recipe, by a constructor or `convert`; in BF16 only what multiplies."""
    begun: list[tuple[torch.dtype, bool]] = []
    monkeypatch.setattr("ottava.nn.layer.build_ahead", lambda dtype, casts: begun.append((dtype, casts)))
    with torch.device("meta"):
        make("tensorwise")
    assert begun == []
    make("tensorwise")
    make("bf16")
    ottava.convert(nn.Linear(64, 64), "mxfp8")
    assert begun == [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
    names: list[str] = []
    monkeypatch.setattr("ottava.engine.functional.native_build.begin", lambda name, dtype=None: names.append(name))
    build_ahead.__wrapped__(torch.bfloat16, casts=False)
    assert names == ([] if torch.accelerator.is_available() else ["gemm", "sums", "pointwise"])
