"""Rollouts that differ from training, for a known reason: `python benchmarks/rollouts.py [FAULT ...]`.

A tiny model is the trainer, a copy of it the engine. The engine generates with a cache, in BF16, by ottava's layers and
transformers; the trainer recomputes whole sequences. A fault is put into one of them, and `attribute` must name it. Its
twin is other code: FP32, operands replaced one GEMM at a time. Writes benchmarks/results/rollouts.json.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import ottava
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GemmRecipe, Recipe
from ottava.serving.attribution import attribute
from ottava.serving.rollout import read_rollout
from ottava.serving.sides import trained
from ottava.serving.trained import of_model

RESULTS = Path(__file__).parent / "results" / "rollouts.json"
_PROMPT, _NEW, _SEQUENCES = 8, 40, 12
_SIZES = {"vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 256**-0.5, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES, max_position_embeddings=128),
    "moe": Qwen3MoeConfig(**_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
}
_ROW, _TENSOR = QuantizationSpec(E4M3, PER_ROW), QuantizationSpec(E4M3, PER_TENSOR)
TOKENS = Recipe("tokens", fprop=GemmRecipe(_ROW, _TENSOR))
CHANNELS = Recipe("channels", fprop=GemmRecipe(_ROW, _ROW))
BLOCKS = ottava.RECIPES["blockwise_fp32"]
POWERS = ottava.RECIPES["blockwise"]
MX = ottava.RECIPES["mxfp8"]


@dataclass
class Pair:
    """A trainer and an engine, and what each does with its logits."""

    trainer: Any
    engine: Any
    temperature: float = 1.0
    """Both divide logits by it."""
    engine_scores: Callable[[Tensor, Tensor], Tensor] | None = None
    """(logits (B, V), ids so far) -> log-probabilities that the engine reports; None: at `temperature`."""
    trainer_temperature: float | None = None
    cache: torch.dtype | None = None
    before: list[tuple[str, Any]] = field(default_factory=list)
    """Models of earlier steps."""
    checkpoint: Any = None
    """What is given as the model of training, if not the trainer."""
    config: dict[str, Any] | None = None
    """Of the engine's checkpoint, where it differs."""
    dropout: float = 0.0
    routes: bool = False
    packed: bool = False
    after: Callable[[dict[str, Tensor]], None] = lambda dump: None
    """What happens to the lists on their way."""


class _Cache8(DynamicCache):
    """Keys and values in eight bits."""

    kind: torch.dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As stored and read back."""
        top = torch.finfo(self.kind).max
        kept = (x.clamp(-top, top).to(self.kind).to(x.dtype) for x in (key_states, value_states))
        return super().update(*kept, *args, **kwargs)


def made(family: str, seed: int, recipe: Any = None) -> Any:
    """A random model in BF16, under a recipe."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif "layers" in name:
                parameter.mul_(0.5)  # as calm as a trained model: rounding does not grow from block to block
    if recipe is not None:
        ottava.convert(model, recipe)
    return model


def pair(family: str, seed: int, recipe: Any = None, engine: Any = "same") -> Pair:
    """Two copies of one model, each under its recipe."""
    return Pair(made(family, seed, recipe), made(family, seed, recipe if engine == "same" else engine))


def moved(model: Any, by: float, pattern: str = "", seed: int = 9) -> Any:
    """A copy whose parameters are of an earlier step: each number away by a share of its tensor's size."""
    older = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in older.named_parameters():
            if pattern in name:
                parameter.add_(torch.randn_like(parameter) * by * parameter.float().norm() / parameter.numel() ** 0.5)
    return older


