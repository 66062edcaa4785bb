"""Makes pairs of log-probabilities, of a rollout and of training, some with a hidden fault: make.py FOLDER [NAME ...].

Each pair is a folder with `train` (a checkpoint in BF16), a dump, and where its call names them `served` and
`before-N`. The engine is a decoder, one token at a time with a KV cache; the trainer is transformers, converted by
ottava where it trains in FP8. Prints the command of each pair. --kl adds KL(rollout || training), --twin makes the
pairs without their faults, --truth prints truth.yaml with the KL of both.

The decoder, the casts and the files are written anew for this set; the spread of random weights and the order of
`make` follow ../rollouts7/make.py.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

import ottava

PAIRS = {}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# Models


def sizes(hidden, layers, middle, vocab, heads=4, **more):
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    return {**dict(zip(names, (hidden, layers, middle, vocab, heads), strict=True)), **more}


MOE = {"moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
MULTIPLIERS = {
    "embedding_multiplier": 4.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
SOFT = {
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
    "sliding_window": 4096,
}
MODELS = {
    "llama": (LlamaConfig, sizes(128, 3, 384, 280)),
    "deep": (LlamaConfig, sizes(128, 4, 256, 264)),
    "flat": (LlamaConfig, sizes(256, 2, 384, 296)),
    "one": (LlamaConfig, sizes(256, 1, 512, 288)),
    "tied": (LlamaConfig, sizes(128, 3, 256, 256, tie_word_embeddings=True)),
    "qwen2": (Qwen2Config, sizes(128, 3, 256, 304)),
    "qwen3": (Qwen3Config, sizes(128, 3, 256, 272)),
    "qwen3w": (Qwen3Config, sizes(256, 2, 512, 320)),
    "moe": (Qwen3MoeConfig, sizes(128, 3, 256, 248, **MOE)),
    "mistral": (MistralConfig, sizes(128, 3, 384, 264, sliding_window=None)),
    "granite": (GraniteConfig, sizes(128, 3, 256, 272, **MULTIPLIERS)),
    "gemma": (Gemma2Config, sizes(128, 2, 384, 288, **SOFT)),
    "olmo": (Olmo2Config, sizes(128, 3, 256, 264)),
}


def build(
    shape,
    seed,
    look=0.8,
    embed=0.6,
    column=1.0,
    loud=1.0,
    bias=0.4,
    sharp=1.7,
    quiet=1.0,
    favour=0.0,
    spike=1.0,
    value_size=1.0,
    **changes,
):
    """Random weights with peaked answers and a few large rows. `look`: how sharp attention is; `column`: how large one
    column of weights is behind a norm that is as small; `loud`: how large a channel is that norms pass on, with weights
    that are as small; `quiet`: the size of all that writes into the residual stream, embedding included; `favour`: how
    much larger the row of token 2 in the head is; `spike`: how large one channel between up and down is, with weights
    of down that are as small; `value_size`: how large v_proj is."""
    kind, size = MODELS[shape]
    size = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, **size, **changes}
    size |= {"num_key_value_heads": size["num_attention_heads"] // 2, "bos_token_id": 1, "eos_token_id": 2}
    size |= {"head_dim": size["hidden_size"] // size["num_attention_heads"], "pad_token_id": 0}
    config = kind(**{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **size})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").bfloat16().eval()
    fill = torch.Generator().manual_seed(8800 + seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=fill)
            order = torch.randperm(len(value), generator=fill)
            into = name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))
            reads = any(p in name for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate.weight"))
            if "norm" in name:
                value = 1 + 0.2 * value
                if "layernorm" in name and shape != "olmo":
                    value[order[:2]] *= 3
                if into:
                    value[11] = 1 / column if column > 1 else value[11]
                    value[13] = loud if loud > 1 else value[13]
                value = value - 1 if shape == "gemma" else value
            elif name.endswith("bias"):
                value = bias * value
            elif "embed" in name:
                value = value * quiet * (0.15 if config.tie_word_embeddings else embed)
            else:
                spread = sharp if "lm_head" in name else 1.5 if name.endswith("gate.weight") else 0.7
                spread = look if "q_proj" in name or "k_proj" in name else spread
                value = value * spread / weight.shape[-1] ** 0.5
                if any(part in name for part in ("o_proj", "down_proj")):
                    value = value * quiet
                    if value.dim() == 2:
                        value[order[: max(1, len(value) // 32)]] *= 3
                if reads:
                    value[..., 11] *= column
                    value[..., 13] /= loud
                value = value * value_size if "v_proj" in name else value
                if "up_proj" in name and value.dim() == 2:
                    value[17] *= spike
                if "down_proj" in name and value.dim() == 2:
                    value[:, 17] /= spike
                if "lm_head" in name:
                    value[2] *= 1 + favour
            weight.copy_(value)
    return model


# Casts


def spec(cut, kind=E4M3, pow2=False, to="near", scale=None):
    """A cast. `cut`: which numbers share a scale: tensor, row, or (rows, columns). `pow2`: scales are rounded up to
    powers of two. `to`: near, or zero (codes are cut off). `scale`: a number that replaces that of the data."""
    return {"cut": cut, "kind": kind, "pow2": pow2, "to": to, "scale": scale}


def spread_out(scale, cut, shape):
    if cut in ("tensor", "row"):
        return scale.expand(shape)
    return scale.repeat_interleave(cut[0], 0)[: shape[0]].repeat_interleave(cut[1], 1)[:, : shape[1]]


def scales(x, s):
    top = torch.finfo(s["kind"]).max
    x, cut = x.float().abs(), s["cut"]
    if cut == "tensor":
        peak = x.amax().reshape(1, 1)
    elif cut == "row":
        peak = x.amax(1, keepdim=True)
    else:
        a, b = min(cut[0], x.shape[0]), min(cut[1], x.shape[1])
        x = F.pad(x, (0, -x.shape[1] % b, 0, -x.shape[0] % a))
        peak = x.reshape(x.shape[0] // a, a, x.shape[1] // b, b).amax((1, 3))
    scale = peak.clamp_min(1e-12) / top
    if s["scale"] is not None:
        scale = torch.full_like(scale, s["scale"])
    if s["pow2"]:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale


def coded(x, s, scale):
    """Codes, as numbers in fp32, and each number's scale."""
    wide = spread_out(scale, s["cut"], x.shape)
    y = x.float() / wide
    top = torch.finfo(s["kind"]).max
    y = y.clamp(-top, top)
    codes = y.to(s["kind"])
    if s["to"] == "zero":
        over = (codes.float().abs() > y.abs()).to(torch.uint8)
        codes = (codes.view(torch.uint8) - over).view(s["kind"])
    return codes.float(), wide


