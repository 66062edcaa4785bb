"""`ottava formats`: every number format, its derived numbers, and the value of each code.

All numbers come from `ottava.numerics.formats`; the values of codes come from the definition in
`ottava.numerics.rounding`. The upper bits of a code choose the row of the grid, and the lowest bits the column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ottava.base.text import to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ottava.numerics.formats import Format

SCHEMA_VERSION = 1
_LISTED_BITS = 8  # codes of wider formats only on request: 16 bits are 4,096 lines
_MAX_LISTED_BITS = 16
_MAX_COLUMN_BITS = 3
_PIPE_WIDTH, _GAP = 120, 2
_OVERVIEW_NOTES = (
    "s|e|m: bits of sign, exponent and mantissa. eps: from 1 to the next number. range: octaves, smallest to largest.",
    "ottava formats NAME shows one format and the value of each code.",
)


class Code(NamedTuple):
    """One code of a format and its value."""

    code: int
    sign: int
    exponent: int
    mantissa: int
    value: float
    kind: str
    """zero, subnormal, normal, infinity or NaN."""


def formats(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A format such as E4M3: its numbers and codes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with values in full.")] = False,
    all_codes: Annotated[bool, typer.Option("--all", help="List the codes of a 16-bit format too.")] = False,
) -> int:
    """Show the number formats: range, precision, and the value of every code.

    Without NAME, one table shows all formats. Exit code 2 for an unknown name.
    """
    from rich.console import Console

    from ottava.numerics.formats import FORMATS, get_format

    if name is None and all_codes:
        raise ValueError("formats --all: lists the codes of one format; give its name, such as BF16")
    chosen = None if name is None else get_format(name)
    listed = chosen is not None and (all_codes or chosen.bits <= _LISTED_BITS)
    codes = list_codes(chosen) if chosen is not None and listed else []
    if as_json:
        described = [_describe(fmt) for fmt in ([chosen] if chosen else FORMATS.values())]
        if listed:
            described[0]["codes"] = [_code_as_json(code, described[0]["bits"]) for code in codes]
        typer.echo(to_json({"schema_version": SCHEMA_VERSION, "formats": described}))
        return 0
    console = Console()
    if not console.is_terminal:  # a pipe has no width, and 80 would fold the tables
        console = Console(width=_PIPE_WIDTH)
    if chosen is None:
        every = list(FORMATS.values())
        console.print(_widest(console, (_overview(every, storage=True), _overview(every, storage=False))))
        console.print()
        for note in _OVERVIEW_NOTES:
            console.print(note, style="dim", highlight=False, soft_wrap=True)
    else:
        _show(console, chosen, codes)
    return 0


def list_codes(fmt: Format) -> list[Code]:
    """Every code of a format of at most 16 bits, in order.

    Raises:
        ValueError: the format has more bits.

    Example:
        >>> from ottava.numerics.formats import E2M1
        >>> list_codes(E2M1)[13]
        Code(code=13, sign=1, exponent=2, mantissa=1, value=-3.0, kind='normal')
    """
    from ottava.numerics.rounding import code_values

    codes = []
    for code, value in enumerate(code_values(fmt).tolist()):
        magnitude = code & ((1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1)
        exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
        sign = code >> (fmt.bits - 1) if fmt.signed else 0
        codes.append(Code(code, sign, exponent, mantissa, value, _kind(value, fmt)))
    return codes


def _kind(value: float, fmt: Format) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity"
    if value == 0:
        return "zero"
    return "normal" if abs(value) >= fmt.min_normal else "subnormal"


def _describe(fmt: Format) -> dict[str, Any]:
    """All numbers of a format as JSON values."""
    from ottava.numerics.formats import dtype_name

    names = (
        *("name", "bits", "signed", "exponent_bits", "mantissa_bits", "bias", "max", "lowest", "min_normal"),
        *("min_subnormal", "eps", "emin", "emax", "range_bits", "has_zero", "has_infinity", "has_nan"),
    )
    return {name: getattr(fmt, name) for name in names} | {
        "dtype": None if fmt.dtype is None else dtype_name(fmt.dtype),
        "storage_dtype": dtype_name(fmt.storage_dtype),
    }


def _code_as_json(code: Code, bits: int) -> dict[str, Any]:
    """A code as JSON. JSON has no infinity and no NaN: for these `value` is null, and `kind` and `sign` name them."""
    finite = math.isfinite(code.value)
    return {"hex": _hex(code.code, bits)} | code._asdict() | {"value": code.value if finite else None}


def _hex(code: int, bits: int) -> str:
    return f"{code:0{-(-bits // 4)}x}"


def _number(value: float) -> str:
    """Five digits; a power of two for very large and very small numbers."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 0.001 <= value < 1e6 else f"{value:.5g}"


