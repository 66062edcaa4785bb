"""Conversion in place: what stays the same object, what is left alone and why; weights in FP8 from the beginning."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ottava
from foreign_samples import Conv1D
from ottava.nn.convert import keep_first_last_bf16, plan_model, weights_outside
from ottava.nn.layer import Linear
from ottava.recipe import Recipe, default_filter, get_recipe
from ottava.weights.parameter import is_quantized_weight


class Mlp(nn.Module):
    """A gated MLP with the names of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, tie: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 64)
        self.layers = nn.ModuleList(Mlp() for _ in range(blocks))
        self.proj = nn.Linear(64, 48, bias=False)
        if tie:
            self.proj.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.proj(x)


class OwnAttention(nn.MultiheadAttention):
    """A subclass, of whose forward nobody knows anything."""


def model(**options: bool | int) -> Model:
    torch.manual_seed(0)
    return Model(**options).bfloat16()  # type: ignore[arg-type]


TOKENS = torch.arange(32).reshape(2, 16)
NAMES = [f"layers.{i}.{name}" for i in range(3) for name in ("gate_proj", "up_proj", "down_proj")] + ["proj"]


def state(module: nn.Module) -> dict[str, object]:
    """Everything that a refused conversion must leave as it was."""
    return {name: (type(m), dict(vars(m))) for name, m in module.named_modules()}


# --- what stays the same --------------------------------------------------------------------------------------------


def test_only_the_class_of_a_layer_changes(recipe: Recipe) -> None:
    """The same modules, Parameters, names and order; the model itself is what was given."""
    net = model()
    modules = dict(net.named_modules())
    parameters = dict(net.named_parameters())
    report = ottava.convert(net, recipe)
    assert report.model is net
    assert report.converted == tuple(NAMES)
    assert {n: m for n, m in net.named_modules() if "quantizers" not in n} == modules
    assert list(dict(net.named_parameters())) == list(parameters)
    assert all(p is parameters[n] for n, p in net.named_parameters())
    assert all(type(net.get_submodule(n)) is Linear for n in NAMES)


def test_hooks_and_attributes_survive() -> None:
    """Hooks registered before fire after; whatever else a framework hung on the layer is still there."""
    net, fired = model(), []
    layer = net.layers[0].up_proj
    layer.register_forward_hook(lambda m, args, y: fired.append("forward"))
    layer.register_full_backward_hook(lambda m, dx, dy: fired.append("backward"))
    layer.weight.register_hook(lambda g: fired.append("weight"))
    layer.weight.tensor_parallel = True
    layer.tag, layer.training = "q", False
    ottava.convert(net, "tensorwise")
    net(TOKENS).float().sum().backward()
    assert sorted(fired) == ["backward", "forward", "weight"]
    assert (layer.tag, layer.training, layer.weight.tensor_parallel) == ("q", False, True)


def test_a_linear_may_be_the_model() -> None:
    """Its full name is "", which patterns can match."""
    layer = nn.Linear(64, 64).bfloat16()
    report = ottava.convert(layer, ottava.RECIPES["tensorwise"].override("*", wgrad=None))
    assert report.converted == ("",)
    assert isinstance(report.model, Linear)
    assert not report.model.resolved.wgrad.quantized


# --- what is left alone, and why ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, word",
    [
        ("lm_head", "head"),
        ("model.output", "head"),
        ("cls.score", "head"),
        ("layers.0.q_proj.lora_A.default", "LoRA"),
        ("layers.0.q_proj.lora_B.default", "LoRA"),
        ("layers.0.mlp.gate", "router"),
        ("layers.0.block_sparse_moe.router", "router"),
        ("layers.0.mlp.shared_expert_gate", "router"),
        ("layers.0.mlp.gate_proj", None),
        ("layers.0.mlp.gate_up_proj", None),
        ("layers.0.q_proj.base_layer", None),
        ("encoder.layer.0.output.dense", None),
        ("heads.qkv", None),
        ("", None),
    ],
)
def test_default_filter_knows_the_names_of_the_field(name: str, word: str | None) -> None:
    """Heads, LoRA adapters and routers stay; SwiGLU's gate is no router, PEFT's base layer no adapter."""
    reason = default_filter(name, nn.Linear(64, 64))
    assert (reason is None) if word is None else (reason is not None and word in reason)


