"""Makes the pairs of this set: a trained checkpoint and the folder that an engine reads, right or with one fault.

python make.py FOLDER [NAME ...]     makes FOLDER/NAME/a and FOLDER/NAME/b of each case, and prints its call of `ottava parity`
python make.py --truth               writes truth.yaml

A right folder holds what `ottava export` wrote under the recipe of training, perhaps with a change that changes no number.
A faulty folder is that, and then one edit such as a broken exporter, loader or setting would make.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ottava

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Tensors = dict[str, Tensor]
Edit = Callable[["Folder"], None]

# ---------------------------------------------------------------------------------------------------- trained models

COMMON = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "use_cache": True, "initializer_range": 0.02, "dtype": "bfloat16", "transformers_version": "5.20.0",
}  # fmt: skip
EXPERTS = 4
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "query_pre_attn_scalar": 32, "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "original_max_position_embeddings": 512, "sliding_window": None,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": EXPERTS,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": None, "intermediate_size": 256,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "moe_intermediate_size": 256,
        "num_experts_per_tok": 2, "num_experts": EXPERTS, "norm_topk_prob": True, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None,
    },
}  # fmt: skip
LACKS = {"gemma2": ("hidden_act",), "phi3": ("attention_bias", "head_dim"), "mixtral": ("attention_bias",), "mistral": ("attention_bias",)}


def weight(rows: int, cols: int) -> Tensor:
    """Rows, columns and groups of columns of different size, so that scales differ from block to block."""
    sizes = torch.randn(rows, 1).mul(0.6).exp() * torch.randn(1, cols // 32).mul(0.7).exp().repeat_interleave(32, 1)
    coarse = torch.randn((rows + 127) // 128, (cols + 127) // 128).mul(1.2).exp()
    return 0.03 * torch.randn(rows, cols) * sizes * coarse.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]


def model(family: str, seed: int, bias: bool = False, dense: bool = False) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors of a random model in BF16, by the names in checkpoints of Hugging Face's.

    `bias`: biases of attention; `dense`: layer 0 of a Qwen3-MoE has no experts.
    """
    torch.manual_seed(seed)
    config = {k: v for k, v in (COMMON | FAMILIES[family]).items() if k not in LACKS.get(family, ())}
    t: Tensors = {"model.embed_tokens.weight": torch.randn(256, 256) * 0.5, "model.norm.weight": torch.randn(256) / 10}
    if not config["tie_word_embeddings"]:
        t["lm_head.weight"] = weight(256, 256)
    for i in range(2):
        at, mlp = f"model.layers.{i}", f"model.layers.{i}.mlp"
        parts = {f"{at}.self_attn.o_proj": (256, 256)}
        if family == "phi3":
            parts |= {f"{at}.self_attn.qkv_proj": (512, 256), f"{mlp}.gate_up_proj": (1024, 256), f"{mlp}.down_proj": (256, 512)}
        else:
            parts |= {f"{at}.self_attn.{p}_proj": (256 if p == "q" else 128, 256) for p in "qkv"}
        if family == "mixtral":
            moe = f"{at}.block_sparse_moe"
            parts[f"{moe}.gate"] = (EXPERTS, 256)
            parts |= {f"{moe}.experts.{e}.{w}": (256, 256) for e in range(EXPERTS) for w in ("w1", "w2", "w3")}
        elif family == "qwen3_moe" and not (dense and i == 0):
            parts[f"{mlp}.gate"] = (EXPERTS, 256)
            parts |= {f"{mlp}.experts.{e}.{w}_proj": (256, 256) for e in range(EXPERTS) for w in ("gate", "up", "down")}
        elif family != "phi3":
            parts |= {f"{mlp}.gate_proj": (512, 256), f"{mlp}.up_proj": (512, 256), f"{mlp}.down_proj": (256, 512)}
        t |= {f"{name}.weight": weight(*size) for name, size in parts.items()}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family == "gemma2":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        t |= {f"{at}.{n}.weight": torch.randn(256) / 10 for n in norms}
        if family.startswith("qwen3"):
            t |= {f"{at}.self_attn.{n}_norm.weight": torch.randn(32) / 10 for n in "qk"}
        if bias:
            t |= {f"{at}.self_attn.{p}_proj.bias": torch.randn(128 if p in "kv" else 256) / 10 for p in "qkvo"}
    if bias:
        config["attention_bias"] = True
    if dense:
        config["mlp_only_layers"] = [0]
    if family != "gemma2":  # Gemma's norms multiply by 1 + w
        t = {k: 1 + x if "norm.weight" in k else x for k, x in t.items()}
    return config, {k: x.bfloat16().contiguous() for k, x in t.items()}


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """As transformers would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({k: x.contiguous() for k, x in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def tree(config: dict[str, Any], tensors: Tensors) -> nn.Module:
    """Modules with these tensors: matrices are nn.Linear, all else only holds a parameter."""
    root = nn.Module()
    if config["tie_word_embeddings"]:
        tensors = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    for name, x in tensors.items():
        if name.endswith(".bias"):
            continue
        *path, last, _ = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]  # type: ignore[assignment]
        if x.dim() == 2 and last != "embed_tokens":
            bias = tensors.get(name.removesuffix("weight") + "bias")
            made: nn.Module = nn.Linear(x.shape[1], x.shape[0], bias=bias is not None, dtype=x.dtype)
            made.weight = nn.Parameter(x.clone())
            if bias is not None:
                made.bias = nn.Parameter(bias.clone())
        else:
            made = nn.Module()
            made.weight = nn.Parameter(x.clone())
        at.add_module(last, made)
    if config["tie_word_embeddings"]:
        root.lm_head.weight = root.model.embed_tokens.weight  # type: ignore[union-attr]
    return root


def exported(config: dict[str, Any], tensors: Tensors, recipe: str, layout: str, engine: str | None) -> tuple[dict[str, Any], Tensors]:
    """What `ottava export` writes for a model with these tensors that was trained under the recipe."""
    net = tree(config, tensors)
    if recipe != "bf16":
        ottava.convert(net, recipe)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        ottava.export(net, out, layout=layout, config=config, recast=recipe == "tensorwise", engine=engine)
        read = {k: x.clone() for file in sorted(out.glob("*.safetensors")) for k, x in load_file(file).items()}
        return json.loads((out / "config.json").read_text()), read


# ---------------------------------------------------------------------------------------------------- served folders


@dataclass
class Folder:
    """A folder that an engine reads, opened for an edit."""

    path: Path
    config: dict[str, Any]
    tensors: Tensors
    source_config: dict[str, Any]
    source: Tensors
    """The checkpoint of training."""
    how: tuple[str, str, str | None]
    """Recipe, layout, and the engine that export was told."""
    words: list[str] = field(default_factory=list)
    """Further words of the call."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the engine."""
    shards: int = 1

    @property
    def q(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def ignore(self) -> list[str]:
        return self.q["ignore" if "ignore" in self.q else "modules_to_not_convert"]

    def cast(self, *parts: str) -> list[str]:
        """Linears with codes, whose name has one of these parts; all without parts."""
        names = sorted({k.partition(".weight_scale")[0] for k in self.tensors if ".weight_scale" in k})
        return [n for n in names if not parts or any(p in n for p in parts)]

    def scale(self, name: str) -> str:
        return next(k for k in self.tensors if k.startswith(f"{name}.weight_scale"))

    def codes(self, name: str) -> str:
        return next(k for k in (f"{name}.weight", f"{name}.weight_packed") if k in self.tensors)

    def spread(self, name: str) -> Tensor:
        """The scale of each element, FP32."""
        s = self.tensors[self.scale(name)]
        if s.dtype != torch.float32:
            s = torch.exp2(s.view(torch.uint8).float() - 127)
        rows, cols = self.source[f"{name}.weight"].shape
        return s.repeat_interleave(rows // s.shape[0], 0).repeat_interleave(cols // s.shape[1], 1)

    def exact(self, name: str) -> Tensor:
        """What the codes stand for before rounding: w / scale, FP32."""
        return self.source[f"{name}.weight"].float() / self.spread(name)

    def take(self, changed: Tensors, *names: str, recipe: str | None = None) -> None:
        """Puts in codes and scales (or numbers in BF16) that export writes for a model with `changed` tensors."""
        if recipe is None and self.how[0] == "bf16":
            self.tensors |= {f"{n}.weight": changed[f"{n}.weight"] for n in names}
            return
        _, other = exported(self.source_config, self.source | changed, recipe or self.how[0], *self.how[1:])
        for key, x in other.items():
            if key.partition(".weight")[0] in names:
                self.tensors[key] = x

    def uncast(self, *names: str) -> None:
        """Numbers in BF16 instead of codes and scales."""
        for name in names:
            del self.tensors[self.scale(name)], self.tensors[self.codes(name)]
            self.tensors[f"{name}.weight"] = self.source[f"{name}.weight"]

    def save(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config, indent=2))
        names = list(self.tensors)
        held = {k: self.tensors[k].contiguous() for k in names}
        if self.shards == 1:
            save_file(held, self.path / "model.safetensors", metadata={"format": "pt"})
        else:
            where = {k: f"model-{1 + i * self.shards // len(names):05d}-of-{self.shards:05d}.safetensors" for i, k in enumerate(names)}
            for file in sorted(set(where.values())):
                save_file({k: x for k, x in held.items() if where[k] == file}, self.path / file, metadata={"format": "pt"})
            total = sum(x.numel() * x.itemsize for x in held.values())
            (self.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
        if self.settings:
            (self.path.parent / "engine.json").write_text(json.dumps(self.settings))
            self.words += ["--engine-config", str(self.path.parent / "engine.json")]


def L(i: int, part: str) -> str:
    return f"model.layers.{i}.{part}"


# ------------------------------------------------------------------------------------------------------------ faults


def up(codes: Tensor, where: Tensor) -> Tensor:
    """The next code away from zero there; 448 stays."""
    bits = codes.view(torch.uint8)
    return torch.where(where & (bits & 0x7F < 0x7E), bits + 1, bits).to(torch.uint8).view(E4)


def away(f: Folder) -> None:
    for n in f.cast():
        x, codes = f.exact(n), f.tensors[f"{n}.weight"]
        f.tensors[f"{n}.weight"] = torch.where(x < 0, -1.0, 1.0).mul(up(codes.float().abs().to(E4), codes.float().abs() < x.abs()).float()).to(E4)


def ties_away(f: Folder) -> None:
    for n in f.cast():
        x, codes = f.exact(n), f.tensors[f"{n}.weight"]
        size = codes.float().abs().to(E4)
        above = up(size, torch.ones_like(x, dtype=torch.bool))
        tie = (x.abs() > size.float()) & (x.abs() - size.float() == above.float() - x.abs())
        f.tensors[f"{n}.weight"] = torch.where(x < 0, -1.0, 1.0).mul(up(size, tie).float()).to(E4)


def twice(f: Folder) -> None:
    for n in f.cast():
        f.tensors[f"{n}.weight"] = f.exact(n).bfloat16().float().clamp(-448, 448).to(E4)


def clamp240(f: Folder) -> None:
    for n in f.cast("experts"):
        f.tensors[f"{n}.weight"] = f.tensors[f"{n}.weight"].float().clamp(-240, 240).to(E4)


def clamp4(f: Folder) -> None:
    """E2M1: code 7 (6.0) becomes 6 (4.0), in both halves of each byte."""
    for n in f.cast():
        b = f.tensors[f"{n}.weight_packed"].int()
        low, high = b & 15, b >> 4
        low, high = (torch.where(h & 7 == 7, h - 1, h) for h in (low, high))
        f.tensors[f"{n}.weight_packed"] = (low | high << 4).to(torch.uint8)


def e5m2(bits_only: bool, *parts: str) -> Edit:
    def edit(f: Folder) -> None:
        for n in f.cast(*parts):
            x = f.exact(n).to(E5)
            f.tensors[f"{n}.weight"] = x.view(torch.uint8).view(E4) if bits_only else x

    return edit


def fnuz(f: Folder) -> None:
    for n in f.cast():
        x = f.exact(n).clamp(-448, 448) / 2  # the range of FNUZ is used to 224, so its scale is twice as large
        bits = x.to(torch.float8_e4m3fnuz).view(torch.uint8)
        f.tensors[f"{n}.weight"] = torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(E4)
        f.tensors[f.scale(n)] = f.tensors[f.scale(n)] * 2


def transposed(f: Folder) -> None:
    names = [L(i, "self_attn.o_proj") for i in range(2)]
    f.take({f"{n}.weight": f.source[f"{n}.weight"].t().contiguous() for n in names}, *names)


def column_major(f: Folder) -> None:
    for n in f.cast("gate_up_proj"):
        s = f.tensors[f.scale(n)]
        f.tensors[f.scale(n)] = s.t().contiguous().view(s.shape)


def swizzled(f: Folder) -> None:
    for n in f.cast():
        s = f.tensors[f.scale(n)]
        rows, cols = s.shape
        f.tensors[f.scale(n)] = s.view(rows // 128, 4, 32, cols // 4, 4).permute(0, 3, 2, 1, 4).contiguous().view(rows, cols)


def each_scale(change: Callable[[Tensor], Tensor], *parts: str) -> Edit:
    def edit(f: Folder) -> None:
        for n in f.cast(*parts):
            f.tensors[f.scale(n)] = change(f.tensors[f.scale(n)])

    return edit


def older(*parts: str, layer: int | None = None) -> Edit:
    """Numbers of an earlier step, from which training went on by some 3 % of each tensor's size."""

    def edit(f: Folder) -> None:
        torch.manual_seed(77)
        names = [k.removesuffix(".weight") for k in f.source if k.endswith("_proj.weight") and any(p in k for p in parts)]
        names = [n for n in names if layer is None or n.startswith(L(layer, ""))]
        f.take({f"{n}.weight": (w.float() + 0.03 * w.float().abs() * torch.randn(w.shape)).bfloat16() for n in names for w in [f.source[f"{n}.weight"]]}, *names)

    return edit


def exchange(pairs: list[tuple[str, str]]) -> Edit:
    """Codes and scales of two linears change places."""

    def edit(f: Folder) -> None:
        for one, two in pairs:
            for key in [k for k in f.tensors if k.startswith(f"{one}.")]:
                other = two + key.removeprefix(one)
                f.tensors[key], f.tensors[other] = f.tensors[other], f.tensors[key]

    return edit


def up_first(f: Folder) -> None:
    for n in f.cast("gate_up_proj"):
        for key in (f"{n}.weight", f.scale(n)):
            x = f.tensors[key]
            half, bits = x.shape[0] // 2, x.view(torch.uint8) if x.dtype == E4 else x
            f.tensors[key] = torch.cat((bits[half:], bits[:half])).view(x.dtype)


def interleaved(f: Folder) -> None:
    for n in f.cast("q_proj"):
        for key in (f"{n}.weight", f.scale(n)):
            x = f.tensors[key]
            bits = x.view(torch.uint8)
            f.tensors[key] = bits.view(8, 2, 16, -1).transpose(1, 2).reshape(bits.shape).contiguous().view(x.dtype)


def router(f: Folder) -> None:
    for i in range(2):
        n = L(i, "mlp.gate")
        f.ignore.remove(n)
        w = f.source[f"{n}.weight"].float().view(EXPERTS, 8, 32)
        e = (w.abs().amax(2) / 448).log2().ceil()
        f.tensors[f"{n}.weight"] = (w / torch.exp2(e)[..., None]).view(EXPERTS, 256).to(E4)
        f.tensors[f"{n}.weight_scale"] = (e + 127).to(torch.uint8)


def head(f: Folder) -> None:
    f.ignore.remove("lm_head")
    w = f.source["lm_head.weight"].float().view(2, 128, 2, 128)
    s = torch.exp2((w.abs().amax((1, 3)) / 448).log2().ceil())
    f.tensors["lm_head.weight"] = (w / s[:, None, :, None]).view(256, 256).to(E4)
    f.tensors["lm_head.weight_scale"] = s


def tied(f: Folder) -> None:
    del f.tensors["lm_head.weight"]
    f.config["tie_word_embeddings"] = True


def activations(f: Folder) -> None:
    how = f.q["config_groups"]["group_0"]["input_activations"]
    how["strategy"] = "token"
    del how["group_size"]


def engine(values: dict[str, Any]) -> Edit:
    return lambda f: f.settings.update(values)


def kv_scheme(f: Folder) -> None:
    f.q["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    f.tensors |= {L(i, f"self_attn.{p}_scale"): torch.tensor([0.02 + 0.01 * i]) for i in range(2) for p in "kv"}


def nothing(f: Folder) -> None:
    """The fault is in the choice of recipe, layout, engine and device."""


def parts(f: Folder) -> None:
    f.uncast(L(1, "self_attn.q_proj"))
    f.ignore.append(L(1, "self_attn.q_proj"))


def ignored(f: Folder) -> None:
    names = f.cast("down_proj")
    f.uncast(*names)
    f.ignore.extend(names)


def substring(f: Folder) -> None:
    f.ignore.remove(L(1, "mlp.gate"))
    f.ignore.append(r"re:.*mlp\.gate")


def regex_dot(f: Folder) -> None:
    f.ignore.append("re:.*mlp.gate.")


def says(**values: Any) -> Edit:
    return lambda f: f.config.update(copy.deepcopy(values))


def block(f: Folder) -> None:
    f.q["weight_block_size"] = [128, 64]


GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
              "repetition_penalty": 1.0, "transformers_version": "5.20.0"}  # fmt: skip


def beside(f: Folder, **other: Any) -> None:
    """Files that both folders have."""
    for at, settings in ((f.path.parent / "a", GENERATION), (f.path, GENERATION | other)):
        at.mkdir(parents=True, exist_ok=True)
        (at / "generation_config.json").write_text(json.dumps(settings, indent=2))
        (at / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512, "tokenizer_class": "PreTrainedTokenizerFast"}))


def no_bias(f: Folder) -> None:
    for i in range(2):
        f.tensors[L(i, "self_attn.k_proj.bias")] = torch.zeros_like(f.source[L(i, "self_attn.k_proj.bias")])


def plus_one(f: Folder) -> None:
    f.tensors |= {k: (1 + x.float()).bfloat16() for k, x in f.tensors.items() if "norm.weight" in k}


def receipt(f: Folder) -> None:
    """The receipt of a training that left one linear in high precision."""
    net, left = tree(f.source_config, f.source), L(1, "mlp.down_proj")
    ottava.convert(net, f.how[0], filter=lambda name, *_: name != left and name != "lm_head")
    torch.manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module(torch.randn(128, module.in_features).bfloat16().requires_grad_()).float().square().sum().backward()
    (f.path.parent / "receipt.json").write_text(json.dumps(ottava.receipt(net).to_dict()))
    f.words += ["--receipt", str(f.path.parent / "receipt.json")]


# -------------------------------------------------------------------------------------------- changes of no number


def ordered(f: Folder) -> None:
    f.config = dict(sorted(f.config.items(), reverse=True))
    f.tensors = dict(sorted(f.tensors.items(), reverse=True))


def renamed(f: Folder) -> None:
    f.config |= {"transformers_version": "5.23.0", "use_cache": False}
    f.path.mkdir(parents=True, exist_ok=True)
    (f.path / "README.md").write_text("# a model card\n")


def sharded(f: Folder) -> None:
    f.shards = 2


def halved(f: Folder) -> None:
    """Half of each code and twice the scale, in blocks where each half is a code."""
    for n in f.cast():
        codes, s = f.tensors[f"{n}.weight"], f.tensors[f.scale(n)]
        blocks = codes.float().view(s.shape[0], s.shape[1], 32)
        fits = ((blocks / 2).to(E4).float() * 2 == blocks).all(2)
        f.tensors[f"{n}.weight"] = torch.where(fits[..., None], blocks / 2, blocks).view(codes.shape).to(E4)
        f.tensors[f.scale(n)] = torch.where(fits, s + 1, s).to(torch.uint8)


def pattern(f: Folder) -> None:
    f.ignore.remove(L(1, "mlp.gate"))
    f.ignore.append(r"re:.*mlp\.gate$")


def wide(f: Folder) -> None:
    f.tensors |= {k: x.float() for k, x in f.tensors.items() if "norm.weight" in k}


def narrow(f: Folder) -> None:
    for n in f.cast():
        s = f.tensors[f.scale(n)]
        assert torch.equal(s.bfloat16().float(), s)
        f.tensors[f.scale(n)] = s.bfloat16()


def head_too(f: Folder) -> None:
    f.tensors["lm_head.weight"] = f.tensors["model.embed_tokens.weight"].clone()


def listed(f: Folder) -> None:
    f.q["modules_to_not_convert"] = ["model.mtp.0.eh_proj", *reversed(f.ignore)]


# -------------------------------------------------------------------------------------------------------------- cases

FP32 = {"env": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}
BASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "fb": ("blockwise", "fp8-block", "vllm", {}),
    "ue": ("blockwise", "fp8-block-ue8m0", "vllm", {}),
    "cb": ("blockwise", "compressed-tensors-block", "vllm", {}),
    "fb32": ("blockwise_fp32", "fp8-block", "vllm", FP32),
    "cb32": ("blockwise_fp32", "compressed-tensors-block", "vllm", FP32),
    "sgl": ("blockwise_fp32", "fp8-block", "sglang", {}),
    "hf": ("blockwise_fp32", "fp8-block", "transformers", {}),
    "mx": ("mxfp8", "compressed-tensors-mxfp8", "vllm", {}),
    "mxs": ("mxfp8", "mxfp8", "sglang", {}),
    "m4": ("mxfp4", "compressed-tensors-mxfp4", "vllm", {}),
    "tw": ("tensorwise", "compressed-tensors-tensor", "vllm", {}),
    "bf-v": ("bf16", "bf16", "vllm", {}),
    "bf-s": ("bf16", "bf16", "sglang", {}),
    "bf-t": ("bf16", "bf16", "transformers", {}),
    "bf-r": ("bf16", "bf16", "trtllm", {}),
}


