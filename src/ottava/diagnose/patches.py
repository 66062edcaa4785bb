"""Fills the templates of remedies with the layers of a finding, to paste into a training script.

${name} is replaced; a line with ${pattern} is repeated for each pattern of layer names. One pattern replaces a long
list of layers if it matches no other layer. A remedy for the first and the last block takes their layers instead of the
finding's; if the run names no blocks, templates that list layers are left out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from string import Template
from typing import Any

import numpy as np

from ottava.diagnose.conditions import Missing
from ottava.diagnose.rows import Context, RunRows
from ottava.diagnose.rules import Remedy
from ottava.measure.layer_names import SYMBOLS, end_blocks, layer_index
from ottava.recipe import CELL_OF, GEMMS, HISTORY_FIELDS, RECIPES, TENSORS, Recipe, get_recipe

_LISTS_LAYERS = re.compile(r"\$\{(pattern|quoted|regex|names)\}")
_SPELLED_OUT = 3  # more layers than this become patterns


def patterns(layers: Sequence[str], others: Iterable[str]) -> list[str]:
    """Shell patterns that match these layers and no other layers.

    Example:
        >>> patterns([f"layers.{i}.mlp.down" for i in range(9)], ["layers.0.mlp.up"])
        ['*.mlp.down']
        >>> patterns(["layers.0.mlp.down"], [])
        ['layers.0.mlp.down']
    """
    layers, rest = list(dict.fromkeys(layers)), set(others) - set(layers)
    if len(layers) <= _SPELLED_OUT:
        return [_escaped(layer) for layer in layers]
    if not rest:
        return ["*"]
    result: list[str] = []
    for suffix in dict.fromkeys(_without_number(layer) for layer in layers):
        pattern = f"*{suffix}"
        matched = [layer for layer in layers if fnmatch.fnmatchcase(layer, pattern)]
        clear = suffix and not any(fnmatch.fnmatchcase(layer, pattern) for layer in rest)
        mine = [layer for layer in layers if _without_number(layer) == suffix]
        result += [pattern] if clear and len(matched) > 1 else [_escaped(layer) for layer in mine]
    return result


def _blocks(layers: Iterable[str]) -> list[str]:
    """Patterns for the blocks of these layers."""
    heads = [re.match(r"(?:.*?\.)?\d+(?=\.|$)", layer) for layer in layers]
    pairs = [(head[0], layer) for head, layer in zip(heads, layers, strict=True) if head]
    return list(dict.fromkeys(_escaped(head) + ("" if head == layer else ".*") for head, layer in pairs))


def _without_number(layer: str) -> str:
    """The part of a dotted name after its last whole number, with the dot."""
    parts = layer.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    rest = ".".join(parts[last + 1 :])
    return f".{rest}" if last >= 0 and rest else ""


def _escaped(layer: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", layer)


def render(
    remedy: Remedy, context: Context, *, id: str, layers: Sequence[str], tensor: str, recipe: str
) -> dict[str, Any]:
    """A remedy as plain values: {text, cost, rung, patch: {framework: text}, notes}.

    Args:
        id, layers, tensor, recipe: those of the finding. No layers: the patch is for all layers, or the remedy's own.
    """
    layers, globs = target_layers(remedy, context, layers)
    gemms = [CELL_OF[tensor, d][0] for d in ("row", "col")] if tensor in TENSORS else GEMMS
    names = list(layers) or ["every layer"]
    predicted = recipe if recipe in RECIPES and RECIPES[recipe].predicted else "delayed"
    own = context.recipes.get(recipe, get_recipe(_registered(recipe)))
    spec = next((s for t in TENSORS for s in own.cells(t) if s is not None and s.predicted), None)
    spec = RECIPES[predicted].fprop.lhs if spec is None else spec
    original = written(own)
    change = remedy.change
    margin = str(change.get("margin", "+1"))
    rates = np.asarray(context.run.steps.get("lr", ()), dtype=np.float64)
    lr = float(rates[np.isfinite(rates)].max(initial=0.0))
    values = {
        "id": re.sub(r"\W", "_", id.lower()),
        "symbol": SYMBOLS.get(tensor, "all operands"),
        "recipe": _registered(recipe),
        "predicted": predicted,
        "margin": str(getattr(spec, "margin", 0) + int(margin) if margin.startswith("+") else int(margin)),
        "amax_history_len": str(change.get("amax_history_len", "")),
        "base": written(own if own.predicted else RECIPES[predicted], change)
        .removeprefix("ottava.get_recipe(")
        .removesuffix(")"),
        "original": original,
        "finest": _finest(change),
        "scales": _scales(change),
        "first": next(iter(layers), "LAYER"),
        "lr": f" (its largest is {lr:.3g})" if lr else "",
        "half_lr": f"{lr / 2:.3g}" if lr else "HALF_OF_IT",
        "gemms": ", ".join(gemms),
        "gemms_off": ", ".join(f"{gemm}=None" for gemm in gemms),
        "names": ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""),
        "quoted": ", ".join(f'"{name}"' for name in layers or context.layers),
        # YAML's double quotes need two backslashes for one
        "regex": "|".join(
            "^" + fnmatch.translate(p).removeprefix("(?s:").removesuffix(")\\Z") + "$" for p in globs
        ).replace("\\", "\\\\"),
    }
    text = Template(remedy.text).safe_substitute(values)
    patch = {framework: _fill(template, values, globs) for framework, template in remedy.patch.items()}
    if not globs:
        patch = {
            framework: text for framework, text in patch.items() if not _LISTS_LAYERS.search(remedy.patch[framework])
        }
    return {"text": text, "cost": remedy.cost, "rung": remedy.rung, "patch": patch, "notes": _notes(remedy, context)}


def target_layers(remedy: Remedy, context: Context, layers: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """The layers that a remedy changes, and patterns for them: the finding's, all without any, or the remedy's own."""
    if remedy.layers == "ends":
        ends = end_blocks(context.layers) or ()
        layers = [layer for layer in context.layers if layer_index(layer) in ends]
        return layers, _blocks(layers)
    known = [*context.layers, *(str(layer.get("name")) for layer in context.run.manifest.get("layers") or ())]
    return layers, patterns(layers or context.layers, known) or ["*"]


def _finest(change: Mapping[str, Any]) -> str:
    """The argument of `override` for finer scales."""
    gemms = change.get("gemms")
    if not isinstance(gemms, Mapping):
        return '"blockwise"'
    if len(gemms) == len(GEMMS) and len(set(gemms.values())) == 1:
        return f'"{gemms[GEMMS[0]]}"'
    return ", ".join(f'{g}=ottava.get_recipe("{n}").{g}' if n else f"{g}=None" for g, n in gemms.items())


def _scales(change: Mapping[str, Any]) -> str:
    """The same in words."""
    gemms = change.get("gemms")
    if not isinstance(gemms, Mapping):
        return "scales per block (1x128 and 128x128), or MXFP8"
    kept = [f"{gemm} as in {name}" for gemm, name in gemms.items() if name]
    return f"finer scales where they cure ({', '.join(kept)})" + "".join(
        f", and BF16 for {gemm}" for gemm, name in gemms.items() if not name
    )


def written(recipe: Recipe, without: Collection[str] = ()) -> str:
    """The recipe as an expression; "recipe" if only its own code can write it.

    Args:
        without: settings of histories to leave out, because another call gives them.

    Example:
        >>> written(get_recipe("delayed", margin=2)), written(get_recipe("bf16").override("*", "mxfp8"))
        ('ottava.get_recipe("delayed", margin=2)', 'recipe')
    """
    registered = RECIPES.get(recipe.name)
    if registered == recipe:
        return f'ottava.get_recipe("{recipe.name}")'
    if registered is None or not registered.predicted:
        return "recipe"
    spec = next(s for t in TENSORS for s in recipe.cells(t) if s is not None and s.predicted)
    usual = next(s for t in TENSORS for s in registered.cells(t) if s is not None and s.predicted)
    history = {n: getattr(spec, n) for n in HISTORY_FIELDS if getattr(spec, n) != getattr(usual, n)}
    plain = all(isinstance(value, (int, str)) for value in history.values())
    if not plain or get_recipe(recipe.name, **history) != recipe:
        return "recipe"
    settings = "".join(f", {name}={value!r}" for name, value in history.items() if name not in without)
    return f'ottava.get_recipe("{recipe.name}"{settings})'


def _fill(template: str, values: dict[str, str], globs: Sequence[str]) -> str:
    lines: list[str] = []
    for line in template.rstrip().splitlines():
        each: Iterable[dict[str, str]] = [{"pattern": p} for p in globs] if "${pattern}" in line else [{}]
        if line == "recipe = ${original}" and values["original"] == "recipe":
            continue  # the recipe in the caller's code
        lines += [Template(line).safe_substitute(values | extra) for extra in each]
    return "\n".join(lines)


def _notes(remedy: Remedy, context: Context) -> list[str]:
    notes = []
    for note in remedy.notes:
        try:
            answer, _ = note.when.ask(RunRows(context))
        except Missing:
            continue
        if (answer == 1).any():
            notes.append(note.say)
    return notes


def _registered(recipe: str) -> str:
    """A recipe that `get_recipe` knows: the run's own, or the nearest one."""
    if recipe in RECIPES:
        return recipe
    return next((name for name in ("delayed", "blockwise", "mxfp8", "rowwise") if name in recipe), "tensorwise")
