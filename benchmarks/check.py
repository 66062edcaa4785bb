"""The prover against planted faults and clean pairs: `python benchmarks/check.py [--only faults|clean|ranks|traces]`.

Faults are rebuilt small from public bugs: the 14 classes of TTrace (arXiv 2506.09280) and twenty of threads of
Megatron-LM, TransformerEngine, torchao, torch, transformers. The author of the prover wrote them: the set is not blind.
A fault is found if `check` gives a finding, and placed if that names the phase and the module of the fault. A clean
pair with a finding is a false alarm. Pairs of several ranks run on gloo. Written to results/check.json.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.prove import StepRecorder, StepRecording, Subject, Verdict, check
from ottava.prove.prover import judge, nudge_for

HERE = Path(__file__).resolve().parent


class Scaled(torch.autograd.Function):
    """The identity, whose backward is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.change(gradient), None


def e5m2_as_e4m3(x: Tensor) -> Tensor:
    scale = 448 / x.abs().max()
    return ((x * scale).to(torch.float8_e5m2).view(torch.float8_e4m3fn).to(x.dtype) / scale).nan_to_num()


class Attention(nn.Module):
    def __init__(self, width: int, fault: str) -> None:
        super().__init__()
        self.qkv, self.out, self.fault = nn.Linear(width, 3 * width), nn.Linear(width, width), fault

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        fault, heads = self.fault, 4
        q, k, v = self.qkv(x).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        if fault == "rope offset":
            k = k.roll(1, 2)
        scale = d**-0.5 if fault == "attention scale" else (d // heads) ** -0.5
        scores = q @ k.transpose(-1, -2) * scale
        hidden = torch.ones(t, t, dtype=torch.bool).triu(2 if fault == "mask off by one" else 1)
        weights = scores.masked_fill(hidden, -1e9).softmax(2 if fault == "softmax dim" else -1)
        mixed = (weights @ v).transpose(1, 2).reshape(b, t, d)
        if fault == "tail unwritten":
            mixed = torch.cat([mixed[:, :-1], torch.full_like(mixed[:, -1:], torch.nan)], 1)
        if fault == "zero gradient":
            mixed = Scaled.apply(mixed, torch.zeros_like)
        if fault == "e5m2 read as e4m3":
            mixed = Scaled.apply(mixed, e5m2_as_e4m3)
        return self.out(mixed)


class Mlp(nn.Module):
    def __init__(self, width: int, fault: str) -> None:
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), fault

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        hidden = F.gelu(up, approximate="tanh" if self.fault == "gelu" else "none")
        if self.fault == "transposed scale":
            hidden = hidden * (1 + 0.1 * torch.arange(hidden.shape[-1]) / hidden.shape[-1])
        if self.fault == "detached":
            hidden = hidden.detach()
        if self.fault == "one wrong row":
            hidden = torch.cat([hidden[:, :1] * 1.1, hidden[:, 1:]], 1)
        if self.fault == "dgrad scale":
            hidden = Scaled.apply(hidden, lambda g: g * 0.98)
        if self.fault == "saturated gradient":
            hidden = Scaled.apply(hidden, lambda g: g.clamp(-g.std(), g.std()))
        return self.down(hidden)


class Norm(nn.LayerNorm):
    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "norm eps":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-2)
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, width: int, fault: str) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, fault)
        self.norm2, self.mlp, self.fault = Norm(width), Mlp(width, fault), fault
        self.norm2.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        more = self.mlp(self.norm2(x))
        return more if self.fault == "residual lost" else x + more


class Model(nn.Module):
    """A decoder of three blocks; the fault is in the second."""

    def __init__(self, fault: str = "", recompute: str = "", width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, fault if n == 1 else "") for n in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)
        self.fault, self.recompute = fault, recompute

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(F.dropout(x, 0.1) if self.recompute == "dropout" else x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.clamp(max=62) if self.fault == "vocabulary cut" else tokens)
        if self.fault == "embedding scaled":
            x = x * 32**0.5
        for block in self.blocks:
            if self.recompute:
                kept = self.fault != "dropout drawn anew in the recomputation"
                reentrant = self.recompute == "reentrant"
                x = checkpoint(self.block, block, x, use_reentrant=reentrant, preserve_rng_state=kept)
            else:
                x = self.block(block, x)
        x = self.norm(x)
        return self.head(x.bfloat16().to(x.dtype) if self.fault == "head in bf16" else x)


