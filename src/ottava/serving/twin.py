"""A twin of a model: any causal model of Hugging Face's in FP32, whose linears multiply what a side has.

Every cause of a difference is a switch of its `ModelState`: operands of linears, other tensors, a cache of keys and
values in FP8, the experts that a router chose, rounding to BF16. Two forwards that differ in one switch show what it
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ottava.base.text import progress
from ottava.numerics.formats import Format
from ottava.numerics.rounding import round_to_format
from ottava.serving.executed import HALVES, in_model, quiet, stacked
from ottava.serving.sides import Model, Side, Text

_LEAST = 1e-12
_MOST = 32
"""Linears that are measured; each costs a forward."""


@dataclass(frozen=True, eq=False)
class ModelState:
    """What a forward computes with."""

    linears: Mapping[str, Side]
    plain: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """Of config.json."""
    cache: Format | None = None
    """Format of cached keys and values; None: as they are."""
    cache_top: float = math.inf
    """The largest number that its scale lets it hold; infinity: scale 1; 0: a scale for each token and head."""
    cached: int | None = None
    """The one layer that has such a cache; None: all."""
    held: str = "kv"
    """Of keys, values, or both."""
    prompt: ModelState | None = None
    """Whose keys and values stand in the cache for prompts; None: its own."""
    scores: Callable[[Tensor], Tensor] | None = None
    """What becomes of attention's scores before their softmax; None: nothing."""
    clip: float = 1.0
    """Share of its largest input at which a linear that casts clips, as a scale of other data does."""
    replay: bool = False
    """Take the experts that the rollout chose."""
    split: bool = False
    """Sum the products of each GEMM in two halves, and these in BF16, as two tensor-parallel ranks do."""

    @classmethod
    def of(cls, model: Model) -> ModelState:
        """The state of one side."""
        return cls(model.linears, model.plain, model.config)

    def given(self, name: str, side: Side) -> ModelState:
        """The same with another operand of one linear."""
        return replace(self, linears={**self.linears, name: side})


class Twin:
    """The causal model of a state's config in transformers; its numbers come from a `ModelState`.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers does not know the config, or the tensors are not those of its model.
    """

    def __init__(self, state: ModelState, dtype: torch.dtype = torch.float32) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ImportError("a twin of the model needs transformers: pip install transformers") from error
        plain = {key: value for key, value in state.config.items() if key not in ("quantization_config", "dtype")}
        try:
            with quiet():
                made = transformers.AutoConfig.for_model(**plain)
                made._experts_implementation = "eager"
                with torch.device("meta"):  # a config of any size is checked before it takes memory
                    _check(state, dict(_places(transformers.AutoModelForCausalLM.from_config(made))))
                model: nn.Module = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
        except Exception as error:  # each family checks its config by errors of any kind
            raise ValueError(f"transformers makes no such model of config.json: {error}".splitlines()[0]) from error
        self.model = model.eval().requires_grad_(False)
        self._places = dict(_places(self.model))
        self._now: dict[str, object] = {}
        self._operands: dict[str, Tensor] = {}
        ends = {name: place.data_ptr() for name, place in self._places.items() if ".experts." in name}
        self._fused = {p: ends[n.replace("gate_proj", "up_proj")] for n, p in ends.items() if "gate_proj" in n}
        """Where a stack's gate begins -> where its up begins: one GEMM reads both."""

    def logits(
        self, state: ModelState, ids: Tensor, routes: Tensor | None = None, prompts: Tensor | None = None
    ) -> Tensor:
        """ids int64 (B, T) -> logits fp32 (B, T, V).

        routes, int64 (B, T, L, k), are the experts of each token in each layer that has some; None: the routers' own.
        prompts, int64 (B,), are the tokens of each prompt. The state's tensors have the names and shapes of the first
        one's.
        """
        from transformers import DynamicCache

        past: dict[int, tuple[Tensor, Tensor]] = {}
        before = (torch.arange(ids.shape[1]) < (0 if prompts is None else prompts[:, None]))[..., None, :, None]

        class Changed(DynamicCache):
            """Keys and values as a cache in FP8 gives them back, and of prompts as another state left them there."""

            prompts = False
            """Whether the other state runs, whose keys and values are kept as they are."""

            def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
                fmt, pair = state.cache, [key_states, value_states]
                if self.prompts:
                    past[layer_idx] = key_states, value_states
                elif layer_idx in past:
                    pair = [torch.where(before, old, new) for old, new in zip(past[layer_idx], pair, strict=True)]
                if fmt is not None and state.cached in (None, layer_idx) and not self.prompts:
                    for i in ("kv".index(one) for one in state.held):
                        top = state.cache_top or pair[i].abs().amax(-1, keepdim=True).clamp(min=_LEAST).float()
                        by = top / fmt.max if state.cache_top < math.inf else 1.0
                        near = round_to_format((pair[i] / by).clamp(-fmt.max, fmt.max), fmt) * by
                        pair[i] = near.to(pair[i].dtype)
                return super().update(*pair, layer_idx, *args, **more)

        if state.prompt is not None:
            kept = Changed()
            kept.prompts = True
            self._run(state.prompt, ids, routes, kept)
        return self._run(state, ids, routes, None if state.cache is None and not past else Changed())

    def _run(self, state: ModelState, ids: Tensor, routes: Tensor | None, cache: Any) -> Tensor:
        with torch.no_grad(), _Switched(self._fill(state), routes, state):
            cached = {} if cache is None else {"past_key_values": cache}
            out: Tensor = self.model(input_ids=ids, use_cache=cache is not None, **cached).logits
        return out.float()

    def _fill(self, state: ModelState) -> dict[int, tuple[Side, Tensor]]:
        """Writes the numbers that changed; the address of each weight -> its side, and its operand in FP32."""
        sides: dict[int, tuple[Side, Tensor]] = {}
        for name, value in _named(state).items():
            if (place := self._places.get(name)) is None:  # a head that is tied
                continue
            if self._now.get(name) is not value:
                # embeddings and the like as an engine loads them; vectors stay, for norms multiply in FP32
                near = value.operand() if isinstance(value, Side) else value.bfloat16() if value.ndim > 1 else value
                self._operands[name] = near.float()
                place.copy_(self._operands[name])
                self._now[name] = value
            if isinstance(value, Side):
                sides[place.data_ptr()] = value, self._operands[name]
        fused = [(sides[up], gate) for gate, up in self._fused.items() if gate in sides and up in sides]
        for (_, more), gate in fused:
            side, first = sides[gate]
            sides[gate] = side, torch.cat((first, more))
        return sides