@pytest.mark.parametrize("sizes, kept", [((31, 64), True), ((64, 31), True), ((32, 32), False)])
def test_default_filter_leaves_tiny_layers(sizes: tuple[int, int], kept: bool) -> None:
    """Below 32 on one side, and the reason names the size."""
    reason = default_filter("up", nn.Linear(*sizes))
    assert (reason is not None and "31 features" in reason) if kept else reason is None


def test_layers_that_would_not_listen_are_reported() -> None:
    """Each of these would silently run in high precision, or lose what it does; none is counted as converted."""
    net = nn.ModuleDict(
        {
            "attention": OwnAttention(64, 4),
            "weight_norm": torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "lazy": nn.LazyLinear(64),
            "replaced": nn.Linear(64, 64),
            "integer": nn.Linear(64, 64),
            "plain": nn.Linear(64, 64),
        }
    )
    net["replaced"].forward = lambda x: x  # as accelerate's hooks do
    net["integer"].weight = nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
    kinds = {name: type(m) for name, m in net.named_modules() if name != "plain"}
    report = ottava.convert(net, "tensorwise", filter=lambda name, layer: True)
    assert report.converted == ("plain",)
    found = {name.split(".")[0]: reason for name, reason in report.skipped.items()}
    assert "read by an attention whose class has a forward of its own" in found["attention"]
    assert "parametrized" in found["weight_norm"]
    assert "LazyLinear" in found["lazy"]
    assert "replaced on the instance" in found["replaced"]
    assert "int8" in found["integer"]
    assert {name: type(m) for name, m in net.named_modules() if name in kinds} == kinds


def test_old_weight_norm_still_computes_the_weight() -> None:
    """torch.nn.utils.weight_norm works with a hook and a plain tensor: convertible, and its gradients arrive."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = torch.nn.utils.weight_norm(nn.Linear(64, 64).bfloat16())
    net = nn.Sequential(layer)
    assert ottava.convert(net, "tensorwise").converted == ("0",)
    net(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight_g.grad is not None
    assert layer.weight_v.grad is not None


def test_a_parametrization_added_later_is_obeyed() -> None:
    """torch makes a subclass of ottava's class then: GEMMs stay quantized and run on the computed weight."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16())
    ottava.convert(net, "tensorwise")

    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    x = torch.ones(4, 64, dtype=torch.bfloat16)
    before = net(x)
    torch.nn.utils.parametrize.register_parametrization(net[0], "weight", Double())
    assert torch.equal(net(x), 2 * before)
    ottava.assert_fp8(net, 1.0)