@dataclass
class Case:
    base: str
    family: str
    edit: Edit
    causes: str
    truth: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of the model."""
    words: tuple[str, ...] = ()
    name: str = ""
    seed: int = 0


FAULTS = [
    Case("mx", "qwen3", away, "rounding", "codes of all linears are rounded away from zero"),
    Case("ue", "mistral", ties_away, "rounding", "ties are rounded away from zero instead of to even, in all linears"),
    Case("cb32", "gemma2", twice, "rounding", "w / scale is rounded to BF16 before it is rounded to E4M3: two roundings"),
    Case("fb", "qwen3_moe", clamp240, "clamp", "codes of the experts are clamped at 240"),
    Case("m4", "llama", clamp4, "clamp", "E2M1 codes end at 4 instead of 6"),
    Case("fb", "mixtral", e5m2(False, ".w2"), "format", "w2 of all experts is stored in E5M2"),
    Case("sgl", "qwen3", e5m2(True, "gate_proj", "up_proj"), "misread", "gate and up are cast to E5M2, and the bits are stored as E4M3"),
    Case("fb32", "phi3", fnuz, "misread|scales", "codes of E4M3 FNUZ (used to 224, scales twice as large) are stored as E4M3: all numbers are doubled; the bits are those of training but for a few"),
    Case("ue", "mistral", transposed, "transposed", "o_proj holds codes and scales of W.T (square)"),
    Case("mx", "llama", says(rms_norm_eps=1e-5), "formula", "rms_norm_eps is 1e-5 instead of 1e-6"),
    Case("fb", "phi3", column_major, "scale-layout", "scales of gate_up_proj are written column by column"),
    Case("mxs", "gemma2", swizzled, "scale-layout", "scales of all linears are in the tiles of 128x4 that a kernel reads"),
    Case("mx", "mistral", each_scale(lambda s: (254 - s.int()).to(torch.uint8)), "reciprocal", "E8M0 scales hold the exponent of the factor that quantizes"),
    Case("mxs", "qwen3_moe", each_scale(lambda s: s + 1, "down_proj"), "scales", "E8M0 scales of down_proj are written with bias 128 instead of 127: twice as large"),
    Case("fb", "mistral", block, "formula|granularity", "weight_block_size is [128, 64] over a grid of 128x128"),
    Case("cb32", "llama", lambda f: f.take({}, *f.cast(), recipe="blockwise"), "scale-format", "the exporter made scales powers of two and cast again; training had FP32 scales"),
    Case("fb32", "mixtral", each_scale(lambda s: s.bfloat16().float(), "experts"), "scale-format", "scales of the experts are rounded to BF16; codes are right"),
    Case("fb", "qwen3", older("mlp.gate_proj", layer=1), "stale", "gate_proj of layer 1 is of an earlier step, codes and scales"),
    Case("bf-s", "llama", older("_proj", layer=1), "stale", "all linears of layer 1 are of an earlier step, in BF16; norms are not"),
    Case("fb32", "llama", exchange([(L(0, "self_attn.k_proj"), L(0, "self_attn.v_proj"))]), "swapped", "k_proj and v_proj of layer 0 have changed places, with their scales"),
    Case("fb", "mixtral", exchange([(L(0, f"block_sparse_moe.experts.0.{w}"), L(0, f"block_sparse_moe.experts.3.{w}")) for w in ("w1", "w2", "w3")]), "swapped", "experts 0 and 3 of layer 0 have changed places, with their scales; the router has not"),
    Case("cb", "phi3", up_first, "rows|swapped", "gate_up_proj has the rows of up first, with their scales"),
    Case("mx", "llama", interleaved, "rows", "rows of q_proj are in the order of interleaved rope (Meta's), with their scales"),
    Case("mx", "qwen3_moe", router, "router", "the router has codes and is not on the list of ignored layers"),
    Case("cb", "qwen3", head, "head", "lm_head has codes and is not on the list of ignored layers"),
    Case("bf-v", "mistral", tied, "tied|formula", "lm_head was dropped and tie_word_embeddings is true; training had an own head"),
    Case("cb", "gemma2", activations, "activation-granularity", "the config says a scale for each token; training had 1x128"),
    Case("fb", "llama", engine({"compilation_config": {"pass_config": {"fuse_act_quant": True}}}), "activation-rounding", "the engine fuses activation and cast, without the rounding to BF16"),
    Case("mx", "qwen3", kv_scheme, "kv-cache", "the config has a scheme for a KV cache in FP8, and there are scales for it"),
    Case("hf", "qwen3", nothing, "device", "transformers on a CPU casts no activations of fp8-block", words=("--device", "cpu")),
    Case("tw", "qwen3", nothing, "joined-scale|activation-granularity", "the exporter joined q, k, v and gate, up under one scale and cast again; and vLLM has a scale for each token, where training had one"),
    Case("mx", "llama", parts, "parts", "q_proj of layer 1 is in BF16 and listed; k and v are not"),
    Case("cb", "phi3", ignored, "ignored", "down_proj is listed and in BF16; training cast it"),
    Case("cb", "qwen3_moe", substring, "substring", r"the pattern for the router, re:.*mlp\.gate, also matches gate_proj and gate_up_proj of the dense layer 0, which have codes", {"dense": True}),
    Case("cb", "qwen3", regex_dot, "regex-dot", "the pattern re:.*mlp.gate. also matches gate_proj and gate_up_proj, which have codes"),
    Case("fb", "mistral", says(rope_theta=10000.0), "formula", "rope_theta is 10,000 instead of 1,000,000"),
    Case("bf-t", "llama", says(num_attention_heads=4, num_key_value_heads=2, head_dim=64), "formula", "4 heads of 64 instead of 8 of 32, 2 of keys instead of 4: all shapes are the same"),
    Case("mxs", "gemma2", says(hidden_activation="gelu"), "formula", "hidden_activation is gelu instead of gelu_pytorch_tanh"),
    Case("bf-v", "qwen3", says(dtype="float16"), "formula", "dtype is float16 (the tensors stay BF16)"),
    Case("fb", "gemma2", says(attn_logit_softcapping=None), "formula", "attn_logit_softcapping is null instead of 50"),
    Case("mx", "phi3", lambda f: beside(f, repetition_penalty=1.1), "formula", "generation_config.json has repetition_penalty 1.1 instead of 1"),
    Case("fb", "llama", no_bias, "plain", "the bias of k_proj is zero in both layers; training had one", {"bias": True}),
    Case("bf-s", "gemma2", plus_one, "plain", "norms hold 1 + w, as for a Llama; a Gemma adds 1 again"),
    Case("fb", "mistral", receipt, "extra|not-fp8", "the receipt says that down_proj of layer 1 ran in high precision; the folder has its codes"),
]

AS_IT_WAS = (nothing, "as it was written")
ORDER = (ordered, "fields and tensors in another order")
CARD = (renamed, "another version of transformers, a model card, use_cache")
TWO = (sharded, "two files and an index")
FILES = (beside, "generation settings and a tokenizer's config beside both")
HALVED = (halved, "half of each code and twice the scale, where that is exact")
PATTERN = (pattern, "the router is listed as a pattern that ends there, re:.*mlp\\.gate$; layer 0 is dense")
WIDE = (wide, "norms in FP32 with the same numbers")
NARROW = (narrow, "scales, powers of two, are stored in BF16 without rounding")
HEAD = (head_too, "the tied head is written, too, equal to the embedding")
LISTED = (listed, "the list of ignored layers in another order, with a layer that does not exist")
OFF = (engine({"compilation_config": {"pass_config": {"fuse_act_quant": False}}, "kv_cache_dtype": "auto"}), "settings of the engine that say what it does without them")
RUN = (nothing, "a run of ottava train")

RIGHT: dict[str, list[tuple[str, tuple[Edit, str]]]] = {
    "fb": [("llama", AS_IT_WAS), ("qwen3", ORDER), ("mistral", OFF), ("gemma2", NARROW), ("phi3", TWO), ("mixtral", TWO), ("qwen3_moe", LISTED)],
    "ue": [("llama", TWO), ("gemma2", CARD), ("phi3", AS_IT_WAS)],
    "cb": [("llama", RUN), ("mixtral", CARD), ("qwen3_moe", PATTERN), ("qwen3", WIDE)],
    "fb32": [("llama", CARD), ("mistral", AS_IT_WAS), ("qwen3_moe", AS_IT_WAS), ("phi3", ORDER)],
    "cb32": [("gemma2", HEAD), ("qwen3", AS_IT_WAS)],
    "sgl": [("qwen3", TWO), ("gemma2", ORDER), ("mixtral", AS_IT_WAS), ("qwen3_moe", CARD)],
    "mx": [("llama", HALVED), ("qwen3", AS_IT_WAS), ("mistral", CARD), ("phi3", HALVED), ("gemma2", TWO), ("qwen3_moe", ORDER)],
    "mxs": [("qwen3", CARD), ("gemma2", HALVED), ("qwen3_moe", AS_IT_WAS)],
    "m4": [("qwen3", AS_IT_WAS), ("phi3", CARD)],
    "bf-v": [("llama", FILES), ("mixtral", AS_IT_WAS)],
    "bf-s": [("gemma2", FILES), ("mistral", TWO)],
    "bf-t": [("llama", AS_IT_WAS), ("qwen3", CARD), ("phi3", ORDER)],
    "bf-r": [("mistral", AS_IT_WAS)],
    "hf": [("qwen3", AS_IT_WAS)],
}


def cases() -> list[Case]:
    """All pairs, in an order that does not tell right from wrong."""
    found = list(FAULTS)
    for base, rows in RIGHT.items():
        for family, (edit, said) in rows:
            options = {"dense": True} if edit is pattern else {}
            found.append(Case(base, family, edit, "", f"equal: {said}", options, ("--device", "cuda") if base == "hf" else ()))
    for i, case in enumerate(found):
        case.seed = 1000 + i
    mixed = torch.randperm(len(found), generator=torch.Generator().manual_seed(11)).tolist()
    for i, j in enumerate(mixed):
        found[j].name = f"pair_{i:02d}"
    return [found[j] for j in mixed]


def trained(folder: Path, served: Path, recipe: str, layout: str, engine_name: str) -> None:
    """A run of ottava train of two steps, and its export."""
    from ottava.cli.app import app

    text = folder.parent / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}, and {i} and {i} is {2 * i}.\n" for i in range(2000)))
    settings = folder.parent / "train.json"  # YAML reads it
    settings.write_text(json.dumps({
        "recipe": recipe, "steps": 2, "batch_size": 2, "sequence_length": 64, "device": "cpu", "data": {"path": str(text)},
        "model": {"d_model": 256, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 256}, "evaluation": {"every": 2, "batches": 1},
    }))  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app(["train", str(settings), "--run-dir", str(folder)], standalone_mode=False)
        app(["export", str(folder), str(served), "-l", layout, "-e", engine_name], standalone_mode=False)
    (served / "export.json").unlink()


def make(case: Case, root: Path) -> list[str]:
    """Both folders of a case, and its call."""
    here = root / case.name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    recipe, layout, engine_name, settings = BASES[case.base]
    if case.truth.endswith(RUN[1]):
        trained(here / "a", here / "b", recipe, layout, engine_name)
        return ["ottava", "parity", str(here / "a"), str(here / "b"), "-e", engine_name, "--no-kl"]
    config, tensors = model(case.family, case.seed, **case.options)
    write(here / "a", config, tensors)
    how = (recipe, layout, None if engine_name == "transformers" else engine_name)
    served = Folder(here / "b", *exported(config, tensors, *how), config, tensors, how, list(case.words), copy.deepcopy(settings))
    case.edit(served)
    served.save()
    return ["ottava", "parity", f"{here / 'a'}@{recipe}", str(here / "b"), "-e", engine_name, "--no-kl", *served.words]


def main(words: list[str]) -> None:
    """See the top of this file."""
    if words == ["--truth"]:
        rows = [{"name": c.name, "family": c.family, "recipe": BASES[c.base][0], "layout": BASES[c.base][1], "engine": BASES[c.base][2],
                 "equal": not c.causes, "causes": c.causes.split("|") if c.causes else [], "truth": c.truth} for c in cases()]  # fmt: skip
        (Path(__file__).parent / "truth.yaml").write_text("".join(f"- {json.dumps(row)}\n" for row in rows))
        print(len(rows), "pairs,", sum(not r["equal"] for r in rows), "with a fault")
        return
    for case in cases():
        if len(words) == 1 or case.name in words[1:]:
            print(*make(case, Path(words[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
