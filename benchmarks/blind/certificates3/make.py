"""Makes the pairs of this set: a trained checkpoint and the folder that an engine reads, right or with one fault.

python make.py FOLDER [NAME ...]     makes FOLDER/NAME/a and FOLDER/NAME/b of each case, and prints its call of `ottava parity`
python make.py --truth               writes truth.yaml

A right folder holds what `ottava export` wrote under the recipe of training, perhaps with a change that changes no number.
A faulty folder is that, and then one edit such as a broken exporter, loader or setting would make.
Models and folders are those of the second set (../certificates2/make.py); faults and changes are this set's own.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
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

_spec = importlib.util.spec_from_file_location("certificates2_make", Path(__file__).parents[1] / "certificates2" / "make.py")
assert _spec is not None and _spec.loader is not None
second = importlib.util.module_from_spec(_spec)
sys.modules["certificates2_make"] = second
_spec.loader.exec_module(second)
Folder, L, exported, model, tree = second.Folder, second.L, second.exported, second.model, second.tree

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Tensors = dict[str, Tensor]
Edit = Callable[[Any], None]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def numbers(f: Any, name: str) -> Tensor:
    """What codes and scales stand for, FP32."""
    codes = f.tensors[f.codes(name)]
    if codes.dtype == torch.uint8:  # two E2M1 in a byte, the low nibble first
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        value = E2M1[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    else:
        value = codes.float()
    s = f.tensors[f.scale(name)]
    s = s.float() if s.is_floating_point() and s.dtype.itemsize > 1 else torch.exp2(bits(s).float() - 127)
    return value * s.repeat_interleave(value.shape[0] // s.shape[0], 0).repeat_interleave(value.shape[1] // s.shape[1], 1)


# ------------------------------------------------------------------------------------------------------------ faults


def each_code(change: Callable[[Any, str, Tensor], Tensor], *parts: str) -> Edit:
    """Other codes for the linears: change(folder, name, codes) gives E4M3 or numbers that E4M3 holds."""

    def edit(f: Any) -> None:
        assert f.cast(*parts)
        for name in f.cast(*parts):
            f.tensors[f.codes(name)] = change(f, name, f.tensors[f.codes(name)]).to(E4)

    return edit


def each_scale(change: Callable[[Tensor], Tensor], *parts: str) -> Edit:
    def edit(f: Any) -> None:
        assert f.cast(*parts)
        for name in f.cast(*parts):
            f.tensors[f.scale(name)] = change(f.tensors[f.scale(name)]).contiguous()

    return edit


def neighbours(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The E4M3 numbers below and above, FP32."""
    exact = exact.clamp(-448, 448)
    near = exact.to(E4)
    b = bits(near).int()
    away = torch.where(near.float().abs() < exact.abs(), b + 1, b)  # at most the code that is next in magnitude
    less = torch.where(near.float().abs() > exact.abs(), b - 1, b)
    small, large = (x.to(torch.uint8).view(E4).float() for x in (less, away))
    return torch.minimum(small, large), torch.maximum(small, large)


def floor(f: Any, name: str, _: Tensor) -> Tensor:
    return neighbours(f.exact(name))[0]


def chance(f: Any, name: str, _: Tensor) -> Tensor:
    low, high = neighbours(f.exact(name))
    part = (f.exact(name) - low) / (high - low).clamp(min=1e-30)
    return torch.where(torch.rand(low.shape, generator=torch.Generator().manual_seed(5)) < part, high, low)


def flushed(_f: Any, _n: str, codes: Tensor) -> Tensor:
    return torch.where(codes.float().abs() < 2.0**-6, torch.zeros(()), codes.float())


def by_e5m2(f: Any, name: str, _: Tensor) -> Tensor:
    return f.exact(name).clamp(-448, 448).to(E5).float().clamp(-448, 448)


def complement(_f: Any, _n: str, codes: Tensor) -> Tensor:
    b = bits(codes).int()
    b = torch.where(b > 128, 384 - b, b)  # -m is 256 - m instead of 128 + m; 0x80 stays
    return torch.where(b == 255, 0, b).to(torch.uint8).view(E4)  # a NaN would be seen


def nibbles(f: Any) -> None:
    for name in f.cast():
        c = f.tensors[f.codes(name)]
        f.tensors[f.codes(name)] = (c << 4) | (c >> 4)