def test_weights_tied_to_each_other_stay_tied() -> None:
    """Two Linear layers on one Parameter, and one layer in two places: one gradient, the sum of both uses."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()
    net[1].weight = net[0].weight
    twice = nn.Sequential(net[0], nn.ReLU(), net[0])
    assert ottava.convert(net, "tensorwise").converted == ("0", "1")
    assert net[0].weight is net[1].weight
    assert ottava.convert(twice, "rowwise").converted == ("0",)
    assert twice[2] is twice[0]
    twice(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    assert net[1].weight.grad is not None


# --- the filter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, skipped", [(True, None), (None, None), (False, "refused by the filter"), ("too wide", "too wide")]
)
def test_a_filter_answers_with_a_bool_a_reason_or_none(answer: bool | str | None, skipped: str | None) -> None:
    """True and None convert; False and a reason do not, and are reported."""
    report = ottava.convert(model(), "tensorwise", filter=lambda name, layer: answer if "up" in name else None)
    assert {r for n, r in report.skipped.items()} == ({skipped} if skipped else set())
    assert len(report.converted) == (7 if skipped else 10)


@pytest.mark.parametrize("answer", [0, 1, re.match("u", "up"), torch.tensor(False), [], b"no"])
def test_any_other_answer_is_refused_before_anything_changes(answer: object) -> None:
    """`lambda name, layer: re.search("mlp", name)` means yes where it matches; 0 is not False. Nobody should guess."""
    net = model()
    before = state(net)
    with pytest.raises(TypeError, match=r"needs True, False, None or a reason"):
        ottava.convert(net, "tensorwise", filter=lambda name, layer: answer if name == "proj" else True)  # type: ignore[arg-type,return-value]
    assert state(net) == before


def test_a_filter_that_raises_leaves_the_model_as_it_was() -> None:
    """Also where earlier layers had been accepted."""
    net = model()
    before = state(net)
    with pytest.raises(KeyError):
        ottava.convert(net, "tensorwise", filter=lambda name, layer: {"layers.0.up_proj": True}[name])
    assert state(net) == before


# --- the recipe -----------------------------------------------------------------------------------------------------


def test_overrides_reach_the_layers_they_name() -> None:
    """By full name; of two that match the later one has the last word."""
    recipe = ottava.RECIPES["tensorwise"].override("layers.0.*", "bf16").override("*.down_proj", wgrad=None)
    net = model()
    ottava.convert(net, recipe)
    ran = {n: [getattr(net.get_submodule(n).resolved, g).quantized for g in ("fprop", "wgrad")] for n in NAMES}  # type: ignore[union-attr]
    for name, quantized in ran.items():
        expected = [not name.startswith("layers.0."), not (name.startswith("layers.0.") or name.endswith("down_proj"))]
        assert quantized == expected, name
    assert all(net.get_submodule(n).recipe == recipe for n in NAMES)


@pytest.mark.parametrize("pattern, nearest", [("layer.0.*", "layers.0"), ("layers.0.upproj", "layers.0.up_proj")])
def test_an_override_that_matches_nothing_changes_nothing(pattern: str, nearest: str) -> None:
    """A typo must not cost a training run its high-precision layers; the nearest name is given."""
    net = model()
    before = state(net)
    with pytest.raises(ValueError, match=f"no linear layer matches.*{re.escape(pattern)}.*{re.escape(nearest)}"):
        ottava.convert(net, ottava.RECIPES["tensorwise"].override(pattern, "bf16"))
    assert state(net) == before


def test_names_begin_where_conversion_began() -> None:
    """Inside a wrapper (DataParallel's "module.") patterns need its prefix; converted before, they do not."""
    recipe = ottava.RECIPES["tensorwise"].override("layers.0.*", "bf16")
    wrapped = nn.ModuleDict({"module": model()})
    with pytest.raises(ValueError, match=r"module\.layers\.0"):
        ottava.convert(wrapped, recipe)
    ottava.convert(wrapped["module"], recipe)
    assert wrapped["module"].layers[0].up_proj.name == "layers.0.up_proj"
    assert not wrapped["module"].layers[0].up_proj.resolved.quantized
    prefixed = ottava.RECIPES["tensorwise"].override("module.layers.0.*", "bf16")
    ottava.convert(wrapped, prefixed)
    assert wrapped["module"].layers[0].up_proj.name == "module.layers.0.up_proj"


def test_what_is_no_module_is_refused_in_words() -> None:
    """Wherever a model is asked for: what was got, and what is needed; no AttributeError of somebody's inside."""
    batch = torch.ones(4, 64)
    takers: list[tuple[str, Callable[[object], object]]] = [
        ("convert", lambda m: ottava.convert(m)),  # type: ignore[arg-type]
        ("keep_first_last_bf16", lambda m: keep_first_last_bf16("tensorwise", m)),  # type: ignore[arg-type]
        ("receipt", lambda m: ottava.receipt(m)),  # type: ignore[arg-type]
        ("receipt", lambda m: ottava.assert_fp8(m)),  # type: ignore[arg-type]
        ("calibrate", lambda m: ottava.calibrate(m, [batch])),  # type: ignore[arg-type]
        ("tune", lambda m: ottava.nn.tune(m)),  # type: ignore[arg-type]
        ("plan_model", lambda m: plan_model(m, "tensorwise", tokens=8)),  # type: ignore[arg-type]
        ("observe", lambda m: ottava.debug.observe(m).__enter__()),  # type: ignore[arg-type]
    ]
    for name, take in takers:
        for got, words in (
            (None, "None"),
            ([nn.Linear(8, 8)], "a list"),
            (nn.Linear, "the class Linear, no object of it"),
        ):
            with pytest.raises(TypeError) as refused:
                take(got)
            assert str(refused.value) == f"{name}: got {words}; needs a torch.nn.Module: the model itself"
    with pytest.raises(TypeError, match="ScalingState: got a str"):
        ottava.ScalingState("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="watch: got a str; needs"):
        ottava.watch("runs/one")  # type: ignore[arg-type]


def test_converting_again_gives_the_new_recipe(recipe: Recipe) -> None:
    """The layer computes what a fresh conversion computes, with its state dict: from the recipes that keep a history,
    and from three others, so that each recipe is left as often as it is taken up."""

    def train(net: nn.Module) -> None:
        torch.manual_seed(3)
        net(TOKENS).float().sum().backward()

    fresh = model()
    ottava.convert(fresh, recipe)
    names = list(fresh.state_dict())
    train(fresh)
    every = list(ottava.RECIPES.values())
    firsts = {every[(every.index(recipe) + step) % len(every)].name for step in (1, 5, 9)} | {"delayed", "guarded"}
    for first in sorted(firsts - {recipe.name}):  # itself keeps its history: test_quantizer
        net = model()
        ottava.convert(net, first)
        train(net)
        ottava.ScalingState(net).update()
        net.zero_grad()
        ottava.convert(net, recipe)
        assert list(net.state_dict()) == names
        train(net)
        for a, b in zip(net.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_converting_to_the_same_delayed_recipe_keeps_its_history() -> None:
    """Only an override was added for another layer: what the others learned stays."""
    net = model()
    ottava.convert(net, "delayed")
    net(TOKENS).float().sum().backward()
    ottava.ScalingState(net).update()
    before = {n: b.clone() for n, b in net.named_buffers()}
    ottava.convert(net, ottava.RECIPES["delayed"].override("layers.0.*", "bf16"))
    after = dict(net.named_buffers())
    assert {n.split(".quantizers")[0] for n in before.keys() - after.keys()} == {n for n in NAMES if "layers.0" in n}
    assert all(torch.equal(b, before[n]) for n, b in after.items())


def test_a_layer_that_a_second_call_skips_says_what_it_stays_under() -> None:
    """Two calls can share a model out, and no report calls an FP8 layer one in high precision."""
    net = model()
    ottava.convert(net, "tensorwise", filter=lambda name, layer: "layers.0" in name)
    report = ottava.convert(net, "mxfp8", filter=lambda name, layer: "not this one" if "layers.0" in name else None)
    assert report.skipped["layers.0.up_proj"] == "not this one; stays under recipe 'tensorwise'"
    assert (net.layers[0].up_proj.recipe.name, net.layers[1].up_proj.recipe.name) == ("tensorwise", "mxfp8")


# --- report and warning ---------------------------------------------------------------------------------------------


def test_the_report_adds_up() -> None:
    """Converted and skipped are all linear layers; text and dict say the same."""
    net = model(tie=True)
    report = ottava.convert(net, "rowwise", filter=lambda name, layer: False if "up" in name else None)
    assert set(report.converted) | set(report.skipped) == set(NAMES)
    assert str(report).splitlines()[0] == "6 of 10 linear layers under recipe 'rowwise'"
    assert "  proj: weight tied to an embedding" in str(report).splitlines()
    values = report.to_dict()
    assert (values["converted"], values["skipped"]) == (list(report.converted), dict(report.skipped))
    assert Recipe.from_dict(values["recipe"]) == ottava.RECIPES["rowwise"]


@pytest.mark.parametrize(
    "make, options",
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3)), {}),
        (lambda: nn.Sequential(nn.Linear(8, 8)), {}),
        (model, {"filter": lambda name, layer: False}),
    ],
    ids=["no_linear", "tiny", "filter"],
)
def test_nothing_converted_is_said_aloud(make: Callable[[], nn.Module], options: dict[str, object]) -> None:
    """Five projects have shipped FP8 flags that did nothing; under "bf16" there is nothing to say."""
    with pytest.warns(UserWarning, match="nothing will run in FP8"):
        report = ottava.convert(make(), "tensorwise", **options)  # type: ignore[arg-type]
    assert report.converted == ()


