"""What the benchmarks measure: models in plain torch, and the packages that convert them beside ottava.

The models are a GPT block, a Llama block, the demo's model, and SmolLM2-135M's architecture. On a GPU the rivals are
BF16 eager and compiled, torchao, Liger's kernels and TransformerEngine; on a CPU the FP8 emulators torchao and
Microsoft's microxcaling. Each rival converts the same BF16 module to a contender. If a rival cannot be imported, the
report names it with the reason. If it fails later, its row has the error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.bench.method import Run
from ottava.nn import Linear, NormLinear, NormMLP, RMSNorm
from ottava.nn.convert import convert
from ottava.nn.mlp import Save
from ottava.nn.rope import RotaryEmbedding, RotaryTable, rotate
from ottava.train.config import ModelConfig
from ottava.train.model import VOCABULARY, ByteTransformer


def attention(qkv: Tensor, heads: int, groups: int, *, causal: bool) -> Tensor:
    """(batch, sequence, (heads + 2 groups) size) -> (batch, sequence, heads size); torch chooses the kernel."""
    size = qkv.shape[-1] // (heads + 2 * groups)
    parts = qkv.split([heads * size, groups * size, groups * size], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != groups)
    return mixed.transpose(1, 2).flatten(-2)


class GPTBlock(nn.Module):
    """A GPT block without dropout: attention and a feed-forward, LayerNorm before each.

    Args:
        d, heads: width and query heads.
        wide: of the feed-forward; 0: 4 d.  groups: heads of keys and values; 0: as many as `heads`.
        causal, approximate: of attention and of GELU.
    """

    def __init__(
        self, d: int, heads: int, wide: int = 0, groups: int = 0, *, causal: bool = True, approximate: str = "none"
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.approximate = heads, groups or heads, causal, approximate
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, d + 2 * self.groups * (d // heads)), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, wide or 4 * d), nn.Linear(wide or 4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        x = x + self.out(attention(self.qkv(self.norm1(x)), self.heads, self.groups, causal=self.causal))
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)), approximate=self.approximate)))


class PlainAttention(nn.Module):
    """Causal self-attention of `LlamaBlock`; without positions if `rotary` is None."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.d_model // config.heads
        self.qkv_proj = nn.Linear(config.d_model, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable | None) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2G, E)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        # torch's fused CPU attention is more than twice as slow in BF16 as in FP32 (backward, torch 2.13).
        dtype = torch.float32 if x.device.type == "cpu" else v.dtype
        qk, v = qk.to(dtype) if rotary is None else _rotated(qk.to(dtype), rotary), v.to(dtype)
        q, k = qk.transpose(1, 2).split((self.heads, self.kv_heads), dim=1)  # (B, H, T, E), (B, G, T, E)
        with torch.autocast(x.device.type, enabled=False):
            y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2).to(qkv.dtype))
        return out


def _rotated(x: Tensor, table: RotaryTable) -> Tensor:
    """x (B, T, H, E), turned by torch's operations alone."""
    first, second = x.chunk(2, -1)
    return x * table.cos + torch.cat((second, first), -1) * table.sin


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class PlainMLP(nn.Module):
    """SwiGLU of `LlamaBlock`: down(silu(gate(x)) * up(x)). Liger's kernel may stand at `swiglu`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.d_model, 2 * config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.d_model, bias=False)
        self.swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        y: Tensor = self.down_proj(self.swiglu(gate, up))
        return y


class LlamaBlock(nn.Module):
    """A layer of the demo's model in plain torch, with fused projections. Fusing changes no result."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = PlainAttention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = PlainMLP(config)

    def forward(self, x: Tensor, rotary: RotaryTable | None = None) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return torch.add(x, self.mlp(self.mlp_norm(x)))


class PlainByteTransformer(ByteTransformer):
    """The demo's model in plain torch: the same initial weights, and nothing of `ottava.nn` but the angles."""

    block, norm_class = LlamaBlock, nn.RMSNorm

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__(config, sequence_length)
        head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        head.weight = self.lm_head.weight
        self.lm_head = head  # type: ignore[assignment]


