"""Makes the pairs of this set: a trained checkpoint and the folder that an engine reads, right or with one fault.

python make.py FOLDER [NAME ...]     makes FOLDER/NAME/a and FOLDER/NAME/b of each case, and prints its call of `ottava parity`
python make.py --truth               writes truth.yaml
python make.py --check FOLDER        which weights of the folders hold other numbers than the export of training has

A right folder holds what `ottava export` wrote under the recipe of training, perhaps with a change that changes no number.
A faulty folder is that, and then one edit such as a broken exporter, loader or setting would make.
Builders of models and writers of folders are those of the third set (../certificates3/make.py); faults and changes are this set's own.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ottava

_spec = importlib.util.spec_from_file_location("certificates3_make", Path(__file__).parents[1] / "certificates3" / "make.py")
assert _spec is not None and _spec.loader is not None
third = importlib.util.module_from_spec(_spec)
sys.modules["certificates3_make"] = third
_spec.loader.exec_module(third)
Folder, L, exported, model = third.Folder, third.L, third.exported, third.model

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Edit = Callable[[Any], None]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def spread(s: Tensor, like: Tensor) -> Tensor:
    """A scale for each number."""
    s = s.float() if s.is_floating_point() and s.dtype.itemsize > 1 else torch.exp2(bits(s).float() - 127)
    return s.repeat_interleave(like.shape[0] // s.shape[0], 0).repeat_interleave(like.shape[1] // s.shape[1], 1)


def weight(f: Any, name: str) -> Tensor:
    return f.source[f"{name}.weight"].float()


def recode(f: Any, name: str, s: Tensor | None = None, w: Tensor | None = None, to: torch.dtype = E4) -> None:
    """Codes of w to the nearest, by these scales or by those of the folder."""
    s = f.tensors[f.scale(name)] if s is None else s
    w = weight(f, name) if w is None else w
    x = w / spread(s, w)
    f.tensors[f.codes(name)] = x.to(to) if to == E5 else x.clamp(-448, 448).to(to)
    f.tensors[f.scale(name)] = s.contiguous()


def plain(f: Any, names: list[str], listed: bool = True) -> None:
    """The numbers of training in BF16 instead of codes."""
    for name in names:
        codes, scale = f.codes(name), f.scale(name)
        del f.tensors[codes], f.tensors[scale]
        f.tensors[f"{name}.weight"] = f.source[f"{name}.weight"].clone()
    if listed:
        f.ignore.extend(names)


# ------------------------------------------------------------------------------------------------------------ faults


def lists(*patterns: str) -> Edit:
    return lambda f: f.ignore.extend(patterns)


def last_layer(f: Any) -> None:
    plain(f, f.cast("model.layers.1."))


def experts_only(f: Any) -> None:
    f.config, f.tensors = exported(f.source_config, f.source, "mxfp8", "compressed-tensors-mxfp8", "vllm")
    plain(f, f.cast("self_attn"))


def router_cast(f: Any) -> None:
    for i in (0, 1):
        name = L(i, "mlp.gate")
        f.tensors[f"{name}.weight"], f.tensors[f"{name}.weight_scale_inv"] = third.mx_codes(f.source[f"{name}.weight"])
        f.ignore.remove(name)


def v_left(f: Any) -> None:
    plain(f, [L(1, "self_attn.v_proj")])


def decoded_with_scales(f: Any) -> None:
    for name in f.cast("o_proj"):
        codes, s = f.tensors[f.codes(name)].float(), f.tensors[f.scale(name)]
        f.tensors[f.codes(name)] = (codes * spread(s, codes)).bfloat16()


def no_scale(f: Any) -> None:
    del f.tensors[f.scale(L(1, "mlp.down_proj"))]


def powers(f: Any) -> None:
    f.config, f.tensors = exported(f.source_config, f.source, "blockwise", "fp8-block", "vllm")


def column_major(f: Any) -> None:
    for name in f.cast():
        s = f.tensors[f.scale(name)]
        f.tensors[f.scale(name)] = s.t().contiguous().view(s.shape)


def swizzled(f: Any) -> None:
    """Tiles of 128 rows x 4 columns, as block-scaled GEMMs of cuBLAS want them."""
    for name in f.cast():
        s = f.tensors[f.scale(name)]
        rows, columns = s.shape
        assert rows % 128 == 0 and columns % 4 == 0
        f.tensors[f.scale(name)] = s.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns).contiguous()


def reciprocals(f: Any) -> None:
    for name in f.cast():
        f.tensors[f.scale(name)] = 1 / f.tensors[f.scale(name)]


def blocks_256(f: Any) -> None:
    for name in f.cast():
        s = f.tensors[f.scale(name)]
        a, b = min(2, s.shape[0]), 2
        pooled = s.unflatten(1, (-1, b)).amax(2).unflatten(0, (-1, a)).amax(1)
        recode(f, name, pooled.repeat_interleave(a, 0).repeat_interleave(b, 1))


def as_e5m2(f: Any) -> None:
    for name in f.cast():
        recode(f, name, to=E5)


def biased_128(f: Any) -> None:
    for name in f.cast():
        f.tensors[f.scale(name)] = f.tensors[f.scale(name)] + 1


def ties_away(f: Any) -> None:
    changed = 0
    for name in f.cast():
        w = weight(f, name)
        x = w / spread(f.tensors[f.scale(name)], w)
        low, high = third.neighbours(x)
        tie = (x - low == high - x) & (low != high) & (x.abs() < 448)
        away = torch.where(x > 0, high, low)
        old = f.tensors[f.codes(name)].float()
        new = torch.where(tie, away, old)
        changed += int((new != old).sum())
        f.tensors[f.codes(name)] = new.to(E4)
    assert changed > 1000, changed


def twice(f: Any) -> None:
    for name in f.cast():
        w = weight(f, name)
        f.tensors[f.codes(name)] = (w / spread(f.tensors[f.scale(name)], w)).bfloat16().float().clamp(-448, 448).to(E4)


def three_sigma(f: Any) -> None:
    for name in f.cast("mlp."):
        w = weight(f, name)
        end = float(3 * w.std())
        recode(f, name, w=w.clamp(-end, end))


def normalized_fnuz(f: Any) -> None:
    """As vLLM's normalize_e4m3fn_to_e4m3fnuz does for AMD: the bits stay, 0x80 is 0, scales are doubled."""
    for name in f.cast():
        b = bits(f.tensors[f.codes(name)])
        f.tensors[f.codes(name)] = torch.where(b == 128, torch.zeros_like(b), b).view(E4)
        f.tensors[f.scale(name)] = f.tensors[f.scale(name)] * 2