# --- first and last blocks ------------------------------------------------------------------------------------------


def test_first_and_last_blocks_stay_in_bf16() -> None:
    """Of three blocks the first and the last; the projection behind them is not one of them."""
    net = model()
    ottava.convert(net, keep_first_last_bf16("tensorwise", net))
    quantized = {n for n in NAMES if net.get_submodule(n).resolved.quantized}  # type: ignore[union-attr]
    assert quantized == {n for n in NAMES if n.startswith("layers.1.") or n == "proj"}


def test_blocks_may_be_linear_layers_themselves() -> None:
    """Their name has no dot behind the number; 1 and 10 are different blocks."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    recipe = keep_first_last_bf16("tensorwise", net, first=2, last=1)
    ottava.convert(net, recipe)
    assert [i for i, layer in enumerate(net) if not layer.resolved.quantized] == [0, 1, 11]


@pytest.mark.parametrize("first, last", [(2, 2), (-1, 1), (0, 4)])
def test_more_blocks_than_there_are_is_refused(first: int, last: int) -> None:
    """With the number that there are."""
    with pytest.raises(ValueError, match=r"has 3 blocks; got"):
        keep_first_last_bf16("tensorwise", model(), first=first, last=last)


def test_a_model_without_blocks_is_refused() -> None:
    """And the way out is named."""
    with pytest.raises(ValueError, match=r"use recipe\.override"):
        keep_first_last_bf16("tensorwise", Mlp())
    assert keep_first_last_bf16("tensorwise", model(), first=0, last=0) == ottava.RECIPES["tensorwise"]


class Other(Conv1D):
    """A linear layer with a weight of (in, out), under a name that nobody knows."""


class Experts(nn.Module):
    """A stack of matrices, with biases in a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 96))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 96))


