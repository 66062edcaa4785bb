"""A receipt of what really ran in every linear layer's last forward and backward.

Silent fallback is the most repeated failure of FP8 training: flags that do nothing, layers that quietly stay in BF16.
The engine notes the kernel of each GEMM when it runs; this file makes a table of the notes, and `assert_fp8` checks it
in CI.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from ottava.base.errors import need
from ottava.base.text import columns, data_frame, html_table, listed
from ottava.engine.functional import QuantizedLayer
from ottava.engine.groups import CollectiveRow
from ottava.nn.attention import FP8_EMULATION, DotProductAttention
from ottava.nn.convert import weights_outside
from ottava.ops.gemm import GemmRecord
from ottava.recipe import GEMMS, GemmRecipe
from ottava.weights.operands import stored_as

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
"""A part of a layer's name that counts layers, and that a number gives back as it was."""
_TORCHS = ("bf16_mm", "scaled_mm", "torch", "torch.mm")  # torch adds in these kernels, see docs/determinism.md


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """One GEMM of one layer."""

    layer: str
    """Full name."""
    gemm: str
    """fprop, dgrad or wgrad; "attention" for one of these; "all" for a layer that is not ottava's."""
    operands: str = "high precision"
    """Formats and granularities of both sides."""
    kernel: str = "-"
    """The kernel that ran; "-" if none did."""
    shape: str = "-"
    """M x N x K; of attention B x H/G x Sq x Sk x D."""
    padding: str = ""
    """The operands that were zero-padded."""
    fp8: bool = False
    """Whether both operands were quantized."""
    native: bool = False
    """Whether they stayed so inside the GEMM; False: emulated."""
    saved_bytes: int = 0
    """fprop: bytes kept for backward: the input's operand and the FP8 copy of the weight."""
    high_precision_bytes: int = 0
    """fprop: bytes that torch's linear would keep: its input."""
    note: str = ""
    """Why not FP8, or why a faster kernel did not run."""
    weight: int = 0
    """Share in `fp8_fraction`: elements of the weight if this GEMM ran, else 0."""
    casts: int = 0
    """fprop: the number of casts of the input in the forward: 2 if x and x.T have different scales."""


