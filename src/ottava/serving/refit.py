"""`refit`: new weights for a running engine, the same tensors that `export` writes, without a file.

An RL trainer sends its weights after each step. Each tensor comes with a checksum of its bytes, which the engine
computes, too: a tensor that did not arrive is named before a rollout is generated with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ottava.base.text import listed
from ottava.serving.export import ExportError, written_tensors
from ottava.serving.sides import digest
from ottava.serving.source import Source

checksum = digest


@dataclass(frozen=True, eq=False)
class Sent:
    """One tensor for the engine."""

    name: str
    """In the engine's checkpoint."""
    tensor: Tensor
    """Codes, scales or numbers, on the CPU."""
    sha256: str
    """`checksum` of the tensor."""


def refit(
    model: nn.Module | Source,
    engine_layout: str | None = None,
    *,
    into: Mapping[str, Tensor] | None = None,
    engine: str | None = None,
    keep: Collection[str] = (),
    static: bool = False,
    recast: bool = False,
    kv_scales: Mapping[str, tuple[float, float]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[Sent]:
    """The tensors that an engine expects of a layout, one at a time: bit for bit those that `export` writes.

    Args:
        model: converted by ottava or not, as it is now.
        engine_layout: a name of `weights.layouts.LAYOUTS`; None: the first that holds the codes of training.
        into: the engine's own tensors by name, which are overwritten in place; types and shapes must be the same.
        engine, keep, static, recast, kv_scales, config: as in `export`.
    Returns:
        Tensors with checksums. Nothing is sent before somebody iterates; one weight at a time is in memory.
    Raises:
        ExportError: as in `export`, at once. With `into` while tensors are sent: one that the engine lacks, of another
            type or shape, whose copy has another checksum, and at the end one that was not sent.

    Example:
        >>> import torch, ottava
        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False)).bfloat16()
        >>> _ = ottava.convert(model, "blockwise_fp32")
        >>> sent = list(refit(model, "fp8-block", config={"model_type": "mine"}))
        >>> [one.name for one in sent], missing({one.name: one.tensor for one in sent}, sent)
        (['0.weight', '0.weight_scale_inv'], [])
    """
    parts = written_tensors(
        model,
        layout=engine_layout,
        config=config,
        static=static,
        keep=keep,
        kv_scales=kv_scales,
        recast=recast,
        engine=engine,
    )[3]
    sent = (Sent(name, tensor, checksum(tensor)) for part in parts for name, tensor in part.items())
    return sent if into is None else _copied(sent, into)


def _copied(sent: Iterable[Sent], into: Mapping[str, Tensor]) -> Iterator[Sent]:
    left = set(into)
    for one in sent:
        place = into.get(one.name)
        if place is None:
            raise ExportError(f"refit: the engine has no {one.name}; its first tensors are {listed(into, 4)}")
        if (place.dtype, place.shape) != (one.tensor.dtype, one.tensor.shape):
            raise ExportError(
                f"refit: {one.name} is {place.dtype} {tuple(place.shape)} in the engine, and {one.tensor.dtype} "
                f"{tuple(one.tensor.shape)} of this layout"
            )
        place.detach().copy_(one.tensor)
        if checksum(place) != one.sha256:
            raise ExportError(f"refit: {one.name} did not arrive whole: its checksum is another one")
        left.discard(one.name)
        yield one
    if left:
        raise ExportError(f"refit: the engine still has old numbers in {listed(sorted(left), 4)}, which were not sent")


def missing(engine: Mapping[str, Tensor], sent: Iterable[Sent]) -> list[str]:
    """Names of the tensors that an engine lacks, or has with other bytes: a refit that did not arrive."""
    return [one.name for one in sent if one.name not in engine or checksum(engine[one.name]) != one.sha256]
