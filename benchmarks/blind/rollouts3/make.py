"""Makes pairs of a rollout and a training, healthy or with one hidden fault: python make.py FOLDER [NAME ...]

The engine is written here: plain torch with a KV cache in BF16, casts by torch.float8_e4m3fn and vLLM's public rules.
Training is transformers' forward, under ottava.convert where it casts. `--off` makes each pair without its fault,
`--measure` prints the KL with the fault and without. The truth is in truth.yaml.
"""

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

warnings.filterwarnings("ignore")
transformers.utils.logging.disable_progress_bar()
State = dict[str, Tensor]
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
BLOCK = (("*", "e4m3:block:128", "e4m3:group:128"),)
BLOCK_POW2 = (("*", "e4m3:block:128:pow2", "e4m3:group:128:pow2"),)
MX = (("*", "e4m3:group:32:pow2", "e4m3:group:32:pow2"),)


@dataclass(frozen=True)
class Shape:
    kind: str = "llama"
    hidden: int = 128
    layers: int = 2
    vocab: int = 256
    peak: float = 3.0  # standard deviation of the logits
    outliers: float = 1.0  # factor of a few channels of the norms
    tied: bool = False
    router: float = 4.0
    blocky: float = 0.0  # spread of the sizes of blocks of weights


def config_of(shape: Shape) -> Any:
    common: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    common |= {"vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": 2 * shape.hidden}
    common |= {"num_hidden_layers": shape.layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    common |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": shape.tied}
    common |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if shape.kind == "moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**common, **moe, decoder_sparse_step=1)
    return {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[shape.kind](**common)


def model_of(shape: Shape, seed: int) -> Any:
    """A random model whose logits are as peaked as those of a trained one."""
    gen = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa")
    gains = {"q_proj": 1.6, "k_proj": 1.6, "o_proj": 1.0, "down_proj": 1.0, "mlp.gate.weight": shape.router}
    gains |= {"lm_head": shape.peak, "embed_tokens": shape.peak if shape.tied else shape.hidden**0.5}
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=gen)
            if "norm" in name:
                new = 1 + 0.1 * noise
                if "layernorm" in name:
                    new[torch.randperm(len(new), generator=gen)[:3]] *= shape.outliers
                new *= 1.4 if "q_norm" in name or "k_norm" in name else 1.0
            else:
                gain = next((g for part, g in gains.items() if part in name), 1.2)
                new = noise * gain / value.shape[-1] ** 0.5
                if shape.blocky and "proj" in name:
                    size = [n // 128 for n in value.shape]
                    spread = torch.exp(shape.blocky * torch.randn(size, generator=gen))
                    new *= spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
            value.data = new.bfloat16()  # not model.bfloat16(), which rounds the rotary frequencies too
    return model.eval()


def stepped(model: Any, size: float, seed: int) -> Any:
    """The model some optimizer steps earlier: every weight but those of the norms moved by noise."""
    old, gen = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in old.named_parameters():
            if "norm" not in name:
                noise = torch.randn(value.shape, generator=gen) * value.float().std() * size
                value.data = (value.float() + noise).bfloat16()
    return old


def cast(x: Tensor, rule: str) -> Tensor:
    """The numbers that FORMAT:SHAPE[:SIZE[:pow2]] makes of x, decoded. static:SCALE has its scale from a file."""
    name, shape, *rest = rule.split(":")
    dtype, top = FORMATS[name]
    x, size = x.float(), int(rest[0]) if rest and shape != "static" else 0
    whole, seen = x.shape, x
    if shape == "group":
        seen = x.reshape(*whole[:-1], whole[-1] // size, size)
    elif shape == "block":
        seen = x.reshape(whole[0] // size, size, whole[1] // size, size)
    dims = {"tensor": tuple(range(x.dim())), "row": (-1,), "group": (-1,), "block": (1, 3)}.get(shape)
    if dims is None:
        scale = torch.tensor(float(rest[0]))
    else:
        scale = (seen.abs().amax(dims, keepdim=True) / top).clamp(min=1e-12)
    if "pow2" in rest:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    elif shape == "block":  # TransformerEngine's rule, as the trainer writes the codes: times top / amax
        return ((seen * (1 / scale)).clamp(-top, top).to(dtype).float() * scale).reshape(whole)
    return ((seen / scale).clamp(-top, top).to(dtype).float() * scale).reshape(whole)


@dataclass(frozen=True)
class Rules:
    """How the engine multiplies."""

    casts: tuple[tuple[str, str, str], ...] = ()  # pattern of a linear, rule of its weight, rule of its input
    kv: tuple[tuple[int, str, float], ...] = ()  # layer (-1: all), format, scale
    ranks: int = 1  # of tensor parallelism
    fused: bool = False  # norms, rotary embedding and activation round once, as fused kernels do
    config: tuple[tuple[str, Any], ...] = ()  # fields that it reads otherwise
    forget: int = 0  # keys after which the first one is lost
    transposed: str = ""  # pattern of linears whose block scales are read transposed


class Engine:
    def __init__(self, config: Any, state: State, rules: Rules, prefix: "Engine | None" = None):
        self.c, self.rules, self.prefix = copy.deepcopy(config), rules, prefix
        for name, value in rules.config:
            setattr(self.c, name, value)
        self.acts: dict[str, str] = {}
        self.w = {}
        for name, value in expanded(state):
            self.w[name] = value
            rule = next((r for r in rules.casts if fnmatch(name, r[0])), None)
            if rule and ("proj" in name or rule[0].endswith(("lm_head", "mlp.gate"))):
                self.w[name] = turned(value) if fnmatch(name, rules.transposed) else cast(value, rule[1])
                self.acts[name] = rule[2]
        self.w.setdefault("lm_head", self.w["model.embed_tokens"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        w, act = self.w[name], self.acts.get(name)
        if act and act != "none":
            x = cast(x, act)
        elif act:
            x = x.float()
        if self.rules.ranks == 1 or not name.endswith(("o_proj", "down_proj")):
            return F.linear(x.to(w.dtype), w).bfloat16()
        parts = zip(x.to(w.dtype).chunk(self.rules.ranks, -1), w.chunk(self.rules.ranks, -1), strict=True)
        y = None
        for part, piece in parts:
            one = F.linear(part, piece).bfloat16()
            y = one if y is None else y + one
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        up = x.float()
        up = up * torch.rsqrt(up.square().mean(-1, keepdim=True) + self.c.rms_norm_eps)
        if self.rules.fused:
            return (up * self.w[name].float()).bfloat16()
        return self.w[name] * up.bfloat16()

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        freq = 1.0 / self.c.rope_parameters["rope_theta"] ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
        angle = at[:, None, :, None].float() * freq
        cos, sin = angle.cos(), angle.sin()
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        if not self.rules.fused:
            cos, sin = cos.bfloat16(), sin.bfloat16()
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * cos + turned * sin).bfloat16()

    def attend(self, layer: int, x: Tensor, at: Tensor, bias: Tensor, caches: list) -> Tensor:
        name, size = f"model.layers.{layer}.self_attn.", x.shape[:2]
        q, k, v = (
            self.linear(f"{name}{part}_proj", x).reshape(*size, -1, self.c.head_dim).transpose(1, 2) for part in "qkv"
        )
        if f"{name}q_norm" in self.w:
            q, k = self.norm(f"{name}q_norm", q), self.norm(f"{name}k_norm", k)
        q, k = self.rotate(q, at), self.rotate(k, at)
        for place, form, scale in self.rules.kv:
            if place in (-1, layer):
                k, v = cast(k, f"{form}:static:{scale}").bfloat16(), cast(v, f"{form}:static:{scale}").bfloat16()
        if caches[layer] is not None:
            k, v = torch.cat((caches[layer][0], k), 2), torch.cat((caches[layer][1], v), 2)
        caches[layer] = (k, v)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        if self.rules.fused:
            score = q.float() @ k.float().transpose(-1, -2) / self.c.head_dim**0.5 + bias
            out = (score.softmax(-1) @ v.float()).bfloat16()
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.bfloat16())
        return self.linear(f"{name}o_proj", out.transpose(1, 2).reshape(*size, -1))

    def gated(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}gate_proj", x), self.linear(f"{name}up_proj", x)
        inner = (F.silu(gate.float()) * up.float()).bfloat16() if self.rules.fused else F.silu(gate) * up
        return self.linear(f"{name}down_proj", inner)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp."
        if f"{name}gate" not in self.w:
            return self.gated(name, x)
        flat = x.reshape(-1, x.shape[-1])
        share, chosen = self.linear(f"{name}gate", flat).float().softmax(-1).topk(self.c.num_experts_per_tok, -1)
        if self.c.norm_topk_prob:
            share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(self.c.num_experts):
            token, place = torch.where(chosen == expert)
            if len(token):
                y = self.gated(f"{name}experts.{expert}.", flat[token])
                out.index_add_(0, token, y * share[token, place, None].bfloat16())
        return out.reshape(x.shape)

    def forward(self, ids: Tensor, at: Tensor, valid: Tensor, caches: list) -> Tensor:
        """Logits of the last column. valid (rows, keys): keys that are tokens."""
        keys, new = valid.shape[1], ids.shape[1]
        seen = (torch.arange(keys) <= torch.arange(keys - new, keys)[:, None]) & valid[:, None, :]
        if self.rules.forget and keys > self.rules.forget:
            first = valid.int().argmax(1)
            seen = seen & (torch.arange(keys) != first[:, None])[:, None, :]
        bias = torch.where(seen, 0.0, -1e30)[:, None]
        x = self.w["model.embed_tokens"][ids]
        for layer in range(self.c.num_hidden_layers):
            name = f"model.layers.{layer}."
            x = x + self.attend(layer, self.norm(f"{name}input_layernorm", x), at, bias, caches)
            x = x + self.mlp(layer, self.norm(f"{name}post_attention_layernorm", x))
        return self.linear("lm_head", self.norm("model.norm", x[:, -1])).float()

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], lengths: list[int], pick: Callable, tools: Tensor | None) -> list:
        """A (token ids, log-probabilities) for each prompt. tools: tokens of an environment at its places, else -1."""
        wide = max(map(len, prompts))
        ids = torch.tensor([[0] * (wide - len(p)) + p for p in prompts])
        valid = torch.tensor([[False] * (wide - len(p)) + [True] * len(p) for p in prompts])
        at = (valid.long().cumsum(1) - 1).clamp(min=0)
        caches: list = [None] * self.c.num_hidden_layers
        if self.prefix and wide > 1:
            self.prefix.forward(ids[:, :-1], at[:, :-1], valid[:, :-1], caches)
            logits = self.forward(ids[:, -1:], at[:, -1:], valid, caches)
        else:
            logits = self.forward(ids, at, valid, caches)
        tokens, logps, place = [], [], at[:, -1:]
        for step in range(max(lengths)):
            token, logp = pick(logits, ids, valid)
            if tools is not None and tools[step] >= 0:
                token, logp = tools[step].expand(len(prompts)), torch.zeros(len(prompts))
            tokens.append(token)
            logps.append(logp)
            ids, place = torch.cat((ids, token[:, None]), 1), place + 1
            valid = torch.cat((valid, torch.ones(len(prompts), 1, dtype=torch.bool)), 1)
            logits = self.forward(token[:, None], place, valid, caches)
        token, logp = torch.stack(tokens, 1), torch.stack(logps, 1)
        return [(token[i, :n].tolist(), logp[i, :n].tolist()) for i, n in enumerate(lengths)]


def turned(w: Tensor) -> Tensor:
    """w with codes and power-of-two scales of blocks, the scales transposed."""
    blocks = w.float().reshape(w.shape[0] // 128, 128, w.shape[1] // 128, 128)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448)))
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).float()
    return (codes * scale.T.reshape(scale.shape)[:, None, :, None]).reshape(w.shape)


def expanded(state: State) -> list[tuple[str, Tensor]]:
    """Names without .weight, a name for each expert's linears."""
    out = []
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(w.chunk(2) for w in value):
                out += [(f"{name[:-12]}{e}.gate_proj", gate), (f"{name[:-12]}{e}.up_proj", up)]
        elif name.endswith("experts.down_proj"):
            out += [(f"{name[:-9]}{e}.down_proj", w) for e, w in enumerate(value)]
        else:
            out.append((name.removesuffix(".weight"), value))
    return out


def picker(report: str, temperature: float, gen: torch.Generator) -> Callable:
    """Samples, and reports log-probabilities as `report` says."""
    word, _, number = report.partition(":")

    def pick(logits: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        raw, hot = logits.log_softmax(-1), logits / (temperature or 1.0)
        if word == "penalty":
            seen = torch.zeros_like(hot).scatter_add_(1, ids, valid.float()) > 0
            hot = torch.where(seen, torch.where(hot > 0, hot / float(number), hot * float(number)), hot)
        if word == "top-p":
            value, order = hot.softmax(-1).sort(-1, descending=True)
            gone = torch.zeros_like(hot, dtype=torch.bool)
            hot = hot.masked_fill(gone.scatter(1, order, value.cumsum(-1) - value > float(number)), -torch.inf)
        done = hot.log_softmax(-1)
        token = torch.multinomial(done.exp(), 1, generator=gen)[:, 0] if temperature else done.argmax(-1)
        given = {"raw": raw, "scaled": raw / (temperature or 1.0)}.get(word, done)
        return token, given.gather(1, token[:, None])[:, 0]

    return pick


@dataclass(frozen=True)
class Pair:
    seed: int
    form: str = "plain"
    shape: Shape = Shape()
    rows: int = 12
    prompt: tuple[int, int] = (8, 16)
    answer: tuple[int, int] = (28, 40)
    tool: tuple[int, int] = (0, 0)  # place and number of tokens that the model did not make
    temperature: float = 1.0  # of the sampler
    divisor: float | None = None  # of training's logits; None: the temperature
    told: float | None = None  # that the command is told; None: the divisor
    report: str = "processed"
    batch: int = 12  # rows that the engine runs at a time
    micro: int = 12  # rows that training runs at a time
    recipe: str = ""  # of training
    skip: str = ""  # linears that training leaves in BF16
    rules: Rules = Rules()
    where: str = "all"  # rows that the fault concerns
    stale: str = ""  # patterns of tensors that the engine has from an earlier step
    drift: float = 0.0  # size of that step
    before: int = 0  # checkpoints of earlier steps that the command is told of
    prefix: bool = False  # the cache of the prompts is of the earlier step
    trainer: str = ""  # dropout, packed or unmasked
    lists: str = ""  # what happens to the lists afterwards
    served: str = ""  # layout of CHECKPOINT
    keep: tuple[str, ...] = ()  # linears in BF16 there
    config: dict[str, Any] = field(default_factory=dict)  # fields of CHECKPOINT that differ
    alter: str = ""  # tensors of CHECKPOINT that differ
    fault: dict[str, Any] = field(default_factory=dict)  # fields that the fault changes


@dataclass
class Row:
    prompt: list[int]
    answer: list[int]
    mask: list[int]
    rollout: list[float]
    train: list[float]


def chosen(where: str, i: int, rows: int) -> bool:
    return {"all": True, "odd": i % 2 == 1, "late": i >= rows // 2, "third": i % 3 == 2}[where]


def prompts_of(pair: Pair) -> tuple[list[list[int]], list[int], Tensor | None]:
    gen = torch.Generator().manual_seed(pair.seed + 1)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    prompts = [
        torch.randint(1, pair.shape.vocab, (between(*pair.prompt),), generator=gen).tolist() for _ in range(pair.rows)
    ]
    tools = None
    if pair.tool[1]:
        tools = torch.full((pair.answer[1],), -1)
        tools[pair.tool[0] : sum(pair.tool)] = torch.randint(1, pair.shape.vocab, (pair.tool[1],), generator=gen)
    return prompts, [between(*pair.answer) for _ in prompts], tools


def mixed(pair: Pair, model: Any, old: Any) -> State:
    """The engine's weights: those of `stale` are the old model's; tensors that CHECKPOINT alters are altered."""
    state, past = dict(model.state_dict()), old.state_dict() if old is not None else {}
    for pattern in pair.stale.split():
        for name in state:
            name_, _, expert = pattern.partition("#")
            if fnmatch(name, name_):
                if expert:
                    state[name] = state[name].clone()
                    state[name][int(expert)] = past[name][int(expert)]
                else:
                    state[name] = past[name]
    if pair.alter:
        state = {name: altered(pair.alter, name, value) for name, value in state.items()}
    return state


def altered(alter: str, name: str, value: Tensor) -> Tensor:
    pattern, _, how = alter.partition("=")
    if not fnmatch(name, pattern):
        return value
    return (value.float() * float(how)).to(value.dtype)


def roll(base: Pair, model: Any, old: Any) -> list:
    """The rollout; rows outside of `where` come from an engine without the fault."""
    full, gen = faulty(base), torch.Generator().manual_seed(base.seed + 2)
    prompts, lengths, tools = prompts_of(full)
    out: list = [None] * len(prompts)
    for side, own in ((full, True), (base, False)):
        mine = [i for i in range(len(prompts)) if chosen(full.where, i, full.rows) == own]
        prefix = Engine(model.config, old.state_dict(), side.rules) if side.prefix else None
        engine = Engine(model.config, mixed(side, model, old), side.rules, prefix)
        for k in range(0, len(mine), full.batch):
            some = mine[k : k + full.batch]
            pick = picker(side.report, side.temperature, gen)
            made = engine.generate([prompts[i] for i in some], [lengths[i] for i in some], pick, tools)
            for i, one in zip(some, made, strict=True):
                out[i] = (prompts[i], *one)
    return out


def faulty(pair: Pair) -> Pair:
    return replace(pair, **pair.fault)


def trained(pair: Pair, model: Any) -> Any:
    """The model whose forward training runs."""
    model = copy.deepcopy(model)
    if pair.recipe:
        import ottava

        def wanted(name: str, layer: Any) -> bool | str:
            return "kept in BF16" if fnmatch(name, pair.skip) else ottava.nn.default_filter(name, layer)

        ottava.convert(model, pair.recipe, filter=wanted if pair.skip else None)
    if pair.trainer.startswith("dropout"):
        rate = float(pair.trainer.partition(":")[2])
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = rate
        model.train()
    return model


@torch.no_grad()
def recompute(pair: Pair, model: Any, rolls: list) -> list[list[float]]:
    """Training's log-probabilities of the answers."""
    torch.manual_seed(pair.seed + 3)
    divisor, out = pair.divisor or pair.temperature or 1.0, []
    for k in range(0, len(rolls), pair.micro):
        some = rolls[k : k + pair.micro]
        if pair.trainer == "packed":
            some = [([token for p, a, _ in some for token in p + a], [], None)]
        lines = [p + a for p, a, _ in some]
        wide = max(map(len, lines))
        left = pair.trainer == "unmasked"
        pads = [[0] * (wide - len(line)) for line in lines]
        ids = torch.tensor([pad + line if left else line + pad for pad, line in zip(pads, lines, strict=True)])
        mask = torch.tensor([[1] * len(line) + [0] * len(pad) for pad, line in zip(pads, lines, strict=True)])
        logits = model(ids, **({} if left or pair.trainer == "packed" else {"attention_mask": mask})).logits.float()
        logps = (logits / divisor).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        if pair.trainer == "packed":
            at = 0
            for prompt, answer, _ in rolls[k : k + pair.micro]:
                at += len(prompt)
                out.append(logps[0, at - 1 : at - 1 + len(answer)].tolist())
                at += len(answer)
            continue
        for i, (prompt, answer, _) in enumerate(some):
            at = len(prompt) + (len(pads[i]) if left else 0) - 1
            out.append(logps[i, at : at + len(answer)].tolist())
    return out


def rows_of(pair: Pair, rolls: list, train: list[list[float]]) -> list[Row]:
    rows = []
    for (prompt, answer, logps), own in zip(rolls, train, strict=True):
        mask = [0 if pair.tool[1] and pair.tool[0] <= t < sum(pair.tool) else 1 for t in range(len(answer))]
        rows.append(Row(prompt, answer, mask, list(logps), list(own)))
    word, _, number = pair.lists.partition(":")
    for i, row in enumerate(rows):
        n = int(number or 0)
        if not chosen(pair.where, i, pair.rows) or not word:
            continue
        if word == "late":  # the engine's list, from place n on
            row.rollout[n:] = [row.rollout[max(n - 1, 0)]] + row.rollout[n:-1]
        elif word == "train-early":
            row.train = row.train[1:] + row.train[-1:]
        elif word == "tail":
            row.rollout[-n:] = [0.0] * n
        elif word == "equal":
            row.train = list(row.rollout)
    return rows


def padded(lists: list[list], value: float = 0, left: bool = False) -> Tensor:
    wide = max(map(len, lists))
    whole = [[value] * (wide - len(x)) + x if left else x + [value] * (wide - len(x)) for x in lists]
    return torch.tensor(whole)


def dump(form: str, folder: Path, rows: list[Row]) -> Path:
    nothing = [[0.0] * len(r.prompt) for r in rows]
    ids = [r.prompt + r.answer for r in rows]
    mask = [[0] * len(r.prompt) + r.mask for r in rows]
    rollout = [none + r.rollout for none, r in zip(nothing, rows, strict=True)]
    train = [none + r.train for none, r in zip(nothing, rows, strict=True)]
    if form == "plain":
        names = ("token_ids", "mask", "rollout_raw_logprob", "prev_recompute_raw_logprob")
        lines = [dict(zip(names, row, strict=True)) for row in zip(ids, mask, rollout, train, strict=True)]
        path = folder / "dump.jsonl"
    elif form == "nemo-rl":
        whole = (padded(ids), padded(mask), padded(rollout, 0.0), padded(train, 0.0))
        names = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
        lines = []
        for i, row in enumerate(zip(*whole, strict=True)):
            line = {name: value.tolist() for name, value in zip(names, row, strict=True)}
            lines.append({"idx": i, "input_lengths": len(ids[i]), "sample_loss_mask": 1.0, **line})
        path = folder / "train_data_step7.jsonl"
    else:
        return dump_tensors(form, folder, rows, (ids, mask, rollout, train))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def dump_tensors(form: str, folder: Path, rows: list[Row], whole: tuple) -> Path:
    if form == "safetensors":
        ids, mask, rollout, train = whole
        tensors = {"token_ids": padded(ids), "mask": padded(mask), "lengths": torch.tensor([len(x) for x in ids])}
        tensors["rollout_raw_logprob"] = padded(rollout, 0.0)
        tensors["prev_recompute_raw_logprob"] = padded(train, 0.0)
        save_file(tensors, folder / "dump.safetensors")
        return folder / "dump.safetensors"
    prompts, answers = padded([r.prompt for r in rows], left=True), padded([r.answer for r in rows])
    prompt_mask = padded([[1] * len(r.prompt) for r in rows], left=True)
    answer_mask = padded([[1] * len(r.answer) for r in rows])
    loss_mask = padded([r.mask for r in rows])
    rollout, train = padded([r.rollout for r in rows], 0.0), padded([r.train for r in rows], 0.0)
    attention = torch.cat((prompt_mask, answer_mask), 1)
    tensors = {"prompts": prompts, "responses": answers, "attention_mask": attention, "response_mask": loss_mask}
    tensors |= {"input_ids": torch.cat((prompts, answers), 1), "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
    tensors |= {"rollout_log_probs": rollout, "old_log_probs": train}
    if form == "trl":
        tensors = {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": answers}
        tensors |= {"completion_mask": loss_mask, "sampling_per_token_logps": rollout, "old_per_token_logps": train}
    torch.save(tensors, folder / "dump.pt")
    return folder / "dump.pt"


def serve(pair: Pair, folder: Path) -> None:
    """CHECKPOINT: the training's weights in the layout that the engine reads."""
    import ottava

    ottava.export(folder / "train", folder / "served", layout=pair.served, keep=pair.keep, recast=True)
    path = folder / "served" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | pair.config, indent=1))
    for file in (folder / "served").glob("*.safetensors"):
        tensors = load_file(file)
        for name, value in tensors.items():
            if pair.alter:
                tensors[name] = altered(pair.alter, name, value)
            if pair.rules.transposed and fnmatch(name, pair.rules.transposed + ".weight_scale_inv"):
                tensors[name] = value.T.reshape(value.shape).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def kl(rows: list[Row]) -> float:
    deltas = [t - r for row in rows for t, r, m in zip(row.train, row.rollout, row.mask, strict=True) if m]
    d = torch.tensor(deltas, dtype=torch.float64).clamp(-5, 5)
    return float((d.exp() - 1 - d).mean())


def measure(base: Pair) -> tuple[list[Row], Any, Any]:
    full = faulty(base)
    model = model_of(full.shape, full.seed)
    old = stepped(model, full.drift, full.seed + 9) if full.drift else None
    rolls = roll(base, model, old)
    rows = rows_of(full, rolls, recompute(full, trained(full, model), rolls))
    return rows, model, old


def make(name: str, base: Pair, out: Path) -> str:
    """Writes a pair into out/name, and gives the call of the command."""
    folder, full = out / name, faulty(base)
    folder.mkdir(parents=True, exist_ok=False)
    rows, model, old = measure(base)
    model.save_pretrained(folder / "train")
    call = ["ottava parity", str(folder / "train")]
    if full.served:
        serve(full, folder)
        call += [str(folder / "served"), "-e vllm"]
    if full.recipe:
        call.append(f"--recipe {full.recipe}")
    call.append(f"--logprobs {dump(full.form, folder, rows)}")
    for i in range(full.before):
        older = old if i == 0 else stepped(old, full.drift, full.seed + 10 + i)
        older.save_pretrained(folder / f"step-{i + 1}-ago")
        call.append(f"--before {folder / f'step-{i + 1}-ago'}")
    told = full.told or full.divisor or full.temperature or 1.0
    if told != 1.0:
        call.append(f"--temperature {told}")
    return " ".join(call)


def on(**fields: Any) -> dict[str, Any]:
    return fields


def rules(casts: tuple = (), **more: Any) -> Rules:
    return Rules(casts=casts, **more)


def by(weight: str, act: str, pattern: str = "*") -> Rules:
    return rules(((pattern, weight, act),))


def other(name: str, value: Any) -> dict[str, Any]:
    """A field of config.json that the engine has otherwise."""
    return {"config": {name: value}, "rules": rules(config=((name, value),))}


LLAMA, QWEN, MOE, WIDE = Shape(), Shape("qwen3"), Shape("moe"), Shape(hidden=256)
DEEP, THREE, STEADY = Shape("qwen3", layers=4), Shape("qwen3", layers=3), Shape("moe", router=8.0)
SPIKY, BLOCKY = Shape(hidden=256, outliers=12.0), Shape(hidden=256, blocky=0.5)
HEAD, ROUTER = ("lm_head", "e4m3:row", "e4m3:row"), ("*mlp.gate", "e4m3:row", "e4m3:row")
FP8 = on(recipe="blockwise_fp32", served="fp8-block", rules=rules(BLOCK))
POW2 = on(recipe="blockwise", served="fp8-block-ue8m0", rules=rules(BLOCK_POW2))
(W, A), (W_POW2, A_POW2) = BLOCK[0][1:], BLOCK_POW2[0][1:]
NEAR = {"rope_type": "default", "rope_theta": 11000.0}

PAIRS: dict[str, Pair] = {
    "p01": Pair(307, "trl", DEEP, rows=8, answer=(50, 60), prompt=(4, 8)),
    "p02": Pair(134, "trl", LLAMA, **POW2, fault=on(skip="*gate_proj")),
    "p03": Pair(103, "plain", DEEP, temperature=0.8, fault=on(report="scaled")),
    "p04": Pair(
        146, "verl", BLOCKY, rows=10, **POW2, fault=on(rules=rules(BLOCK_POW2, transposed="*.1.self_attn.o_proj"))
    ),
    "p05": Pair(135, "verl", MOE, fault=on(rules=by(W, A, "*experts*"), served="fp8-block", keep=("*attn*",))),
    "p06": Pair(125, "safetensors", LLAMA, drift=0.06, before=1, fault=on(stale="lm_head.weight")),
    "p07": Pair(122, "nemo-rl", DEEP, drift=0.2, before=1, fault=on(stale="model.layers.2.mlp.*")),
    "p08": Pair(115, "safetensors", QWEN, tool=(14, 5), answer=(32, 44), fault=on(lists="late:19", where="odd")),
    "p09": Pair(309, "safetensors", WIDE, rows=10, **FP8),
    "p10": Pair(320, "verl", STEADY, prompt=(4, 24), answer=(20, 40), rows=10, rules=rules(ranks=2)),
    "p11": Pair(201, "trl", QWEN, temperature=0.6, fault=on(report="raw", rules=rules(kv=((-1, "e4m3", 1.0),)))),
    "p12": Pair(304, "verl", QWEN, temperature=0.7, batch=3),
    "p13": Pair(302, "nemo-rl", QWEN, batch=1, micro=4),
    "p14": Pair(318, "trl", Shape("qwen3", tied=True), batch=6),
    "p15": Pair(152, "verl", SPIKY, rows=10, **POW2, fault=on(rules=by(W_POW2, "e4m3:row"))),
    "p16": Pair(315, "nemo-rl", WIDE, rows=10, rules=rules(ranks=4), served="bf16"),
    "p17": Pair(333, "plain", STEADY, rows=10, **POW2),
    "p18": Pair(306, "plain", QWEN, temperature=0.0),
    "p19": Pair(310, "verl", QWEN, batch=4, temperature=0.8, **FP8),
    "p20": Pair(312, "trl", LLAMA, recipe="mxfp8", served="mxfp8", rules=rules(MX)),
    "p21": Pair(301, "plain", LLAMA),
    "p22": Pair(192, "nemo-rl", LLAMA, fault=on(rules=rules(forget=24))),
    "p23": Pair(111, "verl", LLAMA, fault=on(lists="late")),
    "p24": Pair(124, "plain", MOE, drift=0.3, before=1, fault=on(stale="model.layers.1.mlp.experts.*#2")),
    "p25": Pair(144, "trl", QWEN, **FP8, fault=on(rules=by("e5m2:block:128", A))),
    "p26": Pair(165, "safetensors", WIDE, rows=10, fault=on(rules=rules(kv=((-1, "e4m3", 0.006),)), where="late")),
    "p27": Pair(171, "verl", LLAMA, served="bf16", fault=other("rope_parameters", NEAR)),
    "p28": Pair(132, "plain", WIDE, rows=10, fault=on(recipe="blockwise_fp32")),
    "p29": Pair(151, "plain", QWEN, **POW2, fault=on(rules=by(W_POW2, "none"))),
    "p30": Pair(172, "plain", MOE, served="bf16", fault=other("norm_topk_prob", False)),
    "p31": Pair(305, "safetensors", LLAMA, temperature=1.3, rules=rules(ranks=2)),
    "p32": Pair(319, "nemo-rl", LLAMA, lists="equal"),
    "p33": Pair(104, "nemo-rl", MOE, fault=on(report="top-p:0.9")),
    "p34": Pair(311, "nemo-rl", LLAMA, **POW2),
    "p35": Pair(141, "nemo-rl", WIDE, rows=10, **POW2, fault=on(rules=rules(BLOCK), served="fp8-block")),
    "p36": Pair(182, "plain", QWEN, micro=3, fault=on(trainer="packed")),
    "p37": Pair(202, "verl", LLAMA, drift=0.1, before=2, fault=on(stale="*", where="odd", rules=rules((HEAD,)))),
    "p38": Pair(191, "verl", QWEN, prompt=(14, 20), drift=0.05, fault=on(prefix=True)),
    "p39": Pair(316, "plain", QWEN, drift=0.05, before=1),
    "p40": Pair(153, "nemo-rl", LLAMA, **FP8, fault=on(rules=by(W, "e4m3:static:0.006"))),
    "p41": Pair(133, "nemo-rl", THREE, **POW2, fault=on(rules=by(W_POW2, A_POW2, "*.1.*"), keep=("*.[02].*",))),
    "p42": Pair(105, "verl", LLAMA, temperature=0.9, fault=on(report="penalty:1.1")),
    "p43": Pair(331, "trl", STEADY, batch=5),
    "p44": Pair(161, "plain", LLAMA, fault=on(rules=rules((HEAD,)))),
    "p45": Pair(162, "nemo-rl", MOE, fault=on(rules=rules((ROUTER,)))),
    "p46": Pair(164, "verl", DEEP, fault=on(rules=rules(kv=((1, "e5m2", 1.0),)))),
    "p47": Pair(308, "verl", LLAMA, rows=24, answer=(16, 20), prompt=(4, 8), micro=6),
    "p48": Pair(102, "verl", QWEN, divisor=1.0, fault=on(temperature=0.7, where="odd")),
    "p49": Pair(112, "nemo-rl", QWEN, temperature=1.2, fault=on(lists="train-early", where="late")),
    "p50": Pair(317, "verl", LLAMA, tool=(12, 6), answer=(32, 44)),
    "p51": Pair(314, "trl", LLAMA, rules=rules(fused=True)),
    "p52": Pair(113, "plain", MOE, fault=on(lists="tail:6", where="third")),
    "p53": Pair(181, "nemo-rl", LLAMA, fault=on(trainer="dropout:0.05")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--off", action="store_true", help="make each pair without its fault")
    parser.add_argument("--measure", action="store_true", help="print the KL with the fault and without; write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names or PAIRS:
        pair = PAIRS[name]
        if args.measure:
            on, off = kl(measure(pair)[0]), kl(measure(replace(pair, fault={}))[0])
            print(f"{name} {on:.3e} {off:.3e} {on / max(off, 1e-12):.1f}", flush=True)
        else:
            print(f"{name}: {make(name, replace(pair, fault={}) if args.off else pair, args.folder)}", flush=True)


if __name__ == "__main__":
    main()