def names(model: nn.Module) -> list[str]:
    return [weight.name for weight in weights_outside(model)]


def test_a_transformer_layer_of_unknown_attention_is_two_thirds_fp8_not_nine_tenths() -> None:
    """linear1 and linear2 hold 8 of 12 d^2; in_proj holds 3 and out_proj, a class of its own, 1."""
    layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
    layer.self_attn = OwnAttention(64, 2, batch_first=True)
    model = nn.Sequential(layer).bfloat16()
    report = ottava.convert(model, "tensorwise")
    reason = "multiplied by OwnAttention itself, a class that convert does not know"
    assert dict(report.outside) == {"0.self_attn.in_proj_weight": reason}
    assert f"multiplied outside layers, in high precision:\n  0.self_attn.in_proj_weight: {reason}" in str(report)
    assert report.to_dict()["outside"] == dict(report.outside)
    model(torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert ottava.receipt(model).fp8_fraction == pytest.approx(2 / 3, abs=1e-15)
    with pytest.raises(
        AssertionError, match=r"66\.7% .*at least 70\.0%[\s\S]*0\.self_attn\.in_proj_weight\.all: multiplied"
    ):
        ottava.assert_fp8(model, 0.7)


def test_layers_of_an_unknown_class_are_seen() -> None:
    """A model without any layer that convert takes: its receipt is not empty, and convert's warning says why."""
    model = nn.ModuleDict({"h": nn.ModuleList(nn.ModuleDict({"c_attn": Other(96, 64)}) for _ in range(2))})
    with pytest.warns(UserWarning, match=r"nothing will run in FP8[\s\S]*h\.0\.c_attn\.weight: multiplied by Other"):
        ottava.convert(model)
    (row, _), text = ottava.receipt(model).rows, str(ottava.receipt(model))
    assert (row.layer, row.gemm, row.weight, row.fp8) == ("h.0.c_attn.weight", "all", 3 * 64 * 96, False)
    assert "h.0-1.c_attn.weight" in text


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Experts(), ["gate_up_proj"]),
        (lambda: nn.MultiheadAttention(64, 2, kdim=32, vdim=32), [f"{n}_proj_weight" for n in "qkv"]),
        (lambda: nn.LSTM(8, 16), ["weight_ih_l0", "weight_hh_l0"]),
        (lambda: nn.Bilinear(4, 5, 6), ["weight"]),
        (lambda: nn.ParameterDict({"up": nn.Parameter(torch.ones(8, 4))}), ["up"]),
    ],
)
def test_weights_that_are_multiplied(make: object, found: list[str]) -> None:
    assert names(make()) == found  # type: ignore[operator]


