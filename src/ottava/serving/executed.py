"""What transformers multiplies when it runs a checkpoint: the operands of each linear, caught as torch gets them.

A rule of `engines` is true if the operands that it predicts are those that were multiplied, bit for bit.
`disagreements` holds the rules against an execution; `parity` calls it where transformers is installed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ottava.serving.sides import Model, Side

HALVES = MappingProxyType({"gate_proj": 0, "up_proj": 1})
"""The parts of a stack of experts' first GEMM -> their place in it."""
_NAMES = (("block_sparse_moe.", "mlp."), (".w1", ".gate_proj"), (".w2", ".down_proj"), (".w3", ".up_proj"))
"""Names of Mixtral's checkpoints -> those of its model."""


@dataclass(frozen=True, eq=False)
class Multiplied:
    """What one linear multiplied."""

    x: Tensor
    """bf16 (T, K): its input, before any cast."""
    rows: Tensor
    """fp32 (T, K): what the GEMM got for it."""
    weight: Tensor
    """fp32 (N, K)."""


@dataclass(frozen=True, eq=False)
class Execution:
    """One forward of an engine."""

    said: str
    """Library, version and device."""
    operands: Mapping[str, Multiplied]
    """By the name of the linear in the model; experts that got no token are absent."""
    logits: Tensor
    """fp32 (T, V)."""


class _Caught(TorchFunctionMode):
    """Keeps the operands of each GEMM of a linear while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.calls.append((args[0].detach(), args[1].detach()))
        elif func is torch.addmm:  # Conv1D: bias, x, W.T
            self.calls.append((args[1].detach(), args[2].detach()))
        return func(*args, **(kwargs or {}))


def execute(folder: Path, ids: Tensor) -> Execution:
    """Runs a checkpoint in transformers, on the CPU, and keeps what its linears multiplied.

    Args:
        folder: of the checkpoint.
        ids: int64 (T,).
    Raises:
        ImportError: transformers, or a library that it needs for this layout, is not installed.
        ValueError: it does not load the checkpoint, or not with exactly its tensors.
    """
    import transformers

    name = f"transformers {transformers.__version__}"
    with quiet():
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                experts_implementation="eager",
            )
            logits, operands = _run(model.eval(), ids)
        except ImportError:
            raise
        except Exception as error:  # whatever a foreign library raises, it does not run this checkpoint
            text = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise ValueError(f"{name} does not run it: {text[:160]}") from error
    lost = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if lost:
        raise ValueError(f"{name} misses or does not expect {len(lost)} tensors, such as {lost[0]}")
    return Execution(f"{name} on cpu", operands, logits)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and the advice of the libraries."""
    from transformers import logging

    with ExitStack() as stack, redirect_stderr(io.StringIO()):
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        yield


def _run(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Multiplied]]:
    caught, found = _Caught(), dict[str, Multiplied]()
    stack: list[tuple[Tensor, int]] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(((args[0] if args else next(iter(kwargs.values()))).detach(), len(caught.calls)))

    def leave(module: nn.Module, name: str) -> None:
        x, start = stack.pop()
        calls = caught.calls[start:]
        if stacked(module):
            found.update(_of_experts(module, name, calls))
        elif len(calls) == 1:
            found[name] = _operands(module, x, *calls[0])

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if stacked(module) or not any(True for _ in module.children()):
                handles = (
                    module.register_forward_pre_hook(enter, with_kwargs=True),
                    module.register_forward_hook(lambda m, a, o, name=name: leave(m, name)),
                )
                for handle in handles:
                    hooks.callback(handle.remove)
        with caught:
            logits: Tensor = model(ids[None]).logits[0].float()
    return logits, found


def stacked(module: nn.Module) -> bool:
    """Whether a module holds its experts as one tensor."""
    weight: Any = getattr(module, "down_proj", None)
    return isinstance(weight, Tensor) and weight.ndim == 3


def _operands(module: nn.Module, x: Tensor, rows: Tensor, weight: Tensor) -> Multiplied:
    """(T, K) each; the weight of a Conv1D lies as (K, N)."""
    turned = type(module).__name__ == "Conv1D"
    whole = weight.t() if turned else weight
    return Multiplied(x.reshape(-1, x.shape[-1]), rows.reshape(-1, rows.shape[-1]).float(), whole.float())


def _of_experts(module: Any, name: str, calls: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Multiplied]:
    """Linears of experts whose weights lie in one stack: gate and up in one GEMM, then down."""
    found: dict[str, Multiplied] = {}
    for (x, both), (inner, down) in zip(calls[::2], calls[1::2], strict=True):
        number = next(e for e in range(module.down_proj.shape[0]) if torch.equal(module.down_proj[e], down))
        halves = both.chunk(2)
        for part, i in HALVES.items():
            found[f"{name}.{number}.{part}"] = _operands(module, x, x, halves[i])
        found[f"{name}.{number}.down_proj"] = _operands(module, inner, inner, down)
    return found


def disagreements(theirs: Model, ran: Execution) -> dict[str, str]:
    """Linear -> what was multiplied, and the rules say otherwise; linears that the batch did not reach are left out.

    Args:
        theirs: what the rules say, of `sides.served`.
    """
    found: dict[str, str] = {}
    for name, side in theirs.linears.items():
        if (real := ran.operands.get(in_model(name))) is not None and (what := _wrong(side, real)):
            found[name] = f"{ran.said}: {what}"
    return found


def in_model(name: str) -> str:
    """The name that a model has for a tensor or module of its checkpoint."""
    for old, new in _NAMES:
        name = name.replace(old, new)
    return name


def _wrong(side: Side, real: Multiplied) -> str:
    wanted, rows = side.operand(), side.rows(real.x)
    if wanted.shape != real.weight.shape:
        return f"a weight {tuple(real.weight.shape)}, and the rules say {tuple(wanted.shape)}"
    for what, a, b in (("weight", wanted, real.weight), ("input", rows, real.rows)):
        if not torch.equal(a, b):
            return f"{float((a != b).double().mean()):.2%} of the {what}'s numbers are not those of the rules"
    return ""
