"""Makes pairs of a rollout and its training, some with a fault; `python make.py FOLDER [NAME...]`.

The engine is plain torch and transformers: it generates token by token with a cache of keys and values in BF16, and its
casts to FP8 are written here by hand. Training computes the same tokens at once, under `ottava.convert` where it is in
FP8. Every pair has a folder with `train` (its checkpoint in BF16), a dump, and where there is one `served` (the files
that the engine reads) and `before` (the checkpoint of an earlier step). Prints for each pair the KL of its two lists
and the call of the command. What is wrong with each pair is in truth.yaml.
"""

import copy
import fnmatch
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

import ottava

warnings.filterwarnings("ignore", category=FutureWarning)
disable_progress_bar()

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = {"tensor": (0, 0), "row": (1, 0), "group": (1, 128), "block": (128, 128), "mx": (1, 32)}
LINEARS = r"layers\.\d+\.(self_attn|mlp)\.(\w+_proj|experts\.\d+)$"

# --- models ---


def build(kind, seed, hidden=128, layers=3, vocab=320, sharp=3.0, **more):
    """A small model with random weights, whose logits are about as peaked as `sharp` says."""
    torch.manual_seed(seed)
    base = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64 if hidden > 128 else 4,
        "head_dim": 32,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-6,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    if kind == "llama":
        net = LlamaForCausalLM(LlamaConfig(**{**base, **more}))
    elif kind == "qwen3":
        net = Qwen3ForCausalLM(Qwen3Config(**{**base, **more}))
    else:
        net = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**base, **moe, **more}))
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
            elif "embed" in name:
                weight.normal_(std=1.0)
            elif "lm_head" in name:
                weight.normal_(std=sharp / hidden**0.5)
            elif ".mlp.gate.weight" in name:
                weight.normal_(std=2.0 / hidden**0.5)
            else:
                weight.normal_(std=1.1 / weight.shape[-1] ** 0.5)
    return net.bfloat16().eval()