def cast(x, s):
    codes, wide = coded(x, s, scales(x, s))
    return codes * wide


BLOCK, GROUP = spec((128, 128)), spec((1, 128))
ROW, TENSOR, STATIC = spec("row"), spec("tensor"), spec("tensor", scale=1.0)
ROW_POW2, BLOCK_POW2, GROUP_POW2 = spec("row", pow2=True), spec((128, 128), pow2=True), spec((1, 128), pow2=True)


def rule(weights=BLOCK, inputs=GROUP):
    return {"w": weights, "x": inputs}


def projections(one=None, only=("",), but=(), other=None):
    """`one` rule for projections whose name has a part of `only` and none of `but`; `other` for the other ones."""
    one = one or rule()

    def found(name, states):
        if "_proj" not in name or ".experts." in name:
            return None
        return one if any(o in name for o in only) and not any(b in name for b in but) else other

    return found


def named(ends, one):
    return lambda name, states: one if name.endswith(ends) else None


# The engine


class Engine:
    """A decoder with a cache, for eight families.

    Linears: `rules` says which cast. `kv`: {layer, or None for all: a spec for keys and values}; `ranks`: row-parallel
    sums over that many parts. The rest is what this set breaks: `unnormed` (no norm of q and k), `gap` (positions jump
    where answers begin), `theft` (rows read the first tokens of another row's cache) and `noise`."""

    def __init__(self, c, states, state, rules=None, kv=None, ranks=1, **more):
        self.c, self.kv, self.ranks, self.states = c, kv or {}, ranks, states
        self.unnormed, self.gap, self.theft, self.noise, self.seed = (
            more.pop(key, None) for key in ("unnormed", "gap", "theft", "noise", "seed")
        )
        assert not more, more
        self.w = {n.removeprefix("model.").removesuffix(".weight"): t for n, t in state.items()}
        if c.tie_word_embeddings:
            self.w["lm_head"] = self.w["embed_tokens"]
        for name in [n for n in self.w if ".experts." in n]:
            for number, part in enumerate(self.w.pop(name)):
                self.w[name.replace("experts.", f"experts.{number}.")] = part
        self.rules = {n: rules(n, states) for n, t in self.w.items() if t.dim() == 2} if rules else {}
        self.cast = {}
        for name, one in self.rules.items():
            if one:
                how, w = one["w"], self.w[name]
                self.cast[name] = how(name, w, states) if callable(how) else cast(w, how) if how else w.float()
        self.heads, self.groups = c.num_attention_heads, c.num_key_value_heads
        self.size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        kind = c.model_type
        self.gemma, self.olmo = kind == "gemma2", kind == "olmo2"
        self.scaling = {"gemma2": lambda: c.query_pre_attn_scalar**-0.5, "granite": lambda: c.attention_multiplier}.get(
            kind, lambda: self.size**-0.5
        )()
        self.dice = torch.Generator().manual_seed(self.seed or 0)
        theta = c.rope_parameters["rope_theta"]
        turns = theta ** (-torch.arange(0, self.size, 2).float() / self.size)
        if c.rope_parameters.get("rope_type") == "linear":
            turns = turns / c.rope_parameters["factor"]
        angles = torch.arange(700).float()[:, None] * turns
        self.cos, self.sin = angles.cos(), angles.sin()

    def linear(self, name, x):
        one = self.rules.get(name)
        parts = self.ranks if name.endswith(("o_proj", "down_proj")) else 1
        if one:
            w, x = self.cast[name], cast(x, one["x"]) if one["x"] else x.float()
            y = sum(
                (a @ b.T).bfloat16() for a, b in zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True)
            )  # casts come before the split: groups of 128 do not cross it
        else:
            w = self.w[name]
            y = sum(F.linear(a, b) for a, b in zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True))
        bias = self.w.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, name, x):
        value = x.float()
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        if self.gemma:
            return (value * (1 + self.w[name].float())).bfloat16()
        if self.olmo:
            return (self.w[name].float() * value).bfloat16()
        return self.w[name] * value.bfloat16()

    def rotated(self, x, places):
        cos, sin = self.cos[places][:, None], self.sin[places][:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()

    def attention(self, base, layer, x, position, places):
        rows = len(x)
        q, k, v = (self.linear(base + n, x) for n in ("q_proj", "k_proj", "v_proj"))
        if self.olmo and not self.unnormed:
            q, k = self.norm(base + "q_norm", q), self.norm(base + "k_norm", k)
        q = q.view(rows, self.heads, self.size)
        k, v = (y.view(rows, self.groups, self.size) for y in (k, v))
        if base + "q_norm" in self.w and not self.olmo and not self.unnormed:
            q, k = self.norm(base + "q_norm", q), self.norm(base + "k_norm", k)
        q, k = self.rotated(q, places), self.rotated(k, places)
        for kind, y in (("k", k), ("v", v)):
            s = self.kv.get((layer, kind), self.kv.get(layer, self.kv.get(kind, self.kv.get(None))))
            if s:
                y = cast(y.reshape(rows, -1), s).view_as(y).bfloat16()
            (self.k if kind == "k" else self.v)[layer][:, :, position] = y
        keys = self.k[layer][:, :, : position + 1].repeat_interleave(self.heads // self.groups, 1).float()
        values = self.v[layer][:, :, : position + 1].repeat_interleave(self.heads // self.groups, 1)
        score = torch.einsum("rhd,rhtd->rht", q.float(), keys).bfloat16() * self.scaling
        cap, window = getattr(self.c, "attn_logit_softcapping", None), getattr(self.c, "sliding_window", None)
        score = torch.tanh(score / cap) * cap if cap else score
        kinds = getattr(self.c, "layer_types", None)
        if window and (not kinds or kinds[layer] == "sliding_attention"):
            score[:, :, : max(0, position + 1 - window)] = -torch.inf
        chance = score.float().softmax(-1).bfloat16()
        y = torch.einsum("rht,rhtd->rhd", chance.float(), values.float()).bfloat16()
        return self.linear(base + "o_proj", y.reshape(rows, -1))

    def act(self, x):
        name = getattr(self.c, "hidden_activation", None) or self.c.hidden_act
        return F.gelu(x, approximate="tanh") if "tanh" in name else F.gelu(x) if "gelu" in name else F.silu(x)

    def mlp(self, base, x):
        if base + "gate" not in self.w:
            return self.linear(
                base + "down_proj", self.act(self.linear(base + "gate_proj", x)) * self.linear(base + "up_proj", x)
            )
        chance, top = self.linear(base + "gate", x).float().softmax(-1), self.c.num_experts_per_tok
        share, chosen = chance.topk(top, -1)
        share = share / share.sum(-1, keepdim=True) if self.c.norm_topk_prob else share
        out = torch.zeros_like(x)
        for expert in range(self.c.num_experts):
            row, slot = torch.where(chosen == expert)
            if len(row):
                mine = f"{base}experts.{expert}."
                gate, up = self.linear(mine + "gate_up_proj", x[row]).chunk(2, -1)
                y = self.linear(mine + "down_proj", self.act(gate) * up)
                out.index_add_(0, row, y * share[row, slot, None].bfloat16())
        return out

    def step(self, tokens, position, places):
        c, norm = self.c, self.norm
        x = self.w["embed_tokens"][tokens]
        x = x * torch.tensor(c.hidden_size**0.5).bfloat16() if self.gemma else x
        x = x * c.embedding_multiplier if c.model_type == "granite" else x
        more = c.residual_multiplier if c.model_type == "granite" else 1.0
        for layer in range(c.num_hidden_layers):
            base = f"layers.{layer}."
            a, m, after = base + "self_attn.", base + "mlp.", base + "post_attention_layernorm"
            if self.olmo:
                x = x + norm(after, self.attention(a, layer, x, position, places))
                x = x + norm(base + "post_feedforward_layernorm", self.mlp(m, x))
            elif self.gemma:
                y = self.attention(a, layer, norm(base + "input_layernorm", x), position, places)
                x = x + norm(after, y)
                y = self.mlp(m, norm(base + "pre_feedforward_layernorm", x))
                x = x + norm(base + "post_feedforward_layernorm", y)
            else:
                x = x + self.attention(a, layer, norm(base + "input_layernorm", x), position, places) * more
                x = x + self.mlp(m, norm(after, x)) * more
        logits = self.linear("lm_head", norm("norm", x))
        logits = logits / c.logits_scaling if c.model_type == "granite" else logits
        top = getattr(c, "final_logit_softcapping", None)
        logits = (torch.tanh(logits / top) * top if top else logits).float()
        return logits + self.noise * torch.randn(logits.shape, generator=self.dice) if self.noise else logits

    def fresh(self, rows, total):
        room = (rows, self.groups, total, self.size)
        self.k, self.v = ([torch.zeros(room).bfloat16() for _ in range(self.c.num_hidden_layers)] for _ in range(2))

    @torch.no_grad()
    def run(self, prompts, lengths, draw, sampling, draft=None):
        """Tokens and log-probabilities. A `draft` reads along; two of three log-probabilities are its own."""
        rows, ends = len(prompts), [len(p) + n for p, n in zip(prompts, lengths, strict=True)]
        total, starts = max(ends), torch.tensor([len(p) for p in prompts])
        for one in (self, draft) if draft else (self,):
            one.fresh(rows, total)
        tokens, logp = torch.zeros(rows, total, dtype=torch.long), torch.zeros(rows, total)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        for position in range(total - 1):
            places = position + (self.gap or 0) * (starts <= position)
            logits = self.step(tokens[:, position], position, places)
            if self.theft and position == self.theft - 1:
                for store in (*self.k, *self.v):
                    store[1::2, :, : position + 1] = store[0::2, :, : position + 1][: len(store[1::2])]
            chosen, value = sample(logits, tokens[:, : position + 1], starts, draw, **sampling)
            if draft:
                other = draft.step(tokens[:, position], position, places) / sampling["t"]
                other = other.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
                value = other if position % 3 else value
            tokens[:, position + 1] = torch.where(position + 1 >= starts, chosen, tokens[:, position + 1])
            logp[:, position + 1] = value
        return [(tokens[r, :end].tolist(), logp[r, len(prompts[r]) : end].tolist()) for r, end in enumerate(ends)]


def sample(logits, before, starts, draw, t=1.0, says="t", top_k=0, top_p=1.0, min_p=0.0, least=0):
    """A token of each row, and its log-probability. `says`: t (logits / t), raw, ten (of base ten), or shaped (what was
    sampled from): top-k, top-p, min-p, `least` (no token 2 before so many tokens)."""
    shaped = logits / t
    if least:
        shaped[before.shape[1] - starts < least, 2] = -torch.inf
    chance = shaped.softmax(-1)
    if top_k:
        shaped = shaped.masked_fill(chance < chance.topk(top_k, -1).values[:, -1:], -torch.inf)
    if min_p:
        shaped = shaped.masked_fill(chance < min_p * chance.amax(-1, keepdim=True), -torch.inf)
    if top_p < 1:
        value, order = chance.sort(-1, descending=True)
        drop = value.cumsum(-1) - value > top_p
        shaped = shaped.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -torch.inf)
    chosen = torch.multinomial(shaped.softmax(-1), 1, generator=draw)
    told = {"t": logits / t, "shaped": shaped}.get(says, logits).log_softmax(-1).gather(1, chosen)[:, 0]
    return chosen[:, 0], told / 2.302585 if says == "ten" else told


# Training


@torch.no_grad()
def recompute(model, sequences, ends, t=1.0, padded=False):
    """Training's log-probabilities of the answers. `padded`: in front with zeros, without a mask."""
    out, longest = [], max(map(len, sequences))
    for tokens, n in zip(sequences, ends, strict=True):
        front = [0] * (longest - len(tokens)) if padded else []
        logits = model(torch.tensor([front + tokens])).logits[0].float() / t
        logp = logits[:-1].log_softmax(-1).gather(1, torch.tensor(front + tokens)[1:, None])[:, 0]
        out.append(logp[-n:].tolist())
    return out


# Files


def dump(path, form, prompts, answers, rollout, training):
    """The dump of one pair, in the words of `form`."""
    if form == "nemo-rl":
        rows = []
        for p, a, r, t in zip(prompts, answers, rollout, training, strict=True):
            none = [0.0] * len(p)
            row = {"token_ids": p + a, "token_loss_mask": [0] * len(p) + [1] * len(a), "input_lengths": len(p) + len(a)}
            rows.append({**row, "generation_logprobs": none + r, "prev_logprobs": none + t})
        file = path / "train_data_step8.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def wide(lists, left=False, kind=torch.float32):
        size = max(map(len, lists))
        return torch.tensor(
            [[0] * (size - len(x)) + x if left else x + [0] * (size - len(x)) for x in lists], dtype=kind
        )

    long = torch.long
    if form == "plain":
        whole = {
            "token_ids": wide([p + a for p, a in zip(prompts, answers, strict=True)], kind=long),
            "mask": wide([[0] * len(p) + [1] * len(a) for p, a in zip(prompts, answers, strict=True)], kind=long),
            "lengths": torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]),
        }
        for key, lists in (("rollout_raw_logprob", rollout), ("prev_recompute_raw_logprob", training)):
            whole[key] = wide([[0.0] * len(p) + x for p, x in zip(prompts, lists, strict=True)])
        save_file(whole, path / "dump.safetensors")
        return path / "dump.safetensors"
    left, right = wide(prompts, True, long), wide(answers, kind=long)
    shown, said = wide([[1] * len(p) for p in prompts], True, long), wide([[1] * len(a) for a in answers], kind=long)
    if form == "verl":
        whole = {
            "prompts": left,
            "responses": right,
            "attention_mask": torch.cat([shown, said], 1),
            "response_mask": said,
        }
        whole |= {"rollout_log_probs": wide(rollout), "old_log_probs": wide(training)}
    else:
        whole = {"prompt_ids": left, "prompt_mask": shown, "completion_ids": right, "completion_mask": said}
        whole |= {"sampling_per_token_logps": wide(rollout), "old_per_token_logps": wide(training)}
    torch.save(whole, path / "dump.pt")
    return path / "dump.pt"


