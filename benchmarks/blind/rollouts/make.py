"""Makes pairs of a rollout and a training, some with a hidden fault: python make.py FOLDER [NAME...]

Prints for each pair the call of the command. The engine is plain torch and transformers with a cache; the training
is transformers, or ottava.convert where training casts. `python make.py --truth` prints truth.yaml.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
import transformers
from pairs import PAIRS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
BF16 = torch.bfloat16
SHARED = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
QWEN = {**SHARED, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOE = {**QWEN, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
BASES = {
    "llama": ("llama", {**SHARED, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 384}),
    "llama_deep": ("llama", {**SHARED, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512}),
    "qwen": ("qwen3", {**QWEN, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 320}),
    "qwen_wide": ("qwen3", {**QWEN, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 448}),
    "moe": ("qwen3_moe", {**MOE, "num_experts": 8, "num_hidden_layers": 2, "vocab_size": 384}),
    "moe_deep": ("qwen3_moe", {**MOE, "num_experts": 6, "num_hidden_layers": 3, "vocab_size": 256}),
}


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints: a model with peaked answers, and three steps of a policy gradient
# ---------------------------------------------------------------------------------------------------------------------
def initialize(model: nn.Module, seed: int) -> None:
    """Weights whose rows differ in size, a few loud channels, and logits of standard deviation 2."""
    noise = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data = 1 + 0.2 * torch.randn(weight.shape, generator=noise)
            if "layernorm" in name:
                weight.data[torch.randperm(len(weight), generator=noise)[:4]] *= 4
            continue
        std = 1.0 if "embed" in name else 2.0 / 16 if "lm_head" in name else weight.shape[-1] ** -0.5
        gain = {"o_proj": 0.5, "down_proj": 0.5, "q_proj": 1.5, "mlp.gate.": 2.5}
        std *= next((value for part, value in gain.items() if part in name), 1.0)
        rows = torch.exp(0.4 * torch.randn(*weight.shape[:-1], 1, generator=noise))
        weight.data = std * rows * torch.randn(weight.shape, generator=noise)


def checkpoints(root: Path, base: str) -> Path:
    """The folder with step-0 to step-3 of one model; made once."""
    place = root / "models" / base
    if (place / "step-3").exists():
        return place
    family, fields = BASES[base]
    seed = int(hashlib.sha256(base.encode()).hexdigest()[:6], 16)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **fields, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    initialize(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.0)
    noise = torch.Generator().manual_seed(seed + 1)
    for step in range(4):
        model.to(BF16).save_pretrained(place / f"step-{step}")
        model.float()
        tokens = torch.randint(3, fields["vocab_size"], (6, 32), generator=noise)
        advantage = torch.randn(6, 1, generator=noise)
        logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        loss = -(advantage * logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return place


def load(folder: Path, **changes: object) -> nn.Module:
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=BF16, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# casts as the engines define them
# ---------------------------------------------------------------------------------------------------------------------
def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def scaled(x: Tensor, amax: Tensor, power: bool) -> Tensor:
    """Engines divide activations by their scale; casts of weights in a refit multiply by its reciprocal."""
    amax = amax.clamp(min=1e-12)
    if power:
        scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    elif amax.ndim < 4:
        scale = amax / 448
    else:
        factor = 448 / amax
        return e4m3(x * factor) * (1 / factor)
    return e4m3(x / scale) * scale


def cast(x: Tensor, rule: str) -> Tensor:
    """x after the cast, in FP32. A rule is tensor, row, group32, group128 or block, with -pow2 for such scales."""
    shape, x, (kind, *power) = x.shape, x.float().flatten(0, -2), rule.split("-")
    if kind == "none":
        return x.reshape(shape)
    if kind == "tensor":
        out = scaled(x, x.abs().amax(), bool(power))
    elif kind == "row":
        out = scaled(x, x.abs().amax(-1, keepdim=True), bool(power))
    elif kind.startswith("group"):
        groups = x.unflatten(-1, (-1, int(kind[5:])))
        out = scaled(groups, groups.abs().amax(-1, keepdim=True), bool(power)).flatten(-2)
    else:
        rows, columns = x.shape
        tiles = nn.functional.pad(x, (0, -columns % 128, 0, -rows % 128))
        tiles = tiles.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        tiles = scaled(tiles, tiles.abs().amax((1, 3), keepdim=True), bool(power))
        out = tiles.flatten(2).flatten(0, 1)[:rows, :columns]
    return out.reshape(shape)


class CastLinear(nn.Module):
    """A linear layer of the engine: codes times scales, sums in FP32, an answer in BF16."""

    def __init__(self, weight: Tensor, weights: str, activations: str) -> None:
        super().__init__()
        self.weight, self.rule = cast(weight, weights), activations

    def forward(self, x: Tensor) -> Tensor:
        return (cast(x, self.rule) @ self.weight.T).to(BF16)


class SplitLinear(nn.Module):
    """A row-parallel linear layer: every rank rounds its part to BF16 before the sum."""

    def __init__(self, weight: Tensor, ranks: int) -> None:
        super().__init__()
        self.parts = weight.chunk(ranks, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.chunk(len(self.parts), dim=-1)
        total = nn.functional.linear(pieces[0], self.parts[0])
        for piece, part in zip(pieces[1:], self.parts[1:], strict=True):
            total = total + nn.functional.linear(piece, part)
        return total


class Experts(nn.Module):
    """Experts of the engine, one after the other; with a capacity, late tokens of an expert are dropped."""

    def __init__(self, old: nn.Module, weights: str, activations: str, capacity: float) -> None:
        super().__init__()
        count = old.num_experts
        if weights == "none":
            self.up, self.down = [*old.gate_up_proj], [*old.down_proj]
        else:
            halves = [gate_up.chunk(2) for gate_up in old.gate_up_proj]
            self.up = [torch.cat([cast(half, weights) for half in pair]) for pair in halves]
            self.down = [cast(old.down_proj[i], weights) for i in range(count)]
        self.rule, self.capacity, self.act = activations, capacity, old.act_fn

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype == BF16:
            return nn.functional.linear(x, weight)
        return (cast(x, self.rule) @ weight.T).to(BF16)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        limit = math.ceil(self.capacity * chosen.numel() / len(self.up)) if self.capacity else None
        for index in range(len(self.up)):
            tokens, slot = torch.where(chosen == index)
            tokens, slot = tokens[:limit], slot[:limit]
            if len(tokens):
                gate, up = self.product(x[tokens], self.up[index]).chunk(2, -1)
                mixed = self.product(self.act(gate) * up, self.down[index]) * shares[tokens, slot, None]
                out.index_add_(0, tokens, mixed.float())
        return out.to(BF16)


# ---------------------------------------------------------------------------------------------------------------------
# the engine
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Setup:
    """What an engine does. `casts` is a list of (pattern, weights, activations); the first that matches counts."""

    step: int = 3
    older: tuple = ()  # (pattern, step): these tensors are of that step
    experts_from: int = 0  # of older experts: the first that is old
    casts: tuple = ()
    head: tuple = ()
    router: tuple = ()  # (rule, layers)
    cache: tuple = ()  # (which of "kv", layers)
    ranks: int = 1
    capacity: float = 0.0
    bias: float = 0.0  # of noise on the router's logits
    prefix: str = ""  # "older": keys and values of the prompt by step-1; "other": of another prompt, for some rows
    chunk: int = 0
    fields: dict = field(default_factory=dict)


class Cache(DynamicCache):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.kinds, self.cast_layers = setup.cache or ("", ())

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: object, **more: object) -> tuple[Tensor, Tensor]:
        if layer in self.cast_layers:
            keys = e4m3(keys.float()).to(BF16) if "k" in self.kinds else keys
            values = e4m3(values.float()).to(BF16) if "v" in self.kinds else values
        return super().update(keys, values, layer, *args, **more)


class Engine:
    """A model that generates token by token with a cache."""

    def __init__(self, steps: Path, setup: Setup, served: Path | None = None) -> None:
        self.setup, self.routes = setup, []
        self.model = load(served or steps / f"step-{setup.step}", **setup.fields)
        codes = self.codes(served) if served else False
        self.older(steps)
        layers = self.model.config.num_hidden_layers
        for name, module in list(self.model.named_modules()):
            if name.endswith("mlp.gate") or isinstance(module, nn.Embedding):
                continue
            rule = next((rest for pattern, *rest in setup.casts if fnmatch(name, pattern)), None)
            if name == "lm_head":
                rule = setup.head or None
            if hasattr(module, "gate_up_proj"):
                self.replace(name, Experts(module, *(rule or ("none", "none")), setup.capacity))
            elif isinstance(module, nn.Linear) and rule:
                weights = "none" if codes else rule[0]
                self.replace(name, CastLinear(module.weight.data, weights, rule[1]))
            elif isinstance(module, nn.Linear) and setup.ranks > 1 and name.endswith(("o_proj", "down_proj")):
                self.replace(name, SplitLinear(module.weight.data, setup.ranks))
        for index in range(layers):
            gate = getattr(self.model.model.layers[index].mlp, "gate", None)
            if gate is not None:
                self.router(gate, index)
        self.draft = Engine(steps, Setup(step=1)) if setup.prefix == "older" else self

    def codes(self, served: Path) -> bool:
        """Puts the numbers of a served FP8 checkpoint into the model; a BF16 checkpoint is loaded already."""
        tensors = load_file(served / "model.safetensors")
        scales = [name for name in tensors if name.endswith("_scale_inv")]
        for name in scales:
            weight, scale = tensors[name.removesuffix("_scale_inv")].float(), tensors[name].float()
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
            owner = self.model.get_submodule(name.removesuffix(".weight_scale_inv"))
            owner.weight = nn.Parameter(weight * scale, requires_grad=False)
        return bool(scales)

    def replace(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, module)

    def older(self, steps: Path) -> None:
        if self.setup.older:
            pattern, step = self.setup.older
            old = dict(load(steps / f"step-{step}").named_parameters())
            for name, weight in self.model.named_parameters():
                if fnmatch(name, pattern):
                    first = self.setup.experts_from if weight.ndim == 3 else 0
                    weight.data[first:] = old[name].data[first:]

    def router(self, gate: nn.Module, index: int) -> None:
        rule, layers = self.setup.router or ("none", ())
        if index in layers:
            gate.weight.data = cast(gate.weight.data, rule).to(BF16)
            gate.register_forward_pre_hook(lambda _, args: (cast(args[0], rule).to(BF16), *args[1:]))
        noise = self.setup.bias * torch.randn(len(gate.weight), generator=torch.Generator().manual_seed(index))

        def choose(module: nn.Module, _: object, answer: tuple) -> tuple:
            logits, shares, chosen = answer
            if self.setup.bias:
                chosen = (logits.float() + noise).topk(module.top_k, dim=-1).indices
                shares = logits.float().softmax(-1).gather(-1, chosen)
                shares = (shares / shares.sum(-1, keepdim=True)).to(BF16)
            self.routes[-1].append(chosen)
            return logits, shares, chosen

        gate.register_forward_hook(choose)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        self.routes.append([])
        return self.model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].float()

    def prefill(self, prompts: Tensor, cache: Cache) -> Tensor:
        chunk = self.setup.chunk or prompts.shape[1]
        if self.setup.prefix == "older":
            self.draft.step(prompts[:, :-1], cache)
            return self.step(prompts[:, -1:], cache)
        if self.setup.prefix == "other":
            self.step(prompts[:, :-1], cache)
            for layer in cache.layers:
                for kept in (layer.keys, layer.values):
                    kept[::3, :, :6] = kept[::3, :, :6].roll(1, 0)
            return self.step(prompts[:, -1:], cache)
        for start in range(0, prompts.shape[1], chunk):
            logits = self.step(prompts[:, start : start + chunk], cache)
        return logits


@dataclass
class Sampling:
    temperature: float = 1.0
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    logprobs: str = "processed"  # or raw, or divided

    def choose(self, logits: Tensor, seen: Tensor, noise: torch.Generator) -> tuple[Tensor, Callable]:
        """The next tokens, and a function that gives the log-probability of any."""
        raw = logits.log_softmax(-1)
        if self.penalty != 1:
            told = torch.zeros_like(logits).scatter(1, seen, 1.0).bool()
            logits = torch.where(told, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        logits = logits / self.temperature
        if self.top_k:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            share = ordered.softmax(-1)
            drop = share.cumsum(-1) - share > self.top_p
            logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
        final = logits.log_softmax(-1)
        tokens = final.argmax(-1) if self.greedy else torch.multinomial(final.exp(), 1, generator=noise).squeeze(1)
        table = {"processed": final, "raw": raw, "divided": raw / self.temperature}[self.logprobs]
        return tokens, lambda chosen: table.gather(1, chosen[:, None]).squeeze(1)


@torch.no_grad()
def generate(engine: Engine, prompts: Tensor, plan: dict, noise: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probabilities of the tokens after the prompt, and routes, of rows with prompts of one length.

    plan: steps, sampling, forced (step -> tokens of a tool), swap (step, engine) for weights that arrive in flight.
    """
    cache, tokens, numbers = Cache(engine.setup), prompts, []
    engine.routes, log = [], []
    logits = engine.prefill(prompts, cache)
    log += engine.routes
    for step in range(plan["steps"]):
        following, logprob = plan["sampling"].choose(logits, tokens, noise)
        following = plan["forced"].get(step, following)[: len(prompts)]
        numbers.append(logprob(following))
        tokens = torch.cat([tokens, following[:, None]], 1)
        if plan["swap"] and step == plan["swap"][0]:
            engine = plan["swap"][1]
        engine.routes = []
        logits = engine.step(following[:, None], cache)
        log += engine.routes
    routes = torch.empty(0)
    if log and log[0]:
        stacks = [torch.stack([one.unflatten(0, (len(prompts), -1)) for one in part], 2) for part in log]
        routes = torch.cat(stacks, 1)
    return tokens, torch.stack(numbers, 1), routes