def blocks_transposed(f: Any) -> None:
    for name in f.cast():
        c = bits(f.tensors[f.codes(name)])
        c = c.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).permute(0, 3, 2, 1).flatten(2).flatten(0, 1)
        f.tensors[f.codes(name)] = c.contiguous().view(E4)


def says(**values: Any) -> Edit:
    return lambda f: f.config.update(values)


def uses(**values: Any) -> Edit:
    return lambda f: f.settings.update(values)


def joined_kv(f: Any) -> None:
    for i in (0, 1):
        k, v = L(i, "self_attn.k_proj"), L(i, "self_attn.v_proj")
        s = torch.maximum(f.tensors[f.scale(k)], f.tensors[f.scale(v)])
        recode(f, k, s.clone())
        recode(f, v, s.clone())


def no_adapter(f: Any) -> None:
    """q and v as they were before training's low-rank update, which the checkpoint of training has."""
    source, g = dict(f.source), torch.Generator().manual_seed(5)
    for key in [k for k in source if k.endswith(("q_proj.weight", "v_proj.weight"))]:
        w = source[key]
        update = torch.randn(w.shape[0], 4, generator=g) @ torch.randn(4, w.shape[1], generator=g)
        source[key] = (w.float() - 0.05 * float(w.float().std()) * update).bfloat16()
    f.config, f.tensors = exported(f.source_config, source, *f.how)


def experts_exchanged(f: Any) -> None:
    at = f"{L(0, 'block_sparse_moe.experts')}."
    for key in [k for k in f.tensors if k.startswith(f"{at}0.")]:
        other = key.replace(f"{at}0.", f"{at}1.")
        f.tensors[key], f.tensors[other] = f.tensors[other], f.tensors[key]