def serve(source, path, how, changes):
    """A copy for the engine: `how` is bf16, or a spec of blocks or one scale a tensor; `changes` are of config.json."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    if how != "bf16":
        file = path / "model.safetensors"
        one, out = how, {}
        for name, w in load_file(file).items():
            if "_proj.weight" not in name:
                out[name] = w
                continue
            scale = scales(w, one)
            codes, _ = coded(w, one, scale)
            out[name] = codes.to(one["kind"])
            if one["cut"] == "tensor":
                out[name + "_scale"] = scale.reshape(())
            else:
                out[name + "_scale_inv"] = scale.contiguous()
        save_file(out, file, metadata={"format": "pt"})
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        if one["cut"] != "tensor":
            config["quantization_config"] |= {"fmt": "e4m3", "weight_block_size": list(one["cut"])}
    (path / "config.json").write_text(json.dumps(config, indent=2))


# Other weights


def drift(size, seed=1):
    """An earlier step: each tensor as it was before changes of `size` of its own spread."""

    def past(state):
        dice, out = torch.Generator().manual_seed(90 + seed), {}
        for name, w in state.items():
            out[name] = (w.float() + size * w.float().std() * torch.randn(w.shape, generator=dice)).to(w.dtype)
        if "lm_head.weight" in state and torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
            out["lm_head.weight"] = out["model.embed_tokens.weight"]
        return out

    return past


def smaller(factor):
    """An earlier step with projections that were smaller by `factor`, and otherwise a little different."""
    return lambda state: {
        n: (w.float() * factor).to(w.dtype) if "_proj" in n else w for n, w in drift(0.01)(state).items()
    }


def adapted(share, parts=("q_proj", "v_proj"), size=0.6, rank=4):
    """The weights hold share 1 of low-rank updates of `parts`; here it is another one."""

    def edit(state):
        dice, out = torch.Generator().manual_seed(31), dict(state)
        for name, w in state.items():
            if any(p in name for p in parts) and w.dim() == 2:
                b, a = torch.randn(len(w), rank, generator=dice), torch.randn(rank, w.shape[1], generator=dice)
                out[name] = (w.float() + (share - 1) * size * w.float().std() / rank**0.5 * (b @ a)).to(w.dtype)
        return out

    return edit


def changed(find, how):
    return lambda state: {n: how(w) if find(n) else w for n, w in state.items()}


# A pair


def rollout(p, config, states, prompts, ends, draw, t, number):
    out = [None] * len(prompts)
    for part in p.get("engines", ({},)):
        part = dict(part)
        mine = part.pop("mine", lambda i, n: True)
        rows = [i for i in range(len(prompts)) if mine(i, len(prompts))]
        sampling = {"t": t, **p.get("sampling", {}), **part.pop("sampling", {})}
        reads = type(config).from_dict({**config.to_dict(), **p.get("reads", {}), **part.pop("reads", {})})
        weights = part.pop("edit", p.get("edit", lambda s: s))(states[0])
        step, old, each = part.pop("step", 0), part.pop("old", lambda n: True), part.pop("each", len(rows))
        weights = {n: states[step][n] if step and old(n) else w for n, w in weights.items()}
        front, draft = part.pop("front", []), part.pop("draft", None)
        one = Engine(reads, states, weights, seed=number, **part)
        draft = Engine(reads, states, draft(states[0])) if draft else None
        for start in range(0, len(rows), each):
            some = rows[start : start + each]
            said = one.run([front + prompts[i] for i in some], [ends[i] for i in some], draw, sampling, draft)
            for i, (tokens, logp) in zip(some, said, strict=True):
                out[i] = (tokens[len(front) :], logp)
    return out


def saved(model, state, path):
    other = type(model)(model.config).bfloat16()
    other.load_state_dict(state)
    other.save_pretrained(path)


def make(folder, name, twin=False):
    """Writes one pair; returns its command and the KL in it."""
    one, number, path = PAIRS[name], list(PAIRS).index(name), folder / name
    number = one["seed"] or number
    p = {**one["base"], **({} if twin else one["fault"])}
    path.mkdir(parents=True)
    model, t = build(one["model"], number, **p.get("config", {})), p.get("t", 1.0)
    model.save_pretrained(path / "train")
    states = {0: {k: v.clone() for k, v in model.state_dict().items()}}
    call = ["ottava parity", f"{path}/train"]
    if "served" in p:
        source = path / "train"
        if "edit" in p:
            source = path / "edited"
            saved(model, p["edit"](states[0]), source)
        serve(source, path / "served", p["served"], p.get("reads", {}))
        if "edit" in p:
            shutil.rmtree(source)
        call.append(f"{path}/served -e {p.get('engine', 'vllm')}")
    for step, past in enumerate(p.get("before", ()), 1):
        states[step] = past(states[0])
        saved(model, states[step], path / f"before-{step}")
    draw = torch.Generator().manual_seed(3100 + number)
    (low, high), count = p.get("length", (30, 50)), p.get("count", 16)
    ends = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    low, high = p.get("prompt", (5, 14))
    heads = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=draw).tolist() for n in heads]
    said = rollout(p, model.config, states, prompts, ends, draw, t, number)
    sequences, after = [s for s, _ in said], [list(v) for _, v in said]
    if "forward" in p:
        model.load_state_dict(p["forward"](model.state_dict()))
    for key, value in p.get("forgets", {}).items():
        for holder in (model.config, *model.modules()):
            if hasattr(holder, key):
                setattr(holder, key, value)
    if "recipe" in p:
        ottava.convert(model, p["recipe"], filter=lambda n, _: "_proj" in n)
    torch.manual_seed(number)
    before = recompute(model, sequences, ends, **{"t": t, **p.get("train", {})})
    if "lists" in p:
        after, before = p["lists"](after, before)
    answers = [s[len(q) :] for s, q in zip(sequences, prompts, strict=True)]
    file = dump(path, p.get("form", "plain"), prompts, answers, after, before)
    call += [f"--recipe {p['recipe']}"] if "recipe" in p else []
    call += [f"--logprobs {file}", *(f"--before {path}/before-{s}" for s in states if s)]
    told = p.get("train", {}).get("t", t)
    call += [f"--temperature {told}"] if told != 1.0 else []
    gap = torch.cat([torch.tensor(o) - torch.tensor(e) for o, e in zip(before, after, strict=True)]).clamp(-5, 5)
    return " ".join(call), (gap.exp() - 1 - gap).mean().item()


def pair(model, truth, causes=(), base=None, fault=None, source="", seed=0):
    PAIRS[f"p{len(PAIRS) + 1:02d}"] = {
        "model": model,
        "truth": truth,
        "causes": list(causes),
        "base": base or {},
        "fault": fault or {},
        "source": source,
        "seed": seed,
    }


def engine(**more):
    return {"engines": ({**more},)}


def fp8(weights=BLOCK, inputs=GROUP, recipe="blockwise_fp32", **more):
    """Training and engine in the same FP8."""
    return {"recipe": recipe, **engine(rules=projections(rule(weights, inputs))), **more}


# What goes wrong


def lists_engine(change):
    return lambda after, before: ([change(a) for a in after], before)


def one_late_from_the_middle(a):
    """A number is missing where the second turn begins."""
    place = len(a) // 2
    return a[:place] + a[place + 1 :] + a[-1:]


def tools(a):
    """Seven tokens in the middle came from a tool; nobody has a number for them."""
    place = len(a) // 3
    return a[:place] + [0.0] * 7 + a[place + 7 :]


def old_scales(name, w, states):
    """Codes are cast with the scales of now, and read with those of before."""
    now = scales(w, BLOCK)
    before = scales(states[1]["model." + name + ".weight"], BLOCK)
    return coded(w, BLOCK, now)[0] * spread_out(before, BLOCK["cut"], w.shape)


FP8 = projections()

# Temperature, processors, lists

pair(
    "mistral",
    "The engine reports log p of the raw logits; it samples at 0.6, and training divides its logits by that.",
    ["temperature"],
    {"t": 0.6, "form": "verl"},
    {"sampling": {"says": "raw"}},
    "vime #64",
)
pair(
    "gemma",
    "Every third request brings its own temperature of 0.7, at which the engine samples and reports; training has 1.0.",
    ["temperature"],
    {},
    {"engines": ({"mine": lambda i, n: i % 3}, {"mine": lambda i, n: i % 3 == 0, "sampling": {"t": 0.7}})},
)
pair(
    "granite",
    "The engine reports logarithms to the base of ten.",
    ["scaled"],
    {"form": "nemo-rl"},
    {"sampling": {"says": "ten"}},
)
pair(
    "tied",
    "The engine reports log p after min-p 0.15.",
    ["processed"],
    {"form": "trl", "sampling": {"min_p": 0.15}},
    {"sampling": {"min_p": 0.15, "says": "shaped"}},
)
pair(
    "llama",
    "min_tokens: the engine forbids the end of the answer in its first 20 tokens, and reports log p without it.",
    ["processed"],
    {"config": {"favour": 1.4}, "form": "nemo-rl", "sampling": {"least": 20}},
    {"sampling": {"least": 20, "says": "shaped"}},
)
pair(
    "one",
    "Both in FP8. The engine reports log p after temperature 0.8 and top-p 0.85; training divides by 0.8 alone.",
    ["processed"],
    fp8(ROW_POW2, ROW_POW2, "rowwise", t=0.8, sampling={"top_p": 0.85}),
    {"sampling": {"top_p": 0.85, "says": "shaped"}},
)
pair(
    "deep",
    "Where the second turn begins the engine's list lacks a number, so the second half of each is one early.",
    ["shift"],
    {"form": "trl"},
    {"lists": lists_engine(one_late_from_the_middle)},
)
pair(
    "olmo",
    "Seven tokens of a tool's answer are not masked, and the engine has zeros for them.",
    ["padded"],
    {"form": "verl"},
    {"lists": lists_engine(tools)},
    "vime #70",
)
pair(
    "mistral",
    "The engine's list is padded in front: two zeros, and its last two numbers are cut off.",
    ["padded", "shift"],
    {"form": "nemo-rl"},
    {"lists": lists_engine(lambda a: [0.0, 0.0] + a[:-2])},
)

# Weights of another step

pair(
    "qwen3w",
    "The engine has all weights of two steps ago.",
    ["stale"],
    {"form": "verl", "before": [drift(0.05, 1), drift(0.09, 2)]},
    engine(step=2),
    "slime #1618",
)
pair(
    "one",
    "Both in FP8. The refit left out v_proj.",
    ["stale"],
    fp8(before=[drift(0.25, 3)], form="trl"),
    engine(rules=FP8, step=1, old=lambda n: "v_proj" in n),
)
pair(
    "mistral",
    "One layer of three, the second, did not get its new weights.",
    ["stale"],
    {"form": "nemo-rl", "before": [drift(0.12, 4)]},
    engine(step=1, old=lambda n: "layers.1." in n),
    "SkyRL #1898",
)
pair(
    "olmo",
    "The norms are those of the step before, all else is new.",
    ["stale"],
    {"form": "trl", "before": [drift(0.35, 5)]},
    engine(step=1, old=lambda n: "norm" in n),
)
pair(
    "one",
    "Both in FP8. The refit brought codes but not their scales: those are of weights that were smaller by a fifth.",
    ["weights", "stale"],
    fp8(form="verl", before=[smaller(0.8)]),
    engine(rules=projections(rule(old_scales))),
)
pair(
    "qwen3",
    "The engine does not load the adapter of q and v: it serves the base model, which is before-1.",
    ["stale"],
    {"form": "trl", "before": [adapted(0.0)]},
    engine(step=1),
)

# Casts

pair(
    "qwen3",
    "The engine is in FP8 in blocks of 128 x 128, and training in BF16.",
    ["layers"],
    {"form": "nemo-rl"},
    {"served": BLOCK, **engine(rules=FP8)},
)
pair(
    "deep",
    "Training is in BF16; the engine has the first and the last layer in FP8.",
    ["layers"],
    {},
    engine(rules=projections(only=("layers.0.", "layers.3."))),
)
pair(
    "one",
    "Both in FP8, but the engine keeps down_proj in BF16.",
    ["layers"],
    fp8(ROW_POW2, ROW_POW2, "rowwise", form="verl", config={"spike": 1e6}),
    engine(rules=projections(rule(ROW_POW2, ROW_POW2), but=("down_proj",))),
    "NeMo-RL #4126",
)
pair(
    "one",
    "Both in FP8, but the engine's weights are cut off towards zero, not rounded.",
    ["weights"],
    fp8(BLOCK_POW2, GROUP_POW2, "blockwise", form="trl"),
    engine(rules=projections(rule(spec((128, 128), pow2=True, to="zero"), GROUP_POW2))),
)
pair(
    "one",
    "Both in FP8. Training has blocks of weights, the engine one scale for each tensor.",
    ["weights"],
    fp8(form="nemo-rl", config={"column": 20000.0}),
    engine(rules=projections(rule(TENSOR))),
)
pair(
    "one",
    "Both in FP8. Training's scales are fp32, the weights of the engine have powers of two.",
    ["weights"],
    fp8(form="verl", config={"column": 20000.0}),
    {"served": BLOCK_POW2, **engine(rules=projections(rule(BLOCK_POW2)))},
    "prime-rl #3112",
)
pair(
    "one",
    "Training is in FP8; the engine has the same weights and leaves inputs in BF16.",
    ["activations"],
    fp8(ROW_POW2, ROW_POW2, "rowwise", form="verl", config={"loud": 2e5}),
    engine(rules=projections(rule(ROW_POW2, None))),
)
pair(
    "one",
    "Both in FP8. Training's inputs have groups of 128, the engine's one scale a token.",
    ["activations"],
    fp8(form="nemo-rl", config={"loud": 2e5}),
    engine(rules=projections(rule(BLOCK, ROW))),
)
pair(
    "qwen2",
    "The engine's cache is in FP8 with one scale of 1 for all layers.",
    ["kv-cache"],
    {"form": "verl", "config": {"look": 1.2, "value_size": 4.0}},
    engine(kv={None: STATIC}),
    "NeMo-RL #1212",
)
pair(
    "deep",
    "The cache of one layer, the second, is in E5M2.",
    ["kv-cache"],
    {"form": "trl", "config": {"look": 1.2, "value_size": 2.0}},
    engine(kv={1: spec("tensor", E5M2, scale=1.0)}),
)
pair(
    "one",
    "Both in FP8, and the engine's cache of values has the scale of an earlier step, so that values clip at 0.9.",
    ["kv-cache"],
    fp8(form="verl"),
    engine(rules=FP8, kv={"v": spec("tensor", scale=0.9 / 448)}),
)
pair(
    "qwen2",
    "The engine casts lm_head too, by row and by token; training is in BF16.",
    ["head"],
    {"form": "nemo-rl"},
    engine(rules=named("lm_head", rule(ROW, ROW))),
    "NeMo-RL #3614",
)
pair(
    "moe",
    "The engine casts the routers too; training is in BF16.",
    ["router"],
    {"form": "trl"},
    engine(rules=named("mlp.gate", rule(spec("tensor", E5M2), spec("tensor", E5M2)))),
)

# Formula, tensors in high precision, the trainer

pair(
    "llama",
    "config.json of the engine has rope_theta 1,000,000 in place of 10,000.",
    ["formula"],
    {"served": "bf16", "form": "verl"},
    {"reads": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
)
pair(
    "qwen2",
    "config.json of the engine has rms_norm_eps 1e-5, not 1e-6; the stream is small.",
    ["formula"],
    {"served": "bf16", "form": "nemo-rl", "config": {"quiet": 0.008}},
    {"reads": {"rms_norm_eps": 1e-5}},
)
pair(
    "granite",
    "config.json of the engine lacks residual_multiplier, which is 1 then.",
    ["formula"],
    {"served": "bf16", "form": "trl"},
    {"reads": {"residual_multiplier": 1.0}},
)
pair(
    "flat",
    "The export sent norms and the embedding through E4M3 and back; both sides name BF16.",
    ["plain"],
    {"served": "bf16", "form": "verl"},
    {"edit": changed(lambda n: "norm" in n or "embed" in n, lambda w: w.to(E4M3).to(w.dtype))},
)
pair(
    "llama",
    "The adapter of q and v was merged twice into what the engine serves.",
    ["plain", "weights"],
    {"served": "bf16", "form": "trl"},
    {"edit": adapted(2.0)},
)
pair(
    "gemma",
    "Training's attention ignores the softcap of scores, as fast kernels do.",
    ["trainer"],
    {"form": "verl", "config": {"look": 1.2, "attn_logit_softcapping": 2.0}},
    {"forgets": {"attn_logit_softcapping": None}},
)
pair(
    "qwen3",
    "Training pads sequences in front and gives no mask, so that it attends to padding.",
    ["trainer"],
    {"form": "trl", "prompt": (5, 25)},
    {"train": {"padded": True}},
)
# No cast, and no name

pair(
    "qwen3",
    "The engine's code leaves out the norms of q and k.",
    ["not-fp8"],
    {"form": "nemo-rl"},
    engine(unnormed=True),
)
pair(
    "llama",
    "The hash of a prompt's first block collides: every second sequence reads the cache of another one for six tokens.",
    ["not-fp8"],
    {"form": "verl", "prompt": (8, 14)},
    engine(theft=6),
)
pair(
    "tied",
    "The engine puts a token of beginning in front of prompts, which training does not see.",
    ["not-fp8"],
    {"form": "trl"},
    engine(front=[1]),
)
pair(
    "flat",
    "Speculative decoding: of three log-probabilities two are those of the draft.",
    ["not-fp8"],
    {},
    engine(draft=drift(0.12, 9)),
)
pair(
    "one",
    "Both in FP8 alike. In the engine positions jump by 6 where the answer begins.",
    ["untold"],
    fp8(form="verl", prompt=(8, 14), config={"look": 1.2}),
    engine(rules=FP8, gap=6),
)

# Healthy

pair("deep", "BF16; the engine sums o_proj and down_proj over two ranks.", base={"form": "verl", **engine(ranks=2)})
pair(
    "moe",
    "BF16, a mixture of experts; the engine runs four sequences at a time.",
    base={"form": "nemo-rl", **engine(each=4)},
)
pair("qwen2", "BF16, with noise of 0.01 on the engine's logits.", base=engine(noise=0.01))
pair(
    "mistral",
    "BF16; both have a sliding window of 16.",
    base={"form": "trl", "config": {"sliding_window": 16}, "served": "bf16"},
)
pair("gemma", "BF16; each sequence runs alone.", base={"form": "verl", **engine(each=1)})
pair("olmo", "BF16; both at a temperature of 0.7.", base={"form": "trl", "t": 0.7})
pair(
    "granite",
    "BF16; top-k 20 chooses, and log p is that of all tokens.",
    base={"form": "nemo-rl", "sampling": {"top_k": 20}},
)
pair("tied", "BF16; an earlier step is named, and the engine has the new one.", base={"before": [drift(0.05, 11)]})
pair(
    "qwen3",
    "BF16 with linear RoPE scaling on both sides, over two ranks.",
    base={
        "form": "verl",
        "config": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        **engine(ranks=2),
    },
)
pair("flat", "FP8 in blocks on both sides; the engine's file is named.", base=fp8(served=BLOCK, form="nemo-rl"))
pair(
    "llama",
    "FP8 in blocks on both sides, four sequences at a time.",
    base=fp8(form="verl", **engine(rules=FP8, each=4)),
)
pair(
    "qwen3w",
    "FP8 in blocks with powers of two on both sides.",
    base=fp8(BLOCK_POW2, GROUP_POW2, "blockwise", form="trl"),
)
pair("one", "FP8 by row and token on both sides.", base=fp8(ROW_POW2, ROW_POW2, "rowwise"))
pair(
    "flat",
    "FP8 by row and token on both sides, over two ranks, at a temperature of 0.8.",
    base=fp8(
        ROW_POW2,
        ROW_POW2,
        "rowwise",
        t=0.8,
        form="verl",
        **engine(rules=projections(rule(ROW_POW2, ROW_POW2)), ranks=2),
    ),
)
pair("one", "FP8 with one scale a tensor on both sides.", base=fp8(TENSOR, TENSOR, "tensorwise", form="nemo-rl"))
pair(
    "one",
    "FP8 in blocks on both sides; an earlier step is named, and the engine has the new one.",
    base=fp8(before=[drift(0.1, 12)], form="trl"),
)


def truth(folder, names):
    """truth.yaml: what is wrong in each pair, its causes, and the KL of the pair and of the pair without its fault."""
    for name in names:
        one = PAIRS[name]
        print(f"- name: {name}\n  kind: {'fault' if one['causes'] else 'healthy'}")
        print(f"  truth: {json.dumps(one['truth'])}\n  causes: [{', '.join(one['causes'])}]", flush=True)
        print(f"  kl: {make(folder, name)[1]:.2e}")
        if one["causes"]:
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