def _power(value: float) -> str:
    return f"2^{math.frexp(value)[1] - 1}"


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="dim")


def _widest(console: Console, tables: Iterable[Table]) -> Table:
    """The first of the tables, widest first, that fits the terminal. If no table fits: the last one, folded."""
    for table in tables:
        # rich's own measure takes seconds for the 4,096 rows of a 16-bit format
        widths = [max(len(str(text)) for text in (column.header, *column.cells)) for column in table.columns]
        if sum(widths) + _GAP * (len(widths) - 1) <= console.width:
            break
    return table


def _overview(every: list[Format], *, storage: bool) -> Table:
    """One line per format, with the torch type last."""
    from ottava.numerics.formats import dtype_name

    table = _table()
    table.add_column("format", style="bold", overflow="fold")
    for heading in ("bits", "s|e|m", "largest", "normal from", "smallest", "eps", "range"):
        table.add_column(heading, justify="right", overflow="fold")
    for heading in ("inf", "NaN", *(["held in"] if storage else [])):
        table.add_column(heading, overflow="fold")
    for fmt in every:
        table.add_row(
            fmt.name,
            str(fmt.bits),
            f"{int(fmt.signed)}|{fmt.exponent_bits}|{fmt.mantissa_bits}",
            _number(fmt.max),
            _power(fmt.min_normal),
            _power(fmt.min_subnormal),
            _power(fmt.eps),
            f"{fmt.range_bits:.1f}",
            "yes" if fmt.has_infinity else "-",
            "yes" if fmt.has_nan else "-",
            *([dtype_name(fmt.storage_dtype)] if storage else []),
        )
    return table


def _show(console: Console, fmt: Format, codes: list[Code]) -> None:
    """Prints the facts of one format and the grid of its codes."""
    console.print(fmt.name, style="bold")
    for label, text in _facts(fmt):
        console.print(f"  {label:<13}{text}", highlight=False, soft_wrap=True)
    console.print()
    if codes:
        low_bits = min(fmt.mantissa_bits or fmt.exponent_bits, _MAX_COLUMN_BITS)
        console.print(_widest(console, (_grid(fmt, codes, column_bits) for column_bits in range(low_bits, 0, -1))))
        console.print()
        for note in _notes(fmt):
            console.print(note, style="dim", highlight=False, soft_wrap=True)
    elif fmt.bits <= _MAX_LISTED_BITS:
        console.print(f"{1 << fmt.bits:,} codes: --all lists them.", style="dim", highlight=False)


