"""TransformerEngine's modules against ottava's own layers, bit for bit, and against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common import recipe as recipes
from ottava.compat.transformer_engine.pytorch import module
from sweep import sweep

RECIPES: tuple[recipes.Recipe, ...] = (recipes.DelayedScaling(), recipes.Float8CurrentScaling())
RECIPES += (recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling())


def run(model: nn.Module, x: Tensor, *more: Any) -> tuple[Tensor, ...]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf, *more)
    y.float().square().sum().backward()
    assert leaf.grad is not None
    return y, leaf.grad, *(p.grad for _, p in sorted(model.named_parameters()))  # type: ignore[misc]


def test_each_is_the_layer_of_ottava() -> None:
    """Output and every gradient to the bit, under four recipes; the tanh formula of GELU among them."""
    torch.manual_seed(0)
    x = torch.randn(48, 64).bfloat16()
    pairs: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (te.Linear(64, 32), ottava.nn.Linear(64, 32), ()),
        (te.LayerNormLinear(64, 32, normalization="RMSNorm"), ottava.nn.NormLinear(64, 32, norm="rmsnorm"), ()),
        (te.LayerNormMLP(64, 96), ottava.nn.NormMLP(64, 96, activation="gelu_tanh"), ()),
        (
            te.LayerNormMLP(64, 96, activation="swiglu", zero_centered_gamma=True, checkpoint=True),
            ottava.nn.NormMLP(64, 96, activation="swiglu", zero_centered_gamma=True, save="recompute"),
            (),
        ),
        (te.GroupedLinear(3, 64, 32), ottava.nn.GroupedLinear(3, 64, 32), ([20, 0, 28],)),
    ]
    for theirs, ours, more in pairs:
        theirs.bfloat16(), ours.bfloat16()
        own, grouped = dict(ours.named_parameters()), isinstance(theirs, te.GroupedLinear)
        assert own.keys() == {name.rpartition("groups.")[2].lstrip("012.") for name, _ in theirs.named_parameters()}
        for name, b in theirs.named_parameters():
            where = own[name.lstrip("groups.012")].data[int(name[7])] if grouped else own[name].data
            where.copy_(b.data)
        for recipe in RECIPES:
            with te.autocast(recipe=recipe):
                expected = run(ours, x, *more)
                got = run(theirs, x, *more)
            if grouped:  # a parameter for each group: y, dx, and pairs of dw and db
                got = [*got[:2], torch.stack(got[2::2]), torch.stack(got[3::2])]
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (type(theirs), recipe)


def test_outside_an_autocast_they_are_torch() -> None:
    x = torch.randn(8, 32)
    layer = te.Linear(32, 16)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    norm = te.RMSNorm(32, zero_centered_gamma=True)
    assert torch.allclose(norm(x), nn.functional.rms_norm(x, (32,), eps=1e-5), atol=1e-6)
    assert torch.allclose(te.LayerNorm(hidden_size=32)(x), nn.functional.layer_norm(x, (32,)), atol=1e-6)
    mlp = te.LayerNormMLP(32, 64, activation="srelu", bias=False, normalization="RMSNorm")
    hidden = nn.functional.linear(nn.functional.rms_norm(x, (32,), eps=1e-5), mlp.fc1_weight).relu().square()
    assert torch.allclose(mlp(x), nn.functional.linear(hidden, mlp.fc2_weight), rtol=1e-5, atol=1e-5)


def test_the_functions_of_fused_kernels_are_those_of_autograd() -> None:
    x, dy = torch.randn(4, 64).requires_grad_(), torch.randn(4, 64)
    y, r = module.l2normalization_fwd_fused(x, 1e-6)
    wide = x.detach().double().requires_grad_()
    (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).backward(dy.double())
    assert torch.equal(module.L2Normalization(seq_length=8)(x), y)
    with pytest.raises(TypeError, match="L2Normalization: unknown argument 'epsilon'"):
        module.L2Normalization(epsilon=1e-3)
    dx = module.l2normalization_backward_fused(dy, x, r, 1e-6).double()
    torch.testing.assert_close(dx, wide.grad, rtol=0, atol=16 * torch.finfo(torch.float32).eps)
    nn.functional.gelu(x, approximate="tanh").backward(dy)
    assert torch.equal(module.dgelu_fused_(dy, x.detach()), x.grad)


def test_biases_and_normed_rows_can_be_asked_for() -> None:
    x = torch.randn(8, 32)
    layer = te.Linear(32, 16, return_bias=True)
    layer.bias.data.fill_(1.0)
    y, bias = layer(x)
    assert torch.equal(y + bias, nn.functional.linear(x, layer.weight) + layer.bias)
    assert layer.bias is bias
    both = te.LayerNormLinear(32, 16, return_bias=True, return_layernorm_output=True)
    y, bias, rows = both(x)
    assert torch.allclose(rows, nn.functional.layer_norm(x, (32,)), atol=1e-6)
    assert torch.equal(y, nn.functional.linear(rows, both.weight))
    y, rows = te.LayerNormLinear(32, 16, return_layernorm_output=True)(x)
    assert (y.shape, rows.shape) == ((8, 16), (8, 32))


def test_weights_start_as_theirs() -> None:
    """Normal, a standard deviation of 0.023, biases 0; or by a function of the caller's."""
    layer = te.Linear(256, 256)
    assert 0.022 < float(layer.weight.std()) < 0.024
    assert not layer.bias.any()
    constant = te.LayerNormMLP(8, 8, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_)
    assert constant.fc1_weight.eq(1).all()
    assert constant.fc2_weight.eq(0).all()
    meta = te.TransformerLayer(32, 64, 4, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_wrong_arguments_say_what_is_needed() -> None:
    for make, error, words in (
        (lambda: te.LayerNorm(), TypeError, "got no size"),
        (lambda: te.LayerNormLinear(8, 8, normalization="Layernorm"), ValueError, "did you mean 'LayerNorm'"),
        (lambda: te.LayerNormMLP(8, 8, activation="gelo"), ValueError, "did you mean 'gelu'"),
        (lambda: te.LayerNormMLP(8, 8, activation_params={"x": 1}), NotImplementedError, "limit and alpha"),
        (lambda: te.RMSNorm(8, parallel_mode="row"), NotImplementedError, "parallel_mode='row'"),
    ):
        with pytest.raises(error, match=words):
            make()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="this machine has no CUDA device"):
            te.Linear(8, 8, device="cuda")
    clamped = te.LayerNormMLP(8, 8, activation="clamped_swiglu", activation_params={"limit": 2.0, "alpha": 1.0})
    assert clamped(torch.ones(1, 8)).shape == (1, 8)


