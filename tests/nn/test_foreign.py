"""torch's attention, GPT-2's Conv1D and Hugging Face's experts as layers: their bits, their projections in FP8."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from foreign_samples import Conv1D
from ottava.nn.foreign import StackedExperts, TorchAttention, TurnedLinear, layers_of, parts_of

E, HEADS, L, S, B = 64, 4, 6, 9, 2
HOW = (
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 48, "vdim": 40},
    {"kdim": 48, "vdim": 40, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
)


def converted(module: nn.Module, recipe: str) -> Any:
    twin = copy.deepcopy(module)
    ottava.convert(twin, recipe, filter=lambda name, layer: True)
    return twin


def masks(own: int, other: int, batch: int) -> list[dict[str, Any]]:
    causal = torch.ones(own, other, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, other, dtype=torch.bool)
    padding[0, -2:] = True
    return [
        {},
        {"attn_mask": causal, "is_causal": True},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "key_padding_mask": padding},
        {"attn_mask": torch.randn(batch * HEADS, own, other)},
        {"attn_mask": torch.randn(own, other), "key_padding_mask": torch.randn(batch, other)},
    ]


def test_in_high_precision_it_is_torchs_to_the_bit() -> None:
    """Every constructor argument, self and cross attention, masks, weights or none, batch first or not; gradients."""
    for how, batch_first, alike in product(HOW, (False, True), (True, False)):
        if alike and "kdim" in how:
            continue
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(E, HEADS, batch_first=batch_first, **how)
        ours = converted(theirs, "bf16")
        assert isinstance(ours, TorchAttention)
        assert isinstance(ours, nn.MultiheadAttention)
        size = S if not alike else L
        query = torch.randn(B, L, E)
        memory = query if alike else torch.randn(B, S, how.get("kdim", E))
        value = query if alike else memory if "vdim" not in how else torch.randn(B, S, how["vdim"])
        given = [x if batch_first else x.transpose(0, 1) for x in (query, memory, value)]
        given = [given[0]] * 3 if alike else [given[0], given[1], given[1] if value is memory else given[2]]
        for mask, need in product(masks(L, size, B), ({"need_weights": False}, {}, {"average_attn_weights": False})):
            if mask.get("is_causal") and "add_bias_kv" in how:
                continue  # torch's hint and its longer keys do not go together
            y, weights = theirs(*given, **mask, **need)
            own, own_weights = ours(*given, **mask, **need)
            assert torch.equal(y, own)
            assert (weights is None) == (own_weights is None)
            assert weights is None or torch.equal(weights, own_weights)
        y.square().sum().backward()
        own.square().sum().backward()
        for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert a.grad is not None
            # of cross attention torch multiplies the same matrices; sums of gradients may be in another order
            assert float((a.grad - b.grad).abs().max()) <= 64 * 2.0**-24 * float(a.grad.abs().max()), name


def test_one_sequence_without_a_batch_and_three_inputs() -> None:
    theirs = nn.MultiheadAttention(E, HEADS)
    ours = converted(theirs, "bf16")
    q, k, v = torch.randn(L, E), torch.randn(S, E), torch.randn(S, E)
    mask = torch.zeros(S, dtype=torch.bool)
    mask[0] = True
    for one in (theirs(q, q, q)[0] - ours(q, q, q)[0], theirs(q, k, v)[0] - ours(q, k, v)[0]):
        assert not one.any()
    for a, b in zip(theirs(q, k, k, key_padding_mask=mask), ours(q, k, k, key_padding_mask=mask), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "delayed"])
def test_an_encoder_and_a_decoder_run_wholly_in_fp8(name: str) -> None:
    """Training and evaluation: torch's fused operators, which go past every layer, stay off; keys stay."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
    model = nn.Transformer(E, HEADS, 2, 1, 128, **options).bfloat16()
    keys = list(model.state_dict())
    report = ottava.convert(model, name)
    assert not report.skipped
    assert not report.outside
    assert [key for key in model.state_dict() if ".quantizers." not in key] == keys
    source, target = (torch.randn(B, n, E, dtype=torch.bfloat16) for n in (S, L))
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -3:] = True
    y = model(source, target, src_key_padding_mask=padding)
    y.float().sum().backward()
    ottava.assert_fp8(model, 1.0)
    model.eval()
    with torch.no_grad():
        again = model(source, target, src_key_padding_mask=padding)
    seen = [row for row in ottava.receipt(model, training=False).rows if row.gemm == "fprop" and row.fp8]
    assert (
        len(seen) == 2 * 4 + 7
    )  # two linears, in_proj and out_proj; a decoder layer has q and kv of the memory besides
    if name != "delayed":  # dropout is off, and scales are those of the tensors
        assert torch.equal(again, y)


