"""A run over many processes, predicted: bytes on each wire, memory of a rank, and the time of a step.

    dp        gradients of a rank's parameters, all-reduced once a step
    shard     codes of weights gathered in each pass of a microbatch; gradients reduce-scattered
    tp        codes of tokens gathered in front of two GEMMs a layer; the other side's sums reduce-scattered in 16 bits
    pp        the stream between stages, and its gradient

Bytes are what a rank puts into collectives. A ring of n moves (n - 1) / n of what is joined over each link. dp and
shard travel beside the GEMMs, tp and pp in front of them. Attention, norms and the loss are not in the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.nn.plan import Device, plan_layer
from ottava.numerics.tensor import QuantizationSpec
from ottava.plan.memory import Memory
from ottava.recipe import HEADS

ROWWISE = ("o_proj", "out_proj", "out", "down_proj", "down", "c_proj", "fc2", "w2", "dense_4h_to_h")
"""Last names of layers that tensor parallelism splits by input features; all others by output features."""
_SUM = 2
"""Bytes of a number in a sum of activations."""


@dataclass(frozen=True)
class Mesh:
    """How processes share a run; their number is the product."""

    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.dp * self.shard * self.tp * self.pp

    @classmethod
    def parse(cls, text: str, microbatches: int = 1) -> Mesh:
        """From "dp=128,tp=8".

        Raises:
            ValueError: an unknown name, or no whole number of at least 1.

        Example:
            >>> Mesh.parse("dp=128,tp=8").world
            1024
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in ("dp", "shard", "tp", "pp") or not size.isdecimal() or int(size) < 1:
                raise ValueError(f"plan: --mesh has {part.strip()!r}; needs dp, shard, tp or pp, as in dp=128,tp=8")
            sizes[name] = int(size)
        return cls(**sizes, microbatches=microbatches)


@dataclass(frozen=True)
class Fabric:
    """Links of a GPU, bytes a second each way. H200: NVLink 4 has 900e9 both ways, a 400 Gbit/s card 50e9."""

    inside: float = 450e9
    outside: float = 50e9
    node: int = 8
    """GPUs that NVLink joins."""


@dataclass(frozen=True)
class Wire:
    """What a rank sends along one dimension of the mesh in a step."""

    gathered: float
    """Bytes put into all-gathers."""
    summed: float
    """Bytes put into all-reduces and reduce-scatters."""
    sent: float
    """Bytes to a neighbour."""
    seconds: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.gathered + self.summed + self.sent


@dataclass(frozen=True)
class Fleet:
    """The prediction."""

    mesh: Mesh
    device: str
    parameters: float
    """Of the fullest rank."""
    state: float
    """Bytes of its weights, gradients, masters and moments."""
    activations: float
    """Bytes that its linear layers keep for backward."""
    wires: Mapping[str, Wire]
    compute: float
    """Seconds of the linear layers of a step."""
    step: float
    """Seconds of a step: GEMMs with the pipeline's bubble or the traffic beside them, the longer, and the rest."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, bytes and seconds."""
        return {**asdict(self), "world": self.mesh.world}

    def __str__(self) -> str:
        lines = [
            f"{self.mesh.world:,} processes, {self.device}: predicted, not measured; linear layers only",
            f"a rank: {self.parameters:,.0f} parameters, {self.state / 1e9:,.2f} GB of state, "
            f"{self.activations / 1e9:,.2f} GB kept by linear layers",
        ]
        for name, wire in self.wires.items():
            if wire.total:
                lines.append(
                    f"  {name:6} {wire.gathered / 1e6:>12,.1f} MB gathered {wire.summed / 1e6:>12,.1f} MB summed "
                    f"{wire.sent / 1e6:>10,.1f} MB sent   {1e3 * wire.seconds:,.2f} ms"
                )
        return "\n".join([*lines, f"step {1e3 * self.step:,.2f} ms, its GEMMs and casts {1e3 * self.compute:,.2f} ms"])