def _takes(name: str, module: Any, x: Tensor) -> Any:
    if name == "DotProductAttention":
        q = x.unflatten(-1, (4, 16))
        return module(q, q, q)
    if name == "GroupedLinear":
        return module(x.flatten(0, 1), [4, 4])
    return module(x, encoder_output=x) if name == "decoder" else module(x)


MAKE: dict[str, Callable[..., Any]] = {
    "Linear": lambda **p: te.Linear(64, 64, return_bias=True, **p),
    "LayerNormLinear": lambda **p: te.LayerNormLinear(64, 64, return_bias=True, return_layernorm_output=True, **p),
    "LayerNormMLP": lambda **p: te.LayerNormMLP(64, 96, **p),
    "GroupedLinear": lambda **p: te.GroupedLinear(2, 64, 64, **p),
    "LayerNorm": lambda **p: te.LayerNorm(64, **p),
    "RMSNorm": lambda **p: te.RMSNorm(64, **p),
    "DotProductAttention": lambda **p: te.DotProductAttention(4, 16),
    "MultiheadAttention": lambda **p: te.MultiheadAttention(64, 4, attention_dropout=0.0, input_layernorm=True, **p),
    "TransformerLayer": lambda **p: te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **p),
    "BERT": lambda **p: te.TransformerLayer(
        64, 96, 4, output_layernorm=True, apply_residual_connection_post_layernorm=True, **p
    ),
    "decoder": lambda **p: te.TransformerLayer(64, 96, 4, layer_type="decoder", drop_path_rate=0.1, **p),
}


@sweep(module=MAKE, params=[torch.float32, torch.bfloat16], x=[torch.float32, torch.bfloat16], fp8=[False, True])
def test_under_amp_every_output_has_the_autocast_dtype_and_gradients_their_owners(
    module: str, params: torch.dtype, x: torch.dtype, fp8: bool
) -> None:
    """TransformerEngine casts what comes in to the dtype of torch.autocast, also the stream of a TransformerLayer."""
    layer = MAKE[module](params_dtype=params, device="cpu")
    for amp in (torch.bfloat16, torch.float16):
        stream = torch.randn(4, 2, 64, dtype=x, requires_grad=True)
        with torch.autocast("cpu", amp), te.autocast(enabled=fp8, recipe=recipes.Float8CurrentScaling()):
            out = _takes(module, layer, stream)
        outs = out if isinstance(out, tuple) else (out,)
        assert {y.dtype for y in outs} == {amp}, (amp, [y.dtype for y in outs])
        sum(y.float().square().mean() for y in outs).backward()
        assert stream.grad is not None
        assert stream.grad.dtype == x
        assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} <= {params}
        layer.zero_grad()


def test_outside_amp_a_norm_has_its_weights_dtype_and_an_fp32_stream_is_saved_once_in_amps() -> None:
    for norm in (te.LayerNorm, te.RMSNorm):
        for params in (torch.float32, torch.bfloat16):
            for x in (torch.float32, torch.bfloat16):
                assert norm(8, params_dtype=params, device="cpu")(torch.randn(2, 8, dtype=x)).dtype == params
    layer, kept = te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"), set()
    saves = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add((t.dtype, tuple(t.shape))) or t, lambda t: t)
    with torch.autocast("cpu", torch.bfloat16), saves:
        layer(torch.randn(16, 2, 64))
    wide = {dtype for dtype, shape in kept if shape in ((16, 2, 64), (32, 64))}
    assert wide == {torch.bfloat16}


def test_groups_take_rows_in_several_dimensions() -> None:
    layer, x = te.ops.GroupedLinear(2, 8, 4, dtype=torch.bfloat16), torch.randn(5, 1, 8).bfloat16()
    flat = [nn.functional.linear(x[:2, 0], layer.weight0, layer.bias0), nn.functional.linear(x[2:, 0], layer.weight1)]
    assert torch.equal(layer(x, torch.tensor([2, 3])), torch.cat(flat)[:, None])
    assert (layer.num_groups, layer.use_bias, te.GroupedLinear(2, 8, 4, bias=False).use_bias) == (2, True, False)