def test_what_cannot_be_taken_is_named() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Tensor) -> Any:  # type: ignore[override]
            return super().forward(*args)

    model = nn.ModuleDict({"own": Own(E, HEADS), "part": nn.MultiheadAttention(E, HEADS)})
    report = ottava.convert(model, "tensorwise", filter=lambda name, layer: "in_proj" in name or "no")
    assert report.skipped["own.out_proj"] == "read by an attention whose class has a forward of its own"
    assert report.skipped["part.out_proj"] == "no"
    assert dict(report.outside) == {
        "own.in_proj_weight": "multiplied by Own itself, a class that convert does not know"
    }
    assert type(model["part"].out_proj) is not ottava.nn.Linear
    x = torch.randn(L, B, E)
    with pytest.raises(RuntimeError, match="is_causal is a hint"):
        model["part"](x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(2, E)])
    with pytest.raises(TypeError, match="got a nested tensor"):
        model["part"](nested, nested, nested)
    assert list(parts_of(nn.MultiheadAttention(E, HEADS, kdim=8, bias=False))) == ["q_proj", "k_proj", "v_proj"]


class Stacked(nn.Module):
    """StackedExperts as transformers 5 has them: what the class says about its weights, and a loop over experts."""

    def __init__(self, turned: bool = False, bias: bool = False, gate: bool = True, of: int = 4) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.has_bias, self.has_gate = of, turned, bias, gate
        self.is_concatenated, self.has_post_expert_norm, self._is_expert_parallel = True, False, False
        wide, self.up = (96, "gate_up_proj") if gate else (48, "up_proj")
        for name, n, k in ((self.up, wide, 64), ("down_proj", 64, 48)):
            self.register_parameter(name, nn.Parameter(torch.randn(of, k, n) if turned else torch.randn(of, n, k)))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(of, n)))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _linear(self, x: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return F.linear(x, weight.T if self.is_transposed else weight, bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            h = self._linear(hidden_states[token], self.up, expert)
            h = self._linear(self._apply_gate(h) if self.has_gate else self.act_fn(h), "down_proj", expert)
            total.index_add_(0, token, h * top_k_weights[token, place, None])
        return total


def test_conv1d_becomes_a_layer_and_stays_what_it_was(recipe: ottava.Recipe) -> None:
    """Parameters, keys, class and bits in high precision; in FP8 the bits of a Linear with the weight turned."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if recipe.casts else torch.float32
    model = nn.ModuleDict({"c_attn": Conv1D(96, 64), "c_proj": Conv1D(64, 96)}).to(dtype)
    before, parameters, keys = copy.deepcopy(model), list(model.parameters()), list(model.state_dict())
    report = ottava.convert(model, recipe.override("c_proj", "bf16"))
    assert report.converted == ("c_attn", "c_proj")
    assert not report.outside
    layer = model["c_attn"]
    assert isinstance(layer, Conv1D)
    assert isinstance(layer, TurnedLinear)
    assert (layer.nf, layer.nx, layer.in_features, layer.out_features) == (96, 64, 64, 96)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [key for key in model.state_dict() if ".quantizers." not in key] == keys
    linear = ottava.nn.Linear(64, 96, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.T)
        linear.bias.copy_(layer.bias)
    x = torch.randn(2, 5, 64, dtype=dtype)
    assert torch.equal(model["c_proj"](x.repeat(1, 1, 2)[..., :96]), before["c_proj"](x.repeat(1, 1, 2)[..., :96]))
    results = []
    for one in (layer, linear):
        torch.manual_seed(1)
        own = x.clone().requires_grad_()
        y = one(own)
        y.square().sum().backward()
        assert own.grad is not None
        results.append((y, own.grad, one.weight.grad, one.bias.grad))
    (y, dx, dw, db), (*wanted, d_bias) = results
    near = 2.0**-7 if recipe.name == "nvfp4" else 0.0  # two-level GEMMs decode, and torch's sums depend on strides
    if not recipe.casts:
        near = 4 * 64 * 2.0**-24  # so do its sums of 64 numbers in FP32, and on addresses; 4: sum |x w| over max |y|
    for a, b in zip((y, dx, dw.T), wanted, strict=True):
        assert float((a - b).abs().max()) <= near * float(b.abs().max())
    assert torch.equal(db, d_bias)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin["c_attn"]) is type(layer)
        assert torch.equal(twin["c_attn"](x), layer(x)) or recipe.predicted


def test_a_conv1d_that_does_something_else_is_left_alone() -> None:
    class Other(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    Other.__name__ = "Conv1D"
    assert parts_of(Other(96, 64)) == {}
    assert list(parts_of(Conv1D(96, 64))) == [""]
    assert list(parts_of(Conv1D(96, 64).to("meta"))) == [""]
    assert parts_of(nn.Conv1d(4, 4, 1)) == {}
    replaced = Conv1D(96, 64)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert parts_of(replaced) == {}


def test_experts_become_grouped_gemms() -> None:
    """Turned or not, with and without biases and gates: in fp32 the bits of their loop, in FP8 all of it counted."""
    for turned, bias, gate in ((False, False, True), (True, True, True), (False, True, False)):
        torch.manual_seed(0)
        theirs = Stacked(turned, bias, gate)
        x, index = torch.randn(30, 64), torch.stack([torch.randperm(4)[:3] for _ in range(30)])
        probs = torch.rand(30, 3)
        ours = copy.deepcopy(theirs)
        parameters, keys = list(ours.parameters()), list(ours.state_dict())
        assert len(ottava.convert(ours, "bf16").converted) == 8
        assert isinstance(ours, StackedExperts)
        assert isinstance(ours, Stacked)
        results = []
        for one in (theirs, ours):
            own, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
            y = one(own, index, top_k_weights=weights)
            y.square().sum().backward()
            results.append([y, own.grad, weights.grad, *(p.grad for p in one.parameters())])
        assert torch.equal(results[0][0], results[1][0])
        for a, b in zip(*results, strict=True):
            assert float((a - b).abs().max()) <= 128 * 2.0**-24 * float(b.abs().max())
        ottava.convert(ours, "blockwise")
        assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))
        assert list(ours.state_dict()) == keys
        with pytest.warns(UserWarning, match="float32 inputs"):
            ours(x, index, probs).sum().backward()
        ottava.assert_fp8(ours, 1.0)
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(twin(x, index, probs), ours(x, index, probs))


def test_experts_that_do_not_say_how_or_do_more_are_named() -> None:
    silent, normed = Stacked(), Stacked()
    del silent.is_transposed
    normed.has_post_expert_norm = True
    model = nn.ModuleDict({"silent": silent, "normed": normed, "linear": nn.Linear(64, 64)})
    report = ottava.convert(model, "tensorwise")
    reason = "a stack of 4 matrices, multiplied by Stacked itself, a class that convert does not know"
    assert dict(report.outside) == {f"{n}.{w}_proj": reason for n in ("silent", "normed") for w in ("gate_up", "down")}
    assert list(layers_of(model)) == ["linear"]


def test_a_refused_expert_runs_in_high_precision_and_says_so() -> None:
    model = nn.Sequential(Stacked().bfloat16())
    report = ottava.convert(model, "mxfp8", filter=lambda name, layer: "too hot" if name.endswith(".2") else None)
    assert {name.split("_proj")[0] for name in report.skipped} == {"0.gate_up", "0.down"}
    model[0](torch.randn(9, 64).bfloat16(), torch.arange(9)[:, None] % 4, torch.ones(9, 1).bfloat16()).sum().backward()
    fp8 = {row.layer: row.fp8 for row in ottava.receipt(model).rows if row.gemm == "fprop"}
    assert len(fp8) == 8
    assert all(ran != name.endswith(".2") for name, ran in fp8.items())


def test_a_head_tied_to_an_embedding_is_converted_if_its_filter_says_so() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(96, 64), "out": nn.Linear(64, 96, bias=False)}).bfloat16()
    model["out"].weight = model["embed"].weight
    assert ottava.convert(model, "bf16").skipped == {"out": "weight tied to an embedding"}
    assert ottava.convert(model, "tensorwise", filter=lambda name, layer: True).converted == ("out",)
    model["out"](model["embed"](torch.arange(5))).sum().backward()
    assert model["out"].weight is model["embed"].weight
    ottava.assert_fp8(model, 1.0)


def _tiny(kind: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(**shape, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    else:
        shape |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        more = {
            "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
            "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 3, "head_dim": 32},
            "gpt_oss": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
        }
        config = transformers.AutoConfig.for_model(kind, **shape, **more[kind])
        config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if kind != "gpt2" and not any(parts_of(module) for module in model.modules()):
        pytest.skip("a transformers whose experts do not say how they multiply")
    return model, config


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_real_models(kind: str) -> None:
    """In high precision their own logits to the bit; under a recipe nothing but head and routers is left out."""
    model, _ = _tiny(kind)
    tokens = torch.randint(0, 64, (2, 11))
    ours = copy.deepcopy(model)
    keys = list(ours.state_dict())
    ottava.convert(ours, "bf16", filter=lambda name, layer: True)
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, model(tokens).logits)
    ours = copy.deepcopy(model).bfloat16()
    report = ottava.convert(ours, "tensorwise")
    assert {name.rpartition(".")[2] for name in report.skipped} == {"lm_head"}
    assert all("router" in reason for reason in report.outside.values())
    assert list(ours.state_dict()) == keys
    ours(tokens, labels=tokens).loss.backward()
    rows = ottava.receipt(ours).rows
    high = {row.layer.rpartition(".")[2] for row in rows if not row.fp8 and row.weight}
    assert high <= {"lm_head", "weight"}
    assert ottava.receipt(ours).fp8_fraction > 0.9
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)