def predict(
    model: nn.Module,
    whole: Memory,
    mesh: Mesh,
    *,
    tokens: int,
    device: Device | None = None,
    stream: int = 2,
    logits: int = 0,
) -> Fleet:
    """Predicts a step of a converted model, which may be on the meta device.

    Args:
        whole: `ottava.memory` of the model and its optimizer, for these tokens.
        tokens: that one part of the batch has in a step: batch x sequence of dp x shard.
        stream: bytes of a number of the residual stream.
        logits: bytes of a token's logits, where they are gathered over tp; 0 where the loss is split, too.
    Raises:
        ValueError: the model has no linear layers.
    """
    device, fabric = device or Device(), Fabric()
    layers = quantized_layers(model)
    if not layers:
        raise ValueError("plan: the model has no linear layers that ottava runs; needs some")
    blocks = _blocks(model)
    width = layers[0].in_features
    inner = [(name, p) for name, p in model.named_parameters() if name.startswith(blocks)]
    ends = [p for name, p in model.named_parameters() if not name.startswith(blocks)]
    # FSDP2 takes shards of shards, which tensor parallelism has made, in high precision
    codes = {id(layer.parameter): mesh.tp == 1 and layer.resolved.cells("weight")[0] is not None for layer in layers}
    end = max((p.numel() for p in ends), default=0) if mesh.pp > 1 else sum(p.numel() for p in ends)
    split = sum(p.numel() for _, p in inner if p.ndim > 1) / mesh.pp + end
    gains = sum(p.numel() for _, p in inner if p.ndim < 2) / mesh.pp
    own = split / mesh.tp + gains
    size = next(model.parameters()).element_size()
    passes = 2 * mesh.microbatches
    gathered = sum(p.numel() * (1 if codes.get(id(p)) else size) for _, p in inner if p.ndim > 1) / mesh.pp / mesh.tp
    gathered = passes * (gathered + gains * size) + mesh.microbatches * end / mesh.tp * size
    sums = mesh.microbatches if mesh.pp > 1 else 1
    hops = min(mesh.pp - 1, 2)
    bytes_of = {
        "dp": (0.0, own / mesh.shard * size if mesh.dp > 1 else 0.0, 0.0),
        "shard": (gathered / mesh.shard, own * size * sums, 0.0) if mesh.shard > 1 else (0.0, 0.0, 0.0),
        "tp": _tokens(layers, mesh, tokens, width, stream, logits, bool(ends)) if mesh.tp > 1 else (0.0, 0.0, 0.0),
        "pp": (0.0, 0.0, hops * tokens / mesh.tp * width * stream),
    }
    wires, reach = {}, 1
    for name in ("tp", "shard", "dp", "pp"):
        ranks = getattr(mesh, name)
        reach *= ranks
        link = fabric.inside if reach <= fabric.node else fabric.outside
        joined, total, sent = bytes_of[name]
        ring = (ranks - 1) * joined + (2 if name == "dp" else 1) * (ranks - 1) / ranks * total
        wires[name] = Wire(joined, total, sent, (ring + sent) / link)
    compute = sum(_seconds(layer, mesh, tokens, device) for layer in layers) / mesh.pp
    busy = compute * (1 + (mesh.pp - 1) / mesh.microbatches)
    flying = min(mesh.pp, mesh.microbatches) / mesh.microbatches / mesh.pp / mesh.tp
    each = (whole.weights + whole.gradients + whole.masters + whole.moments) / whole.parameters
    return Fleet(
        mesh,
        device.name,
        parameters=own / mesh.shard,
        state=own / mesh.shard * each,
        activations=whole.activations * flying,
        wires=wires,
        compute=compute,
        step=max(busy, wires["dp"].seconds + wires["shard"].seconds) + wires["tp"].seconds + wires["pp"].seconds,
    )


def _blocks(model: nn.Module) -> str:
    """Where the layers are that a pipeline shares out: the list of modules with the most parameters."""
    lists = {name: one for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    sizes = {name: sum(p.numel() for p in one.parameters()) for name, one in lists.items()}
    return f"{max(sizes, key=lambda name: sizes[name])}." if sizes else ""


def _tokens(
    layers: list[QuantizedLayer], mesh: Mesh, tokens: int, width: int, stream: int, logits: int, ends: bool
) -> tuple[float, float, float]:
    """Bytes of tensor parallelism with tokens split between layers: (gathered, summed, sent)."""
    held, gathered, summed = tokens // mesh.tp, 0.0, 0.0
    for layer in layers:
        if ends and layer.name.rpartition(".")[2] in HEADS:
            continue  # it is one of the ends
        rowwise = layer.name.rpartition(".")[2] in ROWWISE
        features = layer.out_features if rowwise else layer.in_features
        for spec in layer.resolved.cells("grad_output" if rowwise else "input"):
            gathered += _travels(held, features, spec)
        summed += _SUM * tokens * features
    if ends:  # an embedding that sums onto the tokens, and a head in high precision
        gathered += mesh.pp * (2 * held * width * stream + held * logits)
        summed += mesh.pp * tokens * width * (stream + _SUM)
    return gathered / mesh.pp, summed / mesh.pp, 0.0


def _travels(rows: int, cols: int, spec: QuantizationSpec | None) -> float:
    if spec is None:
        return _SUM * rows * cols
    high, wide = spec.granularity.grid_shape((rows, cols))
    return rows * cols * spec.format.storage_dtype.itemsize + (4 * high * wide if high * wide > 1 else 0)


def _seconds(layer: QuantizedLayer, mesh: Mesh, tokens: int, device: Device) -> float:
    rowwise = layer.name.rpartition(".")[2] in ROWWISE
    k = layer.in_features // (mesh.tp if rowwise else 1)
    n = layer.out_features // (1 if rowwise else mesh.tp)
    part = max(1, tokens // mesh.microbatches)
    planned = plan_layer(layer.name or "layer", (part, max(1, k), max(1, n)), layer.recipe, device)
    return mesh.microbatches * min(planned.planned, planned.bf16)