# ---------------------------------------------------------------------------------------------------------------------
# the trainer
# ---------------------------------------------------------------------------------------------------------------------
def trained(folder: Path, pair: dict) -> nn.Module:
    model = load(folder, attention_dropout=pair.get("dropout", 0.0))
    if pair.get("dropout"):
        model.train()
    if pair.get("recipe"):
        import ottava
        from ottava.nn.convert import default_filter

        def admit(name: str, layer: nn.Module) -> bool | str:
            kept = any(fnmatch(name, pattern) for pattern in pair.get("training_keeps", ()))
            return False if kept or name == "lm_head" else default_filter(name, layer)

        ottava.convert(model, pair["recipe"], filter=admit)
    return model


@torch.no_grad()
def recompute(model: nn.Module, rows: list[Tensor], pair: dict) -> list[Tensor]:
    """Training's log-probability of every token but the first, which has 0."""
    batch, temperature = pair.get("micro_batch", 4), pair.get("training_temperature", pair.get("temperature", 1.0))
    torch.manual_seed(5)
    out = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        width = max(len(row) for row in part)
        if pair.get("packed"):
            tokens, mask, position = torch.cat(part)[None], None, None
        else:
            left = pair.get("pad") == "left"
            pads = [(width - len(row), 0) if left else (0, width - len(row)) for row in part]
            tokens = torch.stack([nn.functional.pad(row, pad) for row, pad in zip(part, pads, strict=True)])
            mask = torch.stack([nn.functional.pad(torch.ones_like(r), p) for r, p in zip(part, pads, strict=True)])
            position = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=position, use_cache=False).logits
        found = (logits.float() / temperature).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        found = nn.functional.pad(found, (1, 0))
        if pair.get("packed"):
            pieces = [piece.clone() for piece in found[0].split([len(row) for row in part])]
            for piece in pieces:
                piece[0] = 0
            out += pieces
        else:
            out += [
                row[keep.bool()] * (torch.arange(int(keep.sum())) > 0) for row, keep in zip(found, mask, strict=True)
            ]
    return out


