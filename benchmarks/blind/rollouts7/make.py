"""Makes pairs of log-probabilities, of a rollout and of training, some with a hidden fault: make.py FOLDER [NAME ...].

Each pair is a folder with `train` (a checkpoint in BF16), a dump, and where its call names them `served` and
`before-N`. The engine is a decoder, one token at a time with a KV cache; the trainer is transformers, converted by
ottava where it trains in FP8. Prints the command of each pair. --kl adds KL(rollout || training), --twin makes the
pairs without their faults, --truth prints truth.yaml with the KL of both.

The decoder, casts, dumps and files are those of ../rollouts6/make.py; models, what an engine or a trainer does
wrong, and the pairs are not.
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
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

import ottava

spec = importlib.util.spec_from_file_location("rollouts6", Path(__file__).parent.parent / "rollouts6" / "make.py")
six = importlib.util.module_from_spec(spec)
spec.loader.exec_module(six)
BLOCK, GROUP, TENSOR, TOKEN, E4M3, E5M2 = six.BLOCK, six.GROUP, six.TENSOR, six.TOKEN, six.E4M3, six.E5M2
cast, rule, stored = six.cast, six.rule, six.stored
PAIRS = {}


# Models


def sizes(hidden, layers, middle, vocab, **more):
    return {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": middle, "vocab_size": vocab, **more}


ROUTED = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 1.25, "residual_multiplier": 0.7, "attention_multiplier": 0.15}
GEMMA = {
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "sliding_window": 4096,
}
MODELS = {
    "llama": (LlamaConfig, sizes(128, 4, 256, 272)),
    "wide": (LlamaConfig, sizes(256, 2, 512, 256)),
    "solo": (LlamaConfig, sizes(256, 1, 512, 288)),
    "tied": (LlamaConfig, sizes(128, 3, 256, 240, tie_word_embeddings=True)),
    "qwen2": (Qwen2Config, sizes(128, 3, 384, 288)),
    "qwen3": (Qwen3Config, sizes(128, 3, 384, 320)),
    "thick": (Qwen3Config, sizes(256, 2, 512, 288)),
    "moe": (Qwen3MoeConfig, sizes(128, 3, 256, 256, **ROUTED)),
    "mistral": (MistralConfig, sizes(128, 3, 384, 304, sliding_window=None)),
    "granite": (GraniteConfig, sizes(128, 3, 256, 256, **GRANITE)),
    "gemma": (Gemma2Config, sizes(128, 3, 256, 256, **GEMMA)),
}


def build(shape, seed, look=0.8, embed=0.6, column=1.0, layer=None, sharp=1.7, bias=0.4, loud=1.0, gate=1.0, **changes):
    """Random weights with peaked answers and a few large rows. `look`: how sharp attention is; `column`: how large one
    column of weights is behind a norm that is as small (in one `layer`, or all); `loud`: how large a channel is that
    norms pass on, with weights that are as small; `gate`: how large gate_proj is."""
    kind, size = MODELS[shape]
    size = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, **size, **changes}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size["hidden_size"] // 4}
    config = kind(**size, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    fill = torch.Generator().manual_seed(7000 + seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=fill)
            order = torch.randperm(len(value), generator=fill)
            mine = layer is None or f"layers.{layer}." in name
            into = name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))
            if "norm" in name:
                value = 1 + 0.2 * value
                if "layernorm" in name:
                    value[order[:2]] *= 4
                if into and mine and column > 1:
                    value[7] = 1 / column
                if into and mine and loud > 1:
                    value[9] = loud
                value = value - 1 if shape == "gemma" else value
            elif name.endswith("bias"):
                value = bias * value
            elif "embed" in name:
                value = value * (0.15 if config.tie_word_embeddings else embed)
            else:
                spread = sharp if "lm_head" in name else 1.5 if name.endswith("gate.weight") else 0.7
                spread = look if "q_proj" in name or "k_proj" in name else spread
                value = value * spread / weight.shape[-1] ** 0.5
                if value.dim() == 2 and any(part in name for part in ("o_proj", "down_proj")):
                    value[order[: max(1, len(value) // 32)]] *= 3
                if any(p in name for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate.weight")):
                    value[..., 7] *= column if mine else 1
                    value[..., 9] /= loud if mine else 1
                value = value * gate if "gate_proj" in name else value
            weight.copy_(value)
    return model


# Casts


def every(one=None, only=(), but=()):
    """One rule for all projections, or for those whose names have one of `only` and none of `but`."""
    one = one or rule()
    return lambda raw: lambda name: (
        one
        if "_proj" in name and (not only or any(o in name for o in only)) and not any(b in name for b in but)
        else None
    )


def alone(part, one):
    return lambda raw: lambda name: one if name.endswith(part) else None


def together(raw):
    """One scale for a fused weight: q, k and v, and gate and up."""

    def found(name):
        if "_proj" not in name:
            return None
        base, own = name.rsplit(".", 1)
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if own in group:
                top = max(raw[f"{base}.{o}"].float().abs().max() for o in group)
                return rule(how=lambda w: cast(w, TENSOR, scale=top / 448)[0], inputs=TENSOR)
        return rule(TENSOR, TENSOR)

    return found


def exchanged(raw):
    """Codes of gate are read with the scales of up, and the reverse."""

    def found(name):
        if "_proj" not in name:
            return None
        other = name.replace("gate_proj", "up_proj") if "gate" in name else name.replace("up_proj", "gate_proj")
        if other == name:
            return rule()

        def how(w):
            codes, scale = cast(w, BLOCK)[1], cast(raw[other], BLOCK)[2]
            wide = scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)[:, : w.shape[1]]
            return codes.float() * wide

        return rule(how=how)

    return found


def exponent_only(x):
    """Groups of 128 are cast with fp32 scales, and multiplied with the exponents of these scales alone."""
    _, codes, scale = cast(x, GROUP)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return codes.float() * scale.repeat_interleave(128, 1)[:, : x.shape[1]]


# The engine


class Decoder(six.Engine):
    """The decoder of rollouts6, and what these pairs need: Gemma 2, linear RoPE scaling, and faults of its own."""

    def __init__(self, c, state, rule=None, dead=None, noise=0.0, soft=0.0, hole=0, seed=0, **more):
        raw = {n.removeprefix("model.").removesuffix(".weight"): t for n, t in state.items()}
        super().__init__(c, state, rule=rule(raw) if rule else None, **more)
        self.gemma = c.model_type == "gemma2"
        self.dead, self.noise, self.soft, self.hole = dead, noise, soft, hole
        self.dice = torch.Generator().manual_seed(seed)
        self.cap = self.cap or getattr(c, "attn_logit_softcapping", None) or 0.0
        rope = c.rope_parameters
        if rope.get("rope_type") == "linear":
            turns = rope["rope_theta"] ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
            angles = torch.arange(600).float()[:, None] * torch.cat([turns, turns]) / rope["factor"]
            self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def linear(self, name, x):
        if self.dead and name.endswith(self.dead[0]):  # one of `ranks` does not arrive at the sum
            x, wide = x.clone(), x.shape[1] // self.dead[1]
            x[:, :wide] = 0
        return super().linear(name, x)

    def norm(self, name, x):
        if not self.gemma:
            return super().norm(name, x)
        value = x.float()
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        return (value * (1 + self.w[name].float())).bfloat16()

    def mlp(self, base, x):
        act = getattr(self.c, "hidden_activation", None) or self.c.hidden_act
        gate = self.linear(base + "gate_proj", x)
        gate = F.gelu(gate, approximate="tanh") if "gelu" in act else F.silu(gate)
        return self.linear(base + "down_proj", gate * self.linear(base + "up_proj", x))

    def step(self, tokens, position, places):
        if self.hole and position % self.hole == 0 and position:  # a block of the cache was freed too early
            for store in (*self.k, *self.v):
                store[:, :, position - 1] = 0
        logits = self.gemma_step(tokens, position, places) if self.gemma else super().step(tokens, position, places)
        logits = self.soft * torch.tanh(logits / self.soft) if self.soft else logits
        return logits + self.noise * torch.randn(logits.shape, generator=self.dice) if self.noise else logits

    def gemma_step(self, tokens, position, places):
        c = self.c
        x = self.w["embed_tokens"][tokens] * torch.tensor(c.hidden_size**0.5).bfloat16()
        for layer in range(c.num_hidden_layers):
            base = f"layers.{layer}."
            y = self.attention(base + "self_attn.", layer, self.norm(base + "input_layernorm", x), position, places)
            x = x + self.norm(base + "post_attention_layernorm", y)
            y = self.mlp(base + "mlp.", self.norm(base + "pre_feedforward_layernorm", x))
            x = x + self.norm(base + "post_feedforward_layernorm", y)
        logits, top = self.linear("lm_head", self.norm("norm", x)), c.final_logit_softcapping
        return (torch.tanh(logits / top) * top if top else logits).float()

    @torch.no_grad()
    def run(self, prompts, lengths, draw, sampling, old=None, until=0, prefix=False):
        """Tokens and log-probabilities, as `generate`. `old` is an engine with earlier weights: it writes the cache of
        prompts (`prefix`), or everything up to the position `until`, when the new weights come in."""
        c, rows = self.c, len(prompts)
        ends = [len(p) + n for p, n in zip(prompts, lengths, strict=True)]
        total, starts = max(ends), torch.tensor([len(p) for p in prompts])
        room = (rows, c.num_key_value_heads, total, c.head_dim)
        self.k, self.v = ([torch.zeros(room).bfloat16() for _ in range(c.num_hidden_layers)] for _ in range(2))
        if old:
            old.k, old.v = self.k, self.v
        tokens, logp = torch.zeros(rows, total, dtype=torch.long), torch.zeros(rows, total)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        for position in range(total - 1):
            places = position + self.skip * (starts <= position)
            now = old if old and position < until else self
            logits = now.step(tokens[:, position], position, places)
            if old and prefix:
                mine = [s[:, :, position].clone() for s in (*self.k, *self.v)]
                old.step(tokens[:, position], position, places)
                fresh = position >= starts - 1
                for store, new in zip((*self.k, *self.v), mine, strict=True):
                    store[fresh, :, position] = new[fresh]
            chosen, value = sample(logits, tokens[:, : position + 1], draw, **sampling)
            tokens[:, position + 1] = torch.where(position + 1 >= starts, chosen, tokens[:, position + 1])
            logp[:, position + 1] = value
        return [(tokens[r, :end].tolist(), logp[r, len(prompts[r]) : end].tolist()) for r, end in enumerate(ends)]


def sample(logits, before, draw, often=0.0, grammar=0, **more):
    """That of rollouts6, with a frequency penalty, and a grammar that allows one token in `grammar` not."""
    shaped = logits.clone()
    if often:
        shaped = shaped - often * torch.zeros_like(shaped).scatter_add_(1, before, torch.ones(before.shape))
    if grammar:
        shaped[:, (torch.arange(shaped.shape[1]) + before.shape[1]) % grammar == 0] = -torch.inf
    return six.sample(shaped, before, draw, **more)


# Other weights


def drift(size, seed=1):
    """Weights of an earlier step: each tensor as it was before changes of `size` of its own spread."""

    def past(state):
        dice = torch.Generator().manual_seed(700 + seed)
        out = {}
        for name, w in state.items():
            out[name] = (w.float() + size * w.float().std() * torch.randn(w.shape, generator=dice)).to(w.dtype)
        if "lm_head.weight" in state and torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
            out["lm_head.weight"] = out["model.embed_tokens.weight"]
        return out

    return past


def adapters(state, size=0.3, rank=4, seed=3):
    """Low-rank updates B @ A for the linears of the MLPs."""
    dice = torch.Generator().manual_seed(seed)
    out = {}
    for name, w in state.items():
        if "mlp" in name and "_proj" in name and w.dim() == 2:
            b, a = torch.randn(len(w), rank, generator=dice), torch.randn(rank, w.shape[1], generator=dice)
            out[name] = b @ a * (size * w.float().std() / rank**0.5)
    return out


def without_adapters(state):
    more = adapters(state)
    return {n: (w.float() - more[n]).to(w.dtype) if n in more else w for n, w in state.items()}


def wrong_slot(state):
    """Up has the update of gate, not its own."""
    more = adapters(state)
    return {
        n: (w.float() - more[n] + more[n.replace("up_proj", "gate_proj")]).to(w.dtype) if "up_proj" in n else w
        for n, w in state.items()
    }


def cleared(*parts):
    return lambda state: {n: torch.zeros_like(w) if any(p in n for p in parts) else w for n, w in state.items()}


# A pair


def rollout(p, config, states, prompts, ends, draw, t):
    """Tokens and the engine's list of each sequence; engines of a pair share them out."""
    out, front = [None] * len(prompts), [p["bos"]] if "bos" in p else []
    for part in p.get("engines", ({},)):
        part = dict(part)
        mine = part.pop("rows", lambda i, n: True)
        rows = [i for i in range(len(prompts)) if mine(i, len(prompts))]
        sampling = {"t": t, **p.get("sampling", {}), **part.pop("sampling", {})}
        reads = type(config).from_dict({**config.to_dict(), **p.get("reads", {})})
        weights, each = p["edit"](states[0]) if "edit" in p else states[0], part.pop("each", len(rows))
        step, is_old = part.pop("step", 0), part.pop("is_old", lambda name: True)
        how = {key: part.pop(key) for key in ("until", "prefix") if key in part}
        how["old"] = Decoder(reads, states[step], **part) if how else None
        if step and not how["old"]:
            weights = {n: states[step][n] if is_old(n) else w for n, w in weights.items()}
        one = Decoder(reads, weights, **part)
        for start in range(0, len(rows), each):
            some = rows[start : start + each]
            given = [front + prompts[i][-p.get("sees", 99) :] for i in some]
            said = one.run(given, [ends[i] for i in some], draw, sampling, **how)
            for i, head, (tokens, logp) in zip(some, given, said, strict=True):
                out[i] = (prompts[i] + tokens[len(head) :], logp)
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
    return six.recompute(model, rollouts, ends, **settings)