def floor_rule(f: Any) -> None:
    f.take({}, *f.cast(), recipe="mxfp8_floor")


def of_transposed(f: Any) -> None:
    names = f.cast("o_proj")
    f.take({f"{n}.weight": f.source[f"{n}.weight"].T.contiguous() for n in names}, *names)


def packed(s: Tensor) -> Tensor:
    return s.unflatten(1, (-1, 4)).flip(-1).flatten(1)


def rowblocks(f: Any) -> None:
    """One scale for each row of blocks, written into the whole grid."""
    for name in f.cast():
        s = f.tensors[f.scale(name)]
        f.tensors[f.scale(name)] = s.amax(1, keepdim=True).expand_as(s).contiguous()
        f.tensors[f.codes(name)] = f.exact(name).to(E4)


def joined(f: Any) -> None:
    """Gate and up share the larger of both scales, block by block."""
    for i in range(2):
        pair = [L(i, f"mlp.{p}_proj") for p in ("gate", "up")]
        largest = torch.maximum(*(f.tensors[f.scale(n)] for n in pair))
        for name in pair:
            f.tensors[f.scale(name)] = largest.clone()
            f.tensors[f.codes(name)] = f.exact(name).clamp(-448, 448).to(E4)


def first_expert(f: Any) -> None:
    for name in f.cast("experts"):
        head, _, rest = name.partition("experts.")
        f.tensors[f.scale(name)] = f.tensors[f.scale(f"{head}experts.0.{rest.partition('.')[2]}")].clone()


def older(x: Tensor, seed: int) -> Tensor:
    """As it was some steps ago."""
    g = torch.Generator().manual_seed(seed)
    return (x.float() * (1 + 0.02 * torch.randn(x.shape, generator=g)) + 0.05 * x.float().std() * torch.randn(x.shape, generator=g)).bfloat16()


def stale_expert(f: Any) -> None:
    names = [n for n in f.cast("experts.2.") if ".1." in n]
    f.take({f"{n}.weight": older(f.source[f"{n}.weight"], 3 + i) for i, n in enumerate(names)}, *names)


def exchange(*pairs: tuple[str, str]) -> Edit:
    """Tensors whose name has the one part get those of the other, all that belongs to them."""

    def edit(f: Any) -> None:
        new: Tensors = {}
        for one, two in pairs:
            for k in f.tensors:
                if one in k:
                    new[k], new[k.replace(one, two)] = f.tensors[k.replace(one, two)], f.tensors[k]
        assert new
        f.tensors |= new

    return edit


def by_group(f: Any) -> None:
    """Rows of qkv as Megatron has them: the queries of a group, its key, its value."""
    for name in f.cast("qkv_proj"):
        for key in (f.codes(name), f.scale(name)):
            q, k, v = bits(f.tensors[key]).split([256, 128, 128])
            x = torch.cat([q.unflatten(0, (4, 64)), k.unflatten(0, (4, 32)), v.unflatten(0, (4, 32))], 1).flatten(0, 1)
            f.tensors[key] = x.contiguous().view(f.tensors[key].dtype)


def ignores(*names: str) -> Edit:
    def edit(f: Any) -> None:
        f.ignore.extend(names)

    return edit


def one_expert(f: Any) -> None:
    name = L(0, "block_sparse_moe.experts.3.w2")
    f.uncast(name)
    f.ignore.append(name)


def up_left(f: Any) -> None:
    names = f.cast("up_proj")
    f.uncast(*names)
    f.ignore.extend(names)


