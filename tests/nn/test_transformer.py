"""A transformer layer is its branches, added: written out in plain torch in fp64, and Hugging Face's own blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.nn.rope import RotaryEmbedding
from ottava.nn.transformer import ARRANGEMENTS, TransformerLayer

EXACT = 1e-11
"""fp64: thousands of roundings of numbers of size 10 or less, eps 2.2e-16."""
ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "relu2": lambda x: F.relu(x) ** 2,
}


def made(seed: int = 0, **settings: object) -> TransformerLayer:
    torch.manual_seed(seed)
    layer = TransformerLayer(32, 40, 4, **({"recipe": "bf16", "dtype": torch.float64} | settings))
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def written_out(layer: TransformerLayer, x: Tensor, memory: Tensor | None, act: str, causal: bool) -> Tensor:
    """(B, S, 32): the textbook's lines, with torch's own norms and attention."""

    def norm(of: nn.Module, t: Tensor) -> Tensor:
        if isinstance(of, nn.LayerNorm):
            return F.layer_norm(t, (32,), of.weight, of.bias, of.eps)
        return F.rms_norm(t, (32,), of.weight, of.eps)

    def linear(of: nn.Module, t: Tensor) -> Tensor:
        return F.linear(norm(of.norm, t) if hasattr(of, "norm") else t, of.weight, of.bias)

    def attention(of: nn.Module, t: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (
            linear(of.qkv, t).chunk(3, -1) if memory is None else (linear(of.q, t), *linear(of.kv, memory).chunk(2, -1))
        )
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, k, v))
        return linear(of.out, F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))

    def mlp(t: Tensor) -> Tensor:
        return linear(layer.mlp.fc2, ACTIVATIONS[act](linear(layer.mlp.fc1, t)))

    if layer.arrangement.startswith("parallel"):
        rows = norm(layer.norms[0], x) if layer.arrangement == "parallel_one_norm" else x
        return x + attention(layer.attention, rows, None, causal) + mlp(rows)
    branches = [lambda t: attention(layer.attention, t, None, causal), mlp]
    if memory is not None:
        branches.insert(1, lambda t: attention(layer.cross, t, memory))
    for i, branch in enumerate(branches):
        x = x + branch(x)
        x = norm(layer.norms[i], x) if layer.arrangement == "post" else x
    return x


def test_every_arrangement_is_what_is_written_out_with_all_gradients() -> None:
    for arrangement, norm, act in itertools.product(ARRANGEMENTS, ("layernorm", "rmsnorm"), ACTIVATIONS):
        cross = act == "gelu" and not arrangement.startswith("parallel")
        causal = act != "relu2"  # no mask: an encoder
        layer = made(
            arrangement=arrangement, norm=norm, activation=act, cross=cross, mask="causal" if causal else "no_mask"
        )
        x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
        memory = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True) if cross else None
        y, wanted = layer(x, memory), written_out(layer, x, memory, act, causal)
        assert (y - wanted).abs().max() < EXACT, (arrangement, norm, act)
        dy, leaves = torch.randn_like(y), [t for t in (x, memory, *layer.parameters()) if t is not None]
        for got, own in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
            assert (got - own).abs().max() < 100 * EXACT * max(1.0, own.abs().max().item()), (arrangement, norm, act)


def test_dropout_and_stochastic_depth() -> None:
    x = torch.randn(512, 2, 32, dtype=torch.float64)
    for layout, axis in (("bshd", 0), ("sbhd", 1)):
        layer, whole = made(drop_path=0.25, layout=layout), made(layout=layout)
        rows = x.transpose(0, axis)
        assert torch.equal(layer.eval()(rows), whole(rows))
        branch = whole.attention(rows)
        layer.train()
        kept = layer._dropped(branch).transpose(0, axis).flatten(1).abs().sum(1)  # of each sample all or nothing
        share = (kept > 0).double().mean().item()
        assert abs(share - 0.75) < 5 * (0.25 * 0.75 / 512) ** 0.5
        own = branch.transpose(0, axis).flatten(1).abs().sum(1)
        assert (kept - torch.where(kept > 0, own / 0.75, 0.0)).abs().max() < EXACT
    rows = x[:4].clone().requires_grad_()
    made(drop_path=1.0)(rows).sum().backward()  # every branch is left out, and its gradient is no NaN
    assert torch.equal(rows.grad, torch.ones_like(rows))
    layer = made(dropout=0.5)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), made()(x))


def load(layer: TransformerLayer, weights: dict[str, list[Tensor]]) -> None:
    """Ours <- Hugging Face's, below each other where ours is one."""
    own = layer.state_dict()
    assert own.keys() == weights.keys()
    layer.load_state_dict({name: torch.cat(parts) for name, parts in weights.items()})