def _named(state: ModelState) -> dict[str, Side | Tensor]:
    """Tensor of the model -> what holds its numbers."""
    numbers: dict[str, Side | Tensor] = {in_model(f"{name}.weight"): side for name, side in state.linears.items()}
    return numbers | {in_model(name): tensor for name, tensor in state.plain.items()}


def _check(state: ModelState, places: Mapping[str, Tensor]) -> None:
    numbers = _named(state)
    if more := [name for name in numbers if name not in places and name != "lm_head.weight"]:
        raise ValueError(f"it has no {more[0]}")
    for name, place in places.items():
        if (value := numbers.get(name)) is None:
            if name != "lm_head.weight":
                raise ValueError(f"it has {name}, and the checkpoint has not")
            continue
        shape = (value.weight if isinstance(value, Side) else value).shape
        if shape != place.shape:
            raise ValueError(f"{name} is {tuple(place.shape)} there, and {tuple(shape)} in the checkpoint")


def _places(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, where its numbers are); experts are views of their stack."""
    inside = set()
    for name, module in model.named_modules():
        if stacked(module):
            whole: Any = module
            inside |= {f"{name}.gate_up_proj", f"{name}.down_proj"}
            for number in range(whole.down_proj.shape[0]):
                for part, i in HALVES.items():
                    yield f"{name}.{number}.{part}.weight", whole.gate_up_proj.data[number].chunk(2)[i]
                yield f"{name}.{number}.down_proj.weight", whole.down_proj.data[number]
    for name, parameter in model.named_parameters():
        if name not in inside:
            yield name, parameter.data
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                yield f"{prefix}.{own}".lstrip("."), buffer


class _Switched(TorchFunctionMode):
    """Multiplies in each linear what its side has, and gives routers their experts."""

    def __init__(self, sides: Mapping[int, tuple[Side, Tensor]], routes: Tensor | None, state: ModelState) -> None:
        super().__init__()
        self.sides, self.split, self.state = sides, state.split, state
        self.routes = None if routes is None else iter(routes.unbind(2))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and (found := self.sides.get(args[1].data_ptr())) is not None:
            return self._linear(*found, *args, **kwargs)
        if func is torch.addmm and (found := self.sides.get(args[2].data_ptr())) is not None:  # Conv1D: bias, x, W.T
            side, operand = found
            return self._linear(side, operand.t(), args[1], args[2], args[0])
        if func is F.scaled_dot_product_attention and self.state.scores is not None:
            return _attention(self.state.scores, *args, **kwargs)
        if getattr(func, "__name__", "") == "topk" and self.routes is not None:
            chosen = next(self.routes).reshape(*args[0].shape[:-1], -1)
            return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
        return func(*args, **kwargs)

    def _linear(self, side: Side, operand: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., K), (N, K) -> (..., N): products summed in FP32, then rounded to the dtype of x."""
        if self.state.clip < 1 and side.cast is not None:
            x = x.clamp(-(top := self.state.clip * x.abs().amax()), top)
        rows = side.rows(x.reshape(-1, x.shape[-1])).float()
        half = rows.shape[1] // 2 if self.split else rows.shape[1]
        y = rows[:, :half] @ operand[:, :half].t()
        if self.split:
            y = y.bfloat16().float() + (rows[:, half:] @ operand[:, half:].t()).bfloat16().float()
        y = y if bias is None else y + bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def _attention(
    change: Callable[[Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's attention with changed scores."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = change((q.float() @ k.float().mT) * (scale or q.shape[-1] ** -0.5))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return (scores.softmax(-1).to(v.dtype) @ v).to(q.dtype)


def kl_alone(ours: Model, theirs: Model, changed: Sequence[str], text: Text | None) -> tuple[dict[str, float], str]:
    """(linear -> nats per token, what was measured or why not).

    The KL of a token is KL(p of training || p with this linear as the engine has it); the mean over tokens.
    """
    if text is None:
        return {}, "not measured"
    if not changed:
        return {}, "0: both sides multiply the same operands"
    if int(text.ids.max()) >= int(ours.config.get("vocab_size", 0)):
        return {}, "not measured: the text has tokens beyond the vocabulary"
    state = ModelState.of(ours)
    try:
        twin = Twin(state)
        base = F.log_softmax(twin.logits(state, text.ids[None])[0], -1)
    except (ImportError, ValueError) as error:
        return {}, f"not measured: {error}"
    found = {}
    for name in progress(changed[:_MOST], "KL of each linear alone"):
        alone = F.log_softmax(twin.logits(state.given(name, theirs.linears[name]), text.ids[None])[0], -1)
        found[name] = float((base.exp() * (base - alone)).sum(-1).mean())
    left = f"; the first {_MOST} of {len(changed)} linears" if len(changed) > _MOST else ""
    return found, f"nats per token, each linear alone, on {text.said}{left}"