def mx_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 bytes of a matrix, by a model of one linear."""
    rows = w.shape[0]
    w = torch.cat([w, w.new_zeros(-rows % 128, w.shape[1])])  # rows do not know of each other
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    layer.weight = nn.Parameter(w.clone())
    net = nn.Sequential(layer)
    ottava.convert(net, "mxfp8")
    with tempfile.TemporaryDirectory() as folder:
        ottava.export(net, Path(folder) / "o", layout="compressed-tensors-mxfp8", config={"model_type": "mine"})
        read = load_file(Path(folder) / "o" / "model.safetensors")
        return read["0.weight"][:rows].clone(), read["0.weight_scale"][:rows].clone()


def cast_too(*parts: str) -> Edit:
    """Layers of high precision get codes, and leave the list."""

    def edit(f: Any) -> None:
        for key in [k for k in f.tensors if any(k.endswith(f"{p}.weight") for p in parts)]:
            name = key.removesuffix(".weight")
            f.tensors[key], f.tensors[f"{name}.weight_scale"] = mx_codes(f.source[key])
            f.ignore.remove(name)

    return edit


def not_listed(f: Any) -> None:
    f.uncast(*f.cast("down_proj"))


def lost(f: Any) -> None:
    for key in [k for k in f.tensors if L(1, "mlp.experts.3.down_proj") in k]:
        del f.tensors[key]


def says(**values: Any) -> Edit:
    def edit(f: Any) -> None:
        f.config |= values

    return edit


def group128(f: Any) -> None:
    f.q["config_groups"]["group_0"]["input_activations"]["group_size"] = 128


def uses(**values: Any) -> Edit:
    """Settings of the engine."""

    def edit(f: Any) -> None:
        f.settings |= values

    return edit


def as_it_was(_: Any) -> None:
    pass


def normalizer(f: Any) -> None:
    key = "model.embed_tokens.weight"
    f.tensors[key] = f.tensors[key] * 16


def receipts(f: Any, left: Callable[[str], bool]) -> None:
    """The receipt of a training that left these linears in high precision."""
    net = tree(f.source_config, f.source)
    ottava.convert(net, f.how[0], filter=lambda name, *_: name != "lm_head" and not left(name))
    torch.manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module(torch.randn(128, module.in_features).bfloat16().requires_grad_()).float().square().sum().backward()
    (f.path.parent / "receipt.json").write_text(json.dumps(ottava.receipt(net).to_dict()))
    f.words += ["--receipt", str(f.path.parent / "receipt.json")]


def not_cast(f: Any) -> None:
    """By its receipt training left all of attention in high precision; it is served with codes."""
    receipts(f, lambda name: "self_attn" in name)


def of_bf16(f: Any) -> None:
    """Codes and scales as `ottava export` writes them for blockwise."""
    f.config, f.tensors = exported(f.source_config, f.source, "blockwise", "fp8-block", "vllm")


# -------------------------------------------------------------------------------------------- changes of no number


def three_files(f: Any) -> None:
    f.shards = 3


def plus_zero(f: Any) -> None:
    """-0 becomes +0."""
    for name in f.cast():
        b = bits(f.tensors[f.codes(name)])
        f.tensors[f.codes(name)] = torch.where(b == 128, torch.zeros_like(b), b).view(E4)


def halved_codes(f: Any) -> None:
    """Where all codes of a block can be halved without rounding, they are, and its scale is doubled."""
    count = 0
    for name in f.cast():
        codes, s = f.tensors[f.codes(name)].float(), f.tensors[f.scale(name)]
        blocks = codes.unflatten(1, (-1, 32))
        half = (blocks / 2).to(E4).float()
        exact = (half * 2 == blocks).all(-1)
        count += int(exact.sum())
        f.tensors[f.codes(name)] = torch.where(exact[..., None], half, blocks).flatten(1).to(E4)
        f.tensors[f.scale(name)] = s + exact.to(torch.uint8)
    assert count > 10


def wide_scales(f: Any) -> None:
    for name in f.cast():  # powers of two, so that BF16 has them, too
        s = f.tensors[f.scale(name)]
        assert s.dtype == torch.float32 and bool((s.bfloat16().float() == s).all())
        f.tensors[f.scale(name)] = s.bfloat16()


def embedding_fp32(f: Any) -> None:
    f.tensors |= {k: f.tensors[k].float() for k in ("model.embed_tokens.weight", "model.norm.weight")}


def trained_files(f: Any) -> None:
    """The checkpoint of training is in two files with an index."""
    here, names = f.path.parent / "a", list(f.source)
    (here / "model.safetensors").unlink()
    where = {k: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, k in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({k: f.source[k].contiguous() for k in names if where[k] == file}, here / file, metadata={"format": "pt"})
    (here / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def backwards(f: Any) -> None:
    """Keys of the config, and tensors, in the other order."""
    f.config = dict(reversed(f.config.items()))
    f.tensors = dict(reversed(f.tensors.items()))


def anchored(f: Any) -> None:
    f.q["ignore"] = [r"re:^lm_head$", r"re:^model\.layers\.\d+\.block_sparse_moe\.gate$"]


def anchored_head(f: Any) -> None:
    f.q["ignore"] = [r"re:^lm_head$"]


def beside(f: Any) -> None:
    """A tokenizer, a README, and the same settings of generation on both sides."""
    f.path.mkdir(parents=True, exist_ok=True)
    (f.path / "README.md").write_text("# A model\n")
    (f.path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    for folder, rows in ((f.path, {"eos_token_id": 2, "bos_token_id": 1}), (f.path.parent / "a", {"bos_token_id": 1, "eos_token_id": 2})):
        (folder / "generation_config.json").write_text(json.dumps(rows))


def head_written(f: Any) -> None:
    f.tensors["lm_head.weight"] = f.tensors["model.embed_tokens.weight"].clone()


def receipt_left(f: Any) -> None:
    """Training left o_proj of layer 0 in high precision, and its receipt says so; it is served in BF16 and listed."""
    name = L(0, "self_attn.o_proj")
    receipts(f, lambda n: n == name)
    f.uncast(name)
    f.ignore.append(name)


def receipt_all(f: Any) -> None:
    receipts(f, lambda n: False)


def listed_twice(f: Any) -> None:
    f.ignore.extend(list(f.ignore))


def zero_expert(f: Any) -> None:
    """The scales of blocks of zeros are others."""
    for name in f.cast("experts.1.w2"):
        assert not f.tensors[f.codes(name)].float().any()
        f.tensors[f.scale(name)] = torch.ones_like(f.tensors[f.scale(name)])


# -------------------------------------------------------------------------------------------------------------- cases

FP32 = {"env": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}
BASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "fb": ("blockwise", "fp8-block", "vllm", {}),
    "ue": ("blockwise", "fp8-block-ue8m0", "vllm", {}),
    "cb": ("blockwise", "compressed-tensors-block", "vllm", {}),
    "fb32": ("blockwise_fp32", "fp8-block", "vllm", FP32),
    "fb32-default": ("blockwise_fp32", "fp8-block", "vllm", {}),
    "cb32": ("blockwise_fp32", "compressed-tensors-block", "vllm", FP32),
    "cb32-t": ("blockwise_fp32", "compressed-tensors-block", "transformers", {}),
    "sgl": ("blockwise_fp32", "fp8-block", "sglang", {}),
    "hf": ("blockwise_fp32", "fp8-block", "transformers", {}),
    "mx": ("mxfp8", "compressed-tensors-mxfp8", "vllm", {}),
    "mx-t": ("mxfp8", "compressed-tensors-mxfp8", "transformers", {}),
    "mxs": ("mxfp8", "mxfp8", "sglang", {}),
    "mxs-v": ("mxfp8", "mxfp8", "vllm", {}),
    "mxs-t": ("mxfp8", "mxfp8", "transformers", {}),
    "m4": ("mxfp4", "compressed-tensors-mxfp4", "vllm", {}),
    "row": ("rowwise", "compressed-tensors-channel", "vllm", {}),
    "opt": ("delayed", "modelopt", "vllm", {}),
    "bf-v": ("bf16", "bf16", "vllm", {}),
    "bf-s": ("bf16", "bf16", "sglang", {}),
    "bf-t": ("bf16", "bf16", "transformers", {}),
    "bf-r": ("bf16", "bf16", "trtllm", {}),
    "bf-8": ("bf16", "fp8-block", "vllm", {}),
}
SOURCE = {"mxs-v": "sglang", "hf": None, "cb32-t": None, "mx-t": None, "mxs-t": None, "bf-t": None}
"""The engine that export was told, where it is not the one that serves."""


@dataclass
class Case:
    base: str
    family: str
    edit: Edit
    causes: str
    truth: str
    run: bool = False
    """A is a run of ottava train."""
    words: tuple[str, ...] = ()
    zeros: str = ""
    """Linears that are zero."""
    name: str = ""
    seed: int = field(default=0)


FAULTS = [
    Case("mx", "qwen3_moe", each_code(floor), "rounding", "codes of all linears are rounded toward minus infinity"),
    Case("fb", "llama", each_code(chance, "self_attn"), "rounding", "codes of attention are rounded by chance (stochastic rounding left on); the others to nearest"),
    Case("cb", "mistral", each_code(flushed), "rounding|clamp", "subnormal codes of E4M3, below 2^-6, are flushed to zero"),
    Case("fb32", "gemma2", each_code(by_e5m2), "format|rounding", "weights are rounded to E5M2's two bits of mantissa and then stored as E4M3: E5M2 numbers in E4M3 codes"),
    Case("cb", "qwen3", each_code(lambda f, n, c: c.float().clamp(-256, 256), "down_proj"), "clamp", "codes of down_proj end at 256"),
    Case("mx", "gemma2", floor_rule, "clamp|scale-format", "cast by OCP's rule: exponents of scales are rounded down and codes above 448 saturate; training rounded them up"),
    Case("m4", "llama", nibbles, "misread|rows", "the two E2M1 codes of each byte are in the other order (high nibble first), so that neighbours in a row change places"),
    Case("fb", "qwen3_moe", each_code(complement), "misread", "bytes of negative codes are in two's complement, by way of int8, and are read as sign and magnitude (the NaN of -1 became 0)"),
    Case("mxs", "qwen3", of_transposed, "transposed", "o_proj (square) has codes and scales that were cast from W.T"),
    Case("mx", "mistral", each_scale(packed), "scale-layout", "four scales of a row packed in an int32 with the bytes in opposite order"),
    Case("m4", "qwen3", each_scale(lambda s: (254 - s.int()).to(torch.uint8), "o_proj"), "reciprocal", "scales of o_proj are the factors that quantize: E8M0 bytes are 254 - b"),
    Case("fb", "phi3", rowblocks, "granularity", "one scale for each row of blocks (128 x all columns), written into the 128x128 grid; codes are of that scale"),
    Case("cb32", "mistral", joined, "joined-scale", "gate and up have the larger of both scales, block by block, and codes of that; training had a scale for each"),
    Case("fb32-default", "qwen3_moe", as_it_was, "scale-format", "VLLM_USE_DEEP_GEMM_E8M0 is at its default, so vLLM makes powers of two of FP32 scales"),
    Case("fb32", "mixtral", first_expert, "scales|swapped", "scales of all experts are those of expert 0; codes are right"),
    Case("fb", "qwen3_moe", stale_expert, "stale", "expert 2 of layer 1 is of an earlier step, codes and scales"),
    Case("mx", "mixtral", exchange((".w1.", ".w3.")), "swapped", "w1 and w3 (gate and up) of all experts are in each other's place, with scales"),
    Case("bf-v", "qwen3", exchange(("q_norm", "k_norm")), "swapped|plain", "q_norm and k_norm are in each other's place"),
    Case("mx", "phi3", by_group, "rows", "rows of qkv_proj are by groups (Megatron's order), with their scales"),
    Case("cb", "phi3", ignores("re:.*gate"), "substring|ignored", "the pattern for routers of another model, re:.*gate, also matches gate_up_proj, which has codes"),
    Case("mx", "llama", ignores("re:.*gate."), "regex-dot", "the pattern re:.*gate. (for a router 'gate.') also matches gate_proj and gate_up_proj, which have codes"),
    Case("fb", "mixtral", one_expert, "ignored|parts", "one linear of one expert is in BF16 and listed; vLLM then keeps all experts of the layer in BF16, and they have codes"),
    Case("mx", "llama", up_left, "parts", "up_proj is in BF16 and listed, gate_proj has codes"),
    Case("mx", "mixtral", cast_too(".block_sparse_moe.gate"), "router", "routers have MXFP8 codes and are not listed"),
    Case("mx", "qwen3_moe", cast_too("lm_head"), "head", "lm_head has MXFP8 codes and is not listed"),
    Case("ue", "qwen3", not_listed, "unscaled", "down_proj is in BF16 without scales, and is not on the list"),
    Case("mxs", "qwen3_moe", lost, "missing", "codes and scales of expert 3's down_proj in layer 1 are not in the folder"),
    Case("mxs-v", "qwen3", as_it_was, "unread", "layout mxfp8 for vLLM, which reads it by other names"),
    Case("sgl", "gemma2", says(query_pre_attn_scalar=256), "formula", "query_pre_attn_scalar is 256 instead of 32"),
    Case("fb", "mistral", says(residual_multiplier=0.22), "unknown", "config.json has a new field, residual_multiplier 0.22"),
    Case("mxs-t", "phi3", as_it_was, "device", "transformers on a CPU casts no activations of mxfp8", words=("--device", "cpu")),
    Case("mx-t", "llama", as_it_was, "activation-arithmetic", "transformers doubles the scale of some blocks of activations (by the page, 1.75 times a power of two)", words=("--device", "cpu")),
    Case("cb32-t", "gemma2", as_it_was, "decoded|activation-arithmetic", "transformers decodes codes to BF16 and computes scales of activations in BF16", words=("--device", "cpu")),
    Case("row", "qwen3", as_it_was, "activation-format", "training had powers of two as scales of activations, vLLM has FP32"),
    Case("fb", "llama", uses(**FP32), "activation-format|scale-format", "VLLM_USE_DEEP_GEMM_E8M0=0: vLLM casts activations with FP32 scales; training had powers of two. Weights are right"),
    Case("mx", "gemma2", group128, "activation-granularity|formula", "the config says one scale for 128 activations; training had one for 32"),
    Case("opt", "llama", as_it_was, "activation-scale", "input_scale of down_proj and o_proj is twice as large as the histories of training say", run=True),
    Case("fb", "phi3", uses(compilation_config={"pass_config": {"fuse_act_quant": True}}), "activation-rounding", "vLLM fuses activation and cast, without the rounding to BF16"),
    Case("bf-v", "mistral", says(tie_word_embeddings=True), "tied|formula", "tie_word_embeddings is true, though the folder has an own head, as training had"),
    Case("bf-v", "gemma2", normalizer, "plain", "the embedding (tied with the head) is multiplied by 16, sqrt(hidden_size), which the engine multiplies again"),
    Case("bf-s", "qwen3", uses(kv_cache_dtype="fp8_e5m2"), "kv-cache", "keys and values are kept in E5M2"),
    Case("fb", "qwen3", not_cast, "not-fp8", "by its receipt training left attention in high precision; the engine casts it"),
    Case("mx", "llama", as_it_was, "master", "codes of all linears are those of bf16(master); training cast its FP32 master", run=True),
    Case("bf-8", "phi3", of_bf16, "extra", "training was in BF16; the folder is in FP8 (blockwise, fp8-block)"),
]  # fmt: skip

AS = (as_it_was, "as it was written")
FILES = (three_files, "three files and an index")
BACK = (backwards, "tensors and fields of the config in the opposite order")
ABOUT = (says(transformers_version="5.23.0", _name_or_path="/models/served"), "another transformers_version, and a _name_or_path")
ZERO = (plus_zero, "-0 is +0 in all codes")
HEAD = (anchored_head, "the list is the pattern re:^lm_head$")
CACHE = (uses(kv_cache_dtype="auto"), "kv_cache_dtype is auto")
WIDE = (embedding_fp32, "the embedding and the last norm are in FP32, the same numbers")
SPLIT = (trained_files, "training's checkpoint is in two files")
BESIDE = (beside, "tokenizer and README beside it, the same generation_config on both sides")
COPY = (head_written, "the tied head is written, too")
ALL = (receipt_all, "with the receipt of a training that cast all")
LEFT = (receipt_left, "training left o_proj of layer 0 in BF16 by its receipt; so does the folder")
RIGHT: dict[str, list[tuple[str, tuple[Edit, str]]]] = {
    "fb": [("llama", ZERO), ("qwen3", LEFT), ("mixtral", (zero_expert, "an expert of zeros has other scales")), ("phi3", BESIDE), ("qwen3_moe", SPLIT),
           ("mistral", (wide_scales, "scales, powers of two, are stored in BF16")), ("gemma2", COPY)],
    "ue": [("llama", FILES), ("qwen3_moe", AS), ("phi3", ABOUT)],
    "cb": [("llama", ALL), ("mixtral", (anchored, "anchored patterns for the head and the routers")), ("gemma2", CACHE), ("qwen3", FILES), ("phi3", HEAD)],
    "fb32": [("mistral", ZERO), ("qwen3", BACK), ("llama", BESIDE)],
    "cb32": [("phi3", BACK), ("qwen3_moe", AS)],
    "sgl": [("qwen3", FILES), ("gemma2", AS)],
    "hf": [("llama", SPLIT), ("phi3", BACK)],
    "mx": [("llama", (halved_codes, "codes are halved and scales doubled where that is exact")), ("mistral", HEAD), ("phi3", LEFT), ("gemma2", ZERO),
           ("mixtral", BACK), ("qwen3", (uses(compilation_config={"pass_config": {"fuse_act_quant": False}}), "fuse_act_quant is false")),
           ("qwen3_moe", (listed_twice, "each ignored layer is listed twice"))],
    "mxs": [("gemma2", FILES), ("qwen3_moe", BACK), ("qwen3", (halved_codes, "codes are halved and scales doubled where that is exact"))],
    "m4": [("mistral", FILES), ("phi3", HEAD)],
    "bf-v": [("llama", WIDE), ("mixtral", FILES), ("gemma2", COPY)],
    "bf-s": [("qwen3_moe", SPLIT), ("mistral", BESIDE)],
    "bf-t": [("qwen3", BACK)],
    "bf-r": [("llama", ABOUT)],
}  # fmt: skip
RUN = Case("mx", "llama", as_it_was, "", "equal: a run of ottava train, as it was written", run=True)


def cases() -> list[Case]:
    """All pairs, in an order that does not tell right from wrong."""
    found = [*FAULTS, RUN]
    for base, rows in RIGHT.items():
        for family, (edit, said) in rows:
            words = ("--device", "cuda") if base == "hf" else ()
            zeros = "experts.1.w2" if edit is zero_expert else ""
            found.append(Case(base, family, edit, "", f"equal: {said}", words=words, zeros=zeros))
    for i, case in enumerate(found):
        case.seed = 3000 + i
    mixed = torch.randperm(len(found), generator=torch.Generator().manual_seed(23)).tolist()
    for i, j in enumerate(mixed):
        found[j].name = f"pair_{i:02d}"
    return [found[j] for j in mixed]


def of_run(case: Case, here: Path) -> None:
    """The faults of the pairs of runs."""
    file, step = here / "b" / "model.safetensors", here / "a" / "checkpoints" / "step-000002.safetensors"
    t = {k: x.clone() for k, x in load_file(file).items()}
    if case.causes == "activation-scale":
        t |= {k: 2 * x for k, x in t.items() if k.endswith(("down_proj.input_scale", "o_proj.input_scale"))}
    elif case.causes == "master":
        held = load_file(step)
        at = "model.layers.0."
        fused = {"attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attention.o_proj": ("self_attn.o_proj",),
                 "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj": ("mlp.down_proj",)}  # fmt: skip
        for name, parts in fused.items():
            w, sizes = held[f"{at}{name}.weight"], [t[f"{at}{p}.weight"].shape[0] for p in parts]
            for of, check in ((w, True), (w.bfloat16(), False)):
                codes, scales = mx_codes(of)
                for p, c, s in zip(parts, codes.split(sizes), scales.split(sizes), strict=True):
                    if check:
                        assert torch.equal(bits(c), bits(t[f"{at}{p}.weight"]))  # training's codes are those of the master
                    else:
                        t[f"{at}{p}.weight"], t[f"{at}{p}.weight_scale"] = c.contiguous(), s.contiguous()
    save_file(t, file, metadata={"format": "pt"})


def make(case: Case, root: Path) -> list[str]:
    """Both folders of a case, and its call."""
    here = root / case.name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    recipe, layout, engine, settings = BASES[case.base]
    if case.run:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            second.trained(here / "a", here / "b", recipe, layout, engine)
        of_run(case, here)
        return ["ottava", "parity", str(here / "a"), str(here / "b"), "-e", engine, "--no-kl"]
    config, tensors = model(case.family, case.seed)
    if case.zeros:
        tensors |= {k: torch.zeros_like(x) for k, x in tensors.items() if case.zeros in k}
    second.write(here / "a", config, tensors)
    how = (recipe, layout, SOURCE.get(case.base, engine))
    made = exported(config, tensors, *(how if case.base != "bf-8" else ("bf16", "bf16", engine)))
    served = Folder(here / "b", *made, config, tensors, how, list(case.words), copy.deepcopy(settings))
    case.edit(served)
    served.save()
    return ["ottava", "parity", f"{here / 'a'}@{recipe}", str(here / "b"), "-e", engine, "--no-kl", *served.words]


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
