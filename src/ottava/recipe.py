"""A training recipe is a table of six cells: three GEMMs x two operands. All of it is data.

    fprop   y  (M, N) = x    (M, K) @ w    (N, K).T      lhs x,    rhs w
    dgrad   dx (M, K) = dy   (M, N) @ w.T  (K, N).T      lhs dy,   rhs w.T
    wgrad   dw (N, K) = dy.T (N, M) @ x.T  (K, M).T      lhs dy.T, rhs x.T

A cell is a `QuantizationSpec`, or None for high precision. Blocks always run along the last dimension, which the GEMM
contracts, so "column-wise" is row-wise of the transpose. Overrides give single layers other cells. A new recipe is one
entry in `RECIPES`. `nn.layer` decides which recipe a layer runs at a given moment. A `GemmRecipe` is a row of the
table: its two cells, and the way to multiply them. An `AttentionRecipe` has the casts of FP8 attention: six tensors,
the same as in cuDNN and TransformerEngine, three of the forward and three of the backward.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn

from ottava.base.errors import RefusesUnknownFields, need_known, need_type, unknown_name
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator, get_accumulator
from ottava.numerics.formats import E2M1, E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_16X16, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec, refuse_pair
from ottava.numerics.transforms import Hadamard, Mean, Transform

Compute = Literal["native", "bf16"]


@dataclass(frozen=True)
class GemmRecipe(RefusesUnknownFields):
    """The two cells of one GEMM, and the way to compute it.

    Raises:
        ValueError: no hardware multiplies these two operands (see `numerics.tensor.refuse_pair`).

    Example:
        >>> cell = QuantizationSpec(E4M3)
        >>> print(GemmRecipe(cell, cell, fast_accum=True))
        E4M3[tensor] x E4M3[tensor]
    """

    lhs: QuantizationSpec | None = None
    """Left operand; None stays in high precision."""
    rhs: QuantizationSpec | None = None
    """Right operand."""
    fast_accum: bool = False
    """Let Hopper keep partial sums in its short accumulator. The field does so in fprop only."""
    compute: Compute = "native"
    """"bf16": decode the operands and multiply in BF16, to tell damage by quantization from damage by accumulation."""
    accumulator: Accumulator | None = None
    """The profile that quantized operands are summed under, on any device, or its name; None: the device's own sums."""
    batch_invariant: bool = False
    """Multiply by the one kernel whose bits of a row do not depend on the other rows; see `batch_invariance`."""

    def __post_init__(self) -> None:
        need_known("GemmRecipe", "compute", self.compute, get_args(Compute))
        for name in ("fast_accum", "batch_invariant"):
            need_type(f"GemmRecipe: {name}", getattr(self, name), bool)
        if self.accumulator is not None:
            object.__setattr__(self, "accumulator", get_accumulator(self.accumulator))
            if self.compute != "native":
                name = self.accumulator.name
                raise ValueError(f"GemmRecipe: accumulator {name!r} with compute 'bf16', which multiplies no codes")
        if reason := refuse_pair(self.lhs, self.rhs, self.accumulator):
            raise ValueError(f"GemmRecipe(lhs={self.lhs}, rhs={self.rhs}): {reason}")

    @property
    def quantized(self) -> bool:
        """Whether this GEMM's operands are quantized."""
        return self.lhs is not None

    def __str__(self) -> str:
        suffix = " in BF16" if self.compute == "bf16" and self.quantized else ""
        suffix += f" under {self.accumulator.name}" if self.accumulator and self.quantized else ""
        return f"{self.lhs or 'high precision'} x {self.rhs or 'high precision'}{suffix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an empty mapping is high precision."""
        values: dict[str, Any] = {}
        if self.lhs is not None and self.rhs is not None:
            values |= {"lhs": self.lhs.to_dict(), "rhs": self.rhs.to_dict()}
        if self.fast_accum:
            values["fast_accum"] = True
        if self.compute != "native":
            values["compute"] = self.compute
        if self.accumulator is not None:
            values["accumulator"] = self.accumulator.to_dict()
        if self.batch_invariant:
            values["batch_invariant"] = True
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GemmRecipe:
        """The inverse of `to_dict`."""
        need_type("GemmRecipe", values, Mapping)
        cells = {side: QuantizationSpec.from_dict(values[side]) for side in ("lhs", "rhs") if values.get(side)}
        return cls(**{**values, "lhs": cells.get("lhs"), "rhs": cells.get("rhs")})


