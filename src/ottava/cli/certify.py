"""`ottava certify`: whether a kernel of anybody's library computes what its format and recipe say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ottava.base.text import progress, to_json
from ottava.cli.console import SpeaksOption


def certify(
    names: Annotated[
        list[str] | None, Argument(metavar="MODULE:FUNCTION ...", help="Adapters, or names that --list shows.")
    ] = None,
    kind: Annotated[str | None, Option(help="The kind of the adapters, in place of their own.")] = None,
    recipe: Annotated[str | None, Option(help="A recipe in place of the adapters' own.")] = None,
    format: Annotated[str | None, Option(help="A format in place of the adapters' own.")] = None,
    operand: Annotated[str | None, Option(help="The operand of a cast: x, weight or grad.")] = None,
    out: Annotated[str | None, Option(help="The output type of a GEMM: bfloat16 or float32.")] = None,
    accumulator: Annotated[
        str | None, Option(help="How a GEMM sums: fp32, hopper, ...; named ones bit for bit.")
    ] = None,
    cases: Annotated[int, Option(min=1, help="Cases of each adapter.")] = 100,
    seed: Annotated[int, Option(help="Of the drawn cases.")] = 0,
    device: Annotated[str, Option(help="The device of all tensors.")] = "cpu",
    all_inputs: Annotated[bool, Option("--all", help="Codecs: also all 2^32 FP32 inputs.")] = False,
    list_ready: Annotated[bool, Option("--list", help="Show the ready adapters.")] = False,
    json: Annotated[Path | None, Option(help="Write the certificates to this file, as JSON.")] = None,
    html: Annotated[Path | None, Option(help="Write one page with all certificates.")] = None,
    language: SpeaksOption = "en",
) -> int:
    """Certify kernels: run them on hard cases, and say whether they are exact, within a proved bound, or wrong.

    An adapter is a function that hands your kernel the tensors of a case; docs/certify.md has the signatures. A wrong
    result comes with its first wrong element, and with the fault that gives these numbers.

    Exit code 1 if something is wrong or raises, 2 for an unknown adapter, kind or recipe.
    """
    from ottava.prove.certificate import certify as run
    from ottava.prove.page import page
    from ottava.prove.ready import load, ready
    from ottava.report.frame import write_page

    if list_ready:
        typer.echo("\n".join(ready()))
        return 0
    if not names:
        raise ValueError("certify: no adapter; give MODULE:FUNCTION, or a name that `ottava certify --list` shows")
    changed = {"recipe": recipe, "format": format, "operand": operand, "out": out, "accumulator": accumulator}
    found = []
    adapters = [load(name, kind, **changed) for name in names]
    made = (run(one, count=cases, seed=seed, device=device, everything=all_inputs) for one in adapters)
    for certificate in progress(made, "certifying", total=len(adapters), prints=True):
        typer.echo(str(certificate))
        found.append(certificate)
    settings = {"cases": cases, "seed": seed, "device": device}
    if json is not None:
        told = {"schema_version": 1, **settings, "adapters": [one.to_dict() for one in found]}
        write_page(json, to_json(told, indent=1) + "\n")
    if html is not None:
        write_page(html, page(found, settings), language)
    return 0 if all(one.good for one in found) else 1
