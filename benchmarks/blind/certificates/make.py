"""Makes the pairs of this set: a checkpoint in BF16 and the folder that an engine reads, right or with a fault.

python make.py FOLDER [NAME ...]     makes FOLDER/NAME/a and FOLDER/NAME/b of each case, and prints its call of `ottava parity`
python make.py --truth               writes truth.yaml

A right folder is what `ottava export` wrote, perhaps with a change that changes no number. A fault is an edit of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ottava

Edit = Callable[["Folder"], None]
BASE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
    "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
    "initializer_range": 0.02,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
}
Q, K, V, O, GATE, UP, DOWN = (
    f"model.layers.{{}}.{part}_proj" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
)
SIZES = {Q: (256, 256), K: (256, 256), V: (256, 256), O: (256, 256), GATE: (512, 256), UP: (512, 256), DOWN: (256, 512)}


def checkpoint(folder: Path, family: str, seed: int) -> None:
    """A random model in BF16, as transformers would write it."""
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(256, 256), "lm_head.weight": torch.randn(256, 256) * 0.06, "model.norm.weight": 1 + torch.randn(256) / 10}
    for i in range(2):
        for name, (rows, cols) in SIZES.items():
            tensors[f"{name.format(i)}.weight"] = torch.randn(rows, cols) * 0.05 * torch.randn(rows, 1).exp()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = 1 + torch.randn(256) / 10
        if family == "qwen3":
            for norm in ("q_norm", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{norm}.weight"] = 1 + torch.randn(32) / 10
    folder.mkdir(parents=True)
    save_file({name: t.bfloat16().contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = BASE | FAMILIES[family] | {"dtype": "bfloat16", "transformers_version": "5.0.0"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@dataclass
class Folder:
    """A folder that an engine reads, opened for an edit."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: dict[str, Tensor]
    """The tensors of the checkpoint in BF16."""
    extra: list[str] = field(default_factory=list)
    """Further words of the call."""

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    def scale(self, name: str) -> str:
        """The name of a linear's scale."""
        return next(key for key in self.tensors if key.startswith(f"{name}.weight_scale"))

    def codes(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def put(self, name: str, codes: Tensor) -> None:
        self.tensors[f"{name}.weight"] = codes.contiguous()

    def spread(self, name: str) -> Tensor:
        """The scale of each element of a 128 x 128 grid."""
        scale, size = self.tensors[self.scale(name)], self.codes(name).shape
        return scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: size[0], : size[1]]

    def exact(self, name: str) -> Tensor:
        """The numbers that the codes stand for before rounding: w / scale, fp32."""
        return self.source[f"{name}.weight"].float() / self.spread(name)

    def save(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config, indent=2))
        for old in self.path.glob("*.safetensors*"):
            old.unlink()
        save_file({k: t.contiguous() for k, t in self.tensors.items()}, self.path / "model.safetensors", metadata={"format": "pt"})


def toward_zero(x: Tensor) -> Tensor:
    """E4M3 codes cut off toward zero."""
    near = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    bits = near.view(torch.uint8)
    return torch.where((near.float().abs() > x.abs()) & (bits & 0x7F != 0), bits - 1, bits).to(torch.uint8).view(torch.float8_e4m3fn)


def by_chance(x: Tensor) -> Tensor:
    """E4M3 codes rounded up or down by chance."""
    torch.manual_seed(5)
    low = toward_zero(x)
    high = (low.view(torch.uint8) + 1).view(torch.float8_e4m3fn)
    share = (x.abs() - low.float().abs()) / (high.float().abs() - low.float().abs()).clamp(min=1e-30)
    up = (torch.rand(x.shape) < share) & (low.view(torch.uint8) & 0x7F < 0x7E)
    return torch.where(up, high.view(torch.uint8), low.view(torch.uint8)).view(torch.float8_e4m3fn)


def of(key: str, value: Any) -> Edit:
    return lambda f: f.config.__setitem__(key, value)


def how(key: str, value: Any) -> Edit:
    return lambda f: f.quantization.__setitem__(key, value)


