"""Makes pairs of log-probabilities, of a rollout and of training, some with a hidden fault: make.py FOLDER [NAME ...].

Each pair is a folder with `train` (a checkpoint in BF16), a dump, and where its call names them `served` and
`before-N`. The engine is a decoder, one token at a time with a KV cache; the trainer is transformers, converted by
ottava where it trains in FP8. Prints the command of each pair. --kl adds KL(rollout || training), --twin makes the
pairs without their faults, --truth prints truth.yaml with the KL of both.

Casts, dumps and files are those of ../rollouts5/make.py; models, the decoder, the trainer and the faults are not.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

import ottava

spec = importlib.util.spec_from_file_location("rollouts5", Path(__file__).parent.parent / "rollouts5" / "make.py")
old = importlib.util.module_from_spec(spec)
spec.loader.exec_module(old)
BLOCK, GROUP, TENSOR, TOKEN, E4M3, E5M2 = old.BLOCK, old.GROUP, old.TENSOR, old.TOKEN, old.E4M3, old.E5M2
cast, dump, served = old.cast, old.dump, old.served


# Models


def sizes(hidden, layers, middle, vocab, **more):
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": middle,
        "vocab_size": vocab,
        **more,
    }


ROUTED = {"moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS = {
    "llama": (LlamaConfig, sizes(128, 3, 384, 288)),
    "one": (LlamaConfig, sizes(256, 1, 512, 256)),
    "two": (LlamaConfig, sizes(256, 2, 384, 320)),
    "five": (LlamaConfig, sizes(128, 5, 256, 224)),
    "qwen2": (Qwen2Config, sizes(128, 3, 256, 256)),
    "qwen3": (Qwen3Config, sizes(256, 2, 384, 300)),
    "moe": (Qwen3MoeConfig, sizes(128, 2, 256, 240, **ROUTED)),
    "mistral": (MistralConfig, sizes(128, 3, 256, 256, sliding_window=None)),
    "granite": (
        GraniteConfig,
        sizes(
            128,
            3,
            256,
            256,
            embedding_multiplier=2.0,
            logits_scaling=1.5,
            residual_multiplier=0.8,
            attention_multiplier=0.2,
        ),
    ),
}


def build(shape: str, seed: int, look=0.7, outlier=1.0, column=1.0, **changes):
    """Random weights: peaked answers, a few large channels; `look` is how sharp attention is,
    `outlier` the size of one row of up_proj, `column` that of one column behind a norm that is as small."""
    kind, size = MODELS[shape]
    size = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, **size, **changes}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size["hidden_size"] // 4}
    config = kind(**size, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    fill = torch.Generator().manual_seed(6000 + seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=fill)
            large = torch.randperm(len(value), generator=fill)
            if "norm" in name:
                value = 1 + 0.15 * value
                value[large[:2]] *= 6 if "layernorm" in name else 1
            elif name.endswith("bias"):
                value = 0.5 * value
            elif "embed" in name:
                value = value * (0.15 if config.tie_word_embeddings else 0.6)
            else:
                spread = 1.7 if "lm_head" in name else 1.6 if name.endswith("gate.weight") else 0.65
                spread = look if "q_proj" in name or "k_proj" in name else spread
                value = value * spread / weight.shape[-1] ** 0.5
                if any(part in name for part in ("o_proj", "down_proj", "up_proj")):
                    value[..., large[: max(1, len(value) // 24)], :] *= 3 if value.dim() == 2 else 1
                if "up_proj" in name and value.dim() == 2:
                    value[large[0]] *= outlier
            if column > 1 and "layernorm" in name:
                value[5] = 1 / column
            if column > 1 and any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                value[:, 5] *= column
            weight.copy_(value)
    return model


# Casts


def rule(weights=BLOCK, inputs=GROUP, fmt=E4M3, pow2=None, x_fmt=E4M3, x_pow2=None, static=None, how=None):
    """How an engine casts the weight and the input of one linear. inputs=None: no cast of them.

    `static` is a scale of other data, `how` a cast of weights of its own.
    """

    def value(x):
        return cast(x, inputs, x_fmt, x_pow2, static)[0]

    return how or (lambda w: cast(w, weights, fmt, pow2)[0]), value if inputs else None


def towards_zero(w):
    """Blocks of 128x128, each number cut, not rounded."""
    back, codes, scale = cast(w, BLOCK)
    wide = scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)[:, : w.shape[1]]
    far = (back.abs() > w.float().abs()) & (codes.float() != 0)
    bits = codes.view(torch.uint8) - far.to(torch.uint8)
    return bits.view(E4M3).float() * wide


def turned(w):
    """The grid of block scales is read with its two sides exchanged, where it is square."""
    _, codes, scale = cast(w, BLOCK)
    scale = scale.T if scale.shape[0] == scale.shape[1] else scale
    wide = scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)[:, : w.shape[1]]
    return codes.float() * wide


def projections(one=None, only=(), but=()):
    one = one or rule()
    return lambda name: (
        one
        if "_proj" in name and (not only or any(o in name for o in only)) and not any(b in name for b in but)
        else None
    )


def ending(part, one=None):
    one = one or rule()
    return lambda name: one if name.endswith(part) else None


def stored(k=None, v=None, layers=None):
    """The KV cache: (format, scale) of keys and of values, in all layers or some."""
    return lambda layer: (k, v) if layers is None or layer in layers else (None, None)


# The engine


class Engine:
    """A decoder with a cache. Fields of config.json it follows: rope_theta, eps, act, sliding window, multipliers."""

    def __init__(self, c, state, rule=None, kv=None, ranks=1, cap=0.0, bare=False, skip=0):
        self.c, self.kv, self.ranks, self.cap, self.bare, self.skip = c, kv, ranks, cap, bare, skip
        self.w, self.values, raw = {}, {}, {}
        for name, tensor in state.items():
            name = name.removeprefix("model.").removesuffix(".weight")
            if name.endswith("gate_up_proj") and tensor.dim() == 3:
                base = name.removesuffix("gate_up_proj")
                for e, both in enumerate(tensor):
                    raw[f"{base}{e}.gate_proj"], raw[f"{base}{e}.up_proj"] = both.chunk(2)
            elif tensor.dim() == 3:
                raw |= {f"{name.removesuffix('down_proj')}{e}.down_proj": one for e, one in enumerate(tensor)}
            else:
                raw[name] = tensor
        if "lm_head" not in raw:
            raw["lm_head"] = raw["embed_tokens"]
        for name, tensor in raw.items():
            found = rule(name) if rule and tensor.dim() == 2 and "embed" not in name else None
            self.w[name] = found[0](tensor) if found else tensor
            if found and found[1]:
                self.values[name] = found[1]
        dim = c.head_dim
        turns = c.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(600).float()[:, None] * torch.cat([turns, turns])
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def linear(self, name, x):
        w = self.w[name].float()
        x = self.values[name](x) if name in self.values else x.float()
        if self.ranks > 1 and w.shape[1] % self.ranks == 0:
            parts = [(a @ b.T).bfloat16() for a, b in zip(x.chunk(self.ranks, 1), w.chunk(self.ranks, 1), strict=True)]
            y = sum(parts[1:], parts[0])
        else:
            y = (x @ w.T).bfloat16()
        bias = self.w.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, name, x):
        value = x.float()
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        return self.w[name] * value.bfloat16()

    def rope(self, x, places):
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[places][:, None], self.sin[places][:, None]
        return x * cos + torch.cat([-b, a], -1) * sin

    def attention(self, base, layer, x, position, places):
        c, rows = self.c, len(x)
        q, k, v = (self.linear(base + part, x).view(rows, -1, c.head_dim) for part in ("q_proj", "k_proj", "v_proj"))
        if base + "q_norm" in self.w and not self.bare:
            q, k = self.norm(base + "q_norm", q), self.norm(base + "k_norm", k)
        q, k = self.rope(q, places), self.rope(k, places)
        for store, new, how in zip(
            (self.k[layer], self.v[layer]), (k, v), self.kv(layer) if self.kv else (0, 0), strict=True
        ):
            if how:
                fmt, scale = how
                top = torch.finfo(fmt).max
                new = ((new.float() / scale).clamp(-top, top).to(fmt).float() * scale).bfloat16()
            store[:, :, position] = new
        window = getattr(c, "sliding_window", None) or 0
        first = max(0, position + 1 - window) if window else 0
        keys, values = (s[layer][:, :, first : position + 1].float() for s in (self.k, self.v))
        q = q.float().view(rows, c.num_key_value_heads, -1, c.head_dim)
        scores = q @ keys.transpose(2, 3) * getattr(c, "attention_multiplier", c.head_dim**-0.5)
        scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
        mixed = scores.softmax(-1) @ values
        return self.linear(base + "o_proj", mixed.reshape(rows, -1).bfloat16())

    def mlp(self, base, x):
        gate = self.linear(base + "gate_proj", x)
        gate = F.gelu(gate, approximate="tanh") if "gelu" in self.c.hidden_act else F.silu(gate)
        return self.linear(base + "down_proj", gate * self.linear(base + "up_proj", x))

    def experts(self, base, x):
        odds = self.linear(base + "gate", x).float().softmax(-1)
        share, chosen = odds.topk(self.c.num_experts_per_tok, -1)
        share = share / share.sum(-1, keepdim=True) if self.c.norm_topk_prob else share
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            row, slot = torch.where(chosen == e)
            out.index_add_(0, row, self.mlp(f"{base}experts.{e}.", x[row]) * share[row, slot, None].bfloat16())
        return out

    def step(self, tokens, position, places):
        c = self.c
        x = self.w["embed_tokens"][tokens] * getattr(c, "embedding_multiplier", 1.0)
        more = getattr(c, "residual_multiplier", 1.0)
        for layer in range(c.num_hidden_layers):
            base = f"layers.{layer}."
            y = self.attention(base + "self_attn.", layer, self.norm(base + "input_layernorm", x), position, places)
            x = x + y * more
            mlp = self.experts if base + "mlp.gate" in self.w else self.mlp
            x = x + mlp(base + "mlp.", self.norm(base + "post_attention_layernorm", x)) * more
        return self.linear("lm_head", self.norm("norm", x)).float() / getattr(c, "logits_scaling", 1.0)

    @torch.no_grad()
    def generate(self, prompts, lengths, draw, sampling):
        """Tokens of prompts and answers, and the log-probability the engine gives each token of an answer."""
        c, rows = self.c, len(prompts)
        ends = [len(p) + n for p, n in zip(prompts, lengths, strict=True)]
        room, total = (rows, c.num_key_value_heads, max(ends), c.head_dim), max(ends)
        self.k, self.v = ([torch.zeros(room).bfloat16() for _ in range(c.num_hidden_layers)] for _ in range(2))
        tokens, logp = torch.zeros(rows, total, dtype=torch.long), torch.zeros(rows, total)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        starts = torch.tensor([len(p) for p in prompts])
        for position in range(total - 1):
            places = position + self.skip * (starts <= position)
            logits = self.step(tokens[:, position], position, places)
            chosen, value = sample(logits, tokens[:, : position + 1], draw, **sampling)
            tokens[:, position + 1] = torch.where(position + 1 >= starts, chosen, tokens[:, position + 1])
            logp[:, position + 1] = value
        return [(tokens[r, :end].tolist(), logp[r, len(prompts[r]) : end].tolist()) for r, end in enumerate(ends)]


def sample(logits, before, draw, t=1.0, report="processed", top_k=0, top_p=1.0, min_p=0.0, again=1.0, ban=0):
    """One token of each row and its log-probability. `ban`: that many first tokens may not come."""
    raw = logits.log_softmax(-1)
    shaped = logits.clone()
    if again != 1:  # the repetition penalty of CTRL
        seen = torch.zeros_like(shaped).scatter_(1, before, 1.0).bool()
        shaped = torch.where(seen, torch.where(shaped > 0, shaped / again, shaped * again), shaped)
    if ban:
        shaped[:, :ban] = -torch.inf
    shaped = shaped / t
    full = shaped.log_softmax(-1)
    if top_k:
        shaped = shaped.masked_fill(shaped < shaped.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        odds, order = shaped.softmax(-1).sort(-1, descending=True)
        drop = odds.cumsum(-1) - odds > top_p
        shaped = shaped.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    if min_p:
        odds = shaped.softmax(-1)
        shaped = shaped.masked_fill(odds < min_p * odds.amax(-1, keepdim=True), -torch.inf)
    processed = shaped.log_softmax(-1)
    chosen = torch.multinomial(processed.exp(), 1, generator=draw)[:, 0]
    lists = {"processed": processed, "full": full, "raw": raw, "scaled": raw / t}
    return chosen, lists[report].gather(1, chosen[:, None])[:, 0]


# The trainer


@torch.no_grad()
def recompute(
    model, rollouts, lengths, t=1.0, batch=8, attn="sdpa", left=False, pack=0, train=False, blind=False, again=False
):
    """Training's log-probabilities. `pack`: rows share a line without a mask; `blind`: left padding without one;
    `again`: positions of an answer begin at 0 anew."""
    model.set_attn_implementation(attn)
    model.train(train)
    out = []
    for start in range(0, len(rollouts), pack or batch):
        some = slice(start, start + (pack or batch))
        rows = [torch.tensor(r[0]) for r in rollouts[some]]
        if pack:
            logits = model(torch.cat(rows)[None]).logits[0].split([len(r) for r in rows])
        else:
            wide = max(map(len, rows))
            sides = [(wide - len(r), 0) if left or blind else (0, wide - len(r)) for r in rows]
            ids = torch.stack([F.pad(r, s) for r, s in zip(rows, sides, strict=True)])
            mask = torch.stack([F.pad(torch.ones_like(r), s) for r, s in zip(rows, sides, strict=True)])
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            if again:
                heads = torch.tensor([len(r) - n for r, n in zip(rows, lengths[some], strict=True)])[:, None]
                places = torch.where(places >= heads, places - heads, places)
            more = {} if blind else {"attention_mask": mask, "position_ids": places}
            logits = model(ids, **more).logits
            logits = [z[s[0] : s[0] + len(r)] for z, s, r in zip(logits, sides, rows, strict=True)]
        for row, z, n in zip(rows, logits, lengths[some], strict=True):
            logp = (z[:-1].float() / t).log_softmax(-1).gather(1, row[1:, None])[:, 0]
            out.append(logp[-n:].tolist())
    model.eval()
    return out


# Other weights


def drift(size, *only, layer="", part=None, seed=1):
    """Weights of an earlier step: all, or of names with one of `only` (and `layer`), or a part: part(w, old)."""

    def old_state(state, everything=False):
        noise, out = torch.Generator().manual_seed(660 + seed), {}
        for name, w in state.items():
            past = (w.float() + torch.randn(w.shape, generator=noise) * w.float().std() * size).bfloat16()
            mine = (not only or any(o in name for o in only)) and layer in name
            out[name] = past if everything else (part(w, past) if part else past) if mine else w.clone()
        return out

    return old_state


def adapter(times, *only):
    """The merged checkpoint, plus its adapter (rank 8, q, v, up and down) that many times: -1 is the base model."""

    def other(state, everything=False):
        noise, out = torch.Generator().manual_seed(8), {}
        for name, w in state.items():
            out[name] = w.clone()
            if any(p in name for p in only or ("q_proj.weight", "v_proj.weight", "up_proj.weight", "down_proj.weight")):
                a, b = torch.randn(8, w.shape[1], generator=noise), torch.randn(len(w), 8, generator=noise)
                change = (b @ a) * (0.35 * w.float().std() / 8**0.5)
                out[name] = (w.float() + times * change).bfloat16()
        return out

    return other


def second_half(w, past):
    half = w.shape[-1] // 2
    return torch.cat([w[..., :half], past[..., half:]], -1)


# Edits of lists: (sequence, engine's list, training's list) -> both


def late(row, by=1):
    return row[:1] * by + row[:-by] if by > 0 else row[-by:] + row[-1:] * -by


def right_aligned(i, e, t, wide=44):
    gap = wide - len(e)
    return ([0.0] * gap + e)[: len(e)], t


def noisy(size):
    def both(i, e, t):
        noise = torch.Generator().manual_seed(i)
        return [min(v + size * torch.randn((), generator=noise).item(), 0.0) for v in e], t

    return both


# The pairs


def pair(model, truth="", causes=(), base=None, fault=None, source=""):
    return {
        "model": model,
        "truth": truth,
        "causes": list(causes),
        "base": base or {},
        "fault": fault or {},
        "source": source,
    }


def fp8(weights=BLOCK, inputs=GROUP, recipe="blockwise_fp32", only=(), but=(), **more):
    """Both sides cast alike; `more` is of the pair."""
    engine = {"rule": projections(rule(weights, inputs), only, but)}
    return {"recipe": recipe, "keep": but, "engines": ({**engine},), **more}


def engine(**more):
    return {"engines": (more,)}


def casts(one=None, only=(), but=(), **more):
    return engine(rule=projections(one, only, but), **more)


def even(i, n):
    return i % 2 == 0


def odd(i, n):
    return i % 2 == 1


PAIRS = {
    # sampling
    "p01": pair(
        "qwen2",
        "The engine reports raw log-probabilities; it samples at 0.6, and training divides its logits by that.",
        ["temperature"],
        {"form": "verl", "t": 0.6},
        engine(sampling={"report": "raw"}),
        "huggingface/trl#4159",
    ),
    "p02": pair(
        "qwen3",
        "The engine divides log p by the temperature of 1.5, not the logits.",
        ["scaled"],
        {"form": "verl", "t": 1.5},
        engine(sampling={"report": "scaled"}),
        "prime-rl#697",
    ),
    "p03": pair(
        "mistral",
        "The engine reports log p after top-p 0.8, normalized anew, at the temperature of 1.1 of both.",
        ["processed"],
        {"form": "plain", "t": 1.1},
        engine(sampling={"top_p": 0.8}),
        "vllm-project/vime#69",
    ),
    "p04": pair(
        "qwen2",
        "The engine reports log p after a repetition penalty of 1.3 (a default of generation_config.json).",
        ["processed"],
        {"form": "verl"},
        engine(sampling={"again": 1.3}),
        "verl#6240",
    ),
    # places of numbers
    "p05": pair(
        "llama",
        "Training's list is one token early (labels were not shifted) in every third sequence.",
        ["shift"],
        {"form": "trl"},
        {"lists": lambda i, e, t: (e, late(t, -1) if i % 3 == 0 else t)},
        "prime-rl#1525",
    ),
    "p06": pair(
        "qwen3",
        "The engine's list is padded in front, read from the front: each sequence is late by its lack to 44 tokens.",
        ["shift", "padded"],
        {"form": "verl", "length": (39, 44)},
        {"lists": right_aligned},
    ),
    "p07": pair(
        "mistral",
        "The last token of each answer, the stop token, has no number in the engine's list: 0 stands there.",
        ["padded"],
        {"form": "trl"},
        {"lists": lambda i, e, t: (e[:-1] + [0.0], t)},
        "vllm-project/vime#70",
    ),
    # refit
    "p08": pair(
        "qwen2",
        "No refit arrived: the engine has the weights of two steps ago, the second of the two --before.",
        ["stale"],
        {"form": "verl", "before": [drift(0.04, seed=1), drift(0.08, seed=2)]},
        engine(step=2),
        "slime#1618",
    ),
    "p09": pair(
        "two",
        "down_proj of all layers is stale; both sides cast in FP8.",
        ["stale"],
        fp8(form="nemo-rl", before=[drift(0.25, "down_proj")]),
        {"engines": ({"rule": projections(), "step": 1},)},
    ),
    "p10": pair(
        "five",
        "Layer 3 of five is stale (a bucket of the refit was lost).",
        ["stale"],
        {"form": "plain", "before": [drift(0.2, layer="layers.3.")]},
        engine(step=1),
    ),
    "p11": pair(
        "mistral",
        "All norms are stale, and nothing else.",
        ["stale"],
        {"form": "trl", "before": [drift(0.15, "norm")]},
        engine(step=1),
    ),
    "p12": pair(
        "qwen2",
        "The biases of q, k and v are stale: the refit sends .weight only.",
        ["stale"],
        {"form": "verl", "before": [drift(0.7, ".bias")]},
        engine(step=1),
    ),
    "p13": pair(
        "qwen3",
        "One of two tensor-parallel ranks kept its o_proj and down_proj: the second half of their columns is stale.",
        ["stale"],
        {"form": "verl", "before": [drift(0.3, "o_proj", "down_proj", part=second_half)]},
        engine(step=1),
    ),
    # which layers
    "p14": pair(
        "two",
        "Training casts in FP8; the engine was started without it and runs in BF16.",
        ["layers"],
        {"form": "nemo-rl"},
        {"recipe": "blockwise_fp32"},
    ),
    "p15": pair(
        "five",
        "The engine casts the last two layers of five in FP8, the others not; training is in BF16.",
        ["layers"],
        {"form": "plain"},
        casts(only=("layers.3.", "layers.4.")),
        "NeMo-RL#4126",
    ),
    "p16": pair(
        "mistral",
        "The engine casts attention's linears in FP8, blocks with powers of two; training is in BF16.",
        ["layers"],
        {"form": "verl"},
        casts(rule(pow2=torch.ceil, x_pow2=torch.ceil), only=("self_attn",)),
    ),
    # weights and inputs
    "p17": pair(
        "one",
        "The engine casts weights to E5M2.",
        ["weights"],
        fp8(form="verl"),
        casts(rule(fmt=E5M2)),
    ),
    "p18": pair(
        "one",
        "The engine cuts weights towards zero when it casts them, where training rounds to nearest.",
        ["weights"],
        fp8(form="plain"),
        casts(rule(how=towards_zero)),
    ),
    "p19": pair(
        "two",
        "The engine reads the grid of block scales with its two sides exchanged.",
        ["weights"],
        {**fp8(form="nemo-rl"), "config": {"outlier": 6.0, "intermediate_size": 256}},
        casts(rule(how=turned)),
    ),
    "p20": pair(
        "one",
        "The engine rounds the block scales of its weights down to powers of two, so codes clip.",
        ["weights"],
        fp8(form="trl"),
        casts(rule(pow2=torch.floor)),
    ),
    "p21": pair(
        "one",
        "One scale for each weight, not blocks: a column 10000 times as large leaves the others below normal numbers.",
        ["weights"],
        {**fp8(form="plain"), "config": {"column": 10000.0}},
        casts(rule(TENSOR, GROUP)),
    ),
    "p22": pair(
        "two",
        "Static scales of inputs from other data: what is above 2.2 clips.",
        ["activations"],
        fp8(form="verl"),
        casts(rule(static=2.2 / 448)),
    ),
    # caches, head, router
    "p23": pair(
        "five",
        "The cache is in E4M3, its scale of 128 is too large (numbers below 2 are not normal); nothing else is cast.",
        ["kv-cache"],
        {"form": "verl"},
        engine(kv=stored((E4M3, 128.0), (E4M3, 128.0))),
        "NeMo-RL#1212",
    ),
    "p24": pair(
        "llama",
        "The cache's values in layer 1 keep a scale of old weights: what is above 0.9 clips.",
        ["kv-cache"],
        {"form": "plain"},
        engine(kv=stored(None, (E4M3, 0.9 / 448), (1,))),
    ),
    "p25": pair(
        "qwen2",
        "The engine casts the head in FP8, and nothing else.",
        ["head"],
        {"form": "trl"},
        engine(rule=ending("lm_head", rule(TOKEN, TOKEN))),
        "NeMo-RL#3614",
    ),
    "p26": pair(
        "moe",
        "The engine casts the routers in FP8 with a static scale of inputs, which clips above 1.2, and nothing else.",
        ["router"],
        {"form": "plain"},
        engine(rule=ending("mlp.gate", rule(TENSOR, static=1.2 / 448))),
    ),
    # the formula
    "p27": pair(
        "llama",
        "config.json of the engine has a rope_theta of 500000, training's 10000.",
        ["formula"],
        {"form": "verl", "served": {"weights": None}, "config": {"look": 1.2}},
        {"reads": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}},
    ),
    "p28": pair(
        "qwen2",
        "config.json of the engine has the act gelu_pytorch_tanh, training's silu.",
        ["formula"],
        {"form": "trl", "served": {"weights": None}},
        {"reads": {"hidden_act": "gelu_pytorch_tanh"}},
    ),
    "p29": pair(
        "mistral",
        "config.json of the engine has a sliding window of 6 tokens, training's none.",
        ["formula"],
        {"form": "plain", "served": {"weights": None}},
        {"reads": {"sliding_window": 6}},
    ),
    "p30": pair(
        "two",
        "config.json of the engine has an eps of 0.1, training's 1e-6; both cast in FP8.",
        ["formula"],
        fp8(form="nemo-rl", served={}, engine="transformers"),
        {"reads": {"rms_norm_eps": 0.1}},
    ),
    "p31": pair(
        "granite",
        "config.json of the engine has logits_scaling 1, training's 1.5.",
        ["formula", "temperature"],
        {"form": "verl", "served": {"weights": None}},
        {"reads": {"logits_scaling": 1.0}},
    ),
    "p32": pair(
        "llama",
        "The file that the engine reads has the adapter merged twice (q, v, up, down).",
        ["plain", "weights"],
        {"form": "trl", "served": {"weights": None}},
        {"edit": adapter(1)},
    ),
    # training's own
    "p33": pair(
        "qwen2",
        "Training recomputes in train mode with a dropout of 0.15 in attention.",
        ["trainer"],
        {"form": "verl"},
        {"train": {"train": True, "attn": "eager", "config": {"attention_dropout": 0.15}}},
    ),
    "p34": pair(
        "mistral",
        "Training recomputes with its adapter off (the reference model's forward).",
        ["trainer"],
        {"form": "trl"},
        {"forward": adapter(-1)},
    ),
    "p35": pair(
        "two",
        "Training pads on the left and gives no mask, so tokens attend to the padding; both cast in FP8.",
        ["trainer"],
        fp8(form="verl", length=(16, 56)),
        {"train": {"blind": True}},
    ),
    # neither side casts
    "p36": pair(
        "qwen2",
        "The engine's tokenizer put a special token in front of each prompt, which training does not have.",
        ["not-fp8"],
        {"form": "trl", "config": {"look": 0.5}},
        {"bos": 1},
    ),
    "p37": pair(
        "llama",
        "Answers were decoded and encoded again: every ninth token of training is another than the engine drew.",
        ["not-fp8"],
        {"form": "verl"},
        {"retoken": 9},
    ),
    "p38": pair(
        "qwen3",
        "The engine leaves the norms of q and k out, and its file says nothing of it.",
        ["not-fp8"],
        {"form": "plain"},
        engine(bare=True),
    ),
    "p39": pair(
        "mistral",
        "The engine's positions skip five between prompt and answer.",
        ["not-fp8"],
        {"form": "nemo-rl", "config": {"look": 1.2}},
        engine(skip=5),
    ),
    "p40": pair(
        "llama",
        "The engine puts a tanh with a cap of 1.0 over the scores of attention.",
        ["not-fp8"],
        {"form": "verl", "config": {"look": 1.2}},
        engine(cap=1.0),
    ),
    # healthy
    "p41": pair("llama", "BF16 on both sides.", base={"form": "verl"}),
    "p42": pair(
        "qwen2",
        "BF16, the engine sums over two ranks; temperature 0.7 on both sides.",
        base={"form": "trl", "t": 0.7, **engine(ranks=2)},
    ),
    "p43": pair(
        "mistral",
        "BF16, batches of three, a sliding window of 12 on both sides; the engine's file is given.",
        base={
            "form": "plain",
            "config": {"sliding_window": 12},
            "served": {"weights": None},
            "engines": ({"each": 3},),
        },
    ),
    "p44": pair(
        "granite",
        "BF16, training pads on the left, three at a time, eager attention.",
        base={"form": "nemo-rl", "train": {"attn": "eager", "batch": 3, "left": True}},
    ),
    "p45": pair("moe", "A mixture of experts in BF16.", base={"form": "plain"}),
    "p46": pair(
        "qwen3",
        "BF16, the engine sums over four ranks; an earlier checkpoint is named but the engine has the new one.",
        base={"form": "verl", "before": [drift(0.1)], **engine(ranks=4)},
    ),
    "p47": pair("qwen2", "BF16, with noise of 0.01 on the engine's list.", base={"form": "trl", "lists": noisy(0.01)}),
    "p48": pair(
        "llama",
        "BF16, a tied head; top-p 0.9 is sampled and the full softmax reported.",
        base={"form": "verl", "config": {"tie_word_embeddings": True}, "sampling": {"top_p": 0.9, "report": "full"}},
    ),
    "p49": pair("two", "FP8 in blocks on both sides.", base=fp8(form="nemo-rl")),
    "p50": pair(
        "two",
        "FP8 in blocks on both sides, the file given; temperature 0.9 on both sides.",
        base=fp8(form="verl", served={}, engine="transformers", t=0.9),
    ),
    "p51": pair(
        "one",
        "FP8 in blocks on both sides, the engine sums over two ranks.",
        base={**fp8(form="plain"), "engines": ({"rule": projections(), "ranks": 2},)},
    ),
    "p52": pair(
        "two",
        "FP8 in blocks with powers of two on both sides.",
        base={**fp8(recipe="blockwise", form="trl"), **casts(rule(pow2=torch.ceil, x_pow2=torch.ceil))},
    ),
    "p53": pair(
        "qwen3",
        "FP8 by rows and tokens with powers of two on both sides.",
        base={**fp8(recipe="rowwise", form="verl"), **casts(rule(TOKEN, TOKEN, pow2=torch.ceil, x_pow2=torch.ceil))},
    ),
    "p54": pair(
        "qwen2",
        "FP8 with one scale for a tensor on both sides (inputs: of what runs together).",
        base=fp8(TENSOR, TENSOR, "tensorwise", form="plain"),
    ),
    "p55": pair(
        "two",
        "FP8 in blocks, both sides leave layer 0 in BF16; the file given.",
        base=fp8(but=("layers.0.",), form="trl", served={"keep": ("layers.0.",)}, engine="transformers"),
    ),
    "p56": pair(
        "llama",
        "FP8 in blocks on both sides, training in batches of five; an earlier checkpoint is named, not served.",
        base=fp8(form="nemo-rl", before=[drift(0.1)], train={"batch": 5}),
    ),
}


# One pair


def rollout(p, config, states, prompts, ends, draw, t):
    """Tokens and the engine's list of each sequence; engines of a pair share them out."""
    out, front = [None] * len(prompts), [p["bos"]] if "bos" in p else []
    for part in p.get("engines", ({},)):
        part = dict(part)
        mine = part.pop("rows", lambda i, n: True)
        rows = [i for i in range(len(prompts)) if mine(i, len(prompts))]
        sampling = {"t": t, **p.get("sampling", {}), **part.pop("sampling", {})}
        reads = type(config).from_dict({**config.to_dict(), **p.get("reads", {})})
        weights, each = states[part.pop("step", 0)], part.pop("each", len(rows))
        one = Engine(reads, p["edit"](weights) if "edit" in p else weights, **part)
        for start in range(0, len(rows), each):
            some = rows[start : start + each]
            given = one.generate([front + prompts[i] for i in some], [ends[i] for i in some], draw, sampling)
            for i, (tokens, logp) in zip(some, given, strict=True):
                out[i] = (tokens[len(front) :], logp)
    return out