def test_what_is_no_weight_of_a_gemm() -> None:
    """Layers, lookups, norms, convolutions; what is added; a tied weight; one that a parametrization computes."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.wte = nn.Linear(64, 48, bias=False), nn.Embedding(48, 64)
            self.tied = self.wte.weight
            self.pos_embed, self.cls_token = nn.Parameter(torch.ones(1, 9, 64)), nn.Parameter(torch.ones(1, 1, 64))
            self.relative_position_bias_table = nn.Parameter(torch.ones(9, 4))
            self.A_log, self.codes = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4, 4).char(), False)
            self.parts = nn.ModuleList(
                [
                    nn.LayerNorm((4, 8)),
                    nn.Conv1d(4, 4, 3),
                    nn.Conv2d(4, 4, 3),
                    nn.BatchNorm1d(4),
                    nn.LazyLinear(4),
                    parametrizations.weight_norm(nn.Linear(64, 64)),
                    nn.ParameterDict({"lora_embedding_A": nn.Parameter(torch.ones(8, 4))}),
                ]
            )

    assert names(Odd()) == []
    assert names(nn.Sequential()) == []


K, N = 160, 96


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16))


RECIPE = "tensorwise"


def test_model_init_makes_fp8_weights_at_once() -> None:
    """At no time more than one weight is in BF16, and the numbers are those of `convert` after the fact."""
    torch.manual_seed(0)
    plain: list[int] = []

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(x)

    def made() -> nn.Module:
        layers = []
        for _ in range(4):
            layers.append(nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.ReLU()))
            plain.append(sum(not is_quantized_weight(m[0].weight) for m in layers))
        return nn.Sequential(*layers, Headed())

    with ottava.model_init(RECIPE, keep_high_precision=True):
        model = made()
    assert max(plain) == 0
    assert type(model[4].lm_head.weight) is nn.Parameter
    torch.manual_seed(0)
    later = made()
    ottava.convert(later, RECIPE, weights="fp8")
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    assert torch.equal(model(x), later(x))
    assert model[1][0].name == "1.0"
    assert model[0][0].weight.high_precision is not None
    with ottava.model_init("delayed"):
        alone = nn.Linear(64, 64, dtype=torch.bfloat16)
    assert is_quantized_weight(alone.weight)
    assert len(set(map(id, nn.modules.module._global_module_registration_hooks.values()))) >= 1
    assert not nn.modules.module._global_parameter_registration_hooks  # ours are gone
    with pytest.raises(ValueError, match="has overrides"), ottava.model_init(get_recipe(RECIPE).override("*", "bf16")):
        pass


def test_under_meta_memory_and_numbers_come_later() -> None:
    with torch.device("meta"), ottava.model_init(RECIPE):
        model = linear()
    assert (model[0].weight.device.type, model[0].weight.codes.is_meta) == ("meta", True)
    with pytest.raises(ValueError, match=r"got input on cpu for a weight on meta; .* model\.to_empty"):
        model(torch.ones(4, K, dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    assert is_quantized_weight(model[0].weight)
    torch.manual_seed(0)
    model[0].reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(model[0].weight.dequantize(), converted()[0].weight.dequantize())
    twin = copy.deepcopy(model)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    assert torch.equal(twin(x), model(x))
    assert twin.float()[0].weight.dtype == torch.float32


def test_of_nested_contexts_the_inner_one_decides() -> None:
    """About layers that are made in it, also when they become children of a module of the outer one."""
    with ottava.model_init("blockwise", keep_high_precision=True):
        first = linear()
        with ottava.model_init("tensorwise"):
            second = linear()
            alone = nn.Linear(K, N, dtype=torch.bfloat16)
            with ottava.model_init("bf16"):
                plain = linear()
        model = nn.Sequential(first, second, alone, nn.Sequential(plain), linear())
    recipes = [model.get_submodule(name).recipe.name for name in ("0.0", "1.0", "2", "3.0.0", "4.0")]
    assert recipes == ["blockwise", "tensorwise", "tensorwise", "bf16", "blockwise"]
    assert [is_quantized_weight(p) for p in model.parameters() if p.dim() == 2] == [True, True, True, False, True]
    assert (second[0].weight.high_precision, alone.weight.high_precision) == (None, None)
    assert model[4][0].weight.high_precision is not None
    assert not nn.modules.module._global_parameter_registration_hooks


def converted() -> nn.Module:
    model = linear()
    ottava.convert(model, RECIPE, weights="fp8")
    return model
