"""Makes pairs of log-probabilities, of a rollout and of training, some with a hidden fault: make.py FOLDER [NAME ...].

Each pair is a folder with `train` (a checkpoint in BF16), a dump, and where its call names them `served` and
`before-N`. The engine is a decoder written here, one token at a time with a KV cache; the trainer is transformers,
converted by ottava where it trains in FP8. Prints the command of each pair; --kl adds KL(rollout || training).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

import ottava

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKEN, GROUP, TENSOR, BLOCK = (1, -1), (1, 128), (-1, -1), (128, 128)
SHAPES = {
    "llama": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 256},
    "deep": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "vocab_size": 320},
    "wide": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 512},
    "qwen": {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 384},
    "thin": {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256, "vocab_size": 200},
    "moe": {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256, "vocab_size": 256},
}
KINDS = {"qwen": Qwen3Config, "thin": Qwen3Config, "moe": Qwen3MoeConfig}
MOE = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


# Models


def build(shape: str, seed: int, **changes):
    """A model with weights that make peaked answers, attention that looks at few tokens, and some large channels."""
    sizes = {**SHAPES[shape], **(MOE if shape == "moe" else {}), "tie_word_embeddings": False, **changes}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": sizes["hidden_size"] // 4}
    sizes |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 512}
    config = KINDS.get(shape, LlamaConfig)(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    fill = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=fill)
            if "norm" in name:
                value = 1 + 0.1 * value
                if "layernorm" in name:
                    value[torch.randperm(len(value), generator=fill)[:3]] *= 8
            elif "embed" not in name or config.tie_word_embeddings:
                value = value * gain(name) / weight.shape[-1] ** 0.5
                if value.dim() == 2 and any(part in name for part in ("v_proj", "up_proj", "o_proj", "down_proj")):
                    value[torch.randperm(len(value), generator=fill)[: len(value) // 16]] *= 4
            else:
                value = value / 2
            weight.copy_(value)
    return model


def gain(name):
    """The spread of y = w x for x of unit size: small in the layers, so that BF16's own noise stays small."""
    if "lm_head" in name or "embed" in name:
        return 1.8
    if name.endswith("gate.weight"):
        return 1.5
    return 0.6 if any(part in name for part in ("q_proj", "k_proj", "gate_proj", "gate_up")) else 0.7


def moved(model, seed: int, size: float, only=()):
    """The state of an earlier step: every weight off by `size` of its spread, or only some: NAME, or NAME@EXPERT."""
    noise = torch.Generator().manual_seed(seed)
    state = {}
    for name, weight in model.state_dict().items():
        change = torch.randn(weight.shape, generator=noise) * weight.float().std() * size
        old = (weight.float() + change).bfloat16()
        state[name] = weight.clone() if only else old
        for part, _, expert in (one.partition("@") for one in only):
            if part in name:
                place = int(expert) if expert else slice(None)
                state[name][place] = old[place]
    return state


# Casts