def loss(model: nn.Module, tokens: Tensor, shift: int = 1, reduction: str = "mean") -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-shift].flatten(0, 1).float(), tokens[:, shift:].flatten(), reduction=reduction)


def adam(parameters: Iterable[nn.Parameter], **changed: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, "weight_decay": 0.1, **changed})


def tokens(seed: int = 0, rows: int = 8) -> Tensor:
    return torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(seed))


def stepping(
    parts: int = 1, scale: float | None = None, clip: float = 0.0, lost: str = "", shift: int = 1, keep: bool = False
) -> Any:
    """A step in micro-batches, with faults of a loop."""

    def step(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        if not keep:
            optimizer.zero_grad()
        for part in batch.chunk(parts):
            (loss(model, part, shift) * (1 / parts if scale is None else scale)).backward()
        for name, p in model.named_parameters():
            if lost and lost in name and p.grad is not None:
                p.grad.zero_()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def resumed(lost: str = "") -> Any:
    """A loop that goes on from a checkpoint behind each step."""

    def step(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        stepping()(model, optimizer, batch)
        torch.save([model.state_dict(), optimizer.state_dict()], file := io.BytesIO())
        weights, state = torch.load(io.BytesIO(file.getvalue()))
        if lost in weights:
            weights[lost] = weights[lost].roll(1, 0)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state | ({"state": {}} if lost == "moments" else {}))

    return step


def watched(harm: float = 1.0) -> Any:
    """A loop under a watch; harm: what a hook that is left behind makes of an output."""

    def step(model: Any, optimizer: Any, batch: Tensor) -> None:
        hook = model.blocks[1].mlp.up.register_forward_hook(lambda module, given, y: y * harm) if harm != 1 else None
        with tempfile.TemporaryDirectory() as folder, ottava.watch(model, folder):
            stepping()(model, optimizer, batch)
        if hook is not None:
            hook.remove()

    return step


M = "blocks.1"
LOCAL: dict[str, tuple[Any, str, str]] = {
    # fault -> (the pair's B, phase, start of the module's path)
    **{
        f: (f, "forward", M + ".attention")
        for f in ("rope offset", "attention scale", "mask off by one", "softmax dim", "tail unwritten")
    },
    **{f: (f, "forward", M + ".mlp") for f in ("gelu", "transposed scale", "one wrong row")},
    **{
        f: (f, "backward", M)
        for f in ("zero gradient", "e5m2 read as e4m3", "detached", "dgrad scale", "saturated gradient")
    },
    "norm eps": ("norm eps", "forward", M + ".norm2"),
    "residual lost": ("residual lost", "forward", M),
    "vocabulary cut": ("vocabulary cut", "forward", ""),
    "embedding scaled": ("embedding scaled", "forward", ""),
    "head in bf16": ("head in bf16", "forward", ""),
    "dropout drawn anew in the recomputation": ("dropout drawn anew in the recomputation", "recomputation", "blocks"),
    "loss not divided by micro-batches": (stepping(4, 1.0), "loss", ""),
    "labels shifted twice": (stepping(shift=2), "loss", ""),
    "gradients clipped wrongly": (stepping(clip=0.1), "clipping", ""),
    "gradient of one weight lost": (stepping(lost="blocks.1.mlp.up.weight"), "clipping", M + ".mlp.up"),
    "learning rate": ({"lr": 1.1e-3}, "update", ""),
    "weight decay": ({"weight_decay": 0.2}, "update", ""),
    "betas": ({"betas": (0.9, 0.999), "eps": 1e-4}, "update", ""),
    "stale weight": ("stale", "start", M),
    "resumed without moments": (resumed("moments"), "update", ""),
    "resumed with rows in another order": (resumed(M + ".mlp.up.weight"), "forward", M + ".mlp"),
    "watched, and an output changed": (watched(1.01), "forward", M + ".mlp"),
    "embedding and head untied": ("untied", "weight gradient", ""),
}


def local_fault(name: str) -> tuple[Verdict, str, str]:
    """The verdict on a fault of one process, with the right phase and module."""
    what, phase, module = LOCAL[name]
    torch.manual_seed(0)
    a, options = Model(recompute="dropout" if "recomputation" in name else ""), {"loss": loss, "optimizer": adam}
    options |= {"steps": 3} if name.startswith("resumed") else {}
    b: Any = copy.deepcopy(a)
    if isinstance(what, dict):
        b = Subject(b, None, lambda p: adam(p, **what))
    elif callable(what):
        b = Subject(b, what)
    elif what == "untied":
        a.head.weight = a.embed.weight
        b.head.weight = nn.Parameter(b.embed.weight.detach().clone())
        b.embed.weight.data.copy_(a.embed.weight.data)
        options["share_weights"] = False
    elif what == "stale":
        b.blocks[1].mlp.up.weight.data[3] += 0.01
        options["share_weights"] = False
    else:
        b = Model(what, a.recompute)
    return check(a, b, tokens(), **options), phase, module


def libraries(seed: int, half: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Models and casts of others: torchao's layers, a model of transformers in BF16 and under ottava."""
    import transformers
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for recipe in ("tensorwise", "rowwise"):
        cast = copy.deepcopy(half)
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(cast, config=config)
        yield f"BF16 and torchao {recipe} {seed}", half, cast, {}
        ours = copy.deepcopy(half)
        ottava.convert(ours, recipe)
        yield f"torchao and ottava, {recipe} {seed}", cast, ours, {}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    theirs = transformers.LlamaForCausalLM(config).bfloat16()
    cast = copy.deepcopy(theirs)
    ottava.convert(cast, "tensorwise")
    logits = {"loss": lambda model, batch: loss(lambda x: model(input_ids=x, use_cache=False).logits, batch)}
    yield f"Llama of transformers and itself {seed}", theirs, copy.deepcopy(theirs), logits
    yield f"Llama of transformers and ottava {seed}", theirs, cast, logits


def clean_pairs() -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, A, B, options) of one process."""
    torch.manual_seed(0)
    for seed in range(3):
        torch.manual_seed(seed)
        a = Model()
        half = copy.deepcopy(a).bfloat16()
        yield f"itself {seed}", a, copy.deepcopy(a), {}
        yield f"recomputed {seed}", a, Model(recompute="yes"), {}
        yield f"recomputed, reentrant {seed}", a, Model(recompute="reentrant"), {}
        yield f"micro-batches of 2 {seed}", a, Subject(copy.deepcopy(a), stepping(4)), {}
        yield f"micro-batches of 4 {seed}", a, Subject(copy.deepcopy(a), stepping(2)), {}
        yield f"compiled {seed}", a, torch.compile(copy.deepcopy(a), backend="aot_eager"), {}
        yield f"BF16 {seed}", a, half, {}
        yield f"BF16 and BF16 in micro-batches {seed}", half, Subject(copy.deepcopy(half), stepping(4)), {}
        yield f"FP64 {seed}", a, copy.deepcopy(a).double(), {}
        yield f"BF16, recomputed {seed}", half, Model(recompute="yes").bfloat16(), {}
        for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"):
            cast = copy.deepcopy(half)
            ottava.convert(cast, recipe)
            yield f"BF16 and {recipe} {seed}", half, cast, {}
            if recipe != "nvfp4":
                parts = Subject(copy.deepcopy(cast), stepping(2))
                yield f"{recipe} and {recipe} in micro-batches {seed}", cast, parts, {}
        yield from libraries(seed, half)
        yield f"resumed {seed}", a, Subject(copy.deepcopy(a), resumed()), {"steps": 3}
        yield f"watched {seed}", a, Subject(copy.deepcopy(a), watched()), {"steps": 2}
        yield f"two steps {seed}", a, copy.deepcopy(a), {"steps": 2}


# --- ranks ----------------------------------------------------------------------------------------------------


RANKS: dict[str, tuple[str, str, str]] = {
    # fault -> (kind of parallelism, phase, start of the module's path)
    "ddp: one parameter is not reduced": ("manual", "weight gradient", "blocks.1.mlp.up"),
    "ddp: summed, not averaged": ("manual", "weight gradient", ""),
    "ddp: a rank starts from other weights": ("manual", "start", M),
    "ddp: a rank has other data": ("manual", "data", ""),
    "ddp: reduced in bf16": ("manual", "weight gradient", ""),
    "tp: the all-reduce of the forward is lost": ("tp", "forward", M + ".mlp"),
    "tp: the bias is added on every rank": ("tp", "forward", M + ".mlp"),
    "tp: the all-reduce of the backward is lost": ("tp", "backward", M + ".mlp"),
    "tp: norm weights are not synchronised": ("tp", "clipping", M + ".norm2"),
    "tp: the mask of the embedding is one late": ("tp, embedding", "forward", "embed"),
    "zero: a shard is not updated": ("fsdp", "update", ""),
    "cp: the loss is averaged over own tokens": ("cp", "loss", ""),
    "cp: gradients of keys are not summed": ("cp", "backward", "blocks"),
    "cp: norm weights are not reduced": ("cp", "weight gradient", "blocks"),
    "cp: positions of the first rank": ("cp", "forward", "blocks.0.attention"),
    "pp: a block is in no stage": ("pp", "forward", ""),
    "pp: the gradient between stages is halved": ("pp", "backward", "blocks"),
    "ep: tokens of other ranks are dropped": ("ep", "forward", M + ".mlp"),
    "ep: the router is not synchronised": ("ep", "weight gradient", M + ".mlp.router"),
    "fsdp: clipped by the norm of a shard": ("fsdp", "clipping", ""),
}
TTRACE: dict[str, str] = {
    # class of TTrace, as far as it could be read here -> the row that rebuilds it
    "TP: wrong embedding mask": "tp: the mask of the embedding is one late",
    "AR: wrong input of the recomputation": "dropout drawn anew in the recomputation",
    "CP: wrong loss scaling": "cp: the loss is averaged over own tokens",
    "DP: wrong loss scaling": "ddp: summed, not averaged",
    "ZeRO: embedding and head untied": "embedding and head untied",
    "SP: router weights not synchronised": "ep: the router is not synchronised",
    "SP: norm weights not synchronised": "tp: norm weights are not synchronised",
    "TP: wrong communication group": "tp: the all-reduce of the forward is lost",
    "FP8: wrong cast": "e5m2 read as e4m3",
    "ZeRO: a parameter is not updated": "zero: a shard is not updated",
    "PP: wrong stage division": "pp: a block is in no stage",
    "TP: gradients used before their reduction": "tp: the all-reduce of the backward is lost",
    "CP: wrong attention gradients": "cp: gradients of keys are not summed",
    "TP and CP: wrong norm gradients": "cp: norm weights are not reduced",
}
CLEAN_RANKS = (
    "tp, embedding",
    "cp",
    "pp",
    "ep",
    "manual",
    "ddp",
    "fsdp",
    "tp",
    "ddp in micro-batches",
    "fsdp with bf16",
    "ddp, rows interleaved",
)


class Reduce(torch.autograd.Function):
    """All-reduce in the forward, or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: bool) -> Tensor:
        ctx.ahead = ahead
        x = x.clone()
        if ahead:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        if not ctx.ahead:
            dist.all_reduce(gradient)
        return gradient, None


