"""`ottava formats`, `recipes` and `explorer`: what a number format holds, and what a recipe casts, with which kernels.

All numbers come from `ottava.numerics.formats`; the values of codes come from the definition in
`ottava.numerics.rounding`. The upper bits of a code choose the row of the grid, and the lowest bits the column.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from ottava.cli.console import answer, fits, print_table, write_file

if TYPE_CHECKING:
    from rich.console import Console

    from ottava.numerics.formats import Format
    from ottava.recipe import Recipe

_LISTED_BITS = 8  # codes of wider formats only on request: 16 bits are 4,096 lines
_MAX_LISTED_BITS = 16
_MAX_COLUMN_BITS = 3
_OVERVIEW_NOTES = (
    "s|e|m: bits of sign, exponent and mantissa. eps: from 1 to the next number. range: octaves, smallest to largest.",
    "ottava formats NAME shows one format and the value of each code, or explains a recipe.",
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
        str | None, Argument(metavar="[NAME]", help="A format such as E4M3, or a recipe such as nvfp4.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, with values in full.")] = False,
    all_codes: Annotated[bool, Option("--all", help="List the codes of a 16-bit format too.")] = False,
) -> int:
    """Show the number formats: range, precision, and the value of every code.

    Without NAME, one table shows all formats. The name of a recipe does what `ottava recipes NAME` does. Exit code 2
    for an unknown name.
    """
    from rich.console import Console

    from ottava.base.errors import unknown_name
    from ottava.numerics.formats import FORMATS
    from ottava.recipe import RECIPES

    if name is None and all_codes:
        raise ValueError("formats --all: lists the codes of one format; give its name, such as BF16")
    chosen = None if name is None else FORMATS.get(name.upper())
    if name is not None and chosen is None:
        if name.partition("/")[0] in RECIPES:
            return recipes(name, as_json)
        raise ValueError(unknown_name("format", name, (*RECIPES, *FORMATS)))
    listed = chosen is not None and (all_codes or chosen.bits <= _LISTED_BITS)
    codes = list_codes(chosen) if chosen is not None and listed else []
    if as_json:
        described = [_describe(fmt) for fmt in ([chosen] if chosen else FORMATS.values())]
        if listed:
            described[0]["codes"] = [_code_as_json(code, described[0]["bits"]) for code in codes]
        answer(True, {"formats": described}, "")
        return 0
    console = Console()
    if chosen is None:
        _overview(console)
    else:
        _show(console, chosen, codes)
    return 0


def recipes(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="A recipe, such as nvfp4.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Show what each recipe casts; with NAME, also its bytes and its kernels on this machine.

    A recipe has three GEMMs with two operands each: fprop y = x w.T, dgrad dx = dy w, wgrad dw = dy.T x. An operand is
    cast to a format in blocks that share a scale, or stays in high precision. Kernels are those that run on operands of
    128 x 128 in BF16; for each other kernel there is the reason why it does not run.

    Exit code 2 for an unknown name.
    """
    from rich.console import Console

    from ottava.recipe import GEMMS, RECIPES, get_recipe

    chosen = None if name is None else get_recipe(name)
    if chosen is not None:
        operands, kernels = _operands(chosen), _kernels(chosen)
        if as_json:
            answer(True, {"recipes": [{**chosen.to_dict(), "operands": operands, "kernels": kernels}]}, "")
        else:
            _explain(Console(), chosen, operands, kernels)
    elif as_json:
        answer(
            True, {"recipes": [recipe.to_dict() | {"operands": _operands(recipe)} for recipe in RECIPES.values()]}, ""
        )
    else:
        rows = [(recipe.name, *(str(getattr(recipe, gemm)) for gemm in GEMMS)) for recipe in RECIPES.values()]
        print_table(Console(), ("recipe", *GEMMS), rows, left=("recipe", *GEMMS))
        print("\nA cell is format[block, scale, rounding ...]. ottava recipes NAME shows bytes and kernels.")
    return 0


def _operands(recipe: Recipe) -> list[dict[str, Any]]:
    """The six cells: GEMM, operand, cast, and bytes of an element with its share of the scales."""
    from ottava.recipe import CELL_OF, TENSOR_OF, bits

    symbols = {"input": "x", "weight": "w", "grad_output": "dy"}
    found = []
    for gemm, side in sorted(CELL_OF.values(), key=lambda cell: ("fprop dgrad wgrad".index(cell[0]), cell[1])):
        tensor, direction = TENSOR_OF[gemm, side]
        spec = getattr(getattr(recipe, gemm), side)
        operand = symbols[tensor] + (".T" if direction == "col" else "")
        cast = "high precision" if spec is None else str(spec)
        found.append({"gemm": gemm, "operand": operand, "cast": cast, "bytes_per_element": bits(spec) / 8})
    return found


