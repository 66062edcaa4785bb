"""Engines' rules: which linears stay in BF16, by pattern and by name; against what the engines' own tests say."""

from __future__ import annotations

import pytest

from ottava.base.untrusted import UntrustedError
from ottava.serving.engines import (
    ENGINES,
    bounded,
    contains,
    decide,
    dotted,
    exact,
    regex,
    shell,
    shell_word,
    suffix,
    units,
    whole_regex,
    within,
)

MLP = [f"model.layers.{i}.mlp.{n}_proj" for i in range(12) for n in ("gate", "up", "down")]
MOE = "model.layers.1.mlp.experts"
ATTENTION = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(12) for n in "qkvo"]


def ignored(engine: str, method: str, *patterns: str, key: str = "") -> set[str]:
    rule = ENGINES[engine].rules[method]
    decided = decide(rule, {key or rule.keys[-1]: list(patterns)}, ATTENTION + MLP)
    return {name for name, one in decided.items() if not one.quantized}


def test_matching_of_one_name() -> None:
    gate = "model.layers.1.mlp.gate_proj"
    for match, pattern, name, meant in (
        (exact, gate, gate, True),
        (exact, "gate_proj", gate, False),
        (regex, "re:.*gate", gate, True),
        (regex, ".*gate", gate, False),
        (regex, "re:gate", gate, False),
        (whole_regex, "re:.*gate", gate, False),
        (whole_regex, "re:.*gate_proj", gate, True),
        (contains, "mlp.gate", gate, True),
        (dotted, "mlp.gate", gate, False),
        (dotted, "layers.1", gate, True),
        (dotted, "layers.1.", gate, True),
        (dotted, "layers.1", gate.replace(".1.", ".11."), False),
        (shell, "*mlp*", gate, True),
        (shell, "mlp", gate, False),
        (shell_word, "mlp", gate, True),
        (shell_word, "ml?", gate, True),
        (shell_word, "mlp.gate", gate, False),
        (suffix, "mlp.gate_proj", gate, True),
        (suffix, "gate_proj", gate, True),
        (suffix, "proj", gate, False),
        (suffix, "model.layers.1", gate, False),
        (within, f"{MOE}.0.gate_proj", MOE, True),
        (within, gate, "model.layers.1.mlp", False),
        (bounded, "model.layers.1", gate.replace(".1.", ".11."), False),
        (bounded, "model.layers.1", gate, True),
        (bounded, "gate_proj", gate, True),
        (bounded, "model.layers.*", gate, True),
    ):
        assert match(pattern, name) is meant, (match.__name__, pattern, name)
    with pytest.raises(UntrustedError, match="no regular expression"):
        regex("re:(", gate)


def test_the_same_list_means_other_layers_to_other_engines() -> None:
    """The pattern for a router that dense models do not have, and a short name."""
    dense = ["model.layers.0.mlp.gate"]
    swallowed = {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}
    assert ignored("vllm", "modelopt", *dense) == swallowed
    assert ignored("sglang", "modelopt", *dense) == set()
    assert ignored("vllm", "fp8", *dense) == ignored("transformers", "fp8", *dense) == set()
    assert ignored("vllm", "fp8", "self_attn") == set()
    assert ignored("sglang", "fp8", "self_attn") == set(ATTENTION)
    assert ignored("trtllm", "modelopt", "model.layers.3") == {n for n in ATTENTION + MLP if ".layers.3." in n}
    assert ignored("vllm", "compressed-tensors", "re:.*self_attn.*") == set(ATTENTION)
    last = {name for name in MLP if name.endswith(".down_proj")}
    assert ignored("sglang", "compressed-tensors", "mlp.down_proj") == last  # a name's end is enough there
    assert ignored("vllm", "compressed-tensors", "mlp.down_proj") == set()
    joined = {name for name in ATTENTION if ".0." in name and not name.endswith("o_proj")}
    assert ignored("vllm", "fp8", "model.layers.0.self_attn.qkv_proj") == joined
    assert ignored("sglang", "fp8", "model.layers.0.self_attn.qkv_proj") == set()  # it looks at the parts only
    assert ignored("transformers", "fp8", "model.layers.1") == {n for n in ATTENTION + MLP if ".layers.1." in n}


def test_parts_of_a_joined_linear() -> None:
    q = "model.layers.0.self_attn.q_proj"
    for engine, method, stays, refused in (
        ("vllm", "fp8", 3, True),
        ("vllm", "compressed-tensors", 3, True),
        ("transformers", "fp8", 1, False),
        ("trtllm", "modelopt", 3, False),
    ):
        rule = ENGINES[engine].rules[method]
        decided = decide(rule, {rule.keys[-1]: [q]}, ATTENTION)
        kept = [one for one in decided.values() if not one.quantized]
        assert len(kept) == stays, engine
        assert bool(kept[0].refused) is refused
    some = [f"{MOE}.{e}.{n}_proj" for e in range(2) for n in ("gate", "up", "down")]
    for engine in ("vllm", "sglang"):  # one expert that is listed keeps all of them
        decided = decide(ENGINES[engine].rules["fp8"], {"modules_to_not_convert": some[:1]}, some)
        assert not any(one.quantized or one.refused for one in decided.values()), engine
    experts = [f"l.mlp.experts.{e}.{n}_proj" for e in range(2) for n in ("gate", "up", "down")]
    assert units(experts) == {"l.mlp.experts": experts}
    assert units(["q_proj", "w1"]) == {"qkv_proj": ["q_proj"], "w1": ["w1"]}


def test_targets_and_bad_lists() -> None:
    rule = ENGINES["vllm"].rules["compressed-tensors"]
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "type": "float"}}},
        "ignore": [],
    }
    assert {name for name, one in decide(rule, config, MLP).items() if one.quantized} == {n for n in MLP if "down" in n}
    for bad in ({"ignore": "lm_head"}, {"ignore": [3]}):
        with pytest.raises(UntrustedError, match="needs a list of names"):
            decide(rule, bad, MLP)
    assert ENGINES["vllm"].leaves("lm_head")
    assert not ENGINES["vllm"].leaves("lm_head", "modelopt")  # ModelOpt's lists name the head, or it is cast
    assert not ENGINES["sglang"].leaves("lm_head", "modelopt")
    assert ENGINES["vllm"].leaves("model.layers.0.mlp.gate")
    assert not ENGINES["vllm"].leaves("model.layers.0.mlp.gate_proj")
    assert not ENGINES["transformers"].leaves("lm_head")


def test_the_rules_of_transformers_are_those_of_transformers() -> None:
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    for pattern in ("model.layers.1", "mlp.gate", "lm_head", "up_proj", "model.layers.*", ".*gate", "self_attn"):
        for name in ATTENTION + MLP:
            assert bounded(pattern, name) is not quantizers.should_convert_module(name, [pattern]), (pattern, name)
    lifecycle = pytest.importorskip("compressed_tensors.utils.match")
    for pattern in ("re:.*mlp.gate.", "re:model.layers.1", "lm_head", MLP[0]):
        for name in MLP:
            theirs = lifecycle.match_name(name, pattern)
            assert (exact(pattern, name) or regex(pattern, name)) is theirs, (pattern, name)