# ---------------------------------------------------------------------------------------------------------------------
# a pair
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Row:
    tokens: Tensor
    prompt: int
    mask: Tensor  # over all tokens
    rollout: Tensor
    training: Tensor | None = None
    routes: Tensor | None = None


def engines(steps: Path, pair: dict, served: Path | None) -> tuple[Engine, Engine]:
    first = Engine(steps, Setup(**pair.get("engine", {})), served)
    second = Engine(steps, Setup(**pair["second"]), served) if "second" in pair else first
    return first, second


def rollout(steps: Path, pair: dict, served: Path | None, seed: int) -> list[Row]:
    """Rows of two or three groups, each with a prompt length of its own. The second engine has the later groups."""
    noise = torch.Generator().manual_seed(seed)
    first, second = engines(steps, pair, served)
    vocabulary, count = first.model.config.vocab_size, pair.get("rows", 16)
    groups, rows = pair.get("groups", 2), []
    base = {
        name: pair[name] for name in ("temperature", "greedy", "top_k", "top_p", "penalty", "logprobs") if name in pair
    }
    for group in range(groups):
        size = count // groups
        length = pair.get("prompt", 8) + 3 * group
        prompts = torch.randint(3, vocabulary, (size, length), generator=noise)
        steps_made = pair.get("length", 56) - length
        forced = {}
        if pair.get("tool"):
            begin = steps_made // 2
            forced = {begin + i: torch.randint(3, vocabulary, (size,), generator=noise) for i in range(5)}
        late = group >= groups // 2
        sampling = Sampling(**{**base, **(pair.get("second_sampling", {}) if late else {})})
        swap = (int(steps_made * pair["swap"]), second) if "swap" in pair else None
        plan = {"steps": steps_made, "sampling": sampling, "forced": forced, "swap": swap}
        engine = second if late and "swap" not in pair else first
        tokens, numbers, routes = generate(engine, prompts, plan, noise)
        for index in range(size):
            end = int(torch.randint(int(steps_made * 0.6), steps_made + 1, (1,), generator=noise)) + length
            mask = torch.arange(end) >= length
            for step in forced:
                mask[length + step : length + step + 1] = False
            values = torch.cat([torch.zeros(length), numbers[index]])[:end] * mask
            kept = routes[index, :end] if routes.numel() else None
            rows.append(Row(tokens[index, :end], length, mask, values, routes=kept))
    order = torch.randperm(len(rows), generator=noise).tolist()
    return rows if pair.get("in_order") else [rows[index] for index in order]