def cast(x, block, fmt=E4M3, pow2=None, scale=None):
    """Codes and scales, one scale for each block; -1 is a whole side. A given scale is a static one, which clips.

    `pow2` is torch.ceil or torch.floor of the scale's exponent; the latter clips, too.
    """
    top = torch.finfo(fmt).max
    rows, columns = x.shape
    high, wide = (rows if block[0] < 0 else block[0]), (columns if block[1] < 0 else block[1])
    padded = F.pad(x.float(), (0, -columns % wide, 0, -rows % high))
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    if scale is None:
        scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / top
        scale = torch.exp2(pow2(torch.log2(scale))) if pow2 else scale
    else:
        scale = torch.full((tiles.shape[0], 1, tiles.shape[2], 1), scale)
    codes = (tiles / scale).clamp(-top, top).to(fmt)
    back = (codes.float() * scale).view(padded.shape)[:rows, :columns]
    return back, codes.view(padded.shape)[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()


def fp8(weights=BLOCK, inputs=GROUP, fmt=E4M3, pow2=None, x_fmt=E4M3, x_pow2=None, static=None, twice=False):
    """A rule for one linear: how an engine casts its weight and its input."""

    def weight(w):
        if twice:  # codes of one scale for each row, decoded and cast again with one for all
            w = cast(w, TOKEN, fmt)[0]
        return cast(w, weights, fmt, pow2)[0]

    return weight, lambda x: cast(x, inputs, x_fmt, x_pow2, static)[0]


# The engine


class Engine:
    """Decodes one token at a time. `rule(name)` is None (BF16) or an `fp8` rule of the linear of that name."""

    def __init__(self, config, state, rule=None, kv=None, ranks=1, window=0, softmax=1.0, cap=0.0):
        self.c, self.kv, self.ranks, self.window, self.softmax = config, kv, ranks, window, softmax
        self.cap = cap
        self.w, self.values = {}, {}
        for name, tensor in state.items():
            name = name.removeprefix("model.").removesuffix(".weight")
            if name.endswith("gate_up_proj") and tensor.dim() == 3:
                for e, both in enumerate(tensor):
                    half = len(both) // 2
                    base = name.replace("gate_up_proj", str(e))
                    self.w[base + ".gate_proj"], self.w[base + ".up_proj"] = both[:half], both[half:]
            elif tensor.dim() == 3:
                self.w.update({name.replace("down_proj", f"{e}.down_proj"): one for e, one in enumerate(tensor)})
            else:
                self.w[name] = tensor
        for name, tensor in list(self.w.items()):
            chosen = rule(name) if rule and tensor.dim() == 2 and "embed" not in name else None
            if chosen:
                self.w[name], self.values[name] = chosen[0](tensor), chosen[1]
        dim = config.head_dim
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(512).float()[:, None] * torch.cat([frequencies, frequencies])
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def linear(self, name, x):
        w = self.w[name].float()
        value = self.values.get(name)
        x = value(x) if value else x.float()
        if self.ranks == 1:
            return (x @ w.T).bfloat16()
        parts = [(a @ b.T).bfloat16() for a, b in zip(x.chunk(self.ranks, 1), w.chunk(self.ranks, 1), strict=True)]
        return sum(parts[1:], parts[0])

    def norm(self, name, x):
        value = x.float()
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        return self.w[name] * value.bfloat16()

    def rope(self, x, position):
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[position] + turned * self.sin[position]

    def cached(self, x, layer):
        rule = self.kv(layer) if self.kv else None
        if rule is None:
            return x
        fmt, scale = rule
        top = torch.finfo(fmt).max
        return ((x.float() / scale).clamp(-top, top).to(fmt).float() * scale).bfloat16()

    def attention(self, base, layer, x, position):
        c, rows = self.c, len(x)
        q = self.linear(base + "q_proj", x).view(rows, c.num_attention_heads, c.head_dim)
        k = self.linear(base + "k_proj", x).view(rows, c.num_key_value_heads, c.head_dim)
        v = self.linear(base + "v_proj", x).view(rows, c.num_key_value_heads, c.head_dim)
        if base + "q_norm" in self.w:
            q, k = self.norm(base + "q_norm", q), self.norm(base + "k_norm", k)
        q, k = self.rope(q, position), self.rope(k, position)
        self.keys[layer][:, :, position], self.rows[layer][:, :, position] = (
            self.cached(k, layer),
            self.cached(v, layer),
        )
        first = max(0, position + 1 - self.window) if self.window else 0
        keys = self.keys[layer][:, :, first : position + 1].float()
        rows_ = self.rows[layer][:, :, first : position + 1].float()
        q = q.float().view(rows, c.num_key_value_heads, -1, c.head_dim)
        scores = (q @ keys.transpose(2, 3)) * (c.head_dim**-0.5 * self.softmax)
        mixed = scores.softmax(-1) @ rows_
        return self.linear(base + "o_proj", mixed.reshape(rows, -1).bfloat16())

    def mlp(self, base, x):
        hidden = F.silu(self.linear(base + "gate_proj", x)) * self.linear(base + "up_proj", x)
        return self.linear(base + "down_proj", hidden)

    def experts(self, base, x):
        odds = self.linear(base + "gate", x).float().softmax(-1)
        share, chosen = odds.topk(self.c.num_experts_per_tok, -1)
        if self.c.norm_topk_prob:
            share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            row, slot = torch.where(chosen == e)
            part = self.mlp(f"{base}experts.{e}.", x[row]) * share[row, slot, None].bfloat16()
            out.index_add_(0, row, part)
        return out

    def step(self, tokens, position):
        x = self.w["embed_tokens"][tokens]
        for layer in range(self.c.num_hidden_layers):
            base = f"layers.{layer}."
            x = x + self.attention(base + "self_attn.", layer, self.norm(base + "input_layernorm", x), position)
            mlp = self.experts if base + "mlp.gate" in self.w else self.mlp
            x = x + mlp(base + "mlp.", self.norm(base + "post_attention_layernorm", x))
        logits = self.linear("lm_head", self.norm("norm", x)).float()
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    @torch.no_grad()
    def generate(self, prompts, lengths, draw, sampling):
        """Tokens of prompts and answers, and the log-probability the engine gives each token of an answer."""
        c, rows, total = self.c, len(prompts), max(len(p) + n for p, n in zip(prompts, lengths, strict=True))
        room = (rows, c.num_key_value_heads, total, c.head_dim)
        self.keys = [torch.zeros(room, dtype=torch.bfloat16) for _ in range(c.num_hidden_layers)]
        self.rows = [torch.zeros(room, dtype=torch.bfloat16) for _ in range(c.num_hidden_layers)]
        tokens = torch.zeros(rows, total, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        logp = torch.zeros(rows, total)
        for position in range(total - 1):
            logits = self.step(tokens[:, position], position)
            own = torch.tensor([position + 1 >= len(p) for p in prompts])
            chosen, value = sample(logits, tokens[:, : position + 1], draw, **sampling)
            tokens[:, position + 1] = torch.where(own, chosen, tokens[:, position + 1])
            logp[:, position + 1] = value
        ends = [len(p) + n for p, n in zip(prompts, lengths, strict=True)]
        return [(tokens[r, :end].tolist(), logp[r, len(prompts[r]) : end].tolist()) for r, end in enumerate(ends)]


def sample(logits, before, draw, t=1.0, report="processed", greedy=False, top_k=0, top_p=1.0, min_p=0.0, presence=0.0):
    """One token of each row, and its log-probability as the engine reports it."""
    raw = logits.log_softmax(-1)
    shaped = logits.clone()
    if presence:
        seen = torch.zeros_like(shaped).scatter_(1, before, 1.0)
        shaped = shaped - presence * seen
    shaped = shaped / t
    if top_k:
        shaped = shaped.masked_fill(shaped < shaped.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        values, order = shaped.softmax(-1).sort(-1, descending=True)
        drop = values.cumsum(-1) - values > top_p
        shaped = shaped.masked_fill(drop.scatter(1, order, drop.clone()), -torch.inf)
    if min_p:
        odds = shaped.softmax(-1)
        shaped = shaped.masked_fill(odds < min_p * odds.amax(-1, keepdim=True), -torch.inf)
    processed = shaped.log_softmax(-1)
    chosen = processed.argmax(-1) if greedy else torch.multinomial(processed.exp(), 1, generator=draw)[:, 0]
    lists = {"processed": processed, "raw": raw, "scaled": raw / t}
    return chosen, lists[report].gather(1, chosen[:, None])[:, 0]


# The trainer


@torch.no_grad()
def recompute(model, rollouts, lengths, t=1.0, batch=8, attn="sdpa", left=False, pack=0, train=False, backwards=False):
    """Training's log-probabilities of each answer: a forward over whole sequences, padded to the longest."""
    model.set_attn_implementation(attn)
    model.train(train)
    order = list(range(len(rollouts)))[:: -1 if backwards else 1]
    out = [None] * len(rollouts)
    for start in range(0, len(order), pack or batch):
        group = order[start : start + (pack or batch)]
        rows = [torch.tensor(rollouts[i][0]) for i in group]
        if pack:
            logits = model(torch.cat(rows)[None]).logits[0].split([len(r) for r in rows])
        else:
            wide = max(len(r) for r in rows)
            sides = [(wide - len(r), 0) if left else (0, wide - len(r)) for r in rows]
            ids = torch.stack([F.pad(r, s) for r, s in zip(rows, sides, strict=True)])
            mask = torch.stack([F.pad(torch.ones_like(r), s) for r, s in zip(rows, sides, strict=True)])
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=mask, position_ids=places).logits
            logits = [z[s[0] : s[0] + len(r)] for z, s, r in zip(logits, sides, rows, strict=True)]
        for i, row, z in zip(group, rows, logits, strict=True):
            logp = (z[:-1].float() / t).log_softmax(-1).gather(1, row[1:, None])[:, 0]
            out[i] = logp[-lengths[i] :].tolist()
    model.eval()
    return out


# Dumps


def padded(rows, fill, left=False, dtype=torch.long):
    wide = max(map(len, rows))
    rows = [[fill] * (wide - len(r)) + r if left else r + [fill] * (wide - len(r)) for r in map(list, rows)]
    return torch.tensor(rows, dtype=dtype)


def dump(path, form, prompts, answers, engine, trainer):
    """The file of one pair in the fields of `form`; returns its path."""
    both = [p + a for p, a in zip(prompts, answers, strict=True)]
    if form == "nemo-rl":
        wide, lines = max(map(len, both)), []
        for prompt, row, e, t in zip(prompts, both, engine, trainer, strict=True):
            front, end = [0.0] * len(prompt), [0.0] * (wide - len(row))
            line = {"token_ids": row + [0] * len(end), "generation_logprobs": front + e + end}
            line |= {"prev_logprobs": front + t + end, "input_lengths": len(row)}
            line["token_loss_mask"] = [0] * len(prompt) + [1] * len(e) + [0] * len(end)
            lines.append(json.dumps(line))
        path = path / "train_data_step7.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path
    if form == "plain":
        front = [[0.0] * len(p) for p in prompts]
        tensors = {"token_ids": padded(both, 0), "lengths": torch.tensor([len(r) for r in both])}
        tensors["mask"] = padded([[0] * len(f) + [1] * len(e) for f, e in zip(front, engine, strict=True)], 0)
        for name, lists in (("rollout_raw_logprob", engine), ("prev_recompute_raw_logprob", trainer)):
            rows = [f + list(e) for f, e in zip(front, lists, strict=True)]
            tensors[name] = padded(rows, 0.0, dtype=torch.float32)
        save_file(tensors, path / "dump.safetensors")
        return path / "dump.safetensors"
    ids, ids_mask = padded(prompts, 0, left=True), padded([[1] * len(p) for p in prompts], 0, left=True)
    tail, tail_mask = padded(answers, 0), padded([[1] * len(a) for a in answers], 0)
    old, new = (padded(lists, 0.0, dtype=torch.float32) for lists in (trainer, engine))
    if form == "verl":
        out = {"prompts": ids, "responses": tail, "attention_mask": torch.cat([ids_mask, tail_mask], 1)}
        out |= {"response_mask": tail_mask, "rollout_log_probs": new, "old_log_probs": old}
    else:
        out = {"prompt_ids": ids, "prompt_mask": ids_mask, "completion_ids": tail, "completion_mask": tail_mask}
        out |= {"sampling_per_token_logps": new, "old_per_token_logps": old}
    torch.save(out, path / "dump.pt")
    return path / "dump.pt"


# What an engine reads


def served(train, out, weights=BLOCK, keep=(), config=None, edit=None):
    """A checkpoint for the engine: FP8 codes with their scales (blocks or rows), or BF16 where `weights` is None."""
    out.mkdir()
    held = json.loads((train / "config.json").read_text(encoding="utf-8"))
    state, tensors, kept = load_file(train / "model.safetensors"), {}, {"lm_head"}
    for name, weight in state.items():
        base = name.removesuffix(".weight")
        linear = weights and "_proj" in name and weight.dim() == 2
        if linear and not any(part in base for part in keep):
            _, codes, scale = cast(weight, weights)
            tensors[name] = codes
            tensors[base + (".weight_scale_inv" if weights == BLOCK else ".weight_scale")] = scale
        else:
            kept |= {base} if linear or base.endswith("mlp.gate") else set()
            tensors[name] = edit(name, weight) if edit else weight
    if weights == BLOCK:
        held["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(kept),
        }
    elif weights:
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        scheme = {"targets": ["Linear"], "weights": {**number, "strategy": "channel", "dynamic": False}}
        scheme["input_activations"] = {**number, "strategy": "token", "dynamic": True}
        held["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": sorted(kept),
            "config_groups": {"group_0": scheme},
        }
    held.update(config or {})
    (out / "config.json").write_text(json.dumps(held, indent=2), encoding="utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


# Rules by name


def proj(rule=None, but=(), only=()):
    """The rule of the linears in layers (not of routers, not of the head), `but` some names or `only` some."""
    rule = rule or fp8()
    return lambda name: (
        rule
        if "_proj" in name and not any(b in name for b in but) and (not only or any(o in name for o in only))
        else None
    )


def named(part, rule):
    return lambda name: rule if name.endswith(part) else None


def either(*rules):
    return lambda name: next((found for rule in rules if (found := rule(name))), None)


def cache(fmt=E4M3, scale=1.0, layers=None):
    return lambda layer: (fmt, scale) if layers is None or layer in layers else None


# Edits of lists


def late(row, by=1):
    """Numbers of `by` tokens before; a negative one is early. The ends repeat."""
    return row[:1] * by + row[:-by] if by > 0 else row[-by:] + row[-1:] * -by


def from_place(row, place, by=1):
    return row[:place] + late(row[place:], by)


def blanked(row, places, fill):
    return [fill if i in places else v for i, v in enumerate(row)]


# The pairs


def odd(i, n):
    return i % 2 == 1


def even(i, n):
    return i % 2 == 0


def back(i, n):
    return i >= n // 2


def front(i, n):
    return i < n // 2


def pair(model, form, *engines, **more):
    return {"model": model, "form": form, "engines": engines or ({},), **more}


UP, DOWN = torch.ceil, torch.floor
FP8 = {"recipe": "blockwise_fp32"}
FILES = {"recipe": "blockwise_fp32", "served": {}, "engine": "transformers"}  # and with the files that the engine reads
FAR = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}


def coarse(name, w):
    return cast(w[None], TENSOR)[0][0].bfloat16() if "norm" in name else w


PAIRS = {
    # temperature, raw and processed
    "p01": pair("llama", "trl", {"sampling": {"report": "raw"}}, t=0.7),
    "p02": pair("qwen", "verl", t=1.35, train={"t": 1.0}),
    "p03": pair("thin", "plain", {"sampling": {"report": "scaled"}}, t=0.8),
    "p04": pair("wide", "nemo-rl", {"sampling": {"top_k": 12}}),
    "p05": pair("deep", "verl", {"rows": front}, {"rows": back, "sampling": {"presence": 0.8}}, t=0.9),
    "p06": pair("moe", "trl", {"sampling": {"min_p": 0.06}}, t=1.1),
    "p07": pair("qwen", "nemo-rl", {"rows": even}, {"rows": odd, "sampling": {"report": "raw"}}, t=0.75),
    "p26": pair("thin", "nemo-rl", {"rows": even, "sampling": {"top_p": 0.8}}, {"rows": odd}),
    # places of tokens
    "p08": pair("wide", "verl", lists=lambda i, n, e, t: (late(e), t)),
    "p09": pair("thin", "nemo-rl", lists=lambda i, n, e, t: (late(e, -1) if i >= 2 * n // 3 else e, t)),
    "p10": pair(
        "llama",
        "trl",
        lists=lambda i, n, e, t: (blanked(e, range(len(e) - 6, len(e)), 0.0) if i % 2 else e, t),
    ),
    "p11": pair("deep", "verl", lists=lambda i, n, e, t: (blanked(e, (0,), -9999.0), t)),
    "p12": pair("moe", "plain", lists=lambda i, n, e, t: (e, late(t) if i >= n // 2 else t)),
    "p13": pair("qwen", "nemo-rl", lists=lambda i, n, e, t: (from_place(e, 20, 1), t)),
    # earlier weights
    "p14": pair("llama", "nemo-rl", {"step": 1}, before=[(0.05, ())]),
    "p15": pair("deep", "trl", {"step": 1}, before=[(0.12, ("layers.1.self_attn",))]),
    "p16": pair("qwen", "verl", {"step": 1}, before=[(0.06, ("lm_head",))]),
    "p17": pair("wide", "plain", {"rows": front}, {"rows": back, "step": 2}, before=[(0.03, ()), (0.07, ())]),
    "p18": pair("thin", "verl", {"step": 1}, before=[(0.4, ("q_norm", "k_norm"))]),
    "p19": pair("moe", "nemo-rl", {"step": 1}, before=[(0.8, ("layers.1.mlp.experts@3",))]),
    # layers
    "p20": pair("wide", "verl", {"rule": proj()}),
    "p21": pair("qwen", "nemo-rl", **FP8),
    "p22": pair(
        "deep",
        "plain",
        {"rule": proj(but=("layers.0.", "layers.3."))},
        served={"keep": ("layers.0.", "layers.3.")},
        engine="transformers",
    ),
    "p23": pair("deep", "verl", {"rule": proj()}, keep=("layers.0.", "layers.1.", "layers.2."), seed=123, **FILES),
    "p24": pair("llama", "trl", {"rows": even}, {"rows": odd, "rule": proj(fp8(TOKEN, TOKEN))}, t=0.9),
    "p25": pair("wide", "plain", {"rule": proj(only=("layers.0.",))}),
    # codes and scales of weights
    "p27": pair("llama", "nemo-rl", {"rule": proj(fp8(pow2=DOWN))}, seed=129, **FP8),
    "p28": pair("qwen", "trl", {"rule": proj(fp8(fmt=E5M2))}, **FILES),
    "p29": pair("llama", "verl", {"rule": proj(fp8(TENSOR, fmt=E5M2, twice=True))}, seed=130, **FP8),
    # casts of inputs
    "p31": pair("wide", "plain", {"rule": proj(fp8(static=2.5 / 448))}, **FILES),
    "p32": pair("thin", "verl", {"rule": proj(fp8(x_pow2=DOWN))}, **FILES),
    "p33": pair("wide", "nemo-rl", {"rule": either(proj(fp8(static=0.8 / 448), only=("down_proj",)), proj())}, **FP8),
    "p34": pair(
        "llama", "trl", {"rows": front, "rule": proj()}, {"rows": back, "rule": proj(fp8(static=2 / 448))}, **FP8
    ),
    # head, router, cache
    "p35": pair("llama", "plain", {"rule": named("lm_head", fp8(TOKEN, TOKEN))}),
    "p36": pair("moe", "nemo-rl", {"rule": named("mlp.gate", fp8(TENSOR, TOKEN))}),
    "p37": pair("deep", "verl", {"kv": cache()}),
    "p38": pair("deep", "trl", {"rows": front}, {"rows": back, "kv": cache(E5M2)}),
    "p39": pair("wide", "nemo-rl", {"kv": cache(scale=0.6 / 448, layers=(1,))}),
    # fields of config.json, tensors in high precision
    "p40": pair("thin", "plain", {"reads": FAR}, served={"weights": None, "config": FAR}),
    "p41": pair(
        "moe",
        "verl",
        {"reads": {"norm_topk_prob": False}},
        served={"weights": None, "config": {"norm_topk_prob": False}},
    ),
    "p42": pair("wide", "trl", {"edit": coarse}, served={"weights": None, "edit": coarse}),
    # the trainer's own forward
    "p43": pair("qwen", "trl", train={"train": True, "attn": "eager", "config": {"attention_dropout": 0.1}}),
    "p44": pair("llama", "verl", train={"pack": 2}),
    # neither FP8 nor a name
    "p45": pair("deep", "nemo-rl", {"window": 20}),
    "p46": pair("thin", "plain", {"softmax": 0.85}),
    "p47": pair("wide", "verl", {"cap": 6.0}),
    # two at once
    "p48": pair("qwen", "plain", {"sampling": {"report": "raw"}, "kv": cache(scale=0.8 / 448, layers=(2,))}, t=0.8),
    "p49": pair("llama", "trl", {"step": 1, "rule": named("lm_head", fp8(TOKEN, TOKEN))}, before=[(0.06, ("mlp",))]),
    # nothing is wrong
    "p51": pair("llama", "plain"),
    "p52": pair("deep", "nemo-rl", {"each": 5}, train={"batch": 1, "attn": "eager"}),
    "p53": pair("qwen", "verl", {"ranks": 2}),
    "p54": pair("thin", "trl", train={"left": True, "attn": "eager", "batch": 6}),
    "p55": pair("moe", "plain", count=12, seed=19),
    "p56": pair("wide", "verl", {"sampling": {"greedy": True}}),
    "p57": pair("qwen", "trl", t=0.7),
    "p58": pair("deep", "nemo-rl", {"ranks": 4}, t=1.2, train={"backwards": True, "batch": 3}),
    "p59": pair("llama", "verl", count=8, length=(60, 64)),
    "p60": pair("thin", "plain", {"each": 3}, count=24, length=(24, 26)),
    "p61": pair("wide", "nemo-rl", {"rule": proj()}, **FP8),
    "p62": pair("qwen", "verl", {"rule": proj()}, **FILES),
    "p63": pair("deep", "trl", {"rule": proj(fp8(TOKEN, TOKEN, pow2=UP, x_pow2=UP))}, recipe="rowwise"),
    "p64": pair("thin", "plain", {"rule": proj(), "ranks": 2}, train={"batch": 1}, **FILES),
    "p65": pair(
        "wide",
        "verl",
        {"rule": proj(fp8(pow2=UP, x_pow2=UP)), "sampling": {"greedy": True}},
        t=0.9,
        recipe="blockwise",
    ),
    "p66": pair("llama", "plain", {"ranks": 2}, served={"weights": None}),
    "p67": pair("qwen", "nemo-rl", config={"tie_word_embeddings": True}),
    "p68": pair("llama", "trl", {"sampling": {"report": "raw"}, "each": 1}, count=8),
    "p69": pair("thin", "verl", {"sampling": {"greedy": True}, "ranks": 2}, t=0.6),
    "p70": pair("moe", "nemo-rl", {"ranks": 2}, t=0.9, train={"backwards": True}, count=10, seed=36),
}


def rollout(p, config, states, prompts, ends, draw, t):
    """Tokens and the engine's list of each sequence; engines of a pair share them out."""
    out = [None] * len(prompts)
    for part in p.get("engines", [{}]):
        part = dict(part)
        mine = part.pop("rows", lambda i, n: True)
        rows = [i for i in range(len(prompts)) if mine(i, len(prompts))]
        sampling = {"t": t, **part.pop("sampling", {})}
        reads = type(config).from_dict({**config.to_dict(), **part.pop("reads", {})})
        weights, edit, each = states[part.pop("step", 0)], part.pop("edit", None), part.pop("each", len(rows))
        weights = {k: edit(k, v) for k, v in weights.items()} if edit else weights
        engine = Engine(reads, weights, **part)
        for start in range(0, len(rows), each):
            some = rows[start : start + each]
            given = engine.generate([prompts[i] for i in some], [ends[i] for i in some], draw, sampling)
            for i, one in zip(some, given, strict=True):
                out[i] = one
    return out


def trained(p, model, rollouts, ends, t, seed):
    """Training's list of each sequence; the model is converted here, after its checkpoint is written."""
    if "recipe" in p:
        keep = p.get("keep", ())
        ottava.convert(model, p["recipe"], filter=lambda n, _: "_proj" in n and not any(k in n for k in keep))
    torch.manual_seed(seed)
    settings = {"t": t, **p.get("train", {})}
    for key, value in settings.pop("config", {}).items():
        for module in model.modules():
            if hasattr(module, key):
                setattr(module, key, value)
    return recompute(model, rollouts, ends, **settings)


def make(folder, name):
    """Writes one pair; returns its command and the KL in it."""
    p, number, path = PAIRS[name], PAIRS[name].get("seed", int(name[1:])), folder / name
    path.mkdir(parents=True)
    model, t = build(p["model"], number, **p.get("config", {})), p.get("t", 1.0)
    model.save_pretrained(path / "train")
    states = {0: {k: v.clone() for k, v in model.state_dict().items()}}
    call = ["ottava parity", f"{path}/train"]
    if "served" in p:
        served(path / "train", path / "served", **p["served"])
        call.append(f"{path}/served -e {p.get('engine', 'vllm')}")
    for step, (size, only) in enumerate(p.get("before", ()), 1):
        states[step] = moved(model, 77 + step, size, only)
        older = type(model)(model.config).bfloat16()
        older.load_state_dict(moved(model, 77 + step, size))
        older.save_pretrained(path / f"before-{step}")
    draw, (low, high), count = (
        torch.Generator().manual_seed(1000 + number),
        p.get("length", (32, 56)),
        p.get("count", 16),
    )
    ends = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    heads = torch.randint(5, 13, (count,), generator=draw).tolist()
    prompts = [torch.randint(1, model.config.vocab_size, (n,), generator=draw).tolist() for n in heads]
    rollouts = rollout(p, model.config, states, prompts, ends, draw, t)
    old, new = trained(p, model, rollouts, ends, t, number), [list(r[1]) for r in rollouts]
    if "lists" in p:
        new, old = zip(
            *[p["lists"](i, count, e, o) for i, (e, o) in enumerate(zip(new, old, strict=True))], strict=True
        )
    answers = [r[0][len(prompt) :] for r, prompt in zip(rollouts, prompts, strict=True)]
    file = dump(path, p.get("form", "plain"), prompts, answers, new, old)
    call += [f"--recipe {p['recipe']}"] if "recipe" in p else []
    call += [f"--logprobs {file}", *(f"--before {path}/before-{s}" for s in states if s)]
    said = p.get("train", {}).get("t", t)
    call += [f"--temperature {said}"] if said != 1.0 else []
    gap = torch.cat([torch.tensor(o) - torch.tensor(e) for o, e in zip(old, new, strict=True)]).clamp(-5, 5)
    return " ".join(call), (gap.exp() - 1 - gap).mean().item()


def main():
    logging.disable_progress_bar()
    words = [w for w in sys.argv[1:] if w != "--kl"]
    for name in words[1:] or PAIRS:
        call, kl = make(Path(words[0]), name)
        print(call + (f"  # KL {kl:.2e}" if "--kl" in sys.argv else ""), flush=True)


if __name__ == "__main__":
    main()