@torch.no_grad()
def dump(one: Pair, seed: int) -> dict[str, Tensor]:
    """The lists of one rollout: the engine generates and reports, the trainer recomputes."""
    torch.manual_seed(seed)
    ids = torch.randint(1, CONFIGS["llama"].vocab_size, (_SEQUENCES, _PROMPT))
    cache: Any = DynamicCache()
    if one.cache is not None:
        cache = _Cache8()
        cache.kind = one.cache
    routes: list[Tensor] = []
    chosen: list[Tensor] = []
    handles = [m.register_forward_hook(lambda m, a, o: chosen.append(o[2])) for n, m in one.engine.named_modules()
               if one.routes and n.endswith("mlp.gate")]  # fmt: skip
    scores = one.engine_scores or (lambda z, _: (z / one.temperature).log_softmax(-1))
    told, step = [], ids
    for _ in range(_NEW):
        logits = one.engine(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1].float()
        if one.routes:
            routes.append(torch.stack([c.view(_SEQUENCES, -1, c.shape[-1]) for c in chosen], 2))
            chosen.clear()
        step = torch.multinomial((logits / one.temperature).softmax(-1), 1)
        told.append(scores(logits, ids).gather(-1, step))
        ids = torch.cat((ids, step), 1)
    if one.routes:
        one.engine(input_ids=step, past_key_values=cache, use_cache=True)
        routes.append(torch.stack([c.view(_SEQUENCES, -1, c.shape[-1]) for c in chosen], 2))
    for handle in handles:
        handle.remove()
    own = one.trainer_temperature or one.temperature
    if one.dropout:
        one.trainer.train()
    given = ids.view(2, -1) if one.packed else ids
    logits = one.trainer(input_ids=given, use_cache=False).logits.float().view(*ids.shape, -1)
    one.trainer.eval()
    again = (logits[:, _PROMPT - 1 : -1] / own).log_softmax(-1).gather(-1, ids[:, _PROMPT:, None])[..., 0]
    found = {"prompts": ids[:, :_PROMPT], "responses": ids[:, _PROMPT:], "attention_mask": torch.ones_like(ids)}
    found |= {"response_mask": torch.ones(_SEQUENCES, _NEW), "rollout_log_probs": torch.cat(told, 1)}
    found |= {"old_log_probs": again} | ({"routed_experts": torch.cat(routes, 1)} if one.routes else {})
    one.after(found)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def shifted(by: int) -> Callable[[dict[str, Tensor]], None]:
    """The engine's list is late."""

    def change(lists: dict[str, Tensor]) -> None:
        lists["rollout_log_probs"] = lists["rollout_log_probs"].roll(by, 1)

    return change


def lost(value: float) -> Callable[[dict[str, Tensor]], None]:
    """Every seventh token has no log-probability."""

    def change(lists: dict[str, Tensor]) -> None:
        lists["rollout_log_probs"][:, 3::7] = value

    return change