def edit(rows: list[Row], pair: dict, seed: int) -> None:
    """Faults of bookkeeping in the rollout's list."""
    noise = torch.Generator().manual_seed(seed)
    kind = pair.get("edit", "")
    for index, row in enumerate(rows):
        where = row.mask.nonzero().squeeze(1)
        values = row.rollout[where]
        if kind == "late" or (kind == "late third" and index % 3 == 1) or (kind == "late half" and index % 2):
            values = torch.cat([values.new_zeros(1), values[:-1]])
        elif kind == "early":
            values = torch.cat([values[1:], values[-1:]])
        elif kind == "late after tool":
            cut = int((where[1:] - where[:-1] > 1).nonzero()[0, 0]) + 1 if (where.diff() > 1).any() else len(values)
            values = torch.cat([values[:cut], values[cut : cut + 1], values[cut:-1]]) if cut < len(values) else values
        elif kind == "zeros":
            values = torch.where(torch.arange(len(values)) >= int(0.8 * len(values)), 0.0, values)
        elif kind == "-9999":
            values = torch.where(torch.rand(len(values), generator=noise) < 1 / 12, -9999.0, values)
        row.rollout[where] = values


def write(folder: Path, rows: list[Row], pair: dict) -> Path:
    name = pair["format"]
    if name == "nemo-rl":
        return write_nemo(folder / "train_data_step1.jsonl", rows)
    if name in ("verl", "trl"):
        return write_two_parts(folder / "dump.pt", rows, name == "verl")
    if name == "plain.safetensors":
        return write_plain_tensors(folder / "dump.safetensors", rows)
    path = folder / "dump.jsonl"
    with path.open("w") as file:
        for row in rows:
            line = {
                "token_ids": row.tokens.tolist(),
                "mask": row.mask.int().tolist(),
                "rollout_raw_logprob": row.rollout.tolist(),
                "prev_recompute_raw_logprob": row.training.tolist(),
            }
            if pair.get("routes"):
                line["routed_experts"] = row.routes.tolist()
            if pair.get("first_forward"):
                line["first_train_forward_raw_logprob"] = row.training.tolist()
            file.write(json.dumps(line) + "\n")
    return path