def trained(p, model, rollouts, ends, t, seed):
    """Training's list; the model is converted here, after its checkpoint is written."""
    if "forward" in p:
        model.load_state_dict(p["forward"](model.state_dict()))
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


def make(folder, name, twin=False):
    """Writes one pair; returns its command and the KL in it."""
    one, number, path = PAIRS[name], list(PAIRS).index(name), folder / name
    p = {**one["base"], **({} if twin else one["fault"])}
    path.mkdir(parents=True)
    model, t = build(one["model"], number, **p.get("config", {})), p.get("t", 1.0)
    model.save_pretrained(path / "train")
    states = {0: {k: v.clone() for k, v in model.state_dict().items()}}
    call = ["ottava parity", f"{path}/train"]
    if "served" in p:
        source = path / "train"
        if "edit" in p:
            other = type(model)(model.config).bfloat16()
            other.load_state_dict(p["edit"](states[0]))
            source = path / "edited"
            other.save_pretrained(source)
        served(source, path / "served", **p["served"], config=p.get("reads"))
        if "edit" in p:
            shutil.rmtree(source)
        call.append(f"{path}/served -e {p.get('engine', 'vllm')}")
    for step, past in enumerate(p.get("before", ()), 1):
        states[step] = past(states[0])
        older = type(model)(model.config).bfloat16()
        older.load_state_dict(past(states[0], everything=True))
        older.save_pretrained(path / f"before-{step}")
    draw, (low, high), count = (
        torch.Generator().manual_seed(2600 + number),
        p.get("length", (30, 52)),
        p.get("count", 16),
    )
    ends = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    heads = torch.randint(4, 14, (count,), generator=draw).tolist()
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=draw).tolist() for n in heads]
    rollouts = rollout(p, model.config, states, prompts, ends, draw, t)
    if "retoken" in p:
        for (tokens, _), prompt in zip(rollouts, prompts, strict=True):
            for place in range(len(prompt) + 4, len(tokens), p["retoken"]):
                tokens[place] = (tokens[place] + 1) % model.config.vocab_size
    before, after = trained(p, model, rollouts, ends, t, number), [list(r[1]) for r in rollouts]
    if "lists" in p:
        both = [p["lists"](i, e, o) for i, (e, o) in enumerate(zip(after, before, strict=True))]
        after, before = [b[0] for b in both], [b[1] for b in both]
    answers = [r[0][len(prompt) :] for r, prompt in zip(rollouts, prompts, strict=True)]
    file = dump(path, p.get("form", "plain"), prompts, answers, after, before)
    call += [f"--recipe {p['recipe']}"] if "recipe" in p else []
    call += [f"--logprobs {file}", *(f"--before {path}/before-{s}" for s in states if s)]
    said = p.get("train", {}).get("t", t)
    call += [f"--temperature {said}"] if said != 1.0 else []
    gap = torch.cat([torch.tensor(o) - torch.tensor(e) for o, e in zip(before, after, strict=True)]).clamp(-5, 5)
    return " ".join(call), (gap.exp() - 1 - gap).mean().item()


def truth(folder, names):
    """truth.yaml: what is wrong in each pair, its causes, and the KL of the pair and of the pair without its fault."""
    for name in names:
        one = PAIRS[name]
        bad = bool(one["causes"])
        _, kl = make(folder, name)
        print(f"- name: {name}\n  kind: {'fault' if bad else 'healthy'}")
        print(f"  truth: {json.dumps(one['truth'])}\n  causes: [{', '.join(one['causes'])}]\n  kl: {kl:.2e}")
        if bad:
            print(f"  twin: {make(folder / 'twin', name, twin=True)[1]:.2e}")
        if one["source"]:
            print(f'  source: "{one["source"]}"')
        sys.stdout.flush()


def main():
    logging.disable_progress_bar()
    words = [w for w in sys.argv[1:] if not w.startswith("--")]
    if "--truth" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            return truth(Path(folder), words or PAIRS)
    for name in words[1:] or PAIRS:
        call, kl = make(Path(words[0]), name, "--twin" in sys.argv)
        print(call + (f"  # KL {kl:.2e}" if "--kl" in sys.argv else ""), flush=True)
    return None


if __name__ == "__main__":
    main()