HIGH_PRECISION = GemmRecipe()


ATTENTION_TENSORS = ("qkv", "s", "o", "do", "dp", "dqkv")
"""The tensors that FP8 attention casts, forward and backward; see `AttentionRecipe`."""
_FORWARD, _BACKWARD = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


@dataclass(frozen=True)
class AttentionRecipe(RefusesUnknownFields):
    """The spec of each tensor that FP8 attention casts: one scale for each tensor, and one for q, k and v together.

    Scales are current, or predicted from a history of the attention's own (its forwards move it, as TransformerEngine's
    do). Or qkv and do have blocks of 32 along the sums of each GEMM (MXFP8), and all others stay in high precision.

    Raises:
        TypeError: a field needs a spec and has none.
        ValueError: a spec of another granularity; or no tensor core multiplies a pair.

    Example:
        >>> str(AttentionRecipe())
        'qkv E4M3[tensor], s E4M3[tensor], o E4M3[tensor], do E5M2[tensor], dp E5M2[tensor], dqkv E5M2[tensor]'
    """

    qkv: QuantizationSpec = _FORWARD
    """Queries, keys and values."""
    s: QuantizationSpec | None = _FORWARD
    """Softmax's probabilities; None only beside blocks."""
    o: QuantizationSpec | None = _FORWARD
    """The result; None leaves it in high precision."""
    do: QuantizationSpec = _BACKWARD
    """Its gradient."""
    dp: QuantizationSpec | None = _BACKWARD
    """The gradient of the scores; None only beside blocks."""
    dqkv: QuantizationSpec | None = _BACKWARD
    """Gradients of queries, keys and values; None leaves them in high precision."""

    def __post_init__(self) -> None:
        for tensor in ATTENTION_TENSORS:
            spec = getattr(self, tensor)
            # no GEMM of attention's own reads o and dqkv
            if spec is None and (tensor in ("o", "dqkv") or (self.blocks and tensor in ("s", "dp"))):
                continue
            need_type(f"AttentionRecipe: {tensor}", spec, QuantizationSpec)
            if spec.transform is not None:
                raise ValueError(f"AttentionRecipe: {tensor} is {spec}; transforms are for the GEMMs of linear layers")
            in_blocks = spec.granularity == BLOCK_1X32 and spec.scale_format == "e8m0" and tensor in ("qkv", "do")
            if not (spec.granularity == PER_TENSOR and not self.blocks) and not (in_blocks and self.blocks):
                raise ValueError(
                    f"AttentionRecipe: {tensor} is {spec}; needs one scale for the tensor, or blocks of 32 with a "
                    "power of two each (MXFP8) for qkv and do, beside None for all others"
                )
        for lhs, rhs in (("qkv", "qkv"), ("s", "qkv"), ("do", "qkv"), ("s", "do"), ("dp", "qkv")):
            if None in (getattr(self, lhs), getattr(self, rhs)):
                continue
            if reason := refuse_pair(getattr(self, lhs), getattr(self, rhs)):
                raise ValueError(f"AttentionRecipe: {lhs} meets {rhs}: {reason}")

    @property
    def blocks(self) -> bool:
        """Whether qkv and do have blocks of 32."""
        return isinstance(self.qkv, QuantizationSpec) and self.qkv.granularity == BLOCK_1X32

    @property
    def predicted(self) -> bool:
        """Whether a scale comes from a history."""
        specs = (getattr(self, tensor) for tensor in ATTENTION_TENSORS)
        return any(spec is not None and spec.predicted for spec in specs)

    def __str__(self) -> str:
        return ", ".join(f"{tensor} {getattr(self, tensor) or 'high precision'}" for tensor in ATTENTION_TENSORS)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None is high precision."""
        specs = {tensor: getattr(self, tensor) for tensor in ATTENTION_TENSORS}
        return {tensor: None if spec is None else spec.to_dict() for tensor, spec in specs.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionRecipe:
        """The inverse of `to_dict`; a missing field takes its default."""
        need_type("AttentionRecipe", values, Mapping)
        specs: dict[str, Any] = {name: QuantizationSpec.from_dict(v) if v else None for name, v in values.items()}
        return cls(**specs)


GEMMS = ("fprop", "dgrad", "wgrad")
CELLS = tuple(f"{gemm}.{side}" for gemm in GEMMS for side in ("lhs", "rhs"))
CELL_OF: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("input", "row"): ("fprop", "lhs"),
        ("input", "col"): ("wgrad", "rhs"),
        ("weight", "row"): ("fprop", "rhs"),
        ("weight", "col"): ("dgrad", "rhs"),
        ("grad_output", "row"): ("dgrad", "lhs"),
        ("grad_output", "col"): ("wgrad", "lhs"),
    }
)
"""(tensor, direction) -> GEMM and side of its cell; "row" is x, "col" is x.T."""
TENSOR_OF = MappingProxyType({cell: tensor for tensor, cell in CELL_OF.items()})
"""GEMM and side of a cell -> (tensor, direction)."""
TENSORS = tuple(tensor for tensor, direction in CELL_OF if direction == "row")
"""The tensors that a linear layer casts; see `Recipe.cells`."""
HISTORY_FIELDS = ("margin", "amax_history_len", "amax_compute_algo", "bootstrap")
"""Fields of a predicted cell that `get_recipe` takes; `QuantizationSpec` explains them."""
_BF16_GEMM = "/fp8_inputs_bf16_gemm"


_Change = GemmRecipe | QuantizationSpec | AttentionRecipe | None
_TARGETS = (*GEMMS, "attention", *CELLS)


@dataclass(frozen=True)
class Override(RefusesUnknownFields):
    """Other cells for the layers whose name matches a pattern ("layers.0.*", "*.mlp.down_proj")."""

    pattern: str
    """Shell pattern for the layer's full name; * matches dots too."""
    changes: tuple[tuple[str, _Change], ...]
    """Pairs such as ("wgrad", GemmRecipe()), ("fprop.lhs", spec) or ("attention", None), applied together."""

    def __post_init__(self) -> None:
        need_type("override: pattern", self.pattern, str)
        if not self.pattern:
            raise ValueError("override: the pattern is empty; needs one such as 'layers.0.*', or '*' for every layer")
        if not self.changes:
            raise ValueError(f"override {self.pattern!r}: nothing to change; give a recipe, GEMMs or cells")
        for target, value in self.changes:
            need_known(f"override {self.pattern!r}", "cell", target, _TARGETS)
            kind: Any = (
                GemmRecipe if target in GEMMS else AttentionRecipe if target == "attention" else QuantizationSpec
            )
            if not (isinstance(value, kind) or (value is None and target not in GEMMS)):
                needed = kind.__name__ if target in GEMMS else f"{kind.__name__} or None"
                raise TypeError(f"override {self.pattern!r}: {target} is {value!r}; needs a {needed}")
        # one order, and the later of two changes of a cell: overrides with equal effects are equal
        changes = dict(self.changes)
        object.__setattr__(self, "changes", tuple((t, changes[t]) for t in _TARGETS if t in changes))

    def apply(self, recipe: Recipe) -> Recipe:
        """`recipe` with the changes made."""
        gemms: dict[str, Any] = {}
        sides: dict[str, dict[str, Any]] = {}
        for target, value in self.changes:
            gemm, _, side = target.partition(".")
            if side:
                sides.setdefault(gemm, {})[side] = value  # both sides at once: GemmRecipe refuses half of a change
            else:
                gemms[gemm] = value
        for gemm, cells in sides.items():
            gemms[gemm] = replace(gemms.get(gemm, getattr(recipe, gemm)), **cells)
        return replace(recipe, **gemms)