def padded(values: list[Tensor], left: bool = False) -> Tensor:
    width = max(len(value) for value in values)
    pads = [(width - len(v), 0) if left else (0, width - len(v)) for v in values]
    return torch.stack([nn.functional.pad(v, pad) for v, pad in zip(values, pads, strict=True)]).contiguous()


def write_nemo(path: Path, rows: list[Row]) -> Path:
    columns = {
        "token_ids": padded([row.tokens for row in rows]),
        "token_loss_mask": padded([row.mask.long() for row in rows]),
        "generation_logprobs": padded([row.rollout for row in rows]),
        "prev_logprobs": padded([row.training for row in rows]),
        "input_lengths": torch.tensor([len(row.tokens) for row in rows]),
    }
    with path.open("w") as file:
        for index in range(len(rows)):
            line = {"idx": index, **{name: column[index].tolist() for name, column in columns.items()}}
            file.write(json.dumps(line) + "\n")
    return path


def write_plain_tensors(path: Path, rows: list[Row]) -> Path:
    tensors = {
        "token_ids": padded([row.tokens for row in rows]),
        "mask": padded([row.mask.long() for row in rows]),
        "rollout_raw_logprob": padded([row.rollout for row in rows]),
        "prev_recompute_raw_logprob": padded([row.training for row in rows]),
        "lengths": torch.tensor([len(row.tokens) for row in rows]),
    }
    save_file(tensors, path)
    return path