def _facts(fmt: Format) -> list[tuple[str, str]]:
    from ottava.numerics.formats import dtype_name

    sign = "1 sign bit" if fmt.signed else "no sign"
    mantissa = f"{fmt.mantissa_bits} mantissa bit{'' if fmt.mantissa_bits == 1 else 's'}"
    specials = [word for word, there in (("infinity", fmt.has_infinity), ("NaN", fmt.has_nan)) if there]
    cast, scaled = _recipes_with(fmt)
    facts = [
        ("layout", f"{sign}, {fmt.exponent_bits} exponent bits, {mantissa}, bias {fmt.bias}"),
        ("largest", f"{fmt.max:.8g} = {fmt.max / 2.0**fmt.emax:.8g} * 2^{fmt.emax}"),
        ("normal from", f"{fmt.min_normal:.8g} = {_power(fmt.min_normal)}"),
        ("smallest", f"{fmt.min_subnormal:.8g} = {_power(fmt.min_subnormal)}"),
        ("eps", f"{fmt.eps:.8g} = {_power(fmt.eps)}: rounding a normal number errs by at most {50 * fmt.eps:.3g} %"),
        ("range", f"{fmt.range_bits:.1f} octaves from the smallest to the largest"),
        ("specials", " and ".join(specials) or "none: every code is a number"),
        ("held in", f"torch.{dtype_name(fmt.storage_dtype)}" + ("" if fmt.dtype else ", one code a byte")),
        ("recipes", ", ".join(cast)),
        ("scales of", ", ".join(scaled)),
    ]
    return [(label, text) for label, text in facts if text]


def _recipes_with(fmt: Format) -> tuple[list[str], list[str]]:
    """Recipes that cast a tensor to the format, and recipes that store scales in it."""
    from ottava.recipe import GEMMS, RECIPES

    specs = {
        name: [spec for gemm in GEMMS for spec in (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs) if spec]
        for name, recipe in RECIPES.items()
    }
    cast = [name for name in specs if any(spec.format == fmt for spec in specs[name])]
    scale_formats = (fmt.name.lower(), f"{fmt.name.lower()}_floor")
    return cast, [name for name in specs if any(spec.scale_format in scale_formats for spec in specs[name])]


def _grid(fmt: Format, codes: list[Code], column_bits: int) -> Table:
    """One row per pattern of the upper bits, one column per pattern of the lowest `column_bits`; no signs."""
    table = _table()
    for heading in ("code", "s|exp|man" if fmt.signed else "exp", "kind"):
        table.add_column(heading, overflow="fold")
    columns = 1 << column_bits
    for low in range(columns):
        table.add_column(f"{low:0{column_bits}b}", justify="right", overflow="fold")
    magnitudes = codes[: 1 << (fmt.exponent_bits + fmt.mantissa_bits)]
    for first in range(0, len(magnitudes), columns):
        row = magnitudes[first : first + columns]
        kinds = "/".join(dict.fromkeys(code.kind for code in row))
        table.add_row(_hex(first, fmt.bits), _bits(fmt, row[0], column_bits), kinds, *(_cell(fmt, c) for c in row))
    return table


def _bits(fmt: Format, code: Code, column_bits: int) -> str:
    """The bits that a row shares, and a dot for each bit of its columns: s|0111|... of E4M3."""
    bits = f"{code.exponent:0{fmt.exponent_bits}b}" + (
        f"{code.mantissa:0{fmt.mantissa_bits}b}" if fmt.mantissa_bits else ""
    )
    bits = bits[: len(bits) - column_bits] + "." * column_bits
    fields = [bits[: fmt.exponent_bits], bits[fmt.exponent_bits :]]
    return "|".join((["s"] if fmt.signed else []) + [field for field in fields if field])


def _cell(fmt: Format, code: Code) -> str:
    if not math.isfinite(code.value):
        return "inf" if math.isinf(code.value) else "NaN"
    return f"{code.value:.5g}" if fmt.mantissa_bits else _power(code.value)


def _notes(fmt: Format) -> list[str]:
    notes = ["The code of a value is the code of its row plus the bits above its column."]
    if fmt.signed:
        notes.append(
            f"The sign bit adds {_hex(1 << (fmt.bits - 1), fmt.bits)} to a code and a minus to its value, also to 0."
        )
    if fmt.mantissa_bits:
        notes.append("Values have five digits here; --json prints all digits.")
    return notes