def scaled(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda f: f.tensors.__setitem__(f.scale(name), change(f.tensors[f.scale(name)]))


def recoded(name: str, change: Callable[[Folder], Tensor]) -> Edit:
    return lambda f: f.put(name, change(f))


def plain(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda f: f.tensors.__setitem__(name, change(f.tensors[name].clone()))


def swapped(one: str, two: str) -> Edit:
    def edit(f: Folder) -> None:
        names = [(f"{one}.weight", f"{two}.weight"), (f.scale(one), f.scale(two))]
        for a, b in names:
            f.tensors[a], f.tensors[b] = f.tensors[b], f.tensors[a]

    return edit


def older(share: float, *names: str) -> Edit:
    """Codes of weights of another step, by the same cast."""

    def edit(f: Folder) -> None:
        torch.manual_seed(6)
        for name in names:
            w = f.source[f"{name}.weight"].float()
            w = (w + share * w.abs().mean() * torch.randn(w.shape)).bfloat16().float()
            amax = w.reshape(w.shape[0] // 128, 128, w.shape[1] // 128, 128).abs().amax((1, 3))
            f.tensors[f.scale(name)] = (1 / (448 / amax)).to(f.tensors[f.scale(name)].dtype)
            f.put(name, (w * (1 / f.spread(name))).clamp(-448, 448).to(torch.float8_e4m3fn))

    return edit


def unscaled(name: str) -> Edit:
    def edit(f: Folder) -> None:
        del f.tensors[f.scale(name)]
        f.tensors[f"{name}.weight"] = f.source[f"{name}.weight"]

    return edit


def listed(*names: str) -> Edit:
    """The engine leaves these out, though they hold codes."""

    def edit(f: Folder) -> None:
        key = "modules_to_not_convert" if "modules_to_not_convert" in f.quantization else "ignore"
        f.quantization[key] = [*f.quantization.get(key, []), *names]

    return edit


def coarse(f: Folder) -> None:
    """One scale for blocks of 256 x 256, written for each of its four."""
    name = Q.format(1)
    scale = f.tensors[f.scale(name)]
    top = scale.amax().expand_as(scale).clone()
    f.put(name, (f.source[f"{name}.weight"].float() / top[0, 0]).clamp(-448, 448).to(torch.float8_e4m3fn))
    f.tensors[f.scale(name)] = top


def head(f: Folder) -> None:
    """The head is cast, too, and no longer on the list."""
    w = f.source["lm_head.weight"].float()
    amax = w.reshape(2, 128, 2, 128).abs().amax((1, 3))
    f.tensors["lm_head.weight_scale_inv"] = 1 / (448 / amax)
    f.put("lm_head", (w / f.spread("lm_head")).to(torch.float8_e4m3fn))
    f.quantization["modules_to_not_convert"] = [n for n in f.quantization.get("modules_to_not_convert") or [] if "lm_head" not in n]


def setting(values: dict[str, Any]) -> Edit:
    def edit(f: Folder) -> None:
        (f.path.parent / "engine.json").write_text(json.dumps(values))
        f.extra += ["--engine-config", str(f.path.parent / "engine.json")]

    return edit


def generation(values: dict[str, Any]) -> Edit:
    return lambda f: (f.path / "generation_config.json").write_text(json.dumps(values)) and None


def sharded(stale: bool) -> Edit:
    """Two files and an index; with `stale`, a third file holds an old q and the index names it."""

    def edit(f: Folder) -> None:
        f.save()
        names = sorted(f.tensors)
        half = len(names) // 2
        where = {n: f"model-0000{1 + (i >= half)}-of-00002.safetensors" for i, n in enumerate(names)}
        for file in sorted(set(where.values())):
            save_file({n: f.tensors[n].contiguous() for n in names if where[n] == file}, f.path / file, metadata={"format": "pt"})
        (f.path / "model.safetensors").unlink()
        if stale:
            name = f"{Q.format(0)}.weight"
            older(0.3, Q.format(0))(f)
            save_file({name: f.tensors[name], f.scale(Q.format(0)): f.tensors[f.scale(Q.format(0))]}, f.path / "model-extra.safetensors", metadata={"format": "pt"})
            where[name] = where[f.scale(Q.format(0))] = "model-extra.safetensors"
        total = sum(t.numel() * t.itemsize for t in f.tensors.values())
        (f.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
        f.save = lambda: None  # type: ignore[method-assign]

    return edit


def halves(x: Tensor) -> Tensor:
    """Rows of the first half of each head between those of the second, as another rotary layout wants them."""
    return x.view(torch.uint8).reshape(8, 2, 16, -1).transpose(1, 2).reshape(x.shape).view(x.dtype)


@dataclass(frozen=True)
class Case:
    """One pair."""

    name: str
    family: str
    recipe: str
    layout: str
    engine: str
    edit: Edit | None
    causes: str
    """Names of docs/serving.md that are right as the first cause, with "|"; empty: the pair is equal."""
    truth: str
    seed: int = 0


E4M3 = torch.float8_e4m3fn
BLOCK = ("blockwise_fp32", "fp8-block", "vllm")
MX = ("mxfp8", "compressed-tensors-mxfp8", "transformers")
SGL = ("blockwise_fp32", "fp8-block", "sglang")
FAULTS: tuple[tuple[str, tuple[str, str, str], Edit | None, str, str], ...] = (
    ("llama", BLOCK, of("rope_theta", 500000.0), "formula", "rope_theta is 500,000 where training had 10,000"),
    ("qwen3", BLOCK, of("rms_norm_eps", 1e-5), "formula", "rms_norm_eps is ten times as large"),
    ("llama", MX, of("hidden_act", "gelu"), "formula", "gelu in place of silu"),
    ("mistral", BLOCK, of("dtype", "float16"), "formula", "the engine computes in float16"),
    ("llama", BLOCK, how("weight_block_size", [64, 128]), "granularity|formula|scales", "the config says blocks of 64 x 128, the grid of scales is of 128 x 128"),
    ("mistral", BLOCK, of("sliding_window", 64), "formula", "a sliding window of 64 that training did not have"),
    ("llama", BLOCK, of("tie_word_embeddings", True), "tied|formula", "the engine ties the head to the embedding; training did not"),
    ("llama", BLOCK, of("attention_bias", True), "formula|missing", "the engine expects biases of attention that are not there"),
    ("qwen3", BLOCK, of("router_score_soft_cap", 30.0), "unknown", "a field that nobody knows"),
    ("llama", BLOCK, of("rope_scaling", {"rope_type": "linear", "factor": 4.0}), "formula|unknown", "positions are divided by four"),
    ("llama", BLOCK, of("attention_multiplier", 0.1), "unknown|formula", "a factor for scores that training's config does not have"),
    ("mistral", BLOCK, of("head_dim", 64), "formula", "heads of 64 columns in place of 32"),
    ("llama", BLOCK, listed("model.layers.0.mlp.down_proj"), "ignored|extra|unread", "down_proj of layer 0 is on the list of layers to leave in BF16, though it holds codes"),
    ("llama", BLOCK, scaled(DOWN.format(1), lambda s: s * 2), "scales", "a scale is doubled"),
    ("qwen3", BLOCK, scaled(O.format(0), lambda s: s.t()), "scale-layout", "the grid of scales is transposed"),
    ("llama", BLOCK, scaled(Q.format(1), lambda s: 1 / s), "reciprocal", "the factor that quantizes is stored"),
    ("llama", BLOCK, scaled(GATE.format(0), lambda s: s.log2().ceil().exp2()), "scale-format|scales", "scales are rounded up to powers of two, codes are not those of these scales"),
    ("mistral", BLOCK, scaled(UP.format(1), lambda s: s.bfloat16().float()), "scale-format", "scales are rounded to BF16"),
    ("llama", BLOCK, recoded(V.format(0), lambda f: toward_zero(f.exact(V.format(0)))), "rounding", "codes are cut off toward zero"),
    ("qwen3", BLOCK, recoded(K.format(1), lambda f: by_chance(f.exact(K.format(1)))), "rounding", "codes are rounded by chance"),
    ("llama", BLOCK, recoded(DOWN.format(0), lambda f: f.exact(DOWN.format(0)).clamp(-240, 240).to(E4M3)), "clamp", "codes end at 240"),
    ("llama", BLOCK, recoded(UP.format(0), lambda f: f.exact(UP.format(0)).to(torch.float8_e5m2).view(torch.uint8).view(E4M3)), "misread", "bits of E5M2 are read as E4M3"),
    ("mistral", BLOCK, recoded(O.format(1), lambda f: f.exact(O.format(1)).clamp(-240, 240).to(torch.float8_e4m3fnuz).view(torch.uint8).view(E4M3)), "misread", "bits of E4M3FNUZ are read as E4M3FN"),
    ("llama", BLOCK, recoded(O.format(1), lambda f: f.codes(O.format(1)).view(torch.uint8).t().contiguous().view(E4M3)), "transposed", "codes of W.T with the scales of W"),
    ("llama", BLOCK, older(0.02, Q.format(0), K.format(0), V.format(0)), "stale", "q, k and v of layer 0 are those of another step"),
    ("qwen3", SGL, older(0.5, GATE.format(1)), "stale", "gate of layer 1 is of a much earlier step"),
    ("llama", BLOCK, swapped(K.format(0), V.format(0)), "swapped", "k and v of layer 0 are swapped"),
    ("mistral", BLOCK, swapped(GATE.format(0), GATE.format(1)), "swapped", "gate of the two layers is swapped"),
    ("llama", BLOCK, recoded(Q.format(0), lambda f: halves(f.codes(Q.format(0)))), "rows", "rows of q have the order of another rotary layout"),
    ("llama", BLOCK, unscaled(V.format(1)), "unscaled|parts|missing", "v of layer 1 is in BF16 and has no scale, but is not on the list"),
    ("qwen3", BLOCK, lambda f: f.tensors.pop(f.scale(UP.format(0))) is None and None, "unscaled|missing", "the scale of up in layer 0 is missing"),
    ("llama", BLOCK, lambda f: f.tensors.pop(f"{DOWN.format(1)}.weight") is None and None, "missing", "the codes of down in layer 1 are missing"),
    ("llama", BLOCK, plain("model.layers.1.input_layernorm.weight", lambda t: t * 1.01), "plain", "a norm's weight is 1 % larger"),
    ("mistral", BLOCK, plain("model.embed_tokens.weight", lambda t: t.index_fill(0, torch.tensor([7]), 0.0)), "plain", "a row of the embedding is zero"),
    ("qwen3", BLOCK, plain("model.layers.0.self_attn.q_norm.weight", lambda t: t.flip(0)), "plain", "q_norm's weight is reversed"),
    ("llama", MX, plain("lm_head.weight", lambda t: t.roll(1, 0)), "plain|tied|head", "rows of the head are shifted by one"),
    ("llama", BLOCK, head, "head", "the engine casts the head, training did not"),
    ("llama", BLOCK, coarse, "granularity|scales", "q of layer 1 is cast with one scale for 256 x 256"),
    ("llama", BLOCK, setting({"kv_cache_dtype": "fp8"}), "kv-cache", "the engine stores keys and values in FP8"),
    ("llama", BLOCK, setting({"env": {"VLLM_USE_DEEP_GEMM_E8M0": "1"}}), "activation-format|scale-format", "the engine makes scales powers of two"),
    ("llama", BLOCK, how("activation_scheme", "static"), "activation-granularity|activation-scale|missing|unread", "the config says static scales of activations, training had 1x128"),
    ("llama", ("blockwise", "fp8-block", "vllm"), None, "activation-format|scale-format", "training's scales of activations are powers of two, the engine's are FP32"),
    ("llama", ("blockwise_fp32", "fp8-block", "transformers"), None, "device|activation-arithmetic|decoded", "transformers casts no activations of fp8-block on a CPU"),
    ("llama", ("tensorwise", "compressed-tensors-tensor", "vllm"), None, "activation-granularity|joined-scale", "the engine scales each token, training had one scale for the tensor"),
    ("qwen3", ("rowwise", "compressed-tensors-channel", "vllm"), None, "activation-format|scale-format", "training's scales of rows are powers of two, the engine's are FP32"),
    ("llama", MX, scaled(DOWN.format(0), lambda s: s + 1), "scales", "the scale bytes of down in layer 0 are one too large"),
    ("mistral", MX, scaled(GATE.format(1), lambda s: s.roll(1, 1)), "scale-layout|scales", "the scales of gate are shifted by one block"),
    ("llama", BLOCK, sharded(True), "stale", "the index names a third file with an old q for layer 0"),
    ("llama", MX, listed("re:.*layers\\.1\\..*"), "ignored|extra|unread|executed", "a pattern leaves all of layer 1 in BF16, though it holds codes"),
    ("llama", BLOCK, generation({"do_sample": True, "temperature": 0.6, "top_k": 20}), "formula|unknown", "the folder brings settings of sampling that training's checkpoint does not have"),
)  # fmt: skip


def ordered(f: Folder) -> None:
    f.config = dict(sorted(f.config.items(), reverse=True))
    f.tensors = dict(sorted(f.tensors.items(), reverse=True))


def renamed(f: Folder) -> None:
    f.config |= {"transformers_version": "5.23.0", "use_cache": False}
    (f.path / "README.md").write_text("a model card")


CLEAN: tuple[tuple[str, Edit | None], ...] = (
    ("as it was written", None),
    ("fields and tensors in another order", ordered),
    ("another version of transformers, a model card, use_cache", renamed),
    ("two files and an index", sharded(False)),
)
RIGHT = (BLOCK, SGL, MX, ("bf16", "bf16", "vllm"))


def cases() -> list[Case]:
    """All pairs, in an order that does not tell right from wrong."""
    found = [Case("", family, *how, edit, causes, truth, seed=i) for i, (family, how, edit, causes, truth) in enumerate(FAULTS)]
    pairs = [(family, how, edit, said) for family in FAMILIES for how in RIGHT for said, edit in CLEAN]
    found += [Case("", family, *how, edit, "", f"equal: {said}", seed=100 + i) for i, (family, how, edit, said) in enumerate(pairs)]
    mixed = torch.randperm(len(found), generator=torch.Generator().manual_seed(3)).tolist()
    return [Case(f"pair_{i:02d}", *list(vars(found[j]).values())[1:]) for i, j in enumerate(mixed)]


def make(case: Case, root: Path) -> list[str]:
    """Both folders of a case, and its call."""
    here = root / case.name
    shutil.rmtree(here, ignore_errors=True)
    checkpoint(here / "a", case.family, case.seed)
    source = f"{here / 'a'}@{case.recipe}"
    ottava.export(here / "a", here / "b", layout=case.layout, recast=case.recipe in ("rowwise", "tensorwise"))
    extra: list[str] = []
    if case.edit is not None:
        config = json.loads((here / "b" / "config.json").read_text())
        tensors = {k: t for file in sorted((here / "b").glob("*.safetensors")) for k, t in load_file(file).items()}
        folder = Folder(here / "b", config, tensors, load_file(here / "a" / "model.safetensors"))
        case.edit(folder)
        folder.save()
        extra = folder.extra
    return ["ottava", "parity", source, str(here / "b"), "-e", case.engine, *extra]


def main(words: list[str]) -> None:
    """See the top of this file."""
    if words == ["--truth"]:
        rows = [{"name": c.name, "family": c.family, "recipe": c.recipe, "layout": c.layout, "engine": c.engine, "equal": not c.causes,
                 "causes": c.causes.split("|") if c.causes else [], "truth": c.truth} for c in cases()]  # fmt: skip
        (Path(__file__).parent / "truth.yaml").write_text("".join(f"- {json.dumps(row)}\n" for row in rows))
        print(len(rows), "pairs,", sum(not r["equal"] for r in rows), "with a fault")
        return
    for case in cases():
        if len(words) == 1 or case.name in words[1:]:
            print(*make(case, Path(words[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