def _kernels(recipe: Recipe) -> list[dict[str, str]]:
    """Every kernel that a cast or GEMM of the recipe asks on the devices of this machine: "runs", or why not."""
    import torch

    from ottava.cli.doctor import explained

    found: dict[tuple[str, ...], list[str]] = {}
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        named = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        for one in explained(recipe, device):
            for step, lines in (("cast lhs", one.casts[0]), ("cast rhs", one.casts[1]), ("gemm", one.product)):
                for kernel, _, why in (line.partition(": ") for line in lines.splitlines()):
                    if kernel != "measured":  # the same for all; `ottava doctor` shows it
                        found.setdefault((named, step, kernel, why), []).append(one.gemm)
    names = ("device", "step", "kernel", "why")
    return [dict(zip(names, key, strict=True)) | {"gemms": ",".join(gemms)} for key, gemms in found.items()]


def _explain(console: Console, recipe: Recipe, operands: list[dict[str, Any]], kernels: list[dict[str, str]]) -> None:
    print(recipe.name, *str(recipe).splitlines()[4:], sep="\n")
    print()
    header = ["gemm", "operand", "cast", "bytes per element"]
    print_table(console, header, [list(row.values()) for row in operands], left=header[:3])
    print("\nBF16 has 2 bytes per element.\n")
    if kernels:
        header = ["device", "step", "gemms", "kernel", "why"]
        print_table(console, header, [[row[name] for name in header] for row in kernels], left=header)
        print("\nThese are the kernels of this machine; `ottava doctor` checks their results.")
    else:
        print("No GEMM is quantized: torch multiplies in high precision.")


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


def _overview(console: Console) -> None:
    """Prints one line per format, with the torch type last where the terminal has room for it."""
    from ottava.numerics.formats import FORMATS, dtype_name

    header = ["format", "bits", "s|e|m", "largest", "normal from", "smallest", "eps", "range", "inf", "NaN", "held in"]
    rows = [
        [
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
            dtype_name(fmt.storage_dtype),
        ]
        for fmt in FORMATS.values()
    ]
    if not fits(console, header, rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    print_table(console, header, rows, left=("format", "inf", "NaN", "held in"))
    _say(console, "", *_OVERVIEW_NOTES)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def _show(console: Console, fmt: Format, codes: list[Code]) -> None:
    """Prints the facts of one format and the grid of its codes."""
    console.print(fmt.name, style="bold")
    for label, text in _facts(fmt):
        console.print(f"  {label:<13}{text}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    if codes:
        low_bits = min(fmt.mantissa_bits or fmt.exponent_bits, _MAX_COLUMN_BITS)
        for column_bits in range(low_bits, 0, -1):
            header, rows = _grid(fmt, codes, column_bits)
            if fits(console, header, rows):
                break
        print_table(console, header, rows, left=header[:3])
        _say(console, "", *_notes(fmt))
    elif fmt.bits <= _MAX_LISTED_BITS:
        _say(console, f"{1 << fmt.bits:,} codes: --all lists them.")


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


def explorer(
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="Where to write.")] = Path("explorer.html"),
    open_it: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Write explorer.html: formats, casts, outliers and a training, computed in the browser.

    The page has the bits of the engine. It needs no network and no server, and shows files of a run that you drop in.

    Exit code 2 if there is no folder for FILE.
    """
    import typer

    from ottava.explorer import explorer_page

    write_file(out, explorer_page().encode())
    size = out.stat().st_size
    answer(as_json, {"page": str(out), "bytes": size}, f"{out}  {size / 1000:,.0f} kB")
    if open_it:
        typer.launch(out.resolve().as_uri())
    return 0


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


def _grid(fmt: Format, codes: list[Code], column_bits: int) -> tuple[list[str], list[list[str]]]:
    """One row per pattern of the upper bits, one column per pattern of the lowest `column_bits`; no signs."""
    columns = 1 << column_bits
    header = ["code", "s|exp|man" if fmt.signed else "exp", "kind"]
    header += [f"{low:0{column_bits}b}" for low in range(columns)]
    magnitudes = codes[: 1 << (fmt.exponent_bits + fmt.mantissa_bits)]
    rows = []
    for first in range(0, len(magnitudes), columns):
        row = magnitudes[first : first + columns]
        kinds = "/".join(dict.fromkeys(code.kind for code in row))
        rows.append([_hex(first, fmt.bits), _bits(fmt, row[0], column_bits), kinds, *(_cell(fmt, c) for c in row)])
    return header, rows


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