def saved(model, state, path):
    other = type(model)(model.config).bfloat16()
    other.load_state_dict(state)
    other.save_pretrained(path)


def make(folder, name, twin=False):
    """Writes one pair; returns its command and the KL in it."""
    one, number, path = PAIRS[name], SEEDS.get(name, list(PAIRS).index(name)), folder / name
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
        six.served(source, path / "served", **p["served"], config=p.get("reads"))
        if "edit" in p:
            shutil.rmtree(source)
        call.append(f"{path}/served -e {p.get('engine', 'vllm')}")
    for step, past in enumerate(p.get("before", ()), 1):
        states[step] = past(states[0])
        saved(model, states[step], path / f"before-{step}")
    draw = torch.Generator().manual_seed(2700 + number)
    (low, high), count = p.get("length", (30, 52)), p.get("count", 16)
    ends = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    heads = torch.randint(5, 15, (count,), generator=draw).tolist()
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=draw).tolist() for n in heads]
    rollouts = rollout(p, model.config, states, prompts, ends, draw, t)
    before, after = trained(p, model, rollouts, ends, t, number), [list(r[1]) for r in rollouts]
    if "lists" in p:
        after, before = p["lists"](after, before)
    answers = [r[0][len(prompt) :] for r, prompt in zip(rollouts, prompts, strict=True)]
    file = six.dump(path, p.get("form", "plain"), prompts, answers, after, before)
    call += [f"--recipe {p['recipe']}"] if "recipe" in p else []
    call += [f"--logprobs {file}", *(f"--before {path}/before-{s}" for s in states if s)]
    said = p.get("train", {}).get("t", t)
    call += [f"--temperature {said}"] if said != 1.0 else []
    gap = torch.cat([torch.tensor(o) - torch.tensor(e) for o, e in zip(before, after, strict=True)]).clamp(-5, 5)
    return " ".join(call), (gap.exp() - 1 - gap).mean().item()


