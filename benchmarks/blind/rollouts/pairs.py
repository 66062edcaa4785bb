"""What each pair is: the model, both sides, the fault, the truth, and the first causes that are right."""

from __future__ import annotations

from typing import Any

# casts of engines: (pattern of linears, weights, activations)
BLOCK = (("*", "block", "group128"),)
BLOCK_POWERS = (("*", "block-pow2", "group128-pow2"),)
MX = (("*", "group32-pow2", "group32-pow2"),)
NONE = ("none", "none")
FP8_TRAINING: dict[str, Any] = {"recipe": "blockwise_fp32"}
SERVED: dict[str, Any] = {"served": {"layout": "fp8-block"}, "reads": "vllm"}

PAIRS: list[dict[str, Any]] = []


def pair(key: str, base: str, form: str, causes: str, truth: str, source: str = "", **options: Any) -> None:
    names = causes.split()
    PAIRS.append(
        {"key": key, "base": base, "format": form, "causes": names, "truth": truth, "source": source, **options}
    )


# ------------------------------------------------------------ log-probabilities
pair(
    "raw",
    "llama",
    "trl",
    "temperature",
    "the engine samples at 0.6 and returns raw log-probabilities; training divides by 0.6",
    "TRL #4159",
    temperature=0.6,
    logprobs="raw",
)
pair(
    "undivided",
    "qwen",
    "nemo-rl",
    "temperature",
    "the engine samples at 1.4 and returns what it sampled from; training does not divide",
    "vime #64",
    temperature=1.4,
    training_temperature=1.0,
)
pair(
    "raw replica",
    "llama_deep",
    "verl",
    "temperature",
    "one of two replicas returns raw log-probabilities at 0.7; half of the sequences",
    "vime #64",
    temperature=0.7,
    second_sampling={"logprobs": "raw"},
)
pair(
    "divided",
    "qwen_wide",
    "plain",
    "scaled",
    "the engine divides raw log-probabilities by 1.3 and does not normalize again; training divides its logits",
    "prime-rl #697",
    temperature=1.3,
    logprobs="divided",
)
pair(
    "top-k",
    "llama_deep",
    "trl",
    "processed",
    "log-probabilities after top-k of 8; training's are over all tokens",
    "TRL #6789",
    top_k=8,
)
pair(
    "top-p",
    "moe_deep",
    "verl",
    "processed",
    "log-probabilities after a temperature of 0.8 and top-p of 0.7; training has the temperature only",
    "verl #6240",
    temperature=0.8,
    top_p=0.7,
)
pair(
    "penalty",
    "llama",
    "plain.safetensors",
    "processed",
    "log-probabilities after a repetition penalty of 1.25",
    "vime #69",
    penalty=1.25,
)
# ------------------------------------------------------------ the list
pair(
    "late",
    "qwen",
    "trl",
    "shift",
    "the rollout's list is one token late, with a zero in front",
    "ms-swift #8196",
    edit="late",
)
pair(
    "late third",
    "llama_deep",
    "plain",
    "shift",
    "every third sequence is one token late",
    "prime-rl #1525",
    edit="late third",
)
pair(
    "late turn",
    "qwen_wide",
    "nemo-rl",
    "shift",
    "after the tool's tokens the rollout's list is one token late; the first turn is right",
    "prime-rl #1525",
    edit="late after tool",
    tool=True,
)
pair(
    "zeros",
    "moe",
    "verl",
    "padded",
    "the last fifth of each answer has zeros in place of numbers",
    "vime #70",
    edit="zeros",
)
pair(
    "-9999",
    "llama",
    "plain",
    "padded",
    "one token of twelve has -9999, as if the engine had no number for it",
    "vime #70",
    edit="-9999",
    lists_only=True,
)
# ------------------------------------------------------------ stale
pair(
    "stale",
    "llama",
    "verl",
    "stale",
    "the engine has the weights of the step before",
    "slime #1618",
    engine={"step": 2},
    before=(2, 1),
)
pair(
    "stale layer",
    "qwen",
    "plain.safetensors",
    "stale",
    "the MLPs of layers 1 and 2 are of two steps before, everything else is new",
    "SkyRL #1898",
    engine={"older": ("*layers.[12].mlp*", 1)},
    before=(2, 1),
)
pair(
    "stale half",
    "llama_deep",
    "nemo-rl",
    "stale",
    "one of two replicas missed the last refit: the second half of the batch is by older weights",
    "SkyRL #1898",
    second={"step": 2},
    in_order=True,
    before=(2,),
)
pair(
    "stale experts",
    "moe",
    "plain",
    "stale",
    "the second half of the experts is of two steps before, as if one rank of experts missed the refits",
    "SkyRL #1898",
    engine={"older": ("*.experts.*", 1), "experts_from": 4},
    before=(1,),
)
pair(
    "in flight",
    "qwen_wide",
    "trl",
    "stale",
    "new weights arrive in flight: 60 % of each answer is by the weights of two steps before",
    "SkyRL #1898",
    engine={"step": 1},
    second={"step": 3},
    swap=0.6,
    before=(2, 1),
)
pair(
    "prefix cache",
    "llama",
    "verl",
    "stale not-fp8",
    "the prefix cache was not reset: keys and values of the prompts are by weights of two steps before",
    "NeMo-RL #4018",
    engine={"prefix": "older"},
    prompt=28,
    before=(2, 1),
)
# ------------------------------------------------------------ layers
pair(
    "fp8 rollout",
    "llama",
    "nemo-rl",
    "layers",
    "the rollout is in FP8 with 128x128 and 1x128, training is in BF16",
    engine={"casts": BLOCK},
)
pair(
    "fp8 training",
    "qwen",
    "verl",
    "layers",
    "training is in FP8, the engine fell back to BF16",
    "Primus #1010",
    **FP8_TRAINING,
)
pair(
    "first and last",
    "llama_deep",
    "plain",
    "layers",
    "the engine keeps the first two and the last layer in BF16, training casts all",
    "NeMo-RL #4126",
    **FP8_TRAINING,
    reads="vllm",
    served={"layout": "fp8-block", "keep": ("model.layers.[013].*",)},
    engine={"casts": (("*layers.2.*", "block", "group128"),)},
)
pair(
    "down alone",
    "llama_deep",
    "trl",
    "layers",
    "training is in BF16, the engine casts the down projections of the MLPs and nothing else",
    "NeMo-RL #4126",
    engine={"casts": (("*.down_proj", "block", "group128"),)},
)
pair(
    "one layer more",
    "llama_deep",
    "verl",
    "layers",
    "training keeps layer 0 in BF16 by a setting of its own, the engine casts every layer",
    "NeMo-RL #4126",
    **FP8_TRAINING,
    training_keeps=("*layers.0.*",),
    engine={"casts": BLOCK},
)
pair(
    "experts only",
    "moe_deep",
    "nemo-rl",
    "layers",
    "training is in BF16, the engine casts the experts and nothing else",
    engine={"casts": (("*.experts", "block", "group128"),)},
)
# ------------------------------------------------------------ weights
pair(
    "powers",
    "llama",
    "plain",
    "weights",
    "training's scales of weights are FP32, the engine's are powers of two",
    "prime-rl #3112",
    **FP8_TRAINING,
    engine={"casts": (("*", "block-pow2", "group128"),)},
)
pair(
    "channels",
    "qwen",
    "trl",
    "weights activations",
    "the engine has a scale for each row of weights and each token, training 128x128 and 1x128",
    "prime-rl #3112",
    **FP8_TRAINING,
    engine={"casts": (("*", "row", "row"),)},
)
pair(
    "one scale",
    "qwen_wide",
    "nemo-rl",
    "weights",
    "the engine cast weights with one scale for each tensor, training with 128x128; activations agree",
    **FP8_TRAINING,
    engine={"casts": (("*", "tensor", "group128"),)},
)
pair(
    "expert powers",
    "moe",
    "verl",
    "weights",
    "experts alone have powers of two as scales of weights in the engine",
    "prime-rl #3112",
    **FP8_TRAINING,
    engine={"casts": (("*.experts", "block-pow2", "group128"), *BLOCK)},
)
# ------------------------------------------------------------ activations
pair(
    "act tensor",
    "llama",
    "plain",
    "activations",
    "the engine has one scale for the activations of a batch, training one for 1x128; weights agree",
    **FP8_TRAINING,
    engine={"casts": (("*", "block", "tensor"),)},
)
pair(
    "weights only",
    "llama",
    "trl",
    "activations",
    "the engine multiplies FP8 weights by BF16 activations, training casts both",
    **FP8_TRAINING,
    **SERVED,
    engine={"casts": (("*", "block", "none"),)},
)
pair(
    "act token",
    "llama",
    "plain.safetensors",
    "activations",
    "the engine has a scale for each token, training for 1x128; weights agree",
    **FP8_TRAINING,
    **SERVED,
    engine={"casts": (("*", "block", "row"),)},
)
pair(
    "act powers",
    "qwen_wide",
    "nemo-rl",
    "activations",
    "the engine's scales of activations are powers of two, training's are FP32; weights agree",
    "prime-rl #3112",
    **FP8_TRAINING,
    engine={"casts": (("*", "block", "group128-pow2"),)},
)
# ------------------------------------------------------------ head, router, cache
pair(
    "head",
    "qwen_wide",
    "verl",
    "head",
    "the engine casts the head, 128x128 and 1x128, and training nothing",
    "NeMo-RL #3614",
    engine={"head": ("block", "group128")},
)
pair(
    "router",
    "moe_deep",
    "plain",
    "router",
    "the engine casts the routers, by row and token, and training nothing",
    "NeMo-RL #3614",
    engine={"router": ("row", (0, 1, 2))},
)
pair(
    "cache",
    "llama_deep",
    "trl",
    "kv-cache",
    "the engine keeps keys and values in E4M3 with a scale of 1",
    "NeMo-RL #1212",
    engine={"cache": ("kv", (0, 1, 2, 3))},
)
pair(
    "some layers",
    "llama_deep",
    "plain",
    "kv-cache",
    "the engine keeps keys and values in E4M3 in the first two of four layers",
    "NeMo-RL #1212",
    engine={"cache": ("kv", (0, 1))},
)
pair(
    "fp8 and cache",
    "llama",
    "verl",
    "kv-cache",
    "both sides cast all linears alike, and the engine also keys and values",
    "NeMo-RL #1212",
    **FP8_TRAINING,
    **SERVED,
    engine={"casts": BLOCK, "cache": ("kv", (0, 1))},
)
pair(
    "routes",
    "moe",
    "plain",
    "routes router",
    "the engine's choice of experts has a correction that training does not know; the dump has the routes",
    "NeMo-RL #2590",
    engine={"bias": 0.3},
    routes=True,
)
# ------------------------------------------------------------ formula
pair(
    "theta",
    "llama",
    "nemo-rl",
    "formula",
    "config.json of the engine has a rope_theta of 500,000, training 10,000",
    "SkyRL #690",
    served={"config": {"rope_parameters/rope_theta": 500000.0}},
    reads="vllm",
)
pair(
    "norm of shares",
    "moe",
    "verl",
    "formula",
    "norm_topk_prob is false in the engine's config.json",
    served={"config": {"norm_topk_prob": False}},
    reads="vllm",
)
pair(
    "norm weights",
    "qwen",
    "plain",
    "plain",
    "in the engine's folder the norms of keys are 6 % larger; no linear differs",
    served={"tensors": ("*k_norm*", 1.06)},
    reads="vllm",
)
# ------------------------------------------------------------ trainer
pair(
    "dropout",
    "llama_deep",
    "verl",
    "trainer",
    "training recomputes with a dropout of 0.1 in attention",
    "unsloth-zoo #832",
    dropout=0.1,
)
pair(
    "packing",
    "qwen_wide",
    "plain",
    "trainer",
    "training packs four sequences in a row without a mask between them, positions go on",
    packed=True,
)
# ------------------------------------------------------------ no name
pair(
    "capacity",
    "moe_deep",
    "nemo-rl",
    "not-fp8",
    "the engine's experts take at most 1.25 of their share and drop later tokens; nothing is cast",
    "NeMo-RL #4243",
    engine={"capacity": 1.25},
)
pair(
    "collision",
    "llama",
    "trl",
    "not-fp8",
    "a collision in the prefix cache: a third of the rows have keys and values of another prompt's start",
    engine={"prefix": "other"},
    prompt=12,
)
pair(
    "window",
    "qwen",
    "verl",
    "untold",
    "both sides cast alike, but the engine's attention sees 12 tokens back, and no config says so",
    **FP8_TRAINING,
    engine={
        "casts": BLOCK,
        "fields": {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["sliding_attention"] * 4},
    },
)
# ------------------------------------------------------------ two faults
pair(
    "stale and raw",
    "qwen_wide",
    "nemo-rl",
    "stale temperature",
    "weights of the step before, and raw log-probabilities at 0.8",
    "slime #1618, TRL #4159",
    temperature=0.8,
    logprobs="raw",
    engine={"step": 2},
    before=(2,),
)
pair(
    "head and cache",
    "llama_deep",
    "plain",
    "head kv-cache",
    "the engine casts its head and keeps keys and values in E4M3",
    "NeMo-RL #3614, #1212",
    engine={"head": ("row", "row"), "cache": ("kv", (0, 1, 2, 3))},
)
pair(
    "fp8 and late",
    "llama",
    "trl",
    "shift layers",
    "every second sequence is one token late, and the rollout is in FP8 where training is in BF16",
    "ms-swift #8196",
    edit="late half",
    engine={"casts": BLOCK},
)
# ------------------------------------------------------------ healthy
pair("h plain", "llama", "plain", "", "BF16 on both sides", rows=24)
pair("h temperature", "qwen", "nemo-rl", "", "BF16, a temperature of 0.7 on both sides", temperature=0.7)
pair("h left", "moe", "verl", "", "BF16, training pads on the left", pad="left")
pair("h greedy", "llama_deep", "trl", "", "BF16, greedy", greedy=True, pad="left")
pair("h ranks", "llama", "plain.safetensors", "", "BF16, the engine sums over two ranks", engine={"ranks": 2})
pair("h four", "qwen_wide", "nemo-rl", "", "BF16, the engine sums over four ranks", engine={"ranks": 4}, length=64)
pair(
    "h single", "llama_deep", "plain", "", "BF16, training one sequence at a time, 1.2", temperature=1.2, micro_batch=1
)
pair(
    "h served",
    "qwen",
    "trl",
    "",
    "BF16, the engine reads a copy; older weights are on the list and were not used",
    served={},
    reads="vllm",
    before=(2, 1),
)
pair(
    "h block",
    "llama",
    "nemo-rl",
    "",
    "FP8 on both sides, 128x128 and 1x128, executed by different code",
    **FP8_TRAINING,
    **SERVED,
    engine={"casts": BLOCK},
)
pair(
    "h block bare",
    "qwen",
    "plain",
    "",
    "FP8 on both sides, 128x128 and 1x128; the call has no folder of the engine",
    **FP8_TRAINING,
    engine={"casts": BLOCK},
)
pair(
    "h block moe",
    "moe",
    "verl",
    "",
    "FP8 on both sides in a mixture of experts, without a folder of the engine",
    **FP8_TRAINING,
    engine={"casts": BLOCK},
)
pair(
    "h powers",
    "llama_deep",
    "trl",
    "",
    "FP8 on both sides, all scales powers of two",
    recipe="blockwise",
    engine={"casts": BLOCK_POWERS},
)
pair("h mx", "qwen_wide", "verl", "", "MXFP8 on both sides", recipe="mxfp8", engine={"casts": MX})
pair("h tools", "llama", "nemo-rl", "", "BF16, tokens of a tool in the middle are not counted", tool=True)
pair("h routes", "moe_deep", "plain", "", "BF16, the dump has the experts that were chosen", routes=True)
pair("h forward", "qwen", "plain", "", "BF16, the first training forward is on the list", first_forward=True)
pair("h chunks", "llama_deep", "verl", "", "BF16, prompts in chunks of five", engine={"chunk": 5}, prompt=17)
pair("h cool", "moe", "trl", "", "BF16, 0.6 on both sides, experts", temperature=0.6, rows=20)
pair("h short", "qwen_wide", "plain", "", "BF16, eight sequences of at most 24 tokens", rows=8, length=24)
pair(
    "h lists",
    "llama",
    "verl",
    "",
    "BF16, only the lists are given, 1.5 on both sides",
    temperature=1.5,
    lists_only=True,
)