def advance(net, seed, rate=2e-3, steps=2):
    """The model after some steps of AdamW on random tokens."""
    after = copy.deepcopy(net).float()
    optimizer = torch.optim.AdamW(after.parameters(), lr=rate)
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(3, net.config.vocab_size, (4, 32), generator=source)
        loss = after(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return after.bfloat16().eval()


def mixed(new, old, pattern):
    """The new model with the old one's tensors where the name matches."""
    net, stale = copy.deepcopy(new), dict(old.named_parameters())
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if re.search(pattern, name):
                weight.copy_(stale[name])
    return net


# --- casts of the engine ---


def cast(x, kind, power=False, dtype=E4M3, fixed=None):
    """Codes times scales, in FP32; a scale for each block, amax / largest number, or `fixed` for all."""
    rows, cols = x.shape
    tall, wide = (size or length for size, length in zip(BLOCKS[kind], x.shape, strict=True))
    tiles = x.float().reshape(rows // tall, tall, cols // wide, wide)
    largest = torch.finfo(dtype).max
    scale = tiles.abs().amax((1, 3), keepdim=True) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if power:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    if fixed is not None:
        scale = torch.full_like(scale, fixed)
    return ((tiles / scale).clamp(-largest, largest).to(dtype).float() * scale).reshape(rows, cols)


class Rule:
    """How an engine casts: weights and inputs by a kind of block each, None for no cast."""

    def __init__(self, weights, inputs, power=False, inputs_power=None, dtype=E4M3, fixed=None, ranks=1):
        self.weights, self.inputs, self.power, self.dtype = weights, inputs, power, dtype
        self.inputs_power = power if inputs_power is None else inputs_power
        self.fixed, self.ranks = fixed, ranks


class CastLinear(nn.Module):
    """A linear on FP8 operands: decoded, multiplied in FP32, rounded once for each rank."""

    def __init__(self, weight, rule, decoded=None):
        super().__init__()
        self.rule, plain = rule, weight.detach()
        if decoded is None:
            decoded = plain.float() if rule.weights is None else cast(plain, rule.weights, rule.power, rule.dtype)
        self.register_buffer("decoded", decoded)

    def forward(self, x):
        rows, rule = x.reshape(-1, x.shape[-1]), self.rule
        rows = rows.float() if rule.inputs is None else cast(rows, rule.inputs, rule.inputs_power, fixed=rule.fixed)
        total = None
        for part, weight in zip(rows.chunk(rule.ranks, 1), self.decoded.chunk(rule.ranks, 1), strict=True):
            product = (part @ weight.T).bfloat16()
            total = product if total is None else total + product
        return total.reshape(*x.shape[:-1], -1)


class CastExperts(nn.Module):
    """The experts of a layer one by one; those that `rules` names are cast, the others stay in BF16."""

    def __init__(self, experts, rules):
        super().__init__()
        self.act, self.pairs = experts.act_fn, nn.ModuleList()
        for index in range(experts.num_experts):
            rule = rules.get(index) or Rule(None, None)
            up, down = experts.gate_up_proj[index], experts.down_proj[index]
            self.pairs.append(nn.ModuleList([CastLinear(up, rule), CastLinear(down, rule)]))

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for number, (up, down) in enumerate(self.pairs):
            token, slot = torch.where(index == number)
            if len(token):
                gate, value = up(hidden[token]).chunk(2, -1)
                out.index_add_(0, token, (down(self.act(gate) * value) * weights[token, slot, None]).to(out.dtype))
        return out


def codes_of(folder):
    """The weights of an exported checkpoint by name, codes times scales; empty without one."""
    tensors = load_file(folder / "model.safetensors") if (folder / "export.json").exists() else {}
    found = {}
    for name, codes in tensors.items():
        if codes.dtype == E4M3:
            scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale")).float()
            for axis in (0, 1):
                scale = scale.repeat_interleave(-(-codes.shape[axis] // scale.shape[axis]), axis)
            found[name.removesuffix(".weight")] = codes.float() * scale[: codes.shape[0], : codes.shape[1]]
    return found


def serve(net, rule=None, only=LINEARS, skip=None, head=None, router=None, files=None):
    """A copy of the model whose linears, head or routers are cast as the engine does; codes of `files` go first."""

    def hit(name):
        return rule is not None and re.search(only, name) and not (skip and re.search(skip, name))

    net, choose = copy.deepcopy(net), rule if callable(rule) else lambda name: rule
    for name, module in list(net.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and leaf != "lm_head" and hit(name):
            setattr(net.get_submodule(parent), leaf, CastLinear(module.weight, choose(name), (files or {}).get(name)))
        elif leaf == "experts":
            rules = {index: rule for index in range(module.num_experts) if hit(f"{name}.{index}")}
            if rules:
                setattr(net.get_submodule(parent), leaf, CastExperts(module, rules))
        elif leaf == "gate" and router is not None:
            module.weight.data = cast(module.weight.data, router.weights, dtype=router.dtype).bfloat16()
            module.register_forward_pre_hook(
                lambda _, args: (cast(args[0].reshape(-1, args[0].shape[-1]), router.inputs).bfloat16(),)
            )
    if head is not None:
        net.lm_head = CastLinear(net.lm_head.weight, head)
    return net


class CastCache(DynamicCache):
    """Keys and values in FP8, in the layers and of the kinds named."""

    def __init__(self, layers=None, what="kv", dtype=E4M3, scale=1.0):
        super().__init__()
        self.which, self.what, self.dtype, self.scale = layers, what, dtype, scale

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.which is None or layer_idx in self.which:
            top = torch.finfo(self.dtype).max
            pair = []
            for sort, x in zip("kv", (key_states, value_states), strict=True):
                codes = (x.float() / self.scale).clamp(-top, top).to(self.dtype)
                pair.append((codes.float() * self.scale).to(x.dtype) if sort in self.what else x)
            key_states, value_states = pair
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


# --- the rollout ---


def nucleus(logits, top_p=1.0):
    """Logits of which the unlikely ones are -inf, as samplers do it."""
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, mass > top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


def penalize(logits, ids, mask, factor):
    """Repetition penalty: logits of tokens that were seen are divided by the factor, negative ones multiplied."""
    seen = torch.zeros_like(logits).scatter_add_(1, ids, mask.float()) > 0
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def report(kind, raw, logits, temperature):
    """The log-probabilities that the engine tells: raw, of the divided logits, divided, or as sampled."""
    if kind == "raw":
        return raw.log_softmax(-1)
    if kind == "scaled":
        return raw.log_softmax(-1) / temperature
    return (raw / temperature).log_softmax(-1) if kind == "divided" else logits.log_softmax(-1)


def decode(pick, prompts, sizes, setting, source, number):
    """One batch of the engine: left-padded prompts, then a token at a time."""
    wide, longest = max(map(len, prompts)), max(sizes)
    ids = torch.tensor([[0] * (wide - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts])
    cache, new, told, fed = setting.get("cache", DynamicCache)(), [], [], ids
    temperature, window = setting.get("engine_t", setting["t"]), setting.get("window")
    for step in range(longest):
        seen = mask.clone()
        if window and mask.shape[1] > window:
            seen[:, :-window] = 0
        place = (mask.cumsum(1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        net = pick(number, step)
        if setting.get("reuse") and number and step == 0:
            fed = fed.clone()
            fed[1:, wide - 8 : wide - 2] = fed[0, wide - 8 : wide - 2]
        hidden = net.model(input_ids=fed, attention_mask=seen, position_ids=place, past_key_values=cache)[0][:, -1]
        if setting.get("float_head"):
            raw = hidden.float() @ net.lm_head.weight.float().T
        else:
            raw = net.lm_head(hidden).float()
        logits = raw / temperature
        if "penalty" in setting:
            logits = penalize(logits, ids, mask, setting["penalty"])
        logits = nucleus(logits, **setting.get("cut", {}))
        if setting.get("greedy"):
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=source)[:, 0]
        tells = setting.get("tell", "divided")
        tells = tells(number) if callable(tells) else tells
        told.append(report(tells, raw, logits, temperature).gather(1, token[:, None])[:, 0])
        new.append(token)
        fed = token[:, None]
        ids, mask = torch.cat([ids, fed], 1), torch.cat([mask, torch.ones_like(fed)], 1)
    new, told = torch.stack(new, 1), torch.stack(told, 1)
    return [(new[i, :n].tolist(), told[i, :n].tolist()) for i, n in enumerate(sizes)]


@torch.no_grad()
def rollout(pick, setting, seed, vocab):
    """Rows of prompt, completion and the engine's log-probabilities, in the order of the prompts."""
    source = torch.Generator().manual_seed(seed)

    def between(low, high):
        return int(torch.randint(low, high + 1, (), generator=source))

    count = setting.get("count", 12)
    prompts = [
        torch.randint(3, vocab, (between(*setting.get("prompt", (8, 14))),), generator=source).tolist()
        for _ in range(count)
    ]
    sizes = [between(*setting.get("new", (18, 34))) for _ in range(count)]
    replicas, size = setting.get("replicas", 1), setting.get("batch", 6)
    rows = [None] * count
    for number in range(replicas):
        mine = list(range(number, count, replicas))
        for start in range(0, len(mine), size):
            some = mine[start : start + size]
            batch = number if replicas > 1 else start // size
            chosen = [prompts[i] for i in some]
            answers = decode(pick, chosen, [sizes[i] for i in some], setting, source, batch)
            for index, (tokens, told) in zip(some, answers, strict=True):
                rows[index] = {"prompt": prompts[index], "new": tokens, "rollout": told}
    return rows


# --- training ---


def batches(net, rows, size, mode):
    """Input, positions, mask and the places of the rows' tokens, batch by batch."""
    for start in range(0, len(rows), size):
        some = [row["prompt"] + row["new"] for row in rows[start : start + size]]
        if mode in ("packed", "joined"):
            flat = torch.tensor([[token for row in some for token in row]])
            place = torch.cat([torch.arange(len(row)) for row in some])[None]
            if mode == "joined":
                place = torch.arange(flat.shape[1])[None]
            ends = torch.tensor([len(row) for row in some]).cumsum(0).tolist()
            yield flat, place, None, [(0, end - len(row)) for row, end in zip(some, ends, strict=True)]
            continue
        wide = max(map(len, some))
        left = mode == "left"
        lead = [wide - len(row) if left else 0 for row in some]
        ids = torch.tensor([[0] * a + row + [0] * (wide - len(row) - a) for a, row in zip(lead, some, strict=True)])
        mask = torch.tensor(
            [[0] * a + [1] * len(row) + [0] * (wide - len(row) - a) for a, row in zip(lead, some, strict=True)]
        )
        yield ids, torch.arange(wide)[None].expand(len(some), -1), None if left else mask, list(enumerate(lead))


@torch.no_grad()
def score(net, rows, temperature=1.0, size=4, mode="padded"):
    """Adds training's log-probabilities of the completions to the rows."""
    place = 0
    for ids, position, mask, where in batches(net, rows, size, mode):
        logits = net(input_ids=ids, position_ids=position, attention_mask=mask, use_cache=False).logits.float()
        table = (logits / temperature).log_softmax(-1)
        for index, first in where:
            row = rows[place]
            begin = first + len(row["prompt"])
            steps = torch.arange(begin, begin + len(row["new"]))
            row["training"] = table[index, steps - 1, torch.tensor(row["new"])].tolist()
            place += 1


def trainer(net, recipe, kept, dropout):
    """The model as training runs it: under a recipe, some linears left alone, or with dropout."""
    net = copy.deepcopy(net)
    if recipe is not None:
        ottava.convert(net, recipe, filter=lambda name, _: name != "lm_head" and not (kept and re.search(kept, name)))
    if dropout:
        for layer in net.model.layers:
            layer.self_attn.attention_dropout = dropout
        net.train()
    return net


# --- faults of the lists ---


def shift(rows, key, by, where=lambda index: True, start=0):
    """Tokens late (by > 0) or early in a list, from a place on; the gap repeats the number at its edge."""
    for index, row in enumerate(rows):
        if where(index):
            values = row[key]
            begin = int(start * len(values)) if start < 1 else start
            tail = values[begin:]
            moved = [tail[0]] * by + tail[:-by] if by > 0 else tail[-by:] + [tail[-1]] * -by
            row[key] = values[:begin] + moved


def blank(rows, key, value, test):
    """A number in place of those that were not there."""
    for index, row in enumerate(rows):
        size = len(row[key])
        row[key] = [value if test(index, place, size, old) else old for place, old in enumerate(row[key])]


# --- dumps ---


def padded(lists, fill, left=False):
    wide = max(map(len, lists))
    return torch.tensor([[fill] * (wide - len(x)) * left + x + [fill] * (wide - len(x)) * (not left) for x in lists])


def dump(rows, kind, folder):
    """Writes the rows in one of four formats; returns the file."""
    full = [row["prompt"] + row["new"] for row in rows]
    marks = [[0] * len(row["prompt"]) + [1] * len(row["new"]) for row in rows]
    told, own = ([[0.0] * len(row["prompt"]) + row[key] for row in rows] for key in ("rollout", "training"))
    if kind in ("plain", "nemo-rl"):
        path = folder / ("dump.jsonl" if kind == "plain" else "train_data_step5.jsonl")
        lines = []
        if kind == "plain":
            names = ("token_ids", "mask", "rollout_raw_logprob", "prev_recompute_raw_logprob")
            lines = [dict(zip(names, parts, strict=True)) for parts in zip(full, marks, told, own, strict=True)]
        else:
            names = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
            wide = max(map(len, full))
            for index, parts in enumerate(zip(full, marks, told, own, strict=True)):
                pads = (0, 0, 0.0, 0.0)
                filled = [x + [pad] * (wide - len(x)) for x, pad in zip(parts, pads, strict=True)]
                row = {"idx": index, "input_lengths": len(full[index]), "sample_loss_mask": 1.0}
                lines.append(row | dict(zip(names, filled, strict=True)))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path
    prompts, new = padded([r["prompt"] for r in rows], 0, left=True), padded([r["new"] for r in rows], 0)
    before = padded([[1] * len(r["prompt"]) for r in rows], 0, left=True)
    after = padded([[1] * len(r["new"]) for r in rows], 0)
    told, own = padded([r["rollout"] for r in rows], 0.0), padded([r["training"] for r in rows], 0.0)
    if kind == "verl":
        both = {"prompts": prompts, "responses": new, "input_ids": torch.cat([prompts, new], 1)}
        both |= {"attention_mask": torch.cat([before, after], 1), "response_mask": after}
        both |= {"rollout_log_probs": told, "old_log_probs": own}
    else:
        both = {"prompt_ids": prompts, "prompt_mask": before, "completion_ids": new, "completion_mask": after}
        both |= {"sampling_per_token_logps": told, "old_per_token_logps": own}
    torch.save(both, folder / "dump.pt")
    return folder / "dump.pt"


def divergence(rows):
    """KL(rollout || training): the mean of exp(d) - 1 - d."""
    told, own = (torch.tensor([x for row in rows for x in row[key]]) for key in ("rollout", "training"))
    gap = (own - told).clamp(-5, 5)
    return float((gap.exp() - 1 - gap).mean())


# --- the pairs ---

SMALL = {"layers": 2}
BLOCKWISE = Rule("block", "group", power=True)
BLOCKWISE_FP32 = Rule("block", "group")
ROWWISE = Rule("row", "row", power=True)
MX = Rule("mx", "mx", power=True)
CLIPPED = Rule("block", "group", power=True, fixed=2.5 / 448)
ONLINE = Rule("tensor", "row")
TWO, FOUR = Rule(None, None, ranks=2), Rule(None, None, ranks=4)


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


def pair(kind, fmt, **more):
    return {"kind": kind, "fmt": fmt, "t": 1.0, **more}


def late_half(index):
    return index >= 6


# name: kind of model, format of the dump, and what differs from a plain pair
PAIRS = {
    # log-probabilities before and after the sampler
    "p01": pair("llama", "nemo-rl", t=0.8, tell="scaled"),
    "p02": pair("qwen3", "trl", cut={"top_p": 0.9}, tell="processed"),
    "p03": pair("llama", "verl", penalty=1.2, tell="processed"),
    "p04": pair("moe", "plain", t=0.7, replicas=2, tell=lambda n: ("divided", "raw")[n]),
    "p05": pair("llama", "trl", engine_t=0.9, count=16),
    # lists
    "p06": pair("qwen3", "verl", edit=lambda rows: shift(rows, "training", -1, late_half)),
    "p07": pair("moe", "plain", edit=lambda rows: shift(rows, "rollout", 2, start=0.5)),
    "p08": pair(
        "llama", "trl", edit=lambda rows: blank(rows, "rollout", 0.0, lambda i, at, n, _: i % 4 == 1 and at >= n - 6)
    ),
    "p09": pair("qwen3", "plain", edit=lambda rows: blank(rows, "rollout", -9999.0, lambda i, at, n, old: old < -3.5)),
    # weights of another step
    "p10": pair("moe", "trl", rate=2e-3, engines=[{"stale": r"experts\.gate_up_proj"}]),
    "p11": pair("llama", "plain", rate=2e-3, engines=[{"stale": "."}, {}], switch=14),
    "p12": pair("llama", "nemo-rl", rate=6e-3, engines=[{"stale": "embed_tokens|lm_head"}]),
    "p13": pair("moe", "verl", rate=6e-3, engines=[{"stale": r"mlp\.gate\.weight"}]),
    # layers left out or added
    "p14": pair("llama", "plain", engines=[{"rule": ONLINE}]),
    "p15": pair("qwen3", "verl", model=SMALL, recipe="blockwise"),
    "p16": pair(
        "llama",
        "nemo-rl",
        recipe="blockwise",
        count=16,
        kept=r"layers\.[02]\.",
        served="fp8-block-ue8m0",
        engines=[{"rule": BLOCKWISE, "read": True}],
    ),
    "p17": pair(
        "moe",
        "nemo-rl",
        engines=[{"rule": ONLINE, "only": r"layers\.\d\..*experts\.2$"}],
        model={"num_experts_per_tok": 4},
    ),
    # codes and scales of the weights
    "p18": pair(
        "qwen3",
        "nemo-rl",
        model=SMALL,
        recipe="blockwise",
        engines=[{"rule": Rule("block", "group", inputs_power=True)}],
    ),
    "p19": pair(
        "llama",
        "plain",
        model={"layers": 2, "hidden": 256},
        recipe="rowwise",
        engines=[{"rule": Rule("row", "row", power=True, dtype=E5M2)}],
    ),
    "p20": pair(
        "qwen3",
        "verl",
        model=SMALL,
        recipe="blockwise",
        served="compressed-tensors-channel",
        recast=True,
        engines=[{"rule": Rule("row", "row"), "read": True}],
    ),
    # inputs
    "p21": pair(
        "qwen3",
        "verl",
        model=SMALL,
        recipe="blockwise",
        served="fp8-block-ue8m0",
        count=20,
        engines=[{"rule": lambda name: CLIPPED if "down" in name else BLOCKWISE, "read": True}],
    ),
    "p22": pair(
        "qwen3",
        "plain",
        model=SMALL,
        recipe="rowwise",
        engines=[{"rule": Rule("row", "row", power=True, fixed=2.0 / 448)}],
    ),
    "p23": pair(
        "llama",
        "nemo-rl",
        model=SMALL,
        recipe="blockwise",
        served="fp8-block-ue8m0",
        count=16,
        engines=[{"rule": Rule("block", "group"), "read": True}],
    ),
    # head, router, cache
    "p24": pair("qwen3", "trl", engines=[{}, {"head": Rule("row", "row", dtype=E5M2)}], replicas=2),
    "p25": pair("moe", "verl", engines=[{"router": ONLINE}]),
    "p26": pair("llama", "nemo-rl", cache=lambda: CastCache([1], dtype=E5M2)),
    "p27": pair("qwen3", "verl", cache=lambda: CastCache(what="v", scale=0.004)),
    # config.json and plain tensors
    "p28": pair("qwen3", "verl", model={"rope_parameters": rope(1000000.0)}, change={"rope_parameters": rope(10000.0)}),
    "p29": pair("qwen3", "nemo-rl", ones=r"layers\.\d\.self_attn\.[qk]_norm"),
    # training itself
    "p30": pair("llama", "plain", dropout=0.1),
    "p31": pair("qwen3", "trl", mode="joined"),
    # no cast, and no name
    "p32": pair("qwen3", "verl", engines=[{"adapter": 0.08}]),
    "p33": pair("llama", "trl", reuse=True, prompt=(12, 16)),
    "p34": pair("qwen3", "plain", model=SMALL, recipe="rowwise", window=24, engines=[{"rule": ROWWISE}]),
    # two at once
    "p35": pair("qwen3", "plain", t=0.7, tell="raw", cache=lambda: CastCache()),
    "p36": pair("llama", "verl", rate=3e-3, engines=[{"stale": ".", "rule": BLOCKWISE}]),
    "p37": pair(
        "moe",
        "trl",
        engines=[{"router": ONLINE}],
        edit=lambda rows: blank(rows, "rollout", 0.0, lambda i, at, n, _: i % 3 == 0 and at < 4),
    ),
    # nothing wrong
    "q01": pair("llama", "plain", greedy=True),
    "q02": pair("qwen3", "verl", batch=1, count=8),
    "q03": pair("llama", "nemo-rl", t=0.7),
    "q04": pair("qwen3", "trl", engines=[{"rule": TWO}]),
    "q05": pair("llama", "verl", attention="eager", batch=12),
    "q06": pair("qwen3", "plain", float_head=True),
    "q07": pair("moe", "nemo-rl", model={"num_experts_per_tok": 4}),
    "q08": pair("moe", "trl", t=1.2, model={"num_experts_per_tok": 4}, batch=3),
    "q09": pair("llama", "plain", new=(56, 64), count=8),
    "q10": pair("qwen3", "verl", new=(14, 18), count=24, batch=12),
    "q11": pair(
        "llama", "nemo-rl", recipe="blockwise", served="fp8-block-ue8m0", engines=[{"rule": BLOCKWISE, "read": True}]
    ),
    "q12": pair("qwen3", "plain", recipe="rowwise", engines=[{"rule": ROWWISE}]),
    "q13": pair(
        "llama",
        "trl",
        t=0.8,
        model=SMALL,
        recipe="blockwise_fp32",
        served="fp8-block",
        engines=[{"rule": BLOCKWISE_FP32, "read": True}],
    ),
    "q14": pair("qwen3", "verl", recipe="mxfp8", engines=[{"rule": MX}]),
    "q15": pair("llama", "plain", rate=2e-3),
    "q16": pair("qwen3", "nemo-rl", change={}),
    "q17": pair("llama", "verl", prompt=(4, 24), new=(4, 36), batch=4),
    "q18": pair("qwen3", "trl", cut={"top_p": 0.9}, tell="raw"),
    "q19": pair("llama", "plain", mode="packed", attention="eager"),
    "q20": pair("llama", "verl", greedy=True, engines=[{"rule": FOUR}]),
}
BATCHES = {"q02": 6, "q05": 2, "q17": 12, "q20": 3}


def variant(net, base, spec, case, seed, place):
    """The model of one engine: weights, config and casts of its own."""
    spec = dict(spec)
    served = mixed(net, base, spec.pop("stale")) if "stale" in spec else copy.deepcopy(net)
    if "change" in case:
        changed = type(net)(type(net.config)(**{**net.config.to_dict(), **case["change"]})).bfloat16().eval()
        changed.load_state_dict(served.state_dict())
        served = changed
    with torch.no_grad():
        for name, weight in served.named_parameters():
            if "ones" in case and re.search(case["ones"], name):
                weight.fill_(1.0)
    if "adapter" in spec:
        size, source = spec.pop("adapter"), torch.Generator().manual_seed(seed + 7)
        for name, weight in served.named_parameters():
            if re.search(r"(q|v|down)_proj", name):
                down, up = (torch.randn(n, 4, generator=source) for n in (weight.shape[1], weight.shape[0]))
                weight.data = (weight.float() + size * (up @ down.T) / (4 * weight.shape[1]) ** 0.5).bfloat16()
    if "attention" in case:
        served.set_attn_implementation(case["attention"])
    codes = codes_of(place / "served") if spec.pop("read", False) else None
    return (serve(served, files=codes, **spec) if spec else served), served


def make(name, folder):
    """Makes one pair; returns its KL and the call of the command."""
    case, seed, place = PAIRS[name], 4000 + 10 * int(name[1:]) + 1000 * (name[0] == "q"), folder / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    base = build(case["kind"], seed, **case.get("model", {}))
    net = advance(base, seed + 1, case["rate"]) if "rate" in case else base
    net.save_pretrained(place / "train")
    if "served" in case:
        trained, keep = trainer(net, case["recipe"], None, None), case.get("keep", ())
        ottava.export(trained, place / "served", layout=case["served"], keep=keep, recast=case.get("recast", False))
    engines = [variant(net, base, spec, case, seed, place) for spec in case.get("engines", [{}])]
    if "change" in case or "ones" in case:
        engines[0][1].save_pretrained(place / "served")
    nets, switch = [engine for engine, _ in engines], case.get("switch")

    def pick(number, step):
        return nets[step >= switch] if switch else nets[number % len(nets)]

    rows = rollout(pick, case, seed + 2, net.config.vocab_size)
    torch.manual_seed(seed + 3)
    training = trainer(net, case.get("recipe"), case.get("kept"), case.get("dropout"))
    score(training, rows, case["t"], BATCHES.get(name, 4), case.get("mode", "padded"))
    if "edit" in case:
        case["edit"](rows)
    call = ["ottava", "parity", str(place / "train")]
    if (place / "served").exists():
        call += [str(place / "served"), "-e", "vllm"]
    if "recipe" in case:
        call += ["--recipe", case["recipe"]]
    call += ["--logprobs", str(dump(rows, case["fmt"], place)), "--format", case["fmt"]]
    if "rate" in case:
        base.save_pretrained(place / "before")
        call += ["--before", str(place / "before")]
    if case["t"] != 1.0:
        call += ["--temperature", str(case["t"])]
    return divergence(rows), " ".join(call)


def main(folder, *names):
    for name in PAIRS:
        if not names or any(fnmatch.fnmatch(name, pattern) for pattern in names):
            value, call = make(name, Path(folder))
            print(f"{name}  KL {value:.3g}  {call}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