def test_hugging_faces_llama_and_qwen3_blocks_bit_for_bit() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, Qwen3Config
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.qwen3 import modeling_qwen3 as qwen

    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2}
    for dtype, (config_class, block, rope) in itertools.product(
        (torch.float32, torch.bfloat16),
        (
            (LlamaConfig, llama.LlamaDecoderLayer, llama.LlamaRotaryEmbedding),
            (Qwen3Config, qwen.Qwen3DecoderLayer, qwen.Qwen3RotaryEmbedding),
        ),
    ):
        torch.manual_seed(0)
        config = config_class(**sizes, head_dim=16, attn_implementation="sdpa")
        theirs = block(config, 0).to(dtype)
        sd = theirs.state_dict()
        for key in sd:
            if "norm" in key:  # theirs rounds to BF16 before it multiplies with a weight: with powers of two, all one
                sd[key].uniform_(-1.0, 1.0).copy_(sd[key] + 2.0 if dtype == torch.float32 else sd[key].sign().exp2())
        normed = "self_attn.q_norm.weight" in sd
        ours = TransformerLayer(
            *(128, 192, 8),
            kv_heads=2,
            norm="rmsnorm",
            eps=config.rms_norm_eps,
            qk_norm="rmsnorm" if normed else None,
            activation="swiglu",
            bias=False,
            recipe="bf16",
            dtype=dtype,
        )
        names = {
            "attention.qkv.weight": [f"self_attn.{n}_proj.weight" for n in "qkv"],
            "attention.qkv.norm.weight": ["input_layernorm.weight"],
            "attention.out.weight": ["self_attn.o_proj.weight"],
            "mlp.fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "mlp.fc1.norm.weight": ["post_attention_layernorm.weight"],
            "mlp.fc2.weight": ["mlp.down_proj.weight"],
        } | ({f"attention.{n}_norm.weight": [f"self_attn.{n}_norm.weight"] for n in "qk"} if normed else {})
        load(ours, {own: [sd[key] for key in keys] for own, keys in names.items()})
        x, positions = torch.randn(2, 33, 128).to(dtype).requires_grad_(), torch.arange(33)
        wanted = theirs(x, position_embeddings=rope(config)(x, positions[None]), attention_mask=None)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        base = config.rope_parameters["rope_theta"]
        y = ours(x, rotary=RotaryEmbedding(16, base=base, dtype=dtype)(positions))
        assert torch.equal(y, wanted), (dtype, block)
        dy = torch.randn_like(y)
        (dx,), (own,) = (torch.autograd.grad(t, x, dy) for t in (y, wanted))
        # their q, k, v, gate and up are GEMMs of their own, whose dx are rounded before they are added
        assert (dx - own).float().norm() <= 8 * torch.finfo(dtype).eps * own.float().norm()


def test_hugging_faces_gpt2_and_neox_blocks() -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPTNeoXConfig
    from transformers.models.gpt2 import modeling_gpt2 as gpt2
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=64,
            n_head=4,
            n_inner=96,
            attn_implementation="sdpa",
            activation_function="gelu_pytorch_tanh",
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
        theirs = gpt2.GPT2Block(config, 0).to(dtype)
        sd = {key: nn.init.normal_(tensor, std=0.1) for key, tensor in theirs.state_dict().items()}
        ours = TransformerLayer(64, 96, 4, activation="gelu_tanh", recipe="bf16", dtype=dtype)
        pairs = {
            "attention.qkv": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
        }
        weights = {f"{own}.weight": [sd[f"{key}.weight"].T] for own, key in pairs.items()}  # Conv1D is (K, N)
        weights |= {f"{own}.bias": [sd[f"{key}.bias"]] for own, key in pairs.items()}
        for own, key in (("attention.qkv.norm", "ln_1"), ("mlp.fc1.norm", "ln_2")):
            weights |= {f"{own}.{kind}": [sd[f"{key}.{kind}"]] for kind in ("weight", "bias")}
        load(ours, weights)
        x = torch.randn(2, 33, 64).to(dtype)
        wanted = theirs(x)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        # addmm on (K, N) may sum in another order than linear on (N, K): sqrt(K) ulps a GEMM, four GEMMs
        assert (ours(x) - wanted).float().norm() <= 4 * 96**0.5 * 2.0**-24 * 8 * wanted.norm() + (
            dtype == torch.bfloat16
        ) * 2 * torch.finfo(dtype).eps * wanted.float().norm()

        config = GPTNeoXConfig(
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=96,
            attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        )
        theirs = neox.GPTNeoXLayer(config, 0).to(dtype)
        sd = {key: nn.init.normal_(tensor, std=0.1) for key, tensor in theirs.state_dict().items()}
        ours = TransformerLayer(64, 96, 4, arrangement="parallel", recipe="bf16", dtype=dtype)
        pairs = {"attention.out": "attention.dense", "mlp.fc1": "mlp.dense_h_to_4h", "mlp.fc2": "mlp.dense_4h_to_h"}
        pairs |= {"attention.qkv.norm": "input_layernorm", "mlp.fc1.norm": "post_attention_layernorm"}
        weights = {f"{own}.{kind}": [sd[f"{key}.{kind}"]] for own, key in pairs.items() for kind in ("weight", "bias")}
        for kind in ("weight", "bias"):  # theirs is head by head q, k, v
            parts = sd[f"attention.query_key_value.{kind}"].unflatten(0, (4, 3, 16)).unbind(1)
            weights[f"attention.qkv.{kind}"] = [part.flatten(0, 1) for part in parts]
        load(ours, weights)
        positions = torch.arange(33)
        table = neox.GPTNeoXRotaryEmbedding(config)(x, positions[None])
        wanted = theirs(x, attention_mask=None, position_embeddings=table)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        y = ours(x, rotary=RotaryEmbedding(4, dtype=dtype)(positions))
        assert (y - wanted).float().norm() <= 2 * torch.finfo(dtype).eps * wanted.float().norm()


def test_mistakes_are_named() -> None:
    for settings, words in (
        ({"arrangement": "paralel"}, "did you mean 'parallel'?"),
        ({"drop_path": 1.5}, "needs 0 to 1 each, dropout below 1"),
        ({"drop_path": 0.1, "layout": "thd"}, "packed sequences ('thd') have none"),
        ({"cross": True, "arrangement": "parallel"}, "needs arrangement 'pre' or 'post'"),
    ):
        with pytest.raises(ValueError, match=r"^TransformerLayer: ") as error:
            made(**settings)
        assert words in str(error.value)
    with pytest.raises(ValueError, match="got no memory; the layer was made with cross=True"):
        made(cross=True)(torch.ones(1, 2, 32, dtype=torch.float64))
