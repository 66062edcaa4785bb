"""Pairs of a rollout and a training, healthy or with a hidden fault: `python make.py FOLDER [NAME...]`.

Each pair is a folder with TRAIN (a checkpoint in BF16), what else the call needs, and a dump; stdout has the calls,
stderr the KLs. The engine is written here in plain torch around transformers' models, with a cache of keys and values
in BF16. Its casts follow the public rules of vLLM (scale = amax / 448, codes = x / scale), and where scales are powers
of two those of torchao's rows, TransformerEngine's blocks and MXFP8. Training is transformers with `ottava.convert`.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import nn

import ottava

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning)
HEAD, E4M3_MAX = "lm_head", 448.0


# --- the pairs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """How one replica of the engine computes."""

    weights: str = ""  # tensor, channel, block, mx; channel2, block2: scales are powers of two
    acts: str = ""  # tensor, token, group, mx, static; token2, group2: scales are powers of two
    only: str = ""  # a pattern of linears: others stay in BF16
    skip: str = ""  # a pattern of linears that stay in BF16
    head: bool = False
    router: bool = False
    kv: bool = False  # keys and values in E4M3 with scale 1
    kv_layers: tuple[int, ...] = ()  # none: all
    ranks: int = 1  # tensor parallelism: sums of so many parts
    stale: str = ""  # a pattern of parameters that come from an earlier step
    age: int = 1
    bug: str = ""
    size: float = 0.0  # of the range of static scales, in maxima of the first prompts
    config: tuple[tuple[str, object], ...] = ()


BF16 = Engine()
BLOCK = Engine("block", "group")
BLOCK2 = Engine("block2", "group2")
ROW = Engine("channel", "token")
ROW2 = Engine("channel2", "token2")
MX = Engine("mx", "mx")
EXPERTS = r"\.experts$"


@dataclass(frozen=True)
class Pair:
    name: str
    arch: str = "llama"
    engine: Engine = BF16
    recipe: str = ""  # of training
    form: str = "plain"  # plain, plain.pt, plain.safetensors, nemo-rl, verl, trl
    other: Engine | None = None  # another replica, for half of the sequences ...
    switch: int = 0  # ... or for all of them, from this token on
    temperature: float = 1.0  # by which the engine divides its logits
    told: float = 0.0  # by which training does (0: the same)
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    processed: bool = False  # log-probabilities after top-p and top-k
    raw: str = ""  # rows whose log-probabilities are those before the temperature: all, half
    edit: str = ""  # what happens to the list afterwards
    trainer: str = ""
    micro: int = 4
    sequences: int = 16
    prompt: tuple[int, int] = (6, 14)
    answer: tuple[int, int] = (24, 40)
    layout: str = ""  # of CHECKPOINT
    emulate: str = ""  # the engine of the call
    before: int = 0  # earlier checkpoints in the call
    routes: bool = False  # the dump has routed_experts
    holes: bool = False  # tokens of tools in the middle of an answer
    clear: bool = False  # every token's experts are far from a tie
    tied: bool = False

    @property
    def divisor(self) -> float:
        return self.told or self.temperature


def scene(**settings: object):
    """A Pair with defaults of its kind."""
    return lambda name, **more: Pair(name, **{**settings, **more})


block = scene(recipe="blockwise", engine=BLOCK2)
row = scene(recipe="rowwise", engine=ROW2)
moe = scene(arch="moe", sequences=12, answer=(20, 32))

LISTS = [
    Pair("untempered_training", "qwen3", temperature=1.25, told=1.0, form="nemo-rl"),
    Pair("logp_over_t", "qwen3", temperature=1.3, edit="divide", raw="all", form="verl"),
    Pair("after_top_k", "qwen3", top_k=24, processed=True, temperature=1.2, form="trl"),
    Pair("early_half", "qwen3", edit="early half", form="plain"),
    Pair("cut_tails", edit="zero tails", form="verl"),
    Pair("sentinel_first", "qwen3", edit="sentinel first", form="trl"),
    Pair("late_after_tool", "qwen3", edit="late after tool", holes=True, form="plain"),
]
STALE = [
    Pair("two_steps_old", "qwen3", engine=Engine(stale=".", age=2), before=2, form="verl"),
    moe("experts_old", engine=Engine(stale="experts"), before=1, form="plain"),
    Pair("in_flight", engine=Engine(stale="."), other=BF16, switch=16, before=1, form="plain.safetensors"),
]
CASTS = [
    block("not_cast", arch="qwen3", engine=BF16, form="verl"),
    moe("cast_experts", engine=replace(ROW, only=EXPERTS), form="plain"),
    row("left_out_ends", engine=replace(ROW2, skip=r"layers\.[03]\."), form="nemo-rl", arch="llama4"),
    block("fp32_scales", engine=Engine("block", "group2"), form="plain"),
    row("one_scale_a_tensor", engine=Engine("tensor", "token2"), arch="qwen3", form="trl"),
    block("rows_for_blocks", engine=Engine("channel", "group2"), form="nemo-rl"),
    block("weights_only", engine=Engine("block2", ""), form="verl"),
    row("served_by_token", engine=Engine("channel2", "token"), layout="compressed-tensors-channel", emulate="vllm"),
    row("clipped", engine=Engine("channel2", "static", size=0.3), form="nemo-rl"),
    moe("router_cast", engine=Engine("channel", "token", only="^$", router=True), form="plain"),
    Pair("cache_one_layer", engine=Engine(kv=True, kv_layers=(0,)), form="plain", answer=(32, 48)),
]
OTHERS = [
    Pair("theta", engine=Engine(config=(("rope_theta", 500.0),)), layout="bf16", emulate="vllm", form="plain.pt"),
    moe(
        "norm_topk", engine=Engine(config=(("norm_topk_prob", False),)), layout="bf16", emulate="sglang", form="nemo-rl"
    ),
    Pair("dropout", "qwen3", trainer="dropout", form="trl"),
    Pair("packed", trainer="packed", form="plain"),
    Pair("decode_position", "qwen3", engine=Engine(bug="position"), form="verl"),
    block("no_q_norm", arch="qwen3", engine=replace(BLOCK2, bug="qnorm"), form="plain"),
]
TWO = [
    Pair("old_and_raw", engine=Engine(stale="."), before=1, temperature=0.8, raw="all", form="plain"),
    Pair("cast_and_raw_half", "qwen3", engine=ROW, temperature=0.8, raw="half", form="trl"),
    Pair("head_and_cache", engine=Engine("channel", "token", only="^$", head=True, kv=True), form="nemo-rl"),
]
HEALTHY = [
    Pair("ok_one_by_one", micro=1, form="plain"),
    Pair("ok_tempered", "qwen3", temperature=0.8, form="trl"),
    Pair("ok_greedy", greedy=True, form="verl"),
    moe("ok_experts", clear=True, form="nemo-rl"),
    Pair("ok_two_ranks", engine=Engine(ranks=2), form="plain.pt"),
    Pair("ok_tied_long", "qwen3", form="verl", answer=(48, 56), sequences=8, tied=True),
    Pair("ok_block", recipe="blockwise_fp32", engine=BLOCK, layout="fp8-block", emulate="transformers", form="plain"),
    row("ok_row", arch="qwen3", form="nemo-rl"),
    moe("ok_block_experts", recipe="blockwise", engine=BLOCK2, form="plain", clear=True),
    block("ok_two_powers", engine=replace(BLOCK2, ranks=2), form="trl"),
    Pair("ok_mx", recipe="mxfp8", engine=MX, form="plain"),
    Pair("ok_refit", before=2, form="verl"),
    Pair("ok_short", "qwen3", sequences=8, answer=(10, 16), form="nemo-rl"),
    Pair("ok_hot", temperature=1.3, layout="bf16", emulate="vllm", form="trl"),
    row("ok_row_tempered", engine=replace(ROW2, ranks=2), temperature=0.7, form="verl", prompt=(4, 20)),
    moe("ok_routes", engine=Engine(ranks=2), routes=True, form="plain", clear=True),
    Pair("ok_tools", "qwen3", holes=True, form="plain.safetensors"),
    Pair("ok_two_replicas", engine=Engine(ranks=2), other=Engine(ranks=4), form="nemo-rl"),
    block("ok_block_greedy", arch="qwen3", greedy=True, form="trl"),
    Pair("ok_top_p_raw", "qwen3", top_p=0.9, form="plain"),
]
PAIRS = LISTS + STALE + CASTS + OTHERS + TWO + HEALTHY


# --- models -----------------------------------------------------------------------------------------------------------


def config_of(arch: str, pair: Pair) -> transformers.PretrainedConfig:
    common = {
        "vocab_size": 384,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": pair.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if arch == "moe":
        small = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 2}
        experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**{**common, **small, **experts})
    if arch == "qwen3":
        return transformers.Qwen3Config(**{**common, "intermediate_size": 384, "num_hidden_layers": 2})
    return transformers.LlamaConfig(**{**common, "num_hidden_layers": 4 if arch == "llama4" else 3})


def empty(config: transformers.PretrainedConfig) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


def weights_of(pair: Pair) -> dict[str, torch.Tensor]:
    """Random numbers with the spread of rows and columns that trained weights have; the head is peaked."""
    model, draw = empty(config_of(pair.arch, pair)), torch.Generator().manual_seed(seed_of(pair.name))
    state = {}
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        value = torch.randn(shape, generator=draw)
        if name.endswith("norm.weight"):
            value = torch.exp(0.3 * value)
        elif "embed" in name or HEAD in name:
            value = value * (2.6 / shape[-1] ** 0.5 if HEAD in name or pair.tied else 1.0)
        else:
            spread = [torch.exp(0.4 * torch.randn(n, generator=draw)) for n in shape[-2:]]
            value = value * spread[0][:, None] * spread[1] * 0.8 / shape[-1] ** 0.5
            value = value * (0.5 if "o_proj" in name or "down_proj" in name else 1.0)
        state[name] = value
    if pair.clear:
        clear_routes(state, draw)
    return {name: value.bfloat16() for name, value in state.items()}


def clear_routes(state: dict[str, torch.Tensor], draw: torch.Generator) -> None:
    """Makes every token prefer two experts by far, so that rounding moves no token to another one."""
    routers = [name for name in state if name.endswith("mlp.gate.weight")]
    embedding = next(name for name in state if "embed" in name)
    hidden, experts = state[embedding].shape[1], state[routers[0]].shape[0]
    centre = torch.linalg.qr(torch.randn(hidden, experts, generator=draw))[0].T * hidden**0.5
    for token in range(state[embedding].shape[0]):
        first, second = torch.randperm(experts, generator=draw)[:2].tolist()
        state[embedding][token] = 0.6 * state[embedding][token] + 1.6 * centre[first] + 1.2 * centre[second]
    for name in routers:
        norm = state[name.replace("mlp.gate", "post_attention_layernorm")]
        state[name] = centre / norm / hidden**0.5
    for name in state:
        if "o_proj" in name or "down_proj" in name:
            state[name] *= 0.35


def earlier(state: dict[str, torch.Tensor], age: int) -> dict[str, torch.Tensor]:
    old = {name: value.float() for name, value in state.items()}
    for step in range(age):
        draw = torch.Generator().manual_seed(100 + step)
        for name, value in old.items():
            old[name] = value + 0.05 * state[name].float().std() * torch.randn(value.shape, generator=draw)
    return {name: value.bfloat16() for name, value in old.items()}


def filled(config: transformers.PretrainedConfig, state: dict[str, torch.Tensor]) -> nn.Module:
    model = empty(config)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def seed_of(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % 1_000_003


# --- the engine -------------------------------------------------------------------------------------------------------


def codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def power(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def cast(x: torch.Tensor, rule: str, scale: float = 0.0) -> torch.Tensor:
    """What x is after a cast to E4M3 and back, in FP32."""
    x = x.float()
    if not rule:
        return x
    if rule == "static":
        return codes(x, torch.tensor(scale / E4M3_MAX))
    if rule == "tensor":
        return codes(x, x.abs().amax().clamp(min=1e-10) / E4M3_MAX)
    if rule in ("token", "channel", "token2", "channel2"):
        amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / E4M3_MAX
        return codes(x, power(amax) if rule.endswith("2") else amax)
    if rule in ("block", "block2"):
        rows, columns = x.shape[-2:]
        tiles = x.unflatten(-1, (columns // 128, 128)).unflatten(-3, (rows // 128, 128))
        amax = tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-10) / E4M3_MAX
        return codes(tiles, power(amax) if rule == "block2" else amax).flatten(-4, -3).flatten(-2)
    size = 32 if rule == "mx" else 128
    groups = x.unflatten(-1, (-1, size))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / E4M3_MAX
    return codes(groups, amax if rule == "group" else power(amax)).flatten(-2)


class Casting:
    """A linear (or an expert's) of the engine."""

    def __init__(self, weight: torch.Tensor, engine: Engine, on: bool, ranks: int = 1) -> None:
        self.engine, self.on, self.ranks = engine, on, ranks
        self.weight = cast(weight, engine.weights) if on else weight.float()
        self.amax = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.on and self.engine.acts:
            if not self.amax:
                self.amax = self.engine.size * x.abs().amax().item()
            x = cast(x, self.engine.acts, self.amax)
        parts = zip(x.float().chunk(self.ranks, -1), self.weight.chunk(self.ranks, -1), strict=True)
        total = None
        for a, b in parts:
            part = (a @ b.T).bfloat16()
            total = part if total is None else total + part
        return total


def fused(model: nn.Module, engine: Engine) -> dict[str, torch.Tensor]:
    """Weights that an engine joins have one common scale."""
    joined: dict[str, torch.Tensor] = {}
    if engine.weights != "tensor":
        return joined
    for name, module in model.named_modules():
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if all(isinstance(getattr(module, part, None), nn.Linear) for part in group):
                whole = cast(torch.cat([getattr(module, part).weight for part in group]), "tensor")
                sizes = [getattr(module, part).weight.shape[0] for part in group]
                joined.update({f"{name}.{part}": value for part, value in zip(group, whole.split(sizes), strict=True)})
    return joined


def experts_forward(self: nn.Module, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, (first, second) in enumerate(self.casting):
        token, place = torch.where(index == expert)
        if token.numel() == 0:
            continue
        gate, up = first(x[token]).chunk(2, -1)
        out[token] += second(F.silu(gate) * up).float() * share[token, place, None].float()
    return out.to(x.dtype)


def router_forward(self: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = self.casting(x.reshape(-1, self.hidden_dim))
    chances = F.softmax(logits.float(), -1)
    share, index = torch.topk(chances, self.top_k, -1)
    if self.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    self.seen.append(index)
    return logits, share.to(logits.dtype), index


class Replica:
    """One copy of the model in the engine."""

    def __init__(self, engine: Engine, config: transformers.PretrainedConfig, state: dict[str, torch.Tensor]) -> None:
        config = copy.deepcopy(config)
        for key, value in engine.config:
            if key == "rope_theta":
                config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
            else:
                setattr(config, key, value)
        self.engine, self.model, self.routers = engine, filled(config, state), []
        joined = fused(self.model, engine)
        for name, module in self.model.named_modules():
            self.patch(name, module, joined)

    def casts(self, name: str) -> bool:
        e = self.engine
        return (
            bool(e.weights)
            and (not e.only or bool(re.search(e.only, name)))
            and not (e.skip and re.search(e.skip, name))
        )

    def patch(self, name: str, module: nn.Module, joined: dict[str, torch.Tensor]) -> None:
        e = self.engine
        if isinstance(module, nn.Linear):
            split = e.ranks if name.endswith(("o_proj", "down_proj")) else 1
            module.forward = Casting(module.weight, e, e.head if name == HEAD else self.casts(name), split)
            module.forward.weight = (
                joined.get(name, module.forward.weight) if self.casts(name) else module.forward.weight
            )
        elif hasattr(module, "gate_up_proj"):
            on = self.casts(name)
            pairs = zip(module.gate_up_proj, module.down_proj, strict=True)
            module.casting = [(Casting(up, e, on), Casting(down, e, on, e.ranks)) for up, down in pairs]
            module.forward = MethodType(experts_forward, module)
        elif type(module).__name__.endswith("Router"):
            module.casting, module.seen = Casting(module.weight, e, e.router), []
            module.forward = MethodType(router_forward, module)
            self.routers.append(module)
        if e.bug == "qnorm" and name.endswith("q_norm"):
            module.forward = lambda x: x

    def step(self, tokens: torch.Tensor, mask: torch.Tensor, cache: transformers.DynamicCache) -> torch.Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if self.engine.bug == "position" and cache.get_seq_length():
            positions = positions + 2
        out = self.model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        return out.logits[:, -1].float()


class Cache(transformers.DynamicCache):
    """Keys and values, in E4M3 where the engine has it so."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def update(self, key_states, value_states, layer_idx, *more, **named):
        e = self.engine
        if e.kv and (not e.kv_layers or layer_idx in e.kv_layers):
            one = torch.tensor(1.0)
            key_states, value_states = (codes(x.float(), one).bfloat16() for x in (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *more, **named)


def kept(logits: torch.Tensor, pair: Pair) -> torch.Tensor:
    """Logits after temperature, top-k and top-p, in the order in which vLLM has them."""
    logits = logits / pair.temperature
    if pair.top_k:
        logits[logits < logits.topk(pair.top_k, -1).values[:, -1:]] = -torch.inf
    if pair.top_p < 1:
        order = logits.sort(-1, descending=True)
        chances = order.values.softmax(-1)
        out = chances.cumsum(-1) - chances > pair.top_p
        logits[torch.zeros_like(out).scatter(-1, order.indices, out)] = -torch.inf
    return logits


@torch.no_grad()
def generate(
    pair: Pair, replicas: list[Replica], prompts: list[list[int]], n: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Tokens, their log-probabilities and routes of n tokens after each prompt; prompts are padded on the left."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache, fresh, out, numbers = Cache(replicas[0].engine), tokens, [], []
    for place in range(n + 1):
        replica = replicas[-1 if pair.switch and place >= pair.switch else 0]
        logits = replica.step(fresh, mask, cache)
        if place == n:  # the last token's routes
            break
        shaped = kept(logits, pair)
        fresh = (
            shaped.argmax(-1, keepdim=True) if pair.greedy else torch.multinomial(shaped.softmax(-1), 1, generator=draw)
        )
        raw = logits.log_softmax(-1) if pair.raw == "all" else (logits / pair.temperature).log_softmax(-1)
        numbers.append((shaped.log_softmax(-1) if pair.processed else raw).gather(-1, fresh))
        out.append(fresh)
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
    layers = [torch.cat([i.reshape(len(prompts), -1, i.shape[-1]) for i in r.seen], 1) for r in replicas[0].routers]
    routes = [torch.stack(layers, 2)[i, width - len(p) :] for i, p in enumerate(prompts)] if layers else []
    return torch.cat(out, 1), torch.cat(numbers, 1), routes


@dataclass
class Rollout:
    tokens: list[list[int]]  # prompt and answer
    prompts: list[int]  # their lengths
    mask: list[list[int]]
    numbers: list[list[float]]  # zero at prompts
    routes: list


def half_of(pair: Pair) -> range:
    return range(1, pair.sequences, 2)


def roll(pair: Pair, config: transformers.PretrainedConfig, states: list[dict[str, torch.Tensor]]) -> Rollout:
    draw = torch.Generator().manual_seed(seed_of(pair.name) + 1)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    def replica(engine: Engine) -> Replica:
        state = {
            k: states[engine.age][k] if engine.stale and re.search(engine.stale, k) else v for k, v in states[0].items()
        }
        return Replica(engine, config, state)

    count = pair.sequences
    prompts = [
        torch.randint(1, config.vocab_size, (integer(*pair.prompt),), generator=draw).tolist() for _ in range(count)
    ]
    lengths = [integer(*pair.answer) for _ in range(count)]
    second = list(half_of(pair)) if pair.other and not pair.switch else []
    groups = [([i for i in range(count) if i not in second], pair.engine)] + ([(second, pair.other)] if second else [])
    out = Rollout([[]] * count, [len(p) for p in prompts], [[]] * count, [[]] * count, [None] * count)
    for rows, engine in groups:
        replicas = [replica(engine)] + ([replica(pair.other)] if pair.switch else [])
        fresh, numbers, routes = generate(
            pair, replicas, [prompts[i] for i in rows], max(lengths[i] for i in rows), draw
        )
        for place, i in enumerate(rows):
            begin, n = len(prompts[i]), lengths[i]
            out.tokens[i] = prompts[i] + fresh[place, :n].tolist()
            out.numbers[i] = [0.0] * begin + numbers[place, :n].tolist()
            out.mask[i] = [0] * begin + [1] * n
            if pair.holes:
                out.mask[i][begin + 8 : begin + 13] = [0] * 5
            if routes:
                out.routes[i] = routes[place][: begin + n]
    if pair.raw == "half":
        halve(pair, out, replica(pair.engine))
    return out


@torch.no_grad()
def halve(pair: Pair, out: Rollout, replica: Replica) -> None:
    """The log-probabilities of half of the sequences as they are before the temperature."""
    for i in half_of(pair):
        tokens = torch.tensor([out.tokens[i]])
        logits = replica.model(tokens).logits[0, :-1].float().log_softmax(-1)
        raw = logits.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        out.numbers[i] = [a * b for a, b in zip(out.mask[i], [0.0] + raw, strict=True)]


def edited(pair: Pair, out: Rollout) -> None:
    """What a pipeline does to the engine's list afterwards."""
    words = pair.edit.split()
    for i in half_of(pair) if words[-1] in ("half", "tails") else range(pair.sequences):
        numbers, begin = out.numbers[i], out.prompts[i]
        if words[0] == "divide":
            numbers = [x / pair.temperature for x in numbers]
        elif words[0] == "late":
            at = begin + 13
            numbers = numbers[:at] + numbers[at - 1 : -1]
        elif words[0] == "early":
            numbers = numbers[:begin] + numbers[begin + 1 :] + [0.0]
        elif words[0] == "zero":
            numbers = numbers[:-5] + [0.0] * 5
        elif words[0] == "sentinel":
            numbers = numbers[:begin] + [-9999.0] + numbers[begin + 1 :]
        out.numbers[i] = numbers


# --- training ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def recomputed(pair: Pair, config: transformers.PretrainedConfig, state: dict[str, torch.Tensor], out: Rollout) -> list:
    model = filled(config, state)
    if pair.recipe:
        ottava.convert(model, pair.recipe, filter=lambda name, _: name != HEAD)
    if pair.trainer == "dropout":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        model.train()
    torch.manual_seed(1)
    size = 2 if pair.trainer == "packed" else pair.micro
    result: list[list[float]] = []
    for start in range(0, len(out.tokens), size):
        batch = out.tokens[start : start + size]
        if pair.trainer == "packed":
            row = torch.tensor([[token for line in batch for token in line]])
            positions = torch.cat([torch.arange(len(line)) for line in batch])[None]
            logits = model(row, attention_mask=torch.ones_like(row), position_ids=positions).logits[0]
            lines = logits.split([len(line) for line in batch])
        else:
            width = max(map(len, batch))
            mask = padded([[1] * len(line) for line in batch], width)
            lines = model(padded(batch, width), attention_mask=mask).logits
        for line, tokens in zip(lines, batch, strict=True):
            chances = (line[: len(tokens) - 1].float() / pair.divisor).log_softmax(-1)
            result.append([0.0] + chances.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    return result


# --- files ------------------------------------------------------------------------------------------------------------


def padded(rows: list, width: int, left: bool = False) -> torch.Tensor:
    gap = [[0] * (width - len(row)) for row in rows]
    return torch.tensor([g + r if left else r + g for g, r in zip(gap, rows, strict=True)])


def write_dump(pair: Pair, out: Rollout, training: list, folder: Path) -> Path:
    name, _, suffix = pair.form.partition(".")
    training = [[a * bool(b) for a, b in zip(t, m, strict=True)] for t, m in zip(training, out.mask, strict=True)]
    width, first = max(map(len, out.tokens)), max(out.prompts)
    rows = list(zip(out.tokens, out.mask, out.numbers, training, out.routes, strict=True))
    if name == "nemo-rl" or (name == "plain" and not suffix):
        names = ["token_ids", "mask", "rollout_raw_logprob", "prev_recompute_raw_logprob"]
        if name == "nemo-rl":
            names = ["token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs"]
        path = folder / ("train_data_step7.jsonl" if name == "nemo-rl" else "dump.jsonl")
        with path.open("w") as file:
            for index, (*lists, routes) in enumerate(rows):
                if name == "nemo-rl":
                    lists = [values + [0] * (width - len(values)) for values in lists]
                line = dict(zip(names, lists, strict=True))
                if name == "nemo-rl":
                    line |= {"idx": index, "input_lengths": len(out.tokens[index])}
                if pair.routes:
                    line["routed_experts"] = routes.tolist()
                file.write(json.dumps(line) + "\n")
        return path
    if name == "plain":
        names = ["token_ids", "mask", "rollout_raw_logprob", "prev_recompute_raw_logprob"]
        data = {key: padded([row[i] for row in rows], width) for i, key in enumerate(names)}
        data["lengths"] = torch.tensor([len(tokens) for tokens in out.tokens])
        path = folder / f"dump.{suffix}"
        save_file(data, path) if suffix == "safetensors" else torch.save(data, path)
        return path
    answers = max(len(t) - p for t, p in zip(out.tokens, out.prompts, strict=True))
    cut = list(zip(out.tokens, out.prompts, strict=True))
    asked, said = padded([t[:p] for t, p in cut], first, True), padded([t[p:] for t, p in cut], answers)
    has_asked, has_said = (
        padded([[1] * p for _, p in cut], first, True),
        padded([[1] * (len(t) - p) for t, p in cut], answers),
    )
    parts = [padded([row[i][p:] for row, p in zip(rows, out.prompts, strict=True)], answers) for i in (1, 2, 3)]
    if name == "verl":
        keys = ["prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs"]
        data = dict(zip(keys, [asked, said, torch.cat([has_asked, has_said], 1), *parts], strict=True))
    else:
        keys = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask"]
        keys += ["sampling_per_token_logps", "old_per_token_logps"]
        data = dict(zip(keys, [asked, has_asked, said, has_said, *parts[1:]], strict=True))
    torch.save(data, folder / "dump.pt")
    return folder / "dump.pt"


def write_served(
    pair: Pair, config: transformers.PretrainedConfig, state: dict[str, torch.Tensor], folder: Path
) -> None:
    model = filled(config, state)
    if pair.recipe and pair.layout != "bf16":
        ottava.convert(model, pair.recipe, filter=lambda name, _: name != HEAD)
    ottava.export(model, folder, layout=pair.layout, engine=pair.emulate, recast=True)
    if pair.engine.config:
        config = json.loads((folder / "config.json").read_text())
        for key, value in pair.engine.config:
            if key == "rope_theta":
                config["rope_parameters"]["rope_theta"] = value
            else:
                config[key] = value
        (folder / "config.json").write_text(json.dumps(config, indent=2))


def kl(out: Rollout, training: list) -> tuple[float, int]:
    parts = zip(out.numbers, training, out.mask, strict=True)
    pairs = [(t, n) for a, b, m in parts for n, t, on in zip(a, b, m, strict=True) if on]
    d = torch.tensor([t - n for t, n in pairs], dtype=torch.float64).clamp(-5, 5)
    return float((d.exp() - 1 - d).mean()), len(pairs)


def make(pair: Pair, folder: Path) -> tuple[str, float, int]:
    """Writes one pair; returns the call, the KL and the number of compared tokens."""
    folder.mkdir(parents=True)
    config, state = config_of(pair.arch, pair), weights_of(pair)
    states = [state] + [earlier(state, age) for age in (1, 2)]
    out = roll(pair, config, states)
    if pair.edit:
        edited(pair, out)
    training = recomputed(pair, config, state, out)
    filled(config, state).save_pretrained(folder / "train")
    words = ["ottava", "parity", str(folder / "train")]
    if pair.layout:
        write_served(pair, config, state, folder / "served")
        words += [str(folder / "served"), "-e", pair.emulate]
    words += ["--recipe", pair.recipe] if pair.recipe else []
    for age in range(pair.before, 0, -1):
        filled(config, states[age]).save_pretrained(folder / f"before-{age}")
        words += ["--before", str(folder / f"before-{age}")]
    words += ["--logprobs", str(write_dump(pair, out, training, folder))]
    words += ["--temperature", str(pair.divisor)] if pair.divisor != 1 else []
    return " ".join(words), *kl(out, training)


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    unknown = set(names) - {pair.name for pair in PAIRS}
    if unknown:
        sys.exit(f"no such pair: {', '.join(sorted(unknown))}")
    for pair in PAIRS:
        if not names or pair.name in names:
            begun = time.process_time()
            call, gap, tokens = make(pair, Path(folder) / pair.name)
            print(f"{pair.name}: {call}", flush=True)
            note = f"{pair.name:24} KL {gap:.2e} over {tokens} tokens, {time.process_time() - begun:.1f} s"
            print(note, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