def rows_of(f: Any, name: str, order: Tensor) -> None:
    """Rows of codes, and of scales where each row has its own, in another order."""
    c, s = f.tensors[f.codes(name)], f.tensors[f.scale(name)]
    f.tensors[f.codes(name)] = bits(c)[order].contiguous().view(c.dtype)
    if s.shape[0] == c.shape[0]:
        f.tensors[f.scale(name)] = s[order].contiguous()


def interleaved(f: Any) -> None:
    """Rows of each head of q and k as for a rotation of neighbours: 0, 16, 1, 17, ..."""
    for name in f.cast("q_proj", "k_proj"):
        rows = f.tensors[f.codes(name)].shape[0]
        head = torch.arange(32).view(2, 16).t().flatten()
        rows_of(f, name, (torch.arange(rows // 32)[:, None] * 32 + head).flatten())


def up_first(f: Any) -> None:
    for name in f.cast("gate_up_proj"):
        rows = f.tensors[f.codes(name)].shape[0]
        s = f.tensors[f.scale(name)]
        rows_of(f, name, torch.arange(rows).roll(rows // 2))
        if s.shape[0] != rows:
            f.tensors[f.scale(name)] = s.roll(s.shape[0] // 2, 0).contiguous()


def own_head(f: Any) -> None:
    w = f.source["model.embed_tokens.weight"].float()
    old = w + 0.05 * w.std() * torch.randn(w.shape, generator=torch.Generator().manual_seed(7))
    f.tensors["lm_head.weight"] = old.bfloat16()
    f.config["tie_word_embeddings"] = False


def no_bias(f: Any) -> None:
    keys = [k for k in f.tensors if k.endswith("v_proj.bias")]
    assert keys and all(bool(f.tensors[k].any()) for k in keys)
    for key in keys:
        f.tensors[key] = torch.zeros_like(f.tensors[key])


def one_plus(f: Any) -> None:
    for key in [k for k in f.tensors if "norm" in k]:
        f.tensors[key] = (f.tensors[key].float() + 1).bfloat16()


def cache_scheme(f: Any) -> None:
    f.q["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    for i in (0, 1):
        f.tensors |= {L(i, f"self_attn.{x}_scale"): torch.tensor([0.0625]) for x in "kv"}


def down_not_cast(f: Any) -> None:
    third.receipts(f, lambda name: name.endswith("down_proj"))


def as_it_was(_: Any) -> None:
    pass


# ------------------------------------------------------------------------------------------------ faults of runs


def coded(w: Tensor, recipe: str, layout: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, by a model of one linear."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    layer.weight = nn.Parameter(w.clone())
    net = nn.Sequential(layer)
    ottava.convert(net, recipe)
    with tempfile.TemporaryDirectory() as folder:
        ottava.export(net, Path(folder) / "o", layout=layout, config={"model_type": "mine"})
        t = load_file(Path(folder) / "o" / "model.safetensors")
        return t["0.weight"].clone(), next(x.clone() for k, x in t.items() if "scale" in k)


def run_master(here: Path, t: dict[str, Tensor], config: dict[str, Any]) -> None:
    held = load_file(here / "a" / "checkpoints" / "step-000002.safetensors")
    changed = 0
    for part in ("attention.o_proj", "mlp.down_proj"):
        key = f"model.layers.0.{part.replace('attention', 'self_attn')}"
        for w, check in ((held[f"model.layers.0.{part}.weight"], True), (held[f"model.layers.0.{part}.weight"].bfloat16(), False)):
            codes, scales = coded(w, "blockwise", "fp8-block")
            if check:  # training's codes are those of the master
                assert torch.equal(bits(codes), bits(t[f"{key}.weight"]))
            else:
                changed += int((codes.float() != t[f"{key}.weight"].float()).sum())
                t[f"{key}.weight"], t[f"{key}.weight_scale_inv"] = codes, scales
    assert changed


def run_inputs(here: Path, t: dict[str, Tensor], config: dict[str, Any]) -> None:
    keys = [k for k in t if k.endswith(("q_proj.input_scale", "k_proj.input_scale", "v_proj.input_scale"))]
    assert keys
    for k in keys:
        t[k] = torch.ones_like(t[k])


def run_head(here: Path, t: dict[str, Tensor], config: dict[str, Any]) -> None:
    def off(rows: Any) -> int:
        if isinstance(rows, dict):
            return sum(off(x) for x in rows.values())
        if isinstance(rows, list) and "lm_head" in rows:
            rows.remove("lm_head")
            return 1
        return 0

    assert off(config)
    if (file := here / "b" / "hf_quant_config.json").exists():
        other = json.loads(file.read_text())
        off(other)
        file.write_text(json.dumps(other))


def run_right(here: Path, t: dict[str, Tensor], config: dict[str, Any]) -> None:
    pass


# -------------------------------------------------------------------------------------------- changes of no number


def files(count: int) -> Edit:
    def edit(f: Any) -> None:
        f.shards = count

    return edit


def sorted_config(f: Any) -> None:
    f.config = dict(sorted(f.config.items()))
    f.tensors = dict(sorted(f.tensors.items(), key=lambda row: row[0][::-1]))


def zero_signs(f: Any) -> None:
    """Each zero gets the other sign."""
    for name in f.cast():
        b = bits(f.tensors[f.codes(name)])
        f.tensors[f.codes(name)] = torch.where((b & 127) == 0, b ^ 128, b).view(E4)


def doubled_codes(f: Any) -> None:
    """Where all codes of a block can be doubled, they are, and its scale is halved."""
    count = 0
    for name in f.cast():
        codes, s = f.tensors[f.codes(name)].float().unflatten(1, (-1, 32)), f.tensors[f.scale(name)]
        fits = (codes.abs() <= 224).all(-1)
        count += int(fits.sum())
        f.tensors[f.codes(name)] = torch.where(fits[..., None], codes * 2, codes).flatten(1).to(E4)
        f.tensors[f.scale(name)] = s - fits.to(torch.uint8)
    assert count > 10, count


def norms_fp32(f: Any) -> None:
    f.tensors |= {k: x.float() for k, x in f.tensors.items() if "norm" in k}


def same_generation(f: Any) -> None:
    f.path.mkdir(parents=True, exist_ok=True)
    for folder in (f.path, f.path.parent / "a"):
        (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_p": 0.95}))


def documents(f: Any) -> None:
    f.path.mkdir(parents=True, exist_ok=True)
    (f.path / "LICENSE").write_text("Apache 2.0\n")
    (f.path / "chat_template.jinja").write_text("{{ messages }}\n")
    (f.path / "special_tokens_map.json").write_text("{}")


def list_reversed(f: Any) -> None:
    f.ignore.reverse()


def head_pattern(f: Any) -> None:
    f.ignore[:] = ["re:^lm_head$" if x == "lm_head" else x for x in f.ignore]


def tied_copy(f: Any) -> None:
    f.tensors["lm_head.weight"] = f.source["model.embed_tokens.weight"].clone()


def down_left(f: Any) -> None:
    """Training left down_proj of layer 1 in BF16, and its receipt says so; it is served in BF16 and listed."""
    name = L(1, "mlp.down_proj")
    third.receipts(f, lambda n: n == name)
    plain(f, [name])


def full_receipt(f: Any) -> None:
    third.receipts(f, lambda n: False)


def three_of_training(f: Any) -> None:
    """The checkpoint of training is in three files with an index."""
    here, names = f.path.parent / "a", list(f.source)
    (here / "model.safetensors").unlink()
    where = {k: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, k in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({k: f.source[k].contiguous() for k in names if where[k] == file}, here / file, metadata={"format": "pt"})
    (here / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


# -------------------------------------------------------------------------------------------------------------- cases

FP32 = {"env": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}
BASES: dict[str, tuple[str, str, str, dict[str, Any], str | None]] = {  # recipe, layout, engine, its settings, engine that export was told
    "fb": ("blockwise", "fp8-block", "vllm", {}, "vllm"),
    "ue": ("blockwise", "fp8-block-ue8m0", "vllm", {}, "vllm"),
    "cb": ("blockwise", "compressed-tensors-block", "vllm", {}, "vllm"),
    "fb32": ("blockwise_fp32", "fp8-block", "vllm", FP32, "vllm"),
    "cb32": ("blockwise_fp32", "compressed-tensors-block", "vllm", FP32, "vllm"),
    "sgl": ("blockwise_fp32", "fp8-block", "sglang", {}, "sglang"),
    "hf": ("blockwise_fp32", "fp8-block", "transformers", {}, None),
    "mx": ("mxfp8", "compressed-tensors-mxfp8", "vllm", {}, "vllm"),
    "mx-t": ("mxfp8", "compressed-tensors-mxfp8", "transformers", {}, None),
    "mxs": ("mxfp8", "mxfp8", "sglang", {}, "sglang"),
    "m4": ("mxfp4", "compressed-tensors-mxfp4", "vllm", {}, "vllm"),
    "m4-s": ("mxfp4", "compressed-tensors-mxfp4", "sglang", {}, "vllm"),
    "row-s": ("rowwise", "compressed-tensors-channel", "sglang", {}, None),
    "one": ("tensorwise", "compressed-tensors-tensor", "vllm", {}, "vllm"),
    "one-t": ("tensorwise", "compressed-tensors-tensor", "transformers", {}, None),
    "opt": ("delayed", "modelopt", "vllm", {}, "vllm"),
    "bf-v": ("bf16", "bf16", "vllm", {}, "vllm"),
    "bf-s": ("bf16", "bf16", "sglang", {}, "sglang"),
    "bf-t": ("bf16", "bf16", "transformers", {}, None),
    "bf-r": ("bf16", "bf16", "trtllm", {}, "trtllm"),
}


@dataclass
class Case:
    base: str
    family: str
    edit: Any
    causes: str
    truth: str
    words: tuple[str, ...] = ()
    run: bool = False
    """A is a run of ottava train."""
    build: str = ""
    """"bias" or "dense", of the builder of models."""
    name: str = ""
    seed: int = 0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
FAULTS = [
    Case("mx", "qwen3", lists(r"re:.*\.mlp\.gate"), "substring", r"the list also has re:.*\.mlp\.gate, for a router that this model does not have; as an unanchored start it matches gate_proj (and gate_up_proj), which have codes"),
    Case("cb", "mistral", lists("re:.*mlp.down."), "regex-dot", "the list also has re:.*mlp.down. (for an adapter 'mlp.down.'); its last dot matches the _ of down_proj, which has codes"),
    Case("fb", "llama", last_layer, "ignored", "all linears of the last layer are in BF16 and listed, as of an exporter that keeps the last layer; training cast them"),
    Case("bf-v", "qwen3_moe", experts_only, "extra", "training was in BF16; the experts are served in MXFP8 (compressed-tensors-mxfp8), attention in BF16 and listed"),
    Case("mxs", "qwen3_moe", router_cast, "router", "the routers (mlp.gate) have MXFP8 codes and scales and are off the list; training left them in BF16"),
    Case("opt", "llama", run_head, "head|unscaled", "lm_head is not on the list of excluded modules any more; its numbers are in BF16, and vLLM casts an unlisted head in this layout", run=True),
    Case("ue", "qwen3", v_left, "parts", "v_proj of layer 1 is in BF16 and listed; q_proj and k_proj have codes"),
    Case("cb", "gemma2", decoded_with_scales, "unscaled", "o_proj of both layers holds decoded BF16 numbers instead of codes; its scales are still in the file, and it is not listed"),
    Case("fb", "mistral", no_scale, "missing|unscaled", "weight_scale_inv of down_proj of layer 1 is not in the file; its codes are"),
    Case("m4-s", "phi3", as_it_was, "unread", "MXFP4 of compressed-tensors in SGLang, which has no scheme for a dense linear"),
    Case("fb", "llama", run_master, "master", "codes and scales of o_proj and down_proj are those of bf16(master); training cast its FP32 master", run=True),
    Case("fb32", "qwen3", powers, "scale-format", "training had FP32 scales; the exporter cast the weights anew with scales that are powers of two"),
    Case("fb32", "llama", column_major, "scale-layout", "grids of scales are written in column-major order under the row-major shape"),
    Case("mx", "mixtral", swizzled, "scale-layout", "scales are in the swizzled order of block-scaled GEMMs (tiles of 128 x 4) under the plain shape"),
    Case("fb32", "phi3", reciprocals, "reciprocal", "weight_scale_inv holds 1 / scale, as its name says, for all linears"),
    Case("cb32", "mixtral", blocks_256, "granularity", "scales are those of 256x256 blocks, repeated in the 128x128 grid; codes are of these scales"),
    Case("fb32", "llama", as_e5m2, "format", "codes of all linears are E5M2, and stored as E5M2, with training's scales"),
    Case("mx", "mistral", biased_128, "scales", "exponents of all scales are biased by 128 instead of 127: all scales are twice as large for equal codes"),
    Case("mxs", "gemma2", ties_away, "rounding", "ties are rounded away from zero instead of to even, in all linears"),
    Case("fb32", "mistral", twice, "rounding", "numbers are rounded to BF16 after the division by the scale, and then to E4M3, in all linears"),
    Case("mx", "llama", three_sigma, "clamp", "weights of the MLPs are cut at three standard deviations of each tensor before the cast; scales are training's"),
    Case("fb32", "qwen3", normalized_fnuz, "misread|scales", "as for AMD's E4M3 FNUZ: the bits of codes stay, 0x80 is 0, and scales are doubled; the engine reads E4M3 FN"),
    Case("fb", "qwen3_moe", blocks_transposed, "transposed", "codes of each 128x128 block are transposed within the block, in all linears"),
    Case("bf-s", "qwen3_moe", says(norm_topk_prob=False), "formula", "norm_topk_prob is false instead of true"),
    Case("mx", "gemma2", says(attn_logit_softcapping=30.0), "formula", "attn_logit_softcapping is 30 instead of 50"),
    Case("bf-v", "mistral", uses(hf_overrides={"rope_theta": 10000.0}), "formula|unknown", "the engine's settings override rope_theta: 10000 instead of 1000000"),
    Case("fb", "qwen3", says(rope_scaling=YARN), "unknown|formula", "the served config alone has rope_scaling (YaRN, factor 4)"),
    Case("one-t", "phi3", as_it_was, "decoded", "transformers decodes codes to BF16 and rounds their products with the FP32 scale of the tensor"),
    Case("hf", "qwen3", as_it_was, "device", "transformers on a CPU casts no activations of fp8-block", words=("--device", "cpu")),
    Case("cb32", "mistral", joined_kv, "joined-scale", "k and v share the larger of their scales, block by block; codes are of these scales"),
    Case("cb", "llama", no_adapter, "stale", "q and v are codes of the weights before a low-rank update of rank 4 that training's checkpoint has: the adapter was not merged"),
    Case("ue", "mixtral", experts_exchanged, "swapped", "experts 0 and 1 of layer 0 are in each other's place, codes and scales; the router is not"),
    Case("mx", "mistral", interleaved, "rows", "rows of each head of q and k are in the order of interleaved rotary pairs, codes and scales"),
    Case("cb", "phi3", up_first, "rows", "the two halves of the rows of gate_up_proj are exchanged: up before gate, codes and scales"),
    Case("one", "phi3", as_it_was, "activation-granularity", "training had one dynamic scale of activations for a tensor; vLLM has one for each token"),
    Case("row-s", "qwen3", as_it_was, "activation-format", "training's scales of activations are powers of two (rowwise); SGLang's are FP32"),
    Case("opt", "llama", run_inputs, "activation-scale", "input_scale of q, k and v is 1, the value before any calibration", run=True),
    Case("cb", "llama", uses(compilation_config={"pass_config": {"fuse_act_quant": True}}), "activation-rounding", "vLLM fuses SiLU, product and cast, without the rounding to BF16 between"),
    Case("bf-v", "gemma2", own_head, "tied|formula", "the served head is its own (near to the embedding, of an earlier step), tie_word_embeddings is false; training's is tied"),
    Case("fb", "qwen3", no_bias, "plain", "biases of v_proj are zeros in the served folder", build="bias"),
    Case("bf-s", "gemma2", one_plus, "plain", "norms hold 1 + w, where Gemma's formula adds the 1 itself"),
    Case("cb", "llama", cache_scheme, "kv-cache", "the served config has a kv_cache_scheme: keys and values in FP8, with k_scale and v_scale of 1/16 in the file"),
    Case("mx", "mistral", down_not_cast, "not-fp8", "by its receipt training left down_proj of both layers in high precision; the folder has codes of it"),
    Case("mx-t", "qwen3", as_it_was, "activation-arithmetic", "transformers doubles the scale of some blocks of activations (by the page, 1.75 times a power of two)"),
]  # fmt: skip

AS = (as_it_was, "as it was written")
FOUR = (files(4), "four files and an index")
TWO = (files(2), "two files and an index")
SORTED = (sorted_config, "fields of the config sorted, tensors in another order")
SIGNS = (zero_signs, "each zero code has the other sign")
DOUBLED = (doubled_codes, "codes are doubled and scales halved where that is exact")
NORMS = (norms_fp32, "norms are in FP32, the same numbers")
SAMPLE = (same_generation, "the same generation_config, with sampling, on both sides")
PAPERS = (documents, "a licence, a chat template and a map of special tokens beside it")
REVERSED = (list_reversed, "the list of ignored layers in the opposite order")
HEAD = (head_pattern, "the head is listed as re:^lm_head$")
COPY = (tied_copy, "the tied head is written, too")
LEFT = (down_left, "training left down_proj of layer 1 in BF16 by its receipt; so does the folder")
RECEIPT = (full_receipt, "with the receipt of a training that cast all")
SPLIT = (three_of_training, "training's checkpoint is in three files")
AUTO = (uses(kv_cache_dtype="auto"), "kv_cache_dtype is auto")
UNFUSED = (uses(compilation_config={"pass_config": {"fuse_act_quant": False}}), "fuse_act_quant is false")
WHERE = (says(_name_or_path="/data/out/served", transformers_version="5.22.0"), "another _name_or_path and transformers_version")
RIGHT: dict[str, list[tuple[str, tuple[Edit, str], str]]] = {
    "fb": [("llama", FOUR, ""), ("qwen3", AS, "bias"), ("mixtral", REVERSED, ""), ("phi3", SIGNS, ""), ("mistral", RECEIPT, ""), ("qwen3_moe", SORTED, "")],
    "ue": [("gemma2", COPY, ""), ("mistral", SIGNS, ""), ("mixtral", SPLIT, ""), ("qwen3", LEFT, "")],
    "cb": [("llama", HEAD, ""), ("qwen3_moe", AS, ""), ("gemma2", UNFUSED, ""), ("phi3", SAMPLE, ""), ("mistral", LEFT, "")],
    "fb32": [("llama", SORTED, ""), ("gemma2", TWO, ""), ("mixtral", AS, ""), ("phi3", PAPERS, "")],
    "cb32": [("qwen3", SIGNS, ""), ("mistral", FOUR, ""), ("llama", WHERE, "")],
    "sgl": [("qwen3", SORTED, ""), ("gemma2", SAMPLE, "")],
    "hf": [("mistral", TWO, ""), ("qwen3", AS, "")],
    "mx": [("llama", DOUBLED, ""), ("mixtral", FOUR, ""), ("phi3", AUTO, ""), ("qwen3_moe", REVERSED, ""), ("gemma2", AS, ""), ("mistral", SPLIT, "")],
    "mxs": [("qwen3", AS, ""), ("gemma2", DOUBLED, ""), ("qwen3_moe", TWO, "")],
    "m4": [("llama", AS, ""), ("qwen3", HEAD, "")],
    "bf-v": [("phi3", NORMS, ""), ("qwen3_moe", AUTO, "")],
    "bf-s": [("llama", FOUR, ""), ("mixtral", PAPERS, "")],
    "bf-t": [("gemma2", COPY, "")],
    "bf-r": [("mistral", AS, "")],
}  # fmt: skip
RUN = Case("ue", "llama", run_right, "", "equal: a run of ottava train, as it was written", run=True)


def cases() -> list[Case]:
    """All pairs, in an order that does not tell right from wrong."""
    found = [*FAULTS, RUN]
    for base, rows in RIGHT.items():
        for family, (edit, said), build in rows:
            words = ("--device", "cuda") if base == "hf" else ()
            more = ", with biases of attention" if build == "bias" else ""
            found.append(Case(base, family, edit, "", f"equal: {said}{more}", words=words, build=build))
    for i, case in enumerate(found):
        case.seed = 4000 + i
    mixed = torch.randperm(len(found), generator=torch.Generator().manual_seed(41)).tolist()
    for i, j in enumerate(mixed):
        found[j].name = f"pair_{i:02d}"
    return [found[j] for j in mixed]


def make(case: Case, root: Path) -> list[str]:
    """Both folders of a case, and its call."""
    here = root / case.name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    recipe, layout, engine, settings, told = BASES[case.base]
    if case.run:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            third.second.trained(here / "a", here / "b", recipe, layout, engine)
        weights, config = here / "b" / "model.safetensors", here / "b" / "config.json"
        t, fields = {k: x.clone() for k, x in load_file(weights).items()}, json.loads(config.read_text())
        case.edit(here, t, fields)
        save_file(t, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(fields, indent=2))
        return ["ottava", "parity", str(here / "a"), str(here / "b"), "-e", engine, "--no-kl"]
    config, tensors = model(case.family, case.seed, **({case.build: True} if case.build else {}))
    third.second.write(here / "a", config, tensors)
    how = (recipe, layout, told)
    served = Folder(here / "b", *exported(config, tensors, *how), config, tensors, how, list(case.words), copy.deepcopy(settings))
    case.edit(served)
    served.save()
    return ["ottava", "parity", f"{here / 'a'}@{recipe}", str(here / "b"), "-e", engine, "--no-kl", *served.words]


def decoded(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each tensor stands for."""
    found = {}
    for key, x in t.items():
        name = key.removesuffix(".weight").removesuffix(".weight_packed")
        if key.endswith((".weight_scale", ".weight_scale_inv")):
            continue
        s = t.get(f"{name}.weight_scale", t.get(f"{name}.weight_scale_inv"))
        if x.dtype == torch.uint8:
            nibbles = torch.stack([x & 15, x >> 4], -1).flatten(1).long()
            x = third.E2M1[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
        x = x.float()
        found[name] = x if s is None or s.ndim < 2 or x.ndim < 2 else x * spread(s, x)
    return found


def check(root: Path) -> None:
    """Numbers of each folder beside those of the export of its training; by a decoder of this file."""
    for case in cases():
        if case.run:
            continue
        config, tensors = model(case.family, case.seed, **({case.build: True} if case.build else {}))
        recipe, layout, _, _, told = BASES[case.base]
        right = decoded(exported(config, tensors, recipe, layout, told)[1])
        served: dict[str, Tensor] = {}
        for file in sorted((root / case.name / "b").glob("*.safetensors")):
            served |= load_file(file)
        has = decoded(served)
        other = [k for k in right if k not in has or not torch.equal(right[k], has[k])]
        more = [k for k in has if k not in right]
        bad = [k for k, x in has.items() if not bool(x.isfinite().all())]
        print(case.name, case.causes or "-", f"{len(other)} of {len(right)} differ", f"{len(more)} more", f"not finite: {bad}" if bad else "", "|", case.truth)


def main(words: list[str]) -> None:
    """See the top of this file."""
    if words == ["--truth"]:
        rows = [{"name": c.name, "family": c.family, "recipe": BASES[c.base][0], "layout": BASES[c.base][1], "engine": BASES[c.base][2],
                 "equal": not c.causes, "causes": c.causes.split("|") if c.causes else [], "truth": c.truth} for c in cases()]  # fmt: skip
        (Path(__file__).parent / "truth.yaml").write_text("".join(f"- {json.dumps(row)}\n" for row in rows))
        print(len(rows), "pairs,", sum(not r["equal"] for r in rows), "with a fault")
        return
    if words[0] == "--check":
        check(Path(words[1]))
        return
    for case in cases():
        if len(words) == 1 or case.name in words[1:]:
            print(*make(case, Path(words[0])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