def write_two_parts(path: Path, rows: list[Row], verl: bool) -> Path:
    prompts = padded([row.tokens[: row.prompt] for row in rows], left=True)
    asked = padded([torch.ones(row.prompt, dtype=torch.long) for row in rows], left=True)
    answers = padded([row.tokens[row.prompt :] for row in rows])
    told = padded([torch.ones(len(row.tokens) - row.prompt, dtype=torch.long) for row in rows])
    counted = padded([row.mask[row.prompt :].long() for row in rows])
    rollouts = padded([row.rollout[row.prompt :] for row in rows])
    training = padded([row.training[row.prompt :] for row in rows])
    if verl:
        tensors = {
            "prompts": prompts,
            "responses": answers,
            "input_ids": torch.cat([prompts, answers], 1),
            "attention_mask": torch.cat([asked, told], 1),
            "response_mask": counted,
            "rollout_log_probs": rollouts,
            "old_log_probs": training,
        }
    else:
        tensors = {
            "prompt_ids": prompts,
            "prompt_mask": asked,
            "completion_ids": answers,
            "completion_mask": counted,
            "sampling_per_token_logps": rollouts,
            "old_per_token_logps": training,
            "advantages": torch.zeros(len(rows)),
        }
    torch.save(tensors, path)
    return path