class SmolLM2(nn.Module):
    """The architecture of SmolLM2-135M (134,515,008 parameters). Weights are random until `load`.

    Projections are fused as in the demo's model: q, k and v in one Linear, gate and up in another. Fusing changes no
    result. The head is the weight of the embedding and stays in high precision.
    Source: the config.json of HuggingFaceTB/SmolLM2-135M.
    """

    def __init__(self, vocabulary: int = 49_152, layers: int = 30, length: int = 2048) -> None:
        super().__init__()
        config = ModelConfig(d_model=576, layers=layers, heads=9, kv_heads=3, ffn=1536, rope_theta=1e5, norm_eps=1e-5)
        self.embedding = nn.Embedding(vocabulary, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        # not a buffer: `.bfloat16()` would round it
        self.rotary = RotaryEmbedding(config.d_model // config.heads, base=config.rope_theta)(torch.arange(length))

    def forward(self, ids: Tensor) -> Tensor:
        """ids, int64 (B, T) -> the mean cross-entropy of each next token, fp32 ()."""
        x = self.embedding(ids)
        rotary = RotaryTable(self.rotary.cos[: ids.shape[1]], self.rotary.sin[: ids.shape[1]], interleaved=False)
        for layer in self.layers:
            x = layer(x, rotary)
        logits = F.linear(self.norm(x)[:, :-1], self.embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def load(self, folder: Path) -> None:
        """Loads the weights of a checkpoint in Hugging Face's layout.

        Raises:
            FileNotFoundError: the folder has no model.safetensors.
            ValueError: the file holds another architecture.
        """
        from safetensors.torch import load_file

        path = folder / "model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no model.safetensors; needs the folder of SmolLM2-135M")
        try:
            self.load_state_dict(_renamed(load_file(path), len(self.layers)))
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{path} does not hold SmolLM2-135M: {error}") from error


def _renamed(theirs: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Turns Hugging Face's names and separate projections into ours."""
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    for i in range(layers):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        q, k, v = (theirs[f"{old}self_attn.{name}_proj.weight"] for name in "qkv")
        gate, up = (theirs[f"{old}mlp.{name}_proj.weight"] for name in ("gate", "up"))
        ours |= {
            f"{new}attention_norm.weight": theirs[f"{old}input_layernorm.weight"],
            f"{new}attention.qkv_proj.weight": torch.cat((q, k, v)),
            f"{new}attention.o_proj.weight": theirs[f"{old}self_attn.o_proj.weight"],
            f"{new}mlp_norm.weight": theirs[f"{old}post_attention_layernorm.weight"],
            f"{new}mlp.gate_up_proj.weight": torch.cat((gate, up)),
            f"{new}mlp.down_proj.weight": theirs[f"{old}mlp.down_proj.weight"],
        }
    return ours


# --- the bytes that a Llama block saves for its backward: plain torch's block beside ottava's ------------------------

# Llama 3 8B at a quarter of its width: F = 3.5 d, heads of 128, four query heads for each key and value head.
WIDTH, FFN, HEADS, KV_HEADS, TOKENS = 1024, 3584, 8, 2, 512
SAVES: tuple[Save, ...] = ("bf16", "fp8", "recompute")


class _Block(nn.Module):
    """x + o(attention(qkv(norm(x)))), then x + mlp(norm(x)); `qkv` and `mlp` contain their norms."""

    def __init__(self, qkv: nn.Module, out: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = qkv, out, mlp
        self.rotary = RotaryEmbedding(WIDTH // HEADS, base=5e5)(torch.arange(TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) -> (T, d)."""
        qkv = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS))  # (T, H + 2 G, E)
        qk, v = qkv.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
        qk = rotate(qk, self.rotary)
        q, k = qk.transpose(0, 1).split((HEADS, KV_HEADS))  # (H, T, E), (G, T, E)
        v = v.transpose(0, 1).contiguous()  # a view would keep all of qkv for the backward
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + self.out(y.transpose(0, 1).flatten(-2))
        return torch.add(x, self.mlp(x))


def blocks() -> Iterator[tuple[str, _Block]]:
    """Yields each block with its name; the first two are plain torch.

    Example:
        >>> [name for name, _ in blocks()][:3]
        ['plain torch', 'plain torch, fused norm', 'bf16, save bf16']
    """
    width = (HEADS + 2 * KV_HEADS) * WIDTH // HEADS
    # on a CPU torch's RMSNorm consists of operations that each save fp32; on a GPU it saves as much as ottava's
    for name, norm in (("plain torch", nn.RMSNorm), ("plain torch, fused norm", RMSNorm)):
        qkv = nn.Sequential(norm(WIDTH, eps=1e-5), nn.Linear(WIDTH, width, bias=False))
        mlp = nn.Sequential(norm(WIDTH, eps=1e-5), PlainMLP(ModelConfig(d_model=WIDTH, ffn=FFN)))
        yield name, _Block(qkv, nn.Linear(WIDTH, WIDTH, bias=False), mlp).bfloat16()
    for recipe in ("bf16", "tensorwise", "mxfp8"):
        for save in SAVES:
            options: Any = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
            norm_mlp = NormMLP(WIDTH, FFN, activation="swiglu", norm="rmsnorm", save=save, **options)
            qkv_proj = NormLinear(WIDTH, width, norm="rmsnorm", **options)
            yield f"{recipe}, save {save}", _Block(qkv_proj, Linear(WIDTH, WIDTH, **options), norm_mlp)


Forward = Callable[..., Tensor]
RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed", "guarded")
"""ottava's recipes that run on the tensor cores of a GPU."""


@dataclass(frozen=True)
class Contender:
    """One way to run a model."""

    name: str
    """Its name in tables."""
    model: nn.Module
    """The model with the trained parameters."""
    forward: Forward
    """The function to call."""


@dataclass(frozen=True)
class Rival:
    """Another package that runs a model in FP8, or faster in BF16."""

    package: str
    """The module to import."""
    change: Callable[[nn.Module, Run], nn.Module]
    """Changes the BF16 model in place, or returns another one."""
    compiled: bool = False
    """Run it under torch.compile, as its authors advise."""


def _torchao(model: nn.Module, run: Run, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not run.cuda)
    return convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def _liger(model: nn.Module, run: Run) -> nn.Module:
    norms = importlib.import_module("liger_kernel.transformers.rms_norm")
    gates = importlib.import_module("liger_kernel.ops.swiglu")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            norm = norms.LigerRMSNorm(module.normalized_shape[0], eps=module.eps or 1e-6, in_place=False)
            norm.weight = module.weight
            model.set_submodule(name, norm)
        if hasattr(module, "swiglu"):
            module.swiglu = gates.LigerSiLUMulFunction.apply
    return model


class _InTransformerEngine(nn.Module):
    """A model with TransformerEngine's Linears that runs under TransformerEngine's autocast."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, *args: Any) -> Any:
        """Calls the model."""
        with self.autocast():
            return self.model(*args)


def _transformer_engine(model: nn.Module, run: Run, recipe: str) -> nn.Module:
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    te_recipe = {
        "delayed": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, margin=0),
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[recipe]()
    holder = nn.ModuleList([model])  # the model itself may be a Linear
    for name, module in list(holder.named_modules()):
        if isinstance(module, nn.Linear):
            sizes, bias = (module.in_features, module.out_features), module.bias is not None
            layer = te.Linear(*sizes, bias=bias, params_dtype=module.weight.dtype, device=module.weight.device)
            with torch.no_grad():
                layer.weight.copy_(module.weight)
                if bias:
                    layer.bias.copy_(module.bias)
            holder.set_submodule(name, layer)
    return _InTransformerEngine(holder[0], lambda: te.autocast(enabled=True, recipe=te_recipe))


def _microxcaling(model: nn.Module, run: Run) -> nn.Module:
    """E4M3 in blocks of 32 for all operands of all GEMMs, without microxcaling's elementwise BF16 rounding in front."""
    importlib.import_module("mx.mx_ops")  # other packages have the name mx, too
    mx: Any = importlib.import_module("mx")
    formats = {"w_elem_format": "fp8_e4m3", "a_elem_format": "fp8_e4m3"}
    specs = mx.finalize_mx_specs({**formats, "scale_bits": 8, "block_size": 32, "bfloat": 0, "custom_cuda": False})
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            layer = mx.Linear(module.in_features, module.out_features, module.bias is not None, mx_specs=specs)
            layer.to(module.weight.dtype).load_state_dict(module.state_dict())
            model.set_submodule(name, layer)
    return model


RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        "torchao tensorwise": Rival("torchao.float8", partial(_torchao, recipe="tensorwise"), compiled=True),
        "torchao rowwise": Rival("torchao.float8", partial(_torchao, recipe="rowwise"), compiled=True),
        "liger bf16": Rival("liger_kernel", _liger),
        "te delayed": Rival("transformer_engine.pytorch", partial(_transformer_engine, recipe="delayed")),
        "te current": Rival("transformer_engine.pytorch", partial(_transformer_engine, recipe="current")),
        "te block": Rival("transformer_engine.pytorch", partial(_transformer_engine, recipe="block")),
    }
)
"""Rivals on a GPU. A new rival is one entry here."""
EMULATORS: Mapping[str, Rival] = MappingProxyType(
    {"torchao tensorwise": RIVALS["torchao tensorwise"], "microxcaling mxfp8": Rival("mx.mx_ops", _microxcaling)}
)
"""Rivals on a CPU."""


def missing() -> dict[str, str]:
    """Rivals that cannot run on this machine, with the reason.

    Example:
        >>> set(missing()) <= set(RIVALS)
        True
    """
    reasons = {}
    for name, rival in RIVALS.items():
        try:
            importlib.import_module(rival.package)
        except (
            Exception
        ) as error:  # e.g. a library of another CUDA, or an assertion about torch: the report shows any error
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def contenders(run: Run, make: Callable[[], nn.Module], recipes: tuple[str, ...] = RECIPES) -> list[Contender]:
    """BF16, BF16 compiled, each recipe eager and compiled, and the rivals on this machine, in this order.

    One whose model cannot be made raises its error when it is called.

    Args:
        make: returns the BF16 model, always with the same weights.
    """
    ways: list[tuple[str, Callable[[], nn.Module], bool]] = [("bf16", make, False), ("bf16 compiled", make, True)]
    for recipe in run.chosen(recipes):
        ways += [(recipe, partial(_converted, make, recipe), False)]
        ways += [(f"{recipe} compiled", partial(_converted, make, recipe), True)]
    absent = missing() if run.rivals else RIVALS
    for name, rival in RIVALS.items():
        if name not in absent and (run.cuda or rival.package == "torchao.float8"):
            compiled = rival.compiled and run.compiled
            ways.append((f"{name} compiled" if compiled else name, partial(_changed, make, rival, run), compiled))
    return [contender(*way) for way in ways if run.compiled or not way[2]]


def _converted(make: Callable[[], nn.Module], recipe: str) -> nn.Module:
    model = make()
    convert(model, recipe, filter=lambda name, layer: True)
    return model


def _changed(make: Callable[[], nn.Module], rival: Rival, run: Run) -> nn.Module:
    return rival.change(make(), run)


def contender(name: str, build: Callable[[], nn.Module], compiled: bool) -> Contender:
    """One that raises its error when it is called, if its model cannot be made."""
    try:
        model = build()
    except Exception as error:
        return Contender(name, nn.Module(), partial(_raise, error))
    return Contender(name, model, torch.compile(model) if compiled else model)


def _raise(error: Exception, *_: Any) -> Tensor:
    raise error


def emulated(make: Callable[[], nn.Module], names: Iterable[str] = tuple(EMULATORS)) -> dict[str, nn.Module]:
    """The installed emulators, each with its own converted BF16 model.

    Args:
        make: returns the model, always with the same weights. Its Linears must be submodules.

    Example:
        >>> set(emulated(lambda: nn.Sequential(nn.Linear(32, 32)).bfloat16())) <= set(EMULATORS)
        True
    """
    run, models = Run(torch.device("cpu"), smoke=False, rounds=1), {}
    for name in names:
        with suppress(ImportError):  # `bench.cpu.machine` names its version, or None
            models[name] = EMULATORS[name].change(make(), run)
    return models