@dataclass(frozen=True)
class Receipt:
    """Rows, and the share of the linear work that ran with quantized operands; as text, equal layers share a row.

    Example: see `receipt`.
    """

    rows: tuple[ReceiptRow, ...]
    """In the order of the model."""
    collectives: tuple[CollectiveRow, ...] = ()
    """What this rank sent in the recorded step."""

    @property
    def fp8_fraction(self) -> float:
        """Share of the GEMMs that ran, weighted by the size of their weight; 0 if none ran."""
        return self._share("fp8")

    @property
    def native_fraction(self) -> float:
        """As `fp8_fraction`, counting only GEMMs that no kernel emulated."""
        return self._share("native")

    def _share(self, field: str) -> float:
        total = sum(row.weight for row in self.rows)
        return sum(row.weight for row in self.rows if getattr(row, field)) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "collectives": [asdict(row) for row in self.collectives],
            "fp8_fraction": self.fp8_fraction,
            "native_fraction": self.native_fraction,
        }

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per GEMM."""
        return data_frame([asdict(row) for row in self.rows])

    def __repr__(self) -> str:
        return f"<Receipt: {len(self.rows)} GEMMs, {self._summary}>"

    def __str__(self) -> str:
        lines = columns(*self._cells)
        if any(row.kernel in _TORCHS for row in self.rows):
            lines.append(f"on a CPU the bits of {listed(_TORCHS)} may depend on the number of threads")
        return "\n".join([*lines, self._summary, *map(str, self.collectives)])

    def _repr_html_(self) -> str:
        sent = html_table([("collectives",), *((str(row),) for row in self.collectives)]) if self.collectives else ""
        return html_table(self._cells, self._summary) + sent

    @property
    def _summary(self) -> str:
        return f"{self.fp8_fraction:.1%} of the linear work in FP8, {self.native_fraction:.1%} on FP8 hardware"

    @property
    def _cells(self) -> list[tuple[str, ...]]:
        header = ("layer", "gemm", "operands", "kernel", "M x N x K", "padding", "saved", "note")
        rows = grouped(self.rows)
        return [
            header,
            *((name, r.gemm, r.operands, r.kernel, r.shape, r.padding, _saved(r), r.note) for name, r in rows),
        ]


def grouped(rows: Sequence[ReceiptRow]) -> list[tuple[str, ReceiptRow]]:
    """Joins rows that differ only in the numbers of the layer's name; the joined name lists the numbers.

    Example:
        >>> row = ReceiptRow("layers.0.up", "fprop")
        >>> rows = [replace(row, layer=f"layers.{i}.up", note="BF16" if i == 3 else "") for i in range(6)]
        >>> [(name, one.note) for name, one in grouped(rows)]
        [('layers.0-2,4-5.up', ''), ('layers.3.up', 'BF16')]
    """
    alike: dict[Any, tuple[ReceiptRow, list[tuple[int, ...]]]] = {}  # the first of its rows, and the numbers of all
    for row in rows:
        parts = row.layer.split(".")
        words = tuple(None if _NUMBER.fullmatch(part) else part for part in parts)  # a name is data, no template
        key = words, replace(row, layer="")
        alike.setdefault(key, (row, []))[1].append(tuple(int(part) for part in parts if _NUMBER.fullmatch(part)))
    found: list[tuple[str, ReceiptRow]] = []
    for (words, _), (first, numbers) in alike.items():
        sides = [sorted(set(side)) for side in zip(*numbers, strict=True)]
        if len(numbers) == math.prod(len(side) for side in sides):  # the name lists all of them and no other
            found.append((_filled(words, map(_ranges, sides)), first))
        else:
            found += [(_filled(words, map(str, one)), first) for one in numbers]
    return found


def _filled(words: Sequence[str | None], numbers: Iterator[str]) -> str:
    return ".".join(next(numbers) if word is None else word for word in words)


def _ranges(numbers: list[int]) -> str:
    """Ascending whole numbers: 0-2,5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def receipt(model: nn.Module, *, training: bool = True, collectives: Sequence[CollectiveRow] = ()) -> Receipt:
    """The kernel of each GEMM of each linear layer in its last forward and backward of training.

    Args:
        training: report the last call in grad mode that was no calibration, if there was one, so that an evaluation
            hides nothing. False: the last call of any kind.
        collectives: `rows` of `ottava.distributed.Collectives`, which has recorded a step; printed below the table.

    Layers that are not ottava's get one row with that note. So do weights that code outside nn.Linear multiplies
    (`nn.convert`), under the name of the parameter. Attention gets a row that names its kernel. Compiled code chooses
    kernels when it runs and notes none; such rows have the kernel "compiled" and show the recipe at the time of
    tracing.

    Example:
        >>> import torch, ottava
        >>> model = nn.Sequential(nn.Linear(64, 40)).bfloat16()
        >>> report = ottava.convert(model, "rowwise_with_gw_hp")
        >>> x = torch.ones(8, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> model(x).sum().backward()
        >>> [(row.gemm, row.note) for row in ottava.receipt(model).rows][2]
        ('wgrad', "recipe 'rowwise_with_gw_hp' keeps it in high precision")
    """
    need("receipt", model, nn.Module)
    rows: list[ReceiptRow] = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            rows += [_row(name, module, gemm, training) for gemm in GEMMS]
        elif isinstance(module, DotProductAttention):
            rows.append(_attention(name, module))
        elif isinstance(module, nn.Linear):
            rows.append(_not_ours(name, module))
    for weight in weights_outside(model):
        rows.append(_torchs(weight.name, f"? of {' x '.join(map(str, weight.shape))}", weight.reason, weight.elements))
    return Receipt(tuple(rows), tuple(collectives))


def _attention(name: str, module: DotProductAttention) -> ReceiptRow:
    """Has no weight, and no share in the linear work."""
    if module.last_backend is None:
        return ReceiptRow(name, "attention", note="has not run")
    shape, kernel = module.last_shape, module.last_backend
    text = " x ".join([str(shape[0]), f"{shape[1]}/{shape[2]}", *map(str, shape[3:])]) if shape else "?"
    fp8 = kernel == FP8_EMULATION
    operands, note = (module.last_note, "") if fp8 else ("high precision", module.last_note)
    return ReceiptRow(name, "attention", operands, kernel, text, fp8=fp8, note=note)


def _not_ours(name: str, module: nn.Linear) -> ReceiptRow:
    """A linear layer that is not converted. One that has a forward of its own may run it in any format."""
    shape = f"? x {module.out_features} x {module.in_features}"
    if type(module).forward is nn.Linear.forward:
        return _torchs(name, shape, "not converted: runs torch's own linear", module.weight.numel())
    note = f"a {type(module).__name__} of {type(module).__module__.partition('.')[0]}: runs its own forward"
    return replace(_torchs(name, shape, note, module.weight.numel()), operands="unknown", kernel="unknown")