class Gather(torch.autograd.Function):
    """The parts of all ranks along a dimension; its gradient is the sum of theirs, or this rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, alone: bool = False) -> Tensor:
        ctx.dim, ctx.alone = dim, alone
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        if not ctx.alone:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None, None


class ContextAttention(nn.Module):
    """Queries of this rank's part of the sequence, keys and values of all parts."""

    def __init__(self, whole: Any, fault: str) -> None:
        super().__init__()
        self.qkv, self.out, self.fault = whole.qkv, whole.out, fault

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        alone = self.fault == "cp: gradients of keys are not summed"
        k, v = (Gather.apply(part, 2, alone) for part in (k, v))
        first = 0 if self.fault == "cp: positions of the first rank" else dist.get_rank() * t
        hidden = torch.arange(k.shape[2])[None] > torch.arange(first, first + t)[:, None]
        weights = (q @ k.transpose(-1, -2) * (d // 4) ** -0.5).masked_fill(hidden, -1e9).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class ParallelEmbedding(nn.Module):
    """A part of the vocabulary; tokens of other ranks give zero, and the sum is whole."""

    def __init__(self, whole: Any, fault: str) -> None:
        super().__init__()
        n, self.first = dist.get_world_size(), dist.get_rank() * (64 // dist.get_world_size())
        self.weight = nn.Parameter(whole.weight.data.chunk(n)[dist.get_rank()].clone())
        self.late = fault == "tp: the mask of the embedding is one late"

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        mine = (local >= (1 if self.late else 0)) & (local < len(self.weight))
        return Reduce.apply(F.embedding(local.clamp(0, len(self.weight) - 1), self.weight) * mine[..., None], True)


class Experts(nn.Module):
    """Four experts and the best of them for each token; on ranks each has its share, and meets all tokens."""

    def __init__(self, width: int, fault: str = "", sharded: bool = False) -> None:
        super().__init__()
        self.router, self.fault, self.sharded = nn.Linear(width, 4), fault, sharded
        self.experts = nn.ModuleList(Mlp(width, "") for _ in range(4))
        if sharded:
            n, r = dist.get_world_size(), dist.get_rank()
            for place in range(4):
                if place * n // 4 != r:
                    self.experts[place] = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        gates = gates * F.one_hot(gates.argmax(-1), 4)
        if not self.sharded:
            return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        n, r, rows = dist.get_world_size(), dist.get_rank(), len(x)
        x, gates = (Gather.apply(part, 0) for part in (x, gates))
        if self.fault == "ep: tokens of other ranks are dropped":
            own = (torch.arange(len(x)) // rows == r).view(-1, 1, 1)
            x, gates = x * own, gates * own
        y = sum(gates[..., i : i + 1] * e(x) for i, e in enumerate(self.experts) if i * n // 4 == r)
        return Reduce.apply(Reduce.apply(y, True), False).chunk(n)[r]


def stage(model: Any) -> tuple[int, int]:
    """The first block of this rank's stage, and that behind its last; the model loses what other ranks hold."""
    n, r = dist.get_world_size(), dist.get_rank()
    begin, end = (min(3, -(-3 * i // n)) for i in (r, r + 1))
    for i in {0, 1, 2} - {*range(begin, end)}:
        model.blocks[i] = nn.Identity()
    for name in (*(("embed",) if r else ()), *(("norm", "head") if r < n - 1 else ())):
        setattr(model, name, nn.Identity())
    return begin, end


def pipeline(model: Any, batch: Tensor, fault: str, begin: int, end: int) -> None:
    """Forward and backward of this rank's stage."""
    n, r = dist.get_world_size(), dist.get_rank()
    begin += fault == "pp: a block is in no stage" and r == n - 1 and begin < 3
    if r:
        x = torch.empty(*batch.shape, 32)
        dist.recv(x, r - 1)
        x.requires_grad_()
    else:
        x = model.embed(batch)
    entered = x
    for block in model.blocks[begin:end]:
        x = block(x)
    if r == n - 1:
        logits = model.head(model.norm(x))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    else:
        dist.send(x.detach().contiguous(), r + 1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, r + 1)
        x.backward(gradient / 2 if fault == "pp: the gradient between stages is halved" else gradient)
    if r:
        dist.send(entered.grad, r - 1)


class ParallelMlp(nn.Module):
    """Cut by columns, then by rows, with the collectives in the module."""

    def __init__(self, whole: Any, fault: str) -> None:
        super().__init__()
        n, r = dist.get_world_size(), dist.get_rank()
        self.up, self.down, self.fault = copy.deepcopy(whole.up), copy.deepcopy(whole.down), fault
        for linear, dim in ((self.up, 0), (self.down, 1)):
            linear.weight = nn.Parameter(linear.weight.data.chunk(n, dim)[r].clone())
        self.up.bias = nn.Parameter(self.up.bias.data.chunk(n)[r].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.fault == "tp: the all-reduce of the backward is lost" else Reduce.apply(x, False)
        hidden = F.gelu(self.up(x))
        every = self.fault == "tp: the bias is added on every rank"
        y = F.linear(hidden, self.down.weight, self.down.bias if every else None)
        if self.fault != "tp: the all-reduce of the forward is lost":
            y = Reduce.apply(y, True)
        return y if every else y + self.down.bias


_ALONE = {
    "ddp: one parameter is not reduced": "blocks.1.mlp.up.weight",
    "ep: the router is not synchronised": "blocks.1.mlp.router.weight",
}


def experts(model: Any) -> Any:
    """The model with four experts in its second block."""
    torch.manual_seed(1)
    model.blocks[1].mlp = Experts(32)
    return model


def rank_step(kind: str, fault: str, batch: Tensor) -> StepRecording:
    """What a rank records."""
    n, r = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model: Any = Model()
    mine = batch[r::n] if "interleaved" in kind else batch.chunk(n)[r]
    net = model
    if fault == "ddp: a rank starts from other weights" and r:
        model.blocks[1].mlp.up.weight.data.mul_(1.01)
    if fault == "ddp: a rank has other data" and r:
        mine = tokens(7)[: len(mine)]
    if kind.startswith("ddp"):
        net = nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "bf16" in kind else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    if kind == "tp":
        model.blocks[1].mlp = ParallelMlp(model.blocks[1].mlp, fault)
        mine = batch
    if "embedding" in kind:
        mine = batch
        model.embed = ParallelEmbedding(model.embed, fault)
    if kind == "cp":
        mine = batch.chunk(n, 1)[r]
        for block in model.blocks:
            block.attention = ContextAttention(block.attention, fault)
    if kind == "ep":
        whole = experts(model).blocks[1].mlp
        model.blocks[1].mlp = Experts(32, fault, sharded=True)
        model.blocks[1].mlp.load_state_dict(whole.state_dict(), strict=False)
        for p in model.blocks[1].mlp.experts.parameters():
            p.register_hook(lambda g: g / n)  # it meets the tokens of all ranks
    blocks = stage(model) if kind == "pp" else (0, 3)
    optimizer = adam(model.parameters())
    with StepRecorder(net) as recorder:
        parts = mine.chunk(2) if "micro" in kind else [mine]
        if kind == "pp":
            pipeline(model, batch, fault, *blocks)
        elif kind == "cp":
            logits = net(mine)[:, : None if r < n - 1 else -1]
            targets = batch[:, 1:][:, r * mine.shape[1] : (r + 1) * mine.shape[1]]
            own = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            whole_count = targets.numel() * n if "own tokens" in fault else batch[:, 1:].numel()
            (own / whole_count).backward()
            for name, p in model.named_parameters():
                if fault != "cp: norm weights are not reduced" or "norm2" not in name:
                    dist.all_reduce(p.grad)
        else:
            for part in parts:
                (loss(net, part) / len(parts)).backward()
        if kind in ("manual", "ep"):
            for name, p in model.named_parameters():
                if ".experts." not in name and name != _ALONE.get(fault):
                    wire = p.grad.bfloat16() if fault == "ddp: reduced in bf16" else p.grad
                    dist.all_reduce(wire)
                    p.grad.copy_(wire if fault == "ddp: summed, not averaged" else wire / n)
        if fault.startswith("tp: norm") and r:
            model.blocks[1].norm2.weight.grad.mul_(1.5)
        if fault.startswith("fsdp: clipped"):
            norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.mul_(0.1 / norm)
        if fault.startswith("zero: a shard") and r:
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    return recorder.recording("B")


def run_rank(rank: int, size: int, folder: str, jobs: list[tuple[str, str, str]]) -> None:
    """A process: all jobs in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/meeting", size), rank=rank, world_size=size)
    for name, kind, fault in jobs:
        rank_step(kind, fault, tokens()).save(Path(folder, name))
        dist.barrier()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def rank_verdicts(size: int) -> Iterator[tuple[str, str, Verdict]]:
    """(fault or "", kind, verdict) of all faults and clean pairs on so many ranks."""
    jobs = [(f"{i}", kind, fault) for i, (fault, (kind, _, _)) in enumerate(RANKS.items())] if size < 4 else []
    jobs += [(f"clean{i}", kind, "") for i, kind in enumerate(CLEAN_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (size, folder, jobs), size)
        for name, kind, fault in jobs:
            b = StepRecording.load(Path(folder, name))
            yield fault, kind, judge(reference(b, kind), b)


def reference(b: StepRecording, kind: str = "") -> StepRecording:
    """One process, with the units of B."""

    def run(nudge: Any = None) -> StepRecording:
        torch.manual_seed(0)
        model = experts(Model()) if kind == "ep" else Model()
        optimizer = adam(model.parameters())
        with StepRecorder(model, nudge=nudge) as recorder:
            loss(model, tokens()).backward()
            optimizer.step()
        return recorder.recording("A")

    a = run()
    a.nudged = [run(nudge_for(a, b, seed)) for seed in (1, 2, 3)]
    return a


# --- mutated traces ------------------------------------------------------------------------------------------


def mutated(count: int = 50) -> Iterator[tuple[str, str, Verdict]]:
    """(what, right tensor, verdict): a fault that is put into a saved trace, and grows along the program."""
    torch.manual_seed(0)
    model = Model()

    def run(nudge: Any = None) -> StepRecording:
        one = copy.deepcopy(model)
        with StepRecorder(one, nudge=nudge) as recorder:
            loss(one, tokens()).backward()
        return recorder.recording("A")

    a = run()
    a.nudged = [run(nudge_for(a, a, seed)) for seed in (1, 2, 3)]
    random = torch.Generator().manual_seed(0)
    places = [i for i, e in enumerate(a.entries) if e.value.is_floating_point()]
    ways = ("scale", "zero row", "swap", "bf16", "one element")
    for number in range(count):
        b = run()
        start = places[int(torch.randint(len(places), (), generator=random))]
        way = ways[number % len(ways)]
        for entry in b.entries[start:]:
            if entry.value.is_floating_point():
                entry.value = _mutate(entry.value, way if entry is b.entries[start] else "scale")
        yield way, str(b.entries[start].key), judge(a, b)


def _mutate(x: Tensor, way: str) -> Tensor:
    x = x.clone()
    flat = x.view(-1, x.shape[-1])
    if way == "scale":
        return x * 1.01
    if way == "zero row":
        flat[flat.square().sum(1).argmax()] = 0
    elif way == "swap":
        order = flat.square().sum(0).argsort()
        flat[:, [order[0], order[-1]]] = flat[:, [order[-1], order[0]]]
    elif way == "bf16":
        return x.bfloat16().to(x.dtype)
    else:
        x.view(-1)[x.abs().argmax()] *= 1.1
    return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", choices=["", "faults", "clean", "ranks", "traces"])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def note(kind: str, name: str, verdict: Verdict, phase: str = "", module: str = "", began: float = 0.0) -> None:
        f = verdict.finding
        # the phase and the module, or one of the modules that the finding names
        named = () if f is None else (f.module, *f.others)
        placed = f is not None and f.phase == phase and any(m.startswith(module) for m in named)
        row: dict[str, Any] = {"set": kind, "name": name, "found": f is not None, "placed": placed}
        row["ttrace"] = next((one for one, row in TTRACE.items() if row == name), None)
        row |= {"phase": f and f.phase, "tensor": f and str(f.key), "seconds": round(time.time() - began, 2)}
        rows.append(row)
        bad = (f is not None) if kind == "clean" else not placed
        print("MISS" if bad else "ok  ", kind, name, "" if f is None else f"{f.phase} | {f.sentence[:170]}", flush=True)

    if only in ("", "faults"):
        for name in LOCAL:
            began = time.time()
            verdict, phase, module = local_fault(name)
            note("faults", name, verdict, phase, module, began)
    if only in ("", "clean"):
        for name, a, b, options in clean_pairs():
            began = time.time()
            note("clean", name, check(a, b, tokens(), **{"loss": loss, "optimizer": adam, **options}), began=began)
    if only in ("", "ranks"):
        for size in (2, 4):
            for fault, kind, verdict in rank_verdicts(size):
                name = fault or f"{kind} on {size} ranks"
                where = RANKS.get(fault, ("", "", ""))[1:]
                note("faults" if fault else "clean", name, verdict, *where, began=time.time())
    if only in ("", "traces"):
        for way, key, verdict in mutated():
            f = verdict.finding
            right = f is not None and str(f.key) == key
            rows.append({"set": "traces", "name": f"{way}: {key}", "found": f is not None, "placed": right})
            if not right:
                print("MISS traces", way, key, f and f.sentence[:150], flush=True)
    sets = {kind: [r for r in rows if r["set"] == kind] for kind in ("faults", "clean", "traces")}
    sets = {kind: own for kind, own in sets.items() if own} | {"ttrace": [r for r in rows if r.get("ttrace")]}
    summary = {
        kind: {"cases": len(own), "found": sum(r["found"] for r in own), "placed": sum(r["placed"] for r in own)}
        for kind, own in sets.items()
    }
    print(json.dumps(summary))
    if not only:
        (HERE / "results" / "check.json").write_text(
            json.dumps({"summary": summary, "blind": False, "rows": rows}, indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