def pair(model, truth="", causes=(), base=None, fault=None, source=""):
    PAIRS[f"p{len(PAIRS) + 1:02d}"] = {
        "model": model,
        "truth": truth,
        "causes": list(causes),
        "base": base or {},
        "fault": fault or {},
        "source": source,
    }


def engine(**more):
    return {"engines": ({**more},)}


def fp8(weights=BLOCK, inputs=GROUP, recipe="blockwise_fp32", pow2=None, **more):
    """Training and engine in the same FP8."""
    return {"recipe": recipe, **engine(rule=every(rule(weights, inputs, pow2=pow2, x_pow2=pow2))), **more}


def engine_list(change):
    """A change of the engine's list of each sequence: change(its number, its list)."""
    return {"lists": lambda after, before: ([change(i, a) for i, a in enumerate(after)], before)}


def training_list(change):
    return {"lists": lambda after, before: (after, [change(i, b) for i, b in enumerate(before)])}


def neighbours(after, before):
    """The engine's lists of two requests are exchanged."""
    return [after[i ^ 1] for i in range(len(after))], before


BF16 = {"served": {"weights": None}}
PLAIN = {"weights": None, "inputs": None}


# Sampling


pair(
    "llama",
    "The engine reports log p of the raw logits; it samples at 0.7, and training divides its logits by that.",
    ["temperature"],
    {"t": 0.7, "form": "nemo-rl"},
    {"sampling": {"report": "raw"}},
    "vllm-project/vllm#42259",
)
pair(
    "qwen2",
    "The engine divides log p of the raw logits by its temperature of 0.8, not the logits.",
    ["scaled"],
    {"t": 0.8},
    {"sampling": {"report": "scaled"}},
)
pair(
    "wide",
    "One of two engines (the second half of the sequences) reports raw log p, the other one at the temperature of 0.6.",
    ["temperature"],
    {"t": 0.6, "form": "verl"},
    {"engines": ({"rows": lambda i, n: i < n // 2}, {"rows": lambda i, n: i >= n // 2, "sampling": {"report": "raw"}})},
    "vllm-project/vime#64",
)
pair(
    "thick",
    "The engine reports log p after top-p 0.7, normalized anew over what is left.",
    ["processed"],
    {"form": "trl"},
    {"sampling": {"top_p": 0.7}},
    "huggingface/trl#6789",
)
pair(
    "mistral",
    "Every fourth sequence ran with top-k 5 (a default of an evaluation), and its log p are normalized over these five.",
    ["processed"],
    {},
    {"engines": ({"rows": lambda i, n: i % 4}, {"rows": lambda i, n: not i % 4, "sampling": {"top_k": 5}})},
    "huggingface/trl#7269",
)
pair(
    "qwen2",
    "The engine reports log p under a grammar that forbids a third of the tokens at each place.",
    ["processed"],
    {"form": "nemo-rl"},
    {"sampling": {"grammar": 3}},
)

# Lists


pair(
    "mistral",
    "The engine's list is two tokens early; its last two places repeat the last number.",
    ["shift"],
    {"form": "verl"},
    engine_list(lambda i, a: a[2:] + [a[-1]] * 2),
    "modelscope/ms-swift#8196",
)
pair(
    "qwen3",
    "A separator between turns has no number in the engine's list: from there (tokens 9 to 16) it is one token early.",
    ["shift"],
    {"form": "nemo-rl"},
    engine_list(lambda i, a: a[: 9 + i % 8] + a[10 + i % 8 :] + [a[-1]]),
    "verl-project/verl#6921",
)
pair(
    "llama",
    "The reply of a tool (8 tokens from the 12th on) counts in the mask; the engine has zeros there.",
    ["padded"],
    {},
    engine_list(lambda i, a: a[:12] + [0.0] * 8 + a[20:]),
    "yaof20/Flash-RL#19",
)
# Refit


pair(
    "thick",
    "The engine has the weights of two steps ago.",
    ["stale"],
    {"before": (drift(0.05, 1), drift(0.08, 2))},
    engine(step=2),
    "huggingface/trl#5312",
)
pair(
    "llama",
    "The refit did not reach o_proj, in any layer.",
    ["stale"],
    {"before": (drift(0.2, 3),)},
    engine(step=1, is_old=lambda n: "o_proj" in n),
)
pair(
    "qwen2",
    "The refit did not reach the third layer (weights, biases and norms).",
    ["stale"],
    {"before": (drift(0.12, 4),), "form": "verl"},
    engine(step=1, is_old=lambda n: "layers.2." in n),
)
pair(
    "qwen3",
    "The refit did not reach the norms (of layers, of q and k, and the last one).",
    ["stale"],
    {"before": (drift(0.2, 5),)},
    engine(step=1, is_old=lambda n: "norm" in n),
)
pair(
    "tied",
    "Head and embedding are tied in training; the refit reached the engine's embedding, not its copy for the head.",
    ["stale"],
    {"before": (drift(0.15, 6),), "form": "trl"},
    engine(step=1, is_old=lambda n: n == "lm_head.weight"),
    "PrimeIntellect-ai/prime-rl#2823",
)
pair(
    "mistral",
    "The refit came while the engine ran: what stands before place 32 is of the old weights, log p and cache.",
    ["stale"],
    {"before": (drift(0.12, 8),)},
    engine(step=1, until=32),
    "NovaSky-AI/SkyRL#979",
)
pair(
    "llama",
    "The cache of prompts was not emptied at the refit: keys and values of prompts are of the old weights.",
    ["stale"],
    {"before": (drift(0.25, 9),), "length": (20, 34), "form": "nemo-rl"},
    engine(step=1, prefix=True),
    "NVIDIA-NeMo/RL#4018",
)
# Casts


pair(
    "wide",
    "The engine was started with --quantization fp8 (rows of weights, tokens of inputs); training is BF16.",
    ["layers"],
    {},
    engine(rule=every(rule(TOKEN, TOKEN))),
    "vllm-project/vllm#41022",
)
pair(
    "wide",
    "Both are FP8, but the engine leaves its first layer in BF16, and training does not.",
    ["layers"],
    fp8(config={"column": 100000.0, "layer": 0}),
    engine(rule=every(but=("layers.0.",))),
)
pair(
    "solo",
    "The engine rounds the scales of weights up to powers of two; training does not.",
    ["weights"],
    fp8(config={"column": 40000.0}),
    engine(rule=every(rule(pow2=torch.ceil))),
    "NovaSky-AI/SkyRL#1898",
)
pair(
    "wide",
    "The engine casts fused weights anew with one scale for q, k, v and one for gate, up; training has blocks.",
    ["weights"],
    fp8(config={"column": 40000.0}),
    engine(rule=together),
    "vllm-project/vllm#41022",
)
pair(
    "wide",
    "In the fused weight the scales of gate and up are exchanged.",
    ["weights"],
    fp8(form="nemo-rl", config={"gate": 2.0}),
    engine(rule=exchanged),
)
pair(
    "thick",
    "Inputs are cast with fp32 scales; the kernel multiplies with the exponents of these scales alone.",
    ["activations"],
    fp8(form="verl"),
    engine(rule=every((rule()[0], exponent_only))),
    "sgl-project/sglang#39289",
)
pair(
    "llama",
    "The engine's inputs have a static scale of other data, which clips; training scales groups.",
    ["activations"],
    fp8(),
    engine(rule=every(rule(inputs=TENSOR, static=0.004))),
    "vllm-project/vllm#4332",
)
pair(
    "solo",
    "The engine casts weights only; training casts inputs, too.",
    ["activations"],
    fp8(config={"loud": 200000.0}),
    engine(rule=every(rule(inputs=None))),
)
pair(
    "qwen2",
    "Keys are cached in E4M3 with a scale of the 99.9th percentile of other data, which clips those with large biases.",
    ["kv-cache"],
    {"config": {"bias": 1.5}},
    engine(kv=stored((E4M3, 0.003), (E4M3, 0.01))),
    "sgl-project/sglang#25790",
)
pair(
    "qwen3",
    "The engine's cache is E5M2.",
    ["kv-cache"],
    {"form": "verl"},
    engine(kv=stored((E5M2, 1.0), (E5M2, 1.0))),
    "NVIDIA-NeMo/RL#1212",
)
pair(
    "thick",
    "Both are FP8; the first layer's values are cached in E4M3 with a scale of an earlier step, eight times too small.",
    ["kv-cache"],
    fp8(),
    engine(rule=every(), kv=stored(None, (E4M3, 0.0008), {0})),
    "sgl-project/sglang#18818",
)
pair(
    "qwen3",
    "The engine casts its head, too (E4M3, a scale for the tensor).",
    ["head"],
    {},
    engine(rule=alone("lm_head", rule(TENSOR, TENSOR))),
    "PrimeIntellect-ai/prime-rl#2438",
)
pair(
    "moe",
    "The engine casts its routers, too (E4M3, a scale for the tensor).",
    ["router"],
    {"config": {"loud": 3000.0}},
    engine(rule=alone("mlp.gate", rule(TENSOR, TENSOR))),
)

# Files


pair(
    "mistral",
    "The engine's config.json has a rope_theta of 1000000, training's 10000.",
    ["formula"],
    BF16,
    {"reads": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
    "NovaSky-AI/SkyRL#690",
)
pair(
    "llama",
    "The engine's config.json has an rms_norm_eps of 1e-5, training's is 1e-6 (embeddings are small).",
    ["formula"],
    {**BF16, "config": {"embed": 0.004}},
    {"reads": {"rms_norm_eps": 1e-5}},
)
pair(
    "gemma",
    "The engine's config.json has no final_logit_softcapping; training caps its logits at 6.",
    ["formula"],
    {**BF16, "train": {"attn": "eager"}},
    {"reads": {"final_logit_softcapping": None}},
)
pair(
    "moe",
    "The engine's config.json has norm_topk_prob false, training's is true.",
    ["formula"],
    {**BF16, "form": "nemo-rl"},
    {"reads": {"norm_topk_prob": False}},
)
pair(
    "wide",
    "An adapter was merged wrongly into the engine's file: up got the update of gate.",
    ["plain", "weights"],
    BF16,
    {"edit": wrong_slot},
    "unslothai/unsloth-zoo#941",
)
pair(
    "mistral",
    "The engine's config.json has a sliding window of 10 tokens, training's has none.",
    ["formula"],
    BF16,
    {"reads": {"sliding_window": 10}},
)


# The trainer


pair(
    "gemma",
    "Training's attention leaves out the softcap of scores of its config.json; the engine does not.",
    ["trainer"],
    {"train": {"attn": "eager"}, "config": {"look": 1.6}},
    {"train": {"attn": "eager", "config": {"attn_logit_softcapping": None}}},
)
pair(
    "qwen2",
    "Training packs four sequences into a line without a mask between them, with positions that run on.",
    ["trainer"],
    {"form": "verl"},
    {"train": {"pack": 4}},
)
# Neither


pair(
    "llama",
    "The engine answers out of order: the lists of neighbours are exchanged.",
    ["not-fp8"],
    {"length": (40, 40), "form": "nemo-rl"},
    {"lists": neighbours},
)
pair(
    "thick",
    "One of four ranks is missing in the engine's sums of down_proj of the second layer.",
    ["not-fp8"],
    {},
    engine(ranks=4, dead=("layers.1.mlp.down_proj", 4)),
)
pair(
    "tied",
    "The engine's tokenizer puts a token in front of each prompt that training does not see.",
    ["not-fp8"],
    {"form": "trl"},
    {"bos": 1},
    "huggingface/trl#4772",
)
# Healthy


pair("llama", "Both BF16.", base={"form": "nemo-rl"})
pair("qwen2", "Both BF16, at 0.8; two ranks sum.", base={"t": 0.8, **engine(ranks=2)})
pair("moe", "Both BF16; routers of both take other experts where two are nearly equal.", base={"form": "verl"})
pair("gemma", "Both BF16.", base={"train": {"attn": "eager"}, "form": "trl"})
pair("granite", "Both BF16, at 1.3, and the engine has a file.", base={"t": 1.3, **BF16})
pair("mistral", "Both BF16; four ranks sum, and training pads left.", base={**engine(ranks=4), "train": {"left": True}})
pair("tied", "Both BF16; the engine runs two at a time, training one.", base={**engine(each=2), "train": {"batch": 1}})
pair("qwen3", "Both BF16, after a refit that arrived.", base={"before": (drift(0.1, 20),), "form": "nemo-rl"})
pair("thick", "Both FP8 in blocks, and the engine has a file.", base=fp8(served={}))
pair("llama", "Both FP8 in blocks, scales powers of two.", base=fp8(recipe="blockwise", pow2=torch.ceil, form="trl"))
pair("qwen2", "Both FP8, one scale a tensor.", base=fp8(TENSOR, TENSOR, "tensorwise"))
pair("wide", "Both FP8, a scale for each row and each token.", base=fp8(TOKEN, TOKEN, "rowwise", pow2=torch.ceil, form="verl"))
pair("mistral", "Both MXFP8.", base=fp8((1, 32), (1, 32), "mxfp8", pow2=torch.ceil))
pair(
    "granite",
    "Both FP8 in blocks; four ranks sum, eager attention.",
    base={**fp8(), **engine(rule=every(), ranks=4), "train": {"attn": "eager"}},
)
pair(
    "qwen3",
    "Both BF16; the engine samples with top-p 0.8 and top-k 20, and reports log p before these.",
    base={"sampling": {"top_p": 0.8, "top_k": 20, "report": "full"}},
)
pair("wide", "Both BF16; the engine's logits have noise of 0.02.", base=engine(noise=0.02))


# Seeds of pairs before which others were dropped, when their KL had been measured; of the others it is the place in the list.
SEEDS = {
    "p02": 2, "p03": 3, "p04": 4, "p05": 5, "p06": 7, "p07": 8, "p08": 9, "p09": 10, "p11": 13, "p14": 16,
    "p28": 34, "p30": 36, "p31": 37, "p32": 38, "p33": 39, "p36": 43, "p37": 44, "p38": 47, "p39": 48, "p40":
    49, "p41": 53, "p42": 54, "p44": 56, "p45": 57, "p46": 58, "p47": 59, "p48": 60, "p49": 61, "p51": 63,
    "p53": 65, "p54": 66, "p55": 67, "p56": 68,
}


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