def at(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Log-probabilities at another temperature than was sampled with."""
    return lambda z, _: (z / temperature).log_softmax(-1)


def filtered(top_p: float = 1.0, top_k: int = 0, penalty: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Processed log-probabilities by the processors of transformers."""
    from transformers import (
        RepetitionPenaltyLogitsProcessor,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    def change(z: Tensor, ids: Tensor) -> Tensor:
        plain = z
        if penalty != 1:
            z = RepetitionPenaltyLogitsProcessor(penalty)(ids, z.clone())
        z = TopPLogitsWarper(top_p)(ids, z) if top_p < 1 else z
        z = TopKLogitsWarper(top_k)(ids, z) if top_k else z
        done = z.log_softmax(-1)
        return torch.where(done.isfinite(), done, plain.log_softmax(-1))  # the token was sampled from all

    return change


def stale(family: str, seed: int, by: float, pattern: str = "", recipe: Any = None) -> Pair:
    """The engine has some tensors of an earlier step."""
    now = made(family, seed)
    older, engine = moved(now, by), copy.deepcopy(now)
    state = engine.state_dict()
    engine.load_state_dict({n: old if pattern in n else state[n] for n, old in older.state_dict().items()})
    found = Pair(now, engine, before=[("step 10", copy.deepcopy(older))])
    if recipe is not None:
        ottava.convert(found.trainer, recipe)
        ottava.convert(found.engine, recipe)
    return found


def but(recipe: Any, keep: Callable[[str], bool], family: str = "llama", seed: int = 0) -> Pair:
    """Training casts all linears; the engine leaves some in BF16."""
    engine = made(family, seed)
    wanted = {n for n, m in engine.named_modules() if isinstance(m, nn.Linear) and not keep(n) and n != "lm_head"}
    ottava.convert(engine, recipe, filter=lambda name, module: None if name in wanted else "left out")
    return Pair(made(family, seed, recipe), engine)


def cast_also(pattern: str, family: str, seed: int, recipe: Any = None) -> Pair:
    """The engine also rounds one weight and its input to FP8: a head, or a router."""
    found = pair(family, seed, recipe)
    for name, module in found.engine.named_modules():
        if name.endswith(pattern):
            w = module.weight.data
            scale = w.float().abs().amax() / 448
            module.weight.data = ((w.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(w.dtype)

            def near(m: nn.Module, args: Any) -> Any:
                s = args[0].float().abs().amax(-1, keepdim=True) / 448
                return ((args[0].float() / s).to(torch.float8_e4m3fn).float() * s).to(args[0].dtype)

            module.register_forward_pre_hook(near)
    return found


def with_config(seed: int, **changed: Any) -> Pair:
    """The engine reads another config.json."""
    found = pair("llama", seed)
    config = copy.deepcopy(CONFIGS["llama"])
    for name, value in changed.items():
        setattr(config, name, value)
    engine = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    engine.load_state_dict(found.engine.state_dict())
    return replace(found, engine=engine, config=json.loads(config.to_json_string(use_diff=False)))


def dropped(seed: int) -> Pair:
    """Training recomputes with dropout."""
    found = pair("llama", seed)
    for layer in found.trainer.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return replace(found, dropout=0.1)


def jittered(seed: int) -> Pair:
    """The engine's routers see other numbers, and choose other experts; the dump has them."""
    found = pair("moe", seed)
    torch.manual_seed(1)
    for name, module in found.engine.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda m, a: (a[0] + 0.1 * torch.randn_like(a[0]),))
    return replace(found, routes=True)


def decoded(seed: int) -> Pair:
    """The engine multiplies what the codes of the weights stand for, and casts no inputs."""
    found = pair("llama", seed, MX, None)
    assert MX.fprop.rhs is not None
    for name, module in found.engine.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = ottava.quantize(module.weight.data, MX.fprop.rhs).dequantize(torch.bfloat16)
    return found


def _tuned(recipe: Any, lhs: Any = "same", rhs: Any = "same") -> Recipe:
    cells = GemmRecipe(recipe.fprop.lhs if lhs == "same" else lhs, recipe.fprop.rhs if rhs == "same" else rhs)
    return Recipe("engine", fprop=cells)


_LAST = CONFIGS["llama"].num_hidden_layers - 1
FAULTS: dict[str, tuple[str, str, Callable[[], Pair]]] = {
    "raw at 0.6": ("trl#4159", "temperature",
                   lambda: replace(pair("llama", 1), temperature=0.6, engine_scores=at(1.0))),
    "raw at 1.4": ("vime#64", "temperature", lambda: replace(pair("moe", 2), temperature=1.4, engine_scores=at(1.0))),
    "trainer at 1": ("ms-swift#8427", "temperature",
                     lambda: replace(pair("llama", 3), temperature=0.7, trainer_temperature=1.0)),
    "scored at 1": ("miles#1345", "temperature",
                    lambda: replace(pair("llama", 4, BLOCKS), temperature=0.8, engine_scores=at(1.0))),
    "log p over T": ("prime-rl#697", "scaled", lambda: replace(
        pair("llama", 5), temperature=1.0, engine_scores=lambda z, _: z.log_softmax(-1) / 0.6)),
    "late by one": ("ms-swift#8196", "shift", lambda: replace(pair("llama", 6), after=shifted(1))),
    "early by one": ("prime-rl#1525", "shift", lambda: replace(pair("moe", 7, BLOCKS), after=shifted(-1))),
    "top-p 0.9": ("vime#69", "processed", lambda: replace(pair("llama", 8), engine_scores=filtered(top_p=0.9))),
    "top-k 20": ("verl#6240", "processed", lambda: replace(pair("llama", 9), engine_scores=filtered(top_k=20))),
    "penalty 1.1": ("vllm: generation_config.json", "processed",
                    lambda: replace(pair("llama", 10), engine_scores=filtered(penalty=1.1))),
    "zeros": ("vime#70", "padded", lambda: replace(pair("llama", 11), after=lost(0.0))),
    "sentinels": ("SkyRL, in vime#70", "padded", lambda: replace(pair("moe", 12), after=lost(-9999.0))),
    "no refit": ("slime#1618", "stale", lambda: stale("llama", 13, 0.03)),
    "no refit, FP8": ("verl#7136", "stale", lambda: stale("llama", 14, 0.05, recipe=BLOCKS)),
    "one block": ("SkyRL#1898", "stale", lambda: stale("llama", 15, 0.1, "layers.1.")),
    "norms": ("Megatron-Bridge#5868", "stale", lambda: stale("llama", 16, 0.1, "norm")),
    "embedding and head": ("xtuner#2044", "stale", lambda: stale("llama", 17, 0.05, "embed_tokens")),
    "MLPs": ("verl#7986", "stale", lambda: stale("llama", 18, 0.05, "mlp")),
    "no adapters": ("open-instruct#1473", "stale", lambda: stale("llama", 19, 0.05, "self_attn")),
    "rollout in FP8": ("verl docs/advance/fp8.md", "layers", lambda: pair("llama", 20, None, TOKENS)),
    "rollout in blocks": ("NeMo-RL fp8 rollout", "layers", lambda: pair("llama", 21, None, BLOCKS)),
    "rollout in MXFP8": ("Megatron-LM#7302", "layers", lambda: pair("llama", 22, None, MX)),
    "served in BF16": ("Primus#1010", "layers", lambda: pair("llama", 23, BLOCKS, None)),
    "first and last": ("NeMo-RL#4126", "layers", lambda: but(
        BLOCKS, lambda name: "layers.0." in name or f"layers.{_LAST}." in name, seed=24)),
    "gate by substring": ("verl#7519", "layers", lambda: but(TOKENS, lambda n: "gate" in n or "up_proj" in n, seed=25)),
    "attention left": ("vime#274", "layers", lambda: but(MX, lambda n: "self_attn" in n, seed=26)),
    "other powers": ("prime-rl#3112", "weights",
                     lambda: pair("llama", 27, POWERS, _tuned(POWERS, rhs=BLOCKS.fprop.rhs))),
    "channels for blocks": ("Megatron-Bridge#1746", "weights",
                            lambda: pair("llama", 28, BLOCKS, _tuned(BLOCKS, rhs=_ROW))),
    "tokens for groups": ("NeMo-RL#3743", "activations", lambda: pair("llama", 29, BLOCKS, _tuned(BLOCKS, lhs=_ROW))),
    "groups for tokens": ("RL-Kernel#180", "activations", lambda: pair(
        "llama", 30, CHANNELS, _tuned(CHANNELS, lhs=QuantizationSpec(E4M3, BLOCK_1X128)))),
    "inputs in BF16": ("transformers on a CPU", "activations", lambda: decoded(31)),
    "cache in E4M3": ("NeMo-RL#1212", "kv-cache", lambda: replace(pair("llama", 32), cache=torch.float8_e4m3fn)),
    "cache in E5M2": ("prime-rl#3555", "kv-cache", lambda: replace(pair("llama", 33, BLOCKS), cache=torch.float8_e5m2)),
    "head in FP8": ("NeMo-RL#3614", "head", lambda: cast_also("lm_head", "llama", 34)),
    "router in FP8": ("verl#7519", "router", lambda: cast_also("mlp.gate", "moe", 35)),
    "other experts": ("NeMo-RL#2590", "routes", lambda: jittered(36)),
    "rope_theta": ("sglang and vllm defaults", "formula",
                   lambda: with_config(37, rope_parameters={"rope_theta": 1000.0, "rope_type": "default"})),
    "norm's epsilon": ("config.json edited", "formula", lambda: with_config(38, rms_norm_eps=0.3)),
    "dropout": ("verl actor in train mode", "trainer", lambda: dropped(39)),
    "packed": ("RL packing without masks", "trainer", lambda: replace(pair("llama", 40), packed=True)),
}  # fmt: skip
"""Name -> (where such a fault was reported, its cause, how it is made)."""


def healthy() -> dict[str, Callable[[], Pair]]:
    """Pairs that differ by kernels and batches only."""
    recipes = {"bf16": None, "blocks": BLOCKS, "powers": POWERS, "mxfp8": MX, "channels": CHANNELS}
    found = {}
    for family in CONFIGS:
        for i, (name, recipe) in enumerate(recipes.items()):
            for seed in (100 + i, 200 + i):
                found[f"{family}, {name}, {seed}"] = lambda f=family, s=seed, r=recipe: pair(f, s, r)
    return found


def measure(name: str, make: Callable[[], Pair], folder: Path, seed: int) -> dict[str, Any]:
    """One row: what was found in a pair."""
    one = make()
    lists = dump(one, seed)
    path = folder / "dump.pt"
    torch.save(lists, path)
    ours = trained(of_model(one.checkpoint or one.trainer))
    theirs = None if one.config is None else replace(ours, config=one.config)
    before = [(word, trained(of_model(model))) for word, model in one.before]
    begun = time.process_time()
    found = attribute(read_rollout(path), ours, theirs, before=before, temperature=one.temperature)
    blind = attribute(read_rollout(path))
    named = sum(part.kl for part in found.parts[:-1])
    return {
        "name": name, "kl": found.kl, "first": found.first and found.first.cause,
        "said": found.first and found.first.said, "rest": found.rest.cause,
        "parts": {part.cause: part.kl for part in found.parts}, "sum": sum(part.kl for part in found.parts),
        "named": named / found.kl if found.kl else 0.0, "without a model": blind.first and blind.first.cause,
        "seconds": round(time.process_time() - begun, 1),
    }  # fmt: skip


def main(names: list[str]) -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    import tempfile

    rows, good = [], []
    with tempfile.TemporaryDirectory() as place:
        for seed, (name, (source, cause, make)) in enumerate(FAULTS.items()):
            if names and name not in names:
                continue
            row = {"fault": cause, "source": source} | measure(name, make, Path(place), seed)
            rows.append(row)
            print(json.dumps(row), flush=True)
        for seed, (name, make) in enumerate(healthy().items()):
            if names and name not in names and "healthy" not in names:
                continue
            good.append(measure(name, make, Path(place), 1000 + seed))
            print(json.dumps(good[-1]), flush=True)
    if names and RESULTS.exists():  # a run of some names replaces their rows
        kept = json.loads(RESULTS.read_text("utf-8"))
        rows = [row for row in kept["faults"] if row["name"] not in {one["name"] for one in rows}] + rows
        good = [row for row in kept["healthy"] if row["name"] not in {one["name"] for one in good}] + good
    write(rows, good)


def write(rows: list[dict[str, Any]], good: list[dict[str, Any]]) -> None:
    """Prints the summary, and writes it with all rows."""
    right = sum(row["first"] == row["fault"] for row in rows)
    untold = sum(row["parts"].get("untold", 0) + row["parts"].get("not-fp8", 0) > 0.1 * row["kl"] for row in rows)
    off = max((abs(row["sum"] / row["kl"] - 1) for row in rows + good if row["kl"]), default=0.0)
    alarms = sum(row["first"] is not None for row in good)
    summary = {"faults": len(rows), "first cause right": right, "more than 10 % of the KL untold": untold,
               "named before rounding, smallest share": min((row["named"] for row in rows), default=0.0),
               "largest error of a sum": off, "healthy": len(good), "alarms": alarms}  # fmt: skip
    print(json.dumps(summary, indent=1))
    RESULTS.write_text(json.dumps({"summary": summary, "faults": rows, "healthy": good}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