@dataclass(frozen=True)
class Recipe(RefusesUnknownFields):
    """A training recipe: six cells and overrides for single layers. Frozen, hashable, compared by every field.

    Raises:
        TypeError: unknown field.  ValueError: no GEMM takes two of the cells together.

    Example:
        >>> recipe = RECIPES["tensorwise"].override("layers.0.*", "bf16").override("*.down_proj", wgrad=None)
        >>> str(recipe.for_layer("layers.3.down_proj").wgrad), str(recipe.for_layer("layers.3.up_proj").wgrad)
        ('high precision x high precision', 'E5M2[tensor] x E4M3[tensor]')
    """

    name: str
    """Its name in receipts and reports."""
    fprop: GemmRecipe = HIGH_PRECISION
    """y = x @ w.T"""
    dgrad: GemmRecipe = HIGH_PRECISION
    """dx = dy @ w"""
    wgrad: GemmRecipe = HIGH_PRECISION
    """dw = dy.T @ x"""
    overrides: tuple[Override, ...] = ()
    """Other cells for single layers; the last matching override wins."""
    attention: AttentionRecipe | None = None
    """The casts of `nn.DotProductAttention`; None, as in every registered recipe: it runs in high precision."""
    predicted: bool = field(init=False, repr=False, compare=False)
    """Whether one of the six cells is predicted, so that doors keep state. A field, because every forward reads it."""
    casts: bool = field(init=False, repr=False, compare=False)
    """Whether a GEMM is quantized, or batch invariant: torch's linear may not run. A field: every forward reads it."""

    def __post_init__(self) -> None:
        need_type("Recipe: name", self.name, str)
        if not self.name:
            raise ValueError("Recipe: a name is needed; receipts and reports show it")
        specs = [getattr(getattr(self, gemm), side) for gemm in GEMMS for side in ("lhs", "rhs")]
        object.__setattr__(self, "predicted", any(spec is not None and spec.predicted for spec in specs))
        object.__setattr__(self, "casts", any(spec is not None for spec in specs) or self.fprop.batch_invariant)
        for tensor in TENSORS:
            row, col = self.cells(tensor)
            if row and col and row.predicted and col.predicted and row != col:
                raise ValueError(
                    f"recipe {self.name!r}: {tensor} is predicted as {row} and as {col}; a tensor has one history: "
                    "give both cells one spec"
                )
        for override in self.overrides:
            override.apply(replace(self, overrides=()))  # refuses bad cells here, not in the first forward

    @property
    def quantized(self) -> bool:
        """Whether any GEMM of any layer is quantized."""
        own = any(getattr(self, gemm).quantized for gemm in GEMMS)
        return own or any(override.apply(replace(self, overrides=())).quantized for override in self.overrides)

    def override(
        self,
        pattern: str,
        recipe: Recipe | str | None = None,
        *,
        cells: Mapping[str, QuantizationSpec | None] | None = None,
        **gemms: GemmRecipe | AttentionRecipe | None,
    ) -> Recipe:
        """This recipe with other cells for the layers that match `pattern`.

        Args:
            pattern: shell pattern for the layer's full name.
            recipe: a Recipe or its name; take all six cells from it.
            cells: single cells by name: {"fprop.lhs": spec}.
            gemms: whole GEMMs: wgrad=GemmRecipe(...), or attention=AttentionRecipe(); None for high precision.
        Raises:
            ValueError: unknown cell or recipe, no change at all, or no GEMM takes two of the cells together.
        """
        changes: list[tuple[str, _Change]] = []
        if recipe is not None:
            whole = get_recipe(recipe)
            changes += [(gemm, getattr(whole, gemm)) for gemm in GEMMS]
            if whole.attention != self.attention:
                changes.append(("attention", whole.attention))
        changes += [(name, value or HIGH_PRECISION if name in GEMMS else value) for name, value in gemms.items()]
        changes += (cells or {}).items()
        return replace(self, overrides=(*self.overrides, Override(pattern, tuple(changes))))

    def cells(self, tensor: str) -> tuple[QuantizationSpec | None, QuantizationSpec | None]:
        """The cells of x and x.T for the door of a tensor, one of TENSORS.

        Example:
            >>> [str(spec) for spec in RECIPES["blockwise"].cells("weight")]
            ['E4M3[128x128, pow2]', 'E4M3[128x128, pow2]']
        """
        need_known("", "tensor", tensor, TENSORS)
        row, col = (getattr(getattr(self, gemm), side) for gemm, side in (CELL_OF[tensor, d] for d in ("row", "col")))
        return row, col

    def for_layer(self, layer: str) -> Recipe:
        """The recipe of the layer with that full name; it has no overrides left."""
        resolved = replace(self, overrides=()) if self.overrides else self
        for override in self.overrides:
            if fnmatch.fnmatchcase(layer, override.pattern):
                resolved = override.apply(resolved)
        return resolved

    def fp8_inputs_bf16_gemm(self) -> Recipe:
        """The diagnostic form: the same quantized operands, and every GEMM in BF16.

        If it cures a run, the accumulation or the FP8 GEMM was at fault; otherwise the quantization was.
        """
        if self.name.endswith(_BF16_GEMM):
            return self

        def in_bf16(value: _Change) -> _Change:
            return replace(value, compute="bf16", accumulator=None) if isinstance(value, GemmRecipe) else value

        return replace(self._changed(in_bf16), name=self.name + _BF16_GEMM)

    def under(self, accumulator: Accumulator | str | None) -> Recipe:
        """This recipe with every GEMM on codes summed under a profile; None: by the device.

        Its name gets the profile's as a suffix: "tensorwise/hopper", which `get_recipe` knows, too.

        Raises:
            ValueError: unknown profile.

        Example:
            >>> recipe = RECIPES["tensorwise"].under("hopper")
            >>> recipe.name, str(recipe.wgrad)
            ('tensorwise/hopper', 'E5M2[tensor] x E4M3[tensor] under hopper')
        """
        profile = None if accumulator is None else get_accumulator(accumulator)
        before: set[str] = set()

        def summed(value: _Change) -> _Change:
            if not isinstance(value, GemmRecipe) or not value.quantized or value.compute != "native":
                return value
            if value.accumulator is not None:
                before.add(value.accumulator.name)
            return replace(value, accumulator=profile)

        changed = self._changed(summed)
        if changed == self:
            return self
        name, slash, last = self.name.rpartition("/")
        own = name if slash and last in before else self.name
        return replace(changed, name=own if profile is None else f"{own}/{profile.name}")

    def _changed(self, change: Callable[[_Change], _Change]) -> Recipe:
        """This recipe with `change` applied to each GEMM and to each value of its overrides."""
        gemms: dict[str, Any] = {gemm: change(getattr(self, gemm)) for gemm in GEMMS}
        overrides = (Override(o.pattern, tuple((t, change(v)) for t, v in o.changes)) for o in self.overrides)
        return replace(self, overrides=tuple(overrides), **gemms)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON and YAML values; `Recipe.from_dict` gives an equal recipe back."""
        values: dict[str, Any] = {"name": self.name}
        values |= {gemm: getattr(self, gemm).to_dict() for gemm in GEMMS}
        if self.attention is not None:
            values["attention"] = self.attention.to_dict()
        if self.overrides:
            values["overrides"] = [
                {"pattern": o.pattern, "changes": {t: v.to_dict() if v else None for t, v in o.changes}}
                for o in self.overrides
            ]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_dict`. Overrides may also name a whole recipe: {"pattern": "lm_head", "recipe": "bf16"}.

        Raises:
            TypeError, ValueError: unknown key, name or combination; the message gives the nearest known name.
        """
        need_type("Recipe", values, Mapping)
        values = dict(values)
        gemms = {gemm: GemmRecipe.from_dict(values.pop(gemm) or {}) for gemm in GEMMS if gemm in values}
        overrides = values.pop("overrides", None) or ()
        need_type("Recipe: overrides", overrides, Sequence)
        if values.get("attention") is not None:
            values["attention"] = AttentionRecipe.from_dict(values["attention"])
        recipe = cls(**{**values, **gemms})
        for entry in overrides:
            need_type(f"override of recipe {recipe.name!r}", entry, Mapping)
            known = ("pattern", "recipe", "changes")
            for key in entry:
                need_known(f"override of recipe {recipe.name!r}", "key", key, known)
            need_type("override: changes", entry.get("changes") or {}, Mapping)
            changes = tuple((t, _change_from_dict(t, v)) for t, v in (entry.get("changes") or {}).items())
            whole = get_recipe(entry["recipe"]) if "recipe" in entry else None
            changes = tuple((gemm, getattr(whole, gemm)) for gemm in GEMMS if whole) + changes
            recipe = replace(recipe, overrides=(*recipe.overrides, Override(entry.get("pattern", ""), changes)))
        return recipe

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per cell: GEMM, side, cast, bits of an element."""
        from ottava.base.text import data_frame

        cells = [(gemm, side, getattr(getattr(self, gemm), side)) for gemm in GEMMS for side in ("lhs", "rhs")]
        return data_frame(
            [
                {"gemm": gemm, "side": side, "cast": str(spec or "high precision"), "bits": bits(spec)}
                for gemm, side, spec in cells
            ]
        )

    def plot(self) -> Any:
        """The six cells as a picture, their colour the bits of their format (`pip install 'ottava[plot]'`).

        Returns:
            A matplotlib Figure.
        """
        from ottava.base import plot

        table = [[getattr(getattr(self, gemm), side) for side in ("lhs", "rhs")] for gemm in GEMMS]
        texts = [[str(spec or "high precision") for spec in row] for row in table]
        widths = [[16 if spec is None else 4 if spec.format.bits == 4 else 8 for spec in row] for row in table]
        return plot.cells(f"{self.name}: left times right operand", GEMMS, texts, widths)

    def __repr__(self) -> str:
        more = f"; {len(self.overrides)} overrides" if self.overrides else ""
        more += "; attention in FP8" if self.attention else ""
        return f"<Recipe {self.name}: " + ", ".join(f"{gemm} {getattr(self, gemm)}" for gemm in GEMMS) + f"{more}>"

    def _repr_html_(self) -> str:
        from ottava.base.text import html_table

        rows = [
            (gemm, *(getattr(getattr(self, gemm), side) or "high precision" for side in ("lhs", "rhs")))
            for gemm in GEMMS
        ]
        return html_table([("gemm", "lhs", "rhs"), *rows], repr(self)[1:-1].partition(":")[0])

    def __str__(self) -> str:
        lines = [f"{gemm}  {getattr(self, gemm)}" for gemm in GEMMS]
        lines += [] if self.attention is None else [f"attention  {self.attention}"]
        lines += [
            f"{o.pattern}: " + ", ".join(f"{t} = {v or 'high precision'}" for t, v in o.changes) for o in self.overrides
        ]
        return "\n  ".join([self.name, *lines])


def _change_from_dict(target: str, value: Mapping[str, Any] | None) -> _Change:
    if target in GEMMS:
        return GemmRecipe.from_dict(value or {})
    if target == "attention":
        return None if value is None else AttentionRecipe.from_dict(value)
    return QuantizationSpec.from_dict(value) if value else None


def _table(
    name: str, input: QuantizationSpec, weight: QuantizationSpec, grad_output: QuantizationSpec, **cells: Any
) -> Recipe:
    """The usual table: each tensor has one spec in both of its GEMMs; `cells` gives the exceptions."""
    gemms = {
        "fprop": GemmRecipe(input, weight, fast_accum=True),
        "dgrad": GemmRecipe(grad_output, weight),
        "wgrad": GemmRecipe(grad_output, input),
    }
    return Recipe(name, **(gemms | cells))


def _behind(lhs: QuantizationSpec, rhs: QuantizationSpec, transform: Transform) -> GemmRecipe:
    """The cells of one GEMM behind the same transform."""
    return GemmRecipe(replace(lhs, transform=transform), replace(rhs, transform=transform))


_TENSOR_E4M3, _TENSOR_E5M2 = QuantizationSpec(E4M3), QuantizationSpec(E5M2)
_ROW = QuantizationSpec(E4M3, PER_ROW, scale_format="pow2")
_TENSOR_POW2 = QuantizationSpec(E4M3, scale_format="pow2")
_1X128, _128X128 = (QuantizationSpec(E4M3, g, scale_format="pow2") for g in (BLOCK_1X128, BLOCK_128X128))
_1X128_FP32, _128X128_FP32 = (replace(spec, scale_format="fp32") for spec in (_1X128, _128X128))
_MX = QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0")
_MX_FLOOR = replace(_MX, scale_format="e8m0_floor")
_DELAYED_E4M3, _DELAYED_E5M2 = (replace(spec, scaling="delayed") for spec in (_TENSOR_E4M3, _TENSOR_E5M2))
_GUARDED_E4M3, _GUARDED_E5M2 = (replace(spec, scaling="guarded", margin=1) for spec in (_TENSOR_E4M3, _TENSOR_E5M2))
_NV = QuantizationSpec(E2M1, BLOCK_1X16, scale_format="e4m3")
_NV_WEIGHT, _NV_RANDOM = replace(_NV, granularity=BLOCK_16X16), replace(_NV, rounding="stochastic")
_FOUR, _FOUR_WEIGHT = (replace(spec, block_scale="four_over_six") for spec in (_NV, _NV_WEIGHT))
_TE_FOUR, _TE_FOUR_WEIGHT = (replace(spec, block_scale="four_over_six_te") for spec in (_NV, _NV_WEIGHT))
_EDEN = replace(_NV, block_scale="ms_eden", transform=Hadamard(128, "fresh", rounded=False))
_AVERIS = replace(_NV, transform=Mean()), _NV_WEIGHT, replace(_NV_RANDOM, transform=Mean())
_MX4 = QuantizationSpec(E2M1, BLOCK_1X32, scale_format="e8m0")

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe("bf16"),
            # torchao's and TE's current scaling, HYBRID: gradients need E5M2's range, all else E4M3's precision
            _table("tensorwise", _TENSOR_E4M3, _TENSOR_E4M3, _TENSOR_E5M2),
            _table("tensorwise_e4m3", _TENSOR_E4M3, _TENSOR_E4M3, _TENSOR_E4M3),
            # torchao "rowwise"
            _table("rowwise", _ROW, _ROW, _ROW),
            # torchao "rowwise_with_gw_hp": the weight gradient, where outliers hurt most, stays in BF16
            _table("rowwise_with_gw_hp", _ROW, _ROW, _ROW, dgrad=GemmRecipe(_ROW, _TENSOR_POW2), wgrad=HIGH_PRECISION),
            # DeepSeek-V3, TE Float8BlockScaling: 1x128 along the contraction, weights in 128x128
            _table("blockwise", _1X128, _128X128, _1X128),
            _table("blockwise_fp32", _1X128_FP32, _128X128_FP32, _1X128_FP32),
            # OCP MXFP8 with NVIDIA's round-up of the block exponent; "floor" is the letter of the OCP text
            _table("mxfp8", _MX, _MX, _MX),
            _table("mxfp8_floor", _MX_FLOOR, _MX_FLOOR, _MX_FLOOR),
            # TE DelayedScaling(HYBRID)
            _table("delayed", _DELAYED_E4M3, _DELAYED_E4M3, _DELAYED_E5M2),
            # delayed, with the current scale if the predicted one would clip or waste 3 octaves; 1 octave of headroom
            _table("guarded", _GUARDED_E4M3, _GUARDED_E4M3, _GUARDED_E5M2),
            # TE NVFP4BlockScaling without its random Hadamard transform
            _table("nvfp4", _NV, _NV_WEIGHT, _NV_RANDOM),
            # TE NVFP4BlockScaling: x.T and dy.T are rotated along the tokens. `nn.keep_first_last_bf16` keeps the ends
            _table("nvfp4_rht", _NV, _NV_WEIGHT, _NV_RANDOM, wgrad=_behind(_NV_RANDOM, _NV, Hadamard())),
            # the same with the better of two scales for each block of x and w; what is rounded at random keeps its amax
            _table("four_over_six", _FOUR, _FOUR_WEIGHT, _NV_RANDOM, wgrad=_behind(_NV_RANDOM, _FOUR, Hadamard())),
            # TE NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True): its rule refuses rotated tensors
            _table("four_over_six_te", _TE_FOUR, _TE_FOUR_WEIGHT, _NV_RANDOM),
            # Quartet II: the backward rotates both operands anew each time, and corrects block scales
            Recipe("ms_eden", GemmRecipe(_FOUR, _FOUR, fast_accum=True), *(GemmRecipe(_EDEN, _EDEN),) * 2),
            # Averis: the mean over tokens is taken out of x and dy, and multiplied in high precision
            _table("averis", *_AVERIS, wgrad=_behind(_NV_RANDOM, _NV, Mean("columns"))),
            # OCP MXFP4 with NVIDIA's round-up of the block exponent, without which gradients would clip, and be biased
            _table("mxfp4", _MX4, _MX4, replace(_MX4, rounding="stochastic")),
        )
    }
)
"""Name -> recipe: everything that `get_recipe` and `convert` take by name."""


def bits(spec: QuantizationSpec | None, shape: tuple[int, int] = (4096, 4096)) -> float:
    """Bits of an element with its share of the scales, as hardware stores them; 16 in high precision.

    Example:
        >>> [bits(RECIPES[name].fprop.lhs) for name in ("bf16", "mxfp8", "nvfp4")]
        [16.0, 8.25, 4.5]
    """
    if spec is None:
        return 16.0
    rows, cols = spec.granularity.block_shape(shape)
    scale = 8 if spec.scale_format.startswith(("e4m3", "e8m0")) else 32
    return round(spec.format.bits + scale / (rows * cols), 6)


def get_recipe(recipe: Recipe | str, **history: Any) -> Recipe:
    """The registered recipe of that name; a Recipe passes through. "NAME/fp8_inputs_bf16_gemm" is its diagnostic form,
    "NAME/hopper" the recipe under that accumulator (`Recipe.under`).

    Args:
        history: fields for each cell with a predicted scale, including cells of overrides: margin, amax_history_len,
            amax_compute_algo, bootstrap (see `QuantizationSpec`).
    Raises:
        ValueError: unknown name (the message gives the nearest known one), a value that a cell refuses, or history
            fields for a recipe without predicted scales.
        TypeError: neither a name nor a Recipe, an unknown field, or a value of another type.

    Example:
        >>> get_recipe("tensorwise/fp8_inputs_bf16_gemm").fprop.compute
        'bf16'
        >>> get_recipe("delayed", margin=1, amax_history_len=1024).dgrad.lhs.amax_history_len
        1024
    """
    if history:
        return _with_history(get_recipe(recipe), history)
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe: got {type(recipe).__name__}; needs a Recipe or the name of one")
    name, slash, form = recipe.partition("/")
    if name not in RECIPES:
        shown = name if slash + form == _BF16_GEMM or form in ACCUMULATORS else recipe  # a path is no name, either
        raise ValueError(unknown_name("recipe", shown, RECIPES))
    if not slash:
        return RECIPES[name]
    if slash + form == _BF16_GEMM:
        return RECIPES[name].fp8_inputs_bf16_gemm()
    if form not in ACCUMULATORS:
        raise ValueError(unknown_name(f"form of recipe {name!r}", form, (_BF16_GEMM[1:], *ACCUMULATORS)))
    return RECIPES[name].under(form)


def _with_history(recipe: Recipe, history: Mapping[str, Any]) -> Recipe:
    for name in history:
        need_known("get_recipe", "history field", name, HISTORY_FIELDS, TypeError)
    predicted = []

    def cell(spec: QuantizationSpec | None) -> QuantizationSpec | None:
        if spec is None or not spec.predicted:
            return spec
        predicted.append(spec)
        return replace(spec, **history)

    def change(value: _Change) -> _Change:
        if isinstance(value, GemmRecipe):
            return replace(value, lhs=cell(value.lhs), rhs=cell(value.rhs))
        return value if isinstance(value, AttentionRecipe) else cell(value)

    changed = recipe._changed(change)
    if not predicted:
        raise ValueError(
            f"get_recipe: {', '.join(history)} given for recipe {recipe.name!r}, which predicts no scale and keeps no "
            "history. Take 'delayed' or 'guarded', or leave these fields out"
        )
    return changed


# --- which layers a recipe does not reach, by their names ---

HEADS = ("lm_head", "output", "head", "embed_out", "output_projection", "score", "classifier", "qa_outputs")
_SMALLEST = 32


def default_filter(name: str, layer: nn.Linear) -> str | None:
    """Why a layer should stay in high precision, or None: output heads, LoRA adapters, routers, tiny layers.

    Heads and routers decide by small differences of large sums and are a small share of the work; adapters are small,
    and the training changes nothing else.

    Example:
        >>> default_filter("model.lm_head", nn.Linear(64, 512)), default_filter("mlp.gate_proj", nn.Linear(64, 256))
        ('output head: sensitive, and its input feeds the loss directly', None)
    """
    parts = name.split(".")
    if parts[-1] in HEADS:
        return "output head: sensitive, and its input feeds the loss directly"
    if any(part.startswith("lora_") for part in parts):
        return "LoRA adapter: small, and all that is being trained"
    if parts[-1] in ("router", "gate", "gating", "shared_expert_gate"):
        return "router: a rounding error changes which expert runs"
    smallest = min(layer.in_features, layer.out_features)
    if smallest < _SMALLEST:
        return f"{smallest} features on one side: below {_SMALLEST} a cast costs more than the GEMM saves"
    return None