def serve(steps: Path, folder: Path, pair: dict) -> Path | None:
    """The folder that the engine reads, where the call names one."""
    if "served" not in pair:
        return None
    place, wanted = folder / "served", pair["served"]
    if "layout" in wanted:
        import ottava

        ottava.export(steps / "step-3", place, layout=wanted["layout"], recast=True, keep=wanted.get("keep", ()))
        return place
    shutil.copytree(steps / "step-3", place)
    if "config" in wanted:
        fields = json.loads((place / "config.json").read_text())
        for path, value in wanted["config"].items():
            *parents, leaf = path.split("/")
            inner = fields
            for parent in parents:
                inner = inner[parent]
            inner[leaf] = value
        (place / "config.json").write_text(json.dumps(fields, indent=2))
    if "tensors" in wanted:
        tensors = load_file(place / "model.safetensors")
        pattern, factor = wanted["tensors"]
        changed = {name: t * factor if fnmatch(name, pattern) else t for name, t in tensors.items()}
        save_file(changed, place / "model.safetensors", metadata={"format": "pt"})
    return place


def divergence(rows: list[Row]) -> float:
    gaps = torch.cat([(row.training - row.rollout)[row.mask] for row in rows]).double().clamp(-5, 5)
    return float((gaps.exp() - 1 - gaps).mean())


def make(root: Path, name: str, pair: dict) -> tuple[str, float]:
    """Makes one pair; the call of the command, and the KL."""
    steps = checkpoints(root, pair["base"])
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seed = pair.get("seed", int(hashlib.sha256(name.encode()).hexdigest()[:6], 16))
    served = serve(steps, folder, pair)
    rows = rollout(steps, pair, served, seed)
    found = recompute(trained(steps / "step-3", pair), [row.tokens for row in rows], pair)
    for row, values in zip(rows, found, strict=True):
        row.training = values
    edit(rows, pair, seed)
    path = write(folder, rows, pair)
    words = ["ottava", "parity"]
    if not pair.get("lists_only"):
        words.append(str(steps / "step-3"))
        words += [str(served)] if served else []
        words += ["-e", pair["reads"]] if "reads" in pair else []
        words += ["--recipe", pair["recipe"]] if pair.get("recipe") else []
        for step in pair.get("before", ()):
            words += ["--before", str(steps / f"step-{step}")]
    words += ["--logprobs", str(path)]
    temperature = pair.get("training_temperature", pair.get("temperature", 1.0))
    words += ["--temperature", str(temperature)] if temperature != 1 else []
    return " ".join(words), divergence(rows)


def named() -> dict[str, dict]:
    """Names that say nothing, in an order that says nothing."""
    order = sorted(PAIRS, key=lambda pair: hashlib.sha256(pair["key"].encode()).hexdigest())
    return {f"rollout_{index:02}": pair for index, pair in enumerate(order)}


def truth() -> None:
    for name, pair in named().items():
        line = {"name": name, "healthy": not pair["causes"], "causes": pair["causes"], "truth": pair["truth"]}
        print("- " + json.dumps({**line, "source": pair["source"]} if pair.get("source") else line))


def main() -> None:
    if sys.argv[1:] == ["--truth"]:
        truth()
        return
    if len(sys.argv) < 2:
        sys.exit("python make.py FOLDER [NAME...]")
    root, wanted = Path(sys.argv[1]).resolve(), sys.argv[2:]
    for name, pair in named().items():
        if not wanted or name in wanted:
            begin = time.process_time()
            call, kl = make(root, name, pair)
            print(call, flush=True)
            print(f"  {name}: KL {kl:.3g}, {time.process_time() - begin:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