def _torchs(name: str, shape: str, note: str, elements: int) -> ReceiptRow:
    """A layer without ottava: torch runs its three GEMMs."""
    return ReceiptRow(name, "all", kernel="torch", shape=shape, note=note, weight=3 * elements)


def assert_fp8(model: nn.Module, min_fraction: float = 0.9, *, native: bool = False) -> None:
    """Raises AssertionError unless that share of the model's linear work ran with quantized operands.

    The last training call counts (see `receipt`), not later evaluations.

    Args:
        min_fraction: 0 to 1, see `Receipt.fp8_fraction`.
        native: count only GEMMs that ran on FP8 hardware.

    Example:
        >>> import torch, ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        >>> assert_fp8(model, 0.99)
        >>> report = ottava.convert(model, "bf16")
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        >>> assert_fp8(model, 0.99)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        AssertionError: ...
    """
    got = receipt(model)
    if not 0 <= min_fraction <= 1:  # NaN neither
        raise ValueError(f"assert_fp8: min_fraction is {min_fraction}; needs a share, 0 to 1")
    fraction = got.native_fraction if native else got.fp8_fraction
    if fraction < min_fraction:
        field = "native" if native else "fp8"
        rows = grouped([row for row in got.rows if not getattr(row, field) and row.gemm != "attention"])
        offenders = [f"  {name}.{row.gemm}: {row.note or row.kernel}" for name, row in rows]
        what = "on FP8 hardware" if native else "in FP8"
        raise AssertionError(
            f"{fraction:.1%} of the linear work ran {what}; at least {min_fraction:.1%} is required. Not {what}:\n"
            + "\n".join(offenders)
        )


def _row(name: str, layer: QuantizedLayer, gemm: str, training: bool) -> ReceiptRow:
    call = layer.last_call
    if call is not None and training:
        call = call.last_training or call
    if call is None:
        return ReceiptRow(name, gemm, str(getattr(layer.resolved, gemm)), note="has not run")
    cells: GemmRecipe = getattr(call.recipe, gemm)
    weight = layer.weight.numel()
    record: GemmRecord | None = call.records.get(gemm)
    if record is not None:
        remark = call.remark if gemm == "fprop" else call.gradient_remark
        note = "; ".join((*([remark] if remark else []), *record.refusals))
        if not record.quantized:
            note = note or _why_high_precision(layer, call.recipe.name, cells)
        if gemm == "fprop" and (stored := stored_as(layer.parameter)):
            note = "; ".join(filter(None, (f"weight is stored as {stored}", note)))
        row = ReceiptRow(
            layer=name,
            gemm=gemm,
            operands=f"{record.lhs} x {record.rhs}" + (f" under {record.accumulator}" if record.accumulator else ""),
            kernel=record.kernel,
            shape=f"{record.m} x {record.n} x {record.k}",
            padding=record.padding,
            fp8=record.quantized,
            native=record.native,
            note=note,
            weight=weight,
        )
        if gemm != "fprop":
            return row
        kept = call.saved_bytes, call.high_precision_bytes
        return replace(row, saved_bytes=kept[0], high_precision_bytes=kept[1], casts=call.casts)
    m = "?" if call.input_shape is None else math.prod(call.input_shape[:-1])
    n, k = layer.out_features, layer.in_features
    text = " x ".join(map(str, {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[gemm]))
    if not any(getattr(call.recipe, g).quantized for g in GEMMS):
        note = _why_high_precision(layer, call.recipe.name, cells)
        return ReceiptRow(name, gemm, kernel="torch", shape=text, note=note, weight=weight)
    if call.input_shape is None:
        note = "chosen when the compiled code runs"
        return ReceiptRow(name, gemm, str(cells), "compiled", text, fp8=cells.quantized, note=note, weight=weight)
    return ReceiptRow(name, gemm, str(cells), note="did not run in the last call")


def _why_high_precision(layer: QuantizedLayer, active: str, cells: GemmRecipe) -> str:
    if cells.quantized:
        return "the recipe computes it in BF16 on quantized operands"
    own = layer.recipe
    if active == own.name and own.overrides and layer.resolved != own:
        return f"recipe {active!r} keeps it in high precision, by its table or an override"
    return f"recipe {active!r} keeps it in high precision"


def _saved(row: ReceiptRow) -> str:
    if not row.high_precision_bytes:
        return ""
    return f"{row.saved_bytes / 1024:.0f} KiB of {row.high_precision_bytes / 1024:.0f}"
