"""What explains a run: `ottava diagnose`, `compare` with a good one, `bisect` one batch, and `what-if` of recipes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from ottava.base.text import columns, grouped
from ottava.cli.console import SpeaksOption, answer, spoken

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ottava.diagnose.compare import Comparison
    from ottava.diagnose.diagnose import Diagnosis, Finding
    from ottava.diagnose.what_if import Prediction
    from ottava.record.dumps import GemmDump
    from ottava.train.checkpoint import Checkpoint
    from ottava.train.config import TrainConfig

SCHEMA_VERSION = 2


def diagnose(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a watched run.")],
    baseline: Annotated[Path | None, Option(metavar="RUN", help="The same training in BF16, or a good run.")] = None,
    language: SpeaksOption = "en",
    framework: Annotated[
        str | None, Option("--for", metavar="NAME", help="Print changes for this framework, not for that which ran.")
    ] = None,
    fail_on: Annotated[
        str, Option(metavar="NAME", help="Exit 1 from this severity on: critical, warning, never.")
    ] = "critical",
    every: Annotated[bool, Option("--all", help="Show the triage tree, and each law that lacks data.")] = False,
    retrain: Annotated[
        bool, Option("--retrain", help="Run the script again with the first remedy, and say what it reached.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Explain a run: what happened, whether FP8 did it, and what to do.

    The watch made experiments while the run trained: it computed the gradient of a batch with casts and without, and
    turned casts off until the error was gone. FP8 is blamed only by such an experiment. Everything else is told from
    facts: learning rates, parameters, batches, and laws that a training step cannot break. With --baseline, facts that
    differ from the good run come before statistics.

    Exit code 1 if a finding is at least as severe as --fail-on.
    """
    from ottava.base.errors import need_known
    from ottava.diagnose.diagnose import diagnose as explain
    from ottava.diagnose.remedies import FRAMEWORKS
    from ottava.record.reader import Run

    for option, value, choices in (
        ("--fail-on", fail_on, ("critical", "warning", "never")),
        ("--for", framework, FRAMEWORKS),
    ):
        need_known("", f"value of {option}", value, (None, *choices))
    good = None if baseline is None else Run.open(baseline)
    bad = Run.open(run)
    if not len(bad.steps["step"]) and not len(bad.table(phase=None)):
        raise ValueError(
            f"{run} holds neither a step nor a cast: the script ended before its first step, or its training ran in "
            "another process. Look at what it printed; a script that starts processes needs torchrun"
        )
    result = explain(bad, baseline=good, framework=framework)
    if retrain and result.findings and (remedies := result.findings[0].remedies):
        from ottava.remedy.cure import retrain as train_again

        try:
            came = str(train_again(bad, remedies[0], run.resolve().with_name(f"{run.resolve().name}-cure"), good))
        except ValueError as error:
            came = str(error)
        remedies[0]["text"] += f" {came[:1].upper()}{came[1:]}"
    values = {"schema_version": SCHEMA_VERSION, "run": str(run), **result.to_dict()}
    answer(as_json, values, _text(result, every), language, "ottava diagnose")
    return 1 if fail_on != "never" and result.fails(fail_on) else 0


def _text(result: Diagnosis, every: bool) -> str:
    lines = [result.sentence]
    if result.event and result.event not in result.sentence:
        lines += ["", f"What happened: {result.event}"]
    if more := [f"  {sentence}" for sentence in result.tried if sentence not in result.sentence]:
        lines += ["", "Tried", *more]
    for number, finding in enumerate(result.findings, 1):
        lines += ["", *_finding(number, finding)]
    if result.notes:
        lines += ["", "Also seen; it may be meant"] + [f"  {note.title}. {note.cause}" for note in result.notes]
    if result.forecast:
        lines += ["", "If you switch this model to FP8"] + [f"  {sentence}" for sentence in result.forecast]
    if every:
        lines += ["", "Triage"]
        for step in result.questions:
            needs = f" (needs {'; '.join(step['needs'])})" if step["needs"] else ""
            said = f"{step['answer'].capitalize()}{needs}. {step['say']}".rstrip()
            lines.append(f"  {step['id']:4} {step['question']} {said}")
        lines += ["", f"Laws: {result.tested} tested" + (", not tested:" if result.untested else "")]
        lines += [f"  {law['id']:4} {law['title']}: needs {law['needs']}" for law in result.untested]
    else:
        missing = f", {len(result.untested)} lack data" if result.untested else ""
        lines += ["", f"{result.tested} laws tested{missing} (--all shows them, and the triage tree)"]
    return "\n".join(lines)


def _finding(number: int, finding: Finding) -> list[str]:
    right = finding.confidence
    said = "; on unseen faults, answers of this kind were right {} times in {}"
    sure = "" if right is None else said.format(*right)
    when = f", step {finding.steps[0]}" if finding.steps else ""
    lines = [f"{number}. {finding.title}  ({finding.severity}{when}{sure})", f"   {finding.cause}"]
    lines += [f"   {sentence}" for sentence in finding.tried]
    for letter, remedy in zip("abcdefgh", finding.remedies, strict=False):
        cost = "" if remedy["cost"] == "nothing" else f" Costs {remedy['cost']}."
        lines.append(f"   {letter}) {remedy['text']}{cost}")
        for framework, patch in remedy["patch"].items():
            lines += [f"      {framework}:"] + [f"        {line}" for line in patch.splitlines()]
    return lines


def compare(
    good: Annotated[Path, Argument(metavar="GOOD", help="Folder of the run that went well.")],
    bad: Annotated[Path, Argument(metavar="BAD", help="Folder of the run that went wrong.")],
    align: Annotated[str, Option(metavar="AXIS", help="Pair looks by step, or by tokens.")] = "step",
    control: Annotated[
        list[Path] | None, Option(metavar="RUN", help="Another good run, of another seed; repeatable.")
    ] = None,
    top: Annotated[int, Option(metavar="N", min=1, help="Rows of the table.")] = 15,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Compare a good run with a bad one: settings first, then which tensor left the good run's band, and when.

    The table is ranked by bits lost per element. 6 dB of SQNR are one bit. An element that the cast flushed or clipped
    lost all of its bits. Eight octaves of growth count as one bit.

    The band of a statistic is the range of the good run around that step; --control widens it.

    Exit code 1 if the loss or a tensor of the bad run left the band of the good one.
    """
    from ottava.diagnose.compare import compare as compare_runs
    from ottava.record.reader import Run

    runs = [Run.open(path) for path in (good, bad, *(control or ()))]
    result = compare_runs(runs[0], runs[1], align=align, controls=runs[2:])
    values = {"schema_version": SCHEMA_VERSION, "good": str(good), "bad": str(bad), **result.to_dict()}
    answer(as_json, values, _compared(result, top), language, "ottava compare")
    return 1 if result.diverged else 0


def _compared(result: Comparison, top: int) -> str:
    from ottava.measure.layer_names import symbol

    lines = [result.verdict, *(["", "Settings that differ"] if result.config else [])]
    if result.config:
        lines += columns(("", "good", "bad"), *((f"  {d['key']}", d["good"], d["bad"]) for d in result.config))
    if result.unmatched:
        lines += ["", f"Only in one run: {', '.join(result.unmatched[:8])}"]
    if result.first is not None and result.first["then"]:
        lines += ["", f"Then: {', '.join(result.first['then'])}"]
    rows = [
        [
            f"  {entry['layer']}",
            symbol(entry["tensor"], entry["direction"]),
            entry["metric"],
            f"{entry['good']:.4g}",
            f"{entry['bad']:.4g}",
            f"{entry['effect']:+.3g} {entry['unit']}",
            f"{entry['bits']:.2f}",
            entry["step"],
        ]
        for entry in result.ranked[:top]
    ]
    lines += ["", f"Largest differences, of {result.steps_compared} looks"]
    head = ["  layer", "tensor", "statistic", "good", "bad", "effect", "bits lost", "step"]
    return "\n".join(lines + (columns(head, *rows) if rows else ["  none"]))


def bisect(
    path: Annotated[
        Path, Argument(metavar="RUN|CHECKPOINT|DUMP", help="Run folder or checkpoint of `ottava train`, or a dump.")
    ],
    step: Annotated[
        int | None, Option(metavar="N", help="Replay this step's batch; default: the step after the checkpoint.")
    ] = None,
    batch: Annotated[Path | None, Option(metavar="FILE", help="Replay this dumped batch.")] = None,
    recipe: Annotated[str | None, Option(metavar="NAME", help="Recipe to bisect; default: the run's recipe.")] = None,
    accumulator: Annotated[
        str | None, Option(metavar="NAME", help="Emulate the sums of this tensor core, such as hopper.")
    ] = None,
    target: Annotated[
        str, Option(metavar="gradient|loss", help="Quantity to compare with high precision.")
    ] = "gradient",
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Replay one batch with parts of the recipe off, and name the GEMM, the layer and the operand that err most.

    bisect loads CHECKPOINT, or the newest checkpoint of RUN, and changes no file. Every probe keeps a few casts, turns
    the others off, and compares the gradient with that of high precision. A dump of a layer's GEMM operands needs no
    model. For a model of your own, call ottava.debug.bisect. With --accumulator, a CPU separates damage by quantization
    from damage by the accumulator of that tensor core.

    Exit code 0 if the error is spread over the layers, or there is none; 1 if one layer has most of it; 4 if there is
    no checkpoint or it is damaged.
    """
    from ottava.experiments.bisect import Probe
    from ottava.experiments.bisect import bisect as search

    if path.is_file() and path.parent.name != "checkpoints":
        answer(as_json, *_operands(path, accumulator), language)
        return 0
    checkpoint, config = _open(path)
    model, loss, data, states, position = _load(checkpoint, config, step, batch)

    def show(probe: Probe) -> None:
        typer.echo(spoken(f"  {probe.what}: error {probe.error:.4f}", language), err=True)

    if target not in ("gradient", "loss"):
        raise ValueError(f"--target {target!r}: needs gradient or loss")
    quantity: Literal["gradient", "loss"] = "gradient" if target == "gradient" else "loss"
    listener = None if as_json else show
    result = search(
        model, data, loss, recipe, target=quantity, random=states, on_probe=listener, accumulator=accumulator
    )
    facts = {"checkpoint": str(checkpoint.path), "step": position, **result.to_dict()}
    answer(as_json, facts, f"{checkpoint.path}, batch of step {position}\n\n{result}", language)
    return 1 if result.suspect is not None and not result.spread else 0


def _open(path: Path) -> tuple[Checkpoint, TrainConfig]:
    """The checkpoint at a path, and the settings of its run."""
    from ottava.train.checkpoint import CheckpointError, whole_checkpoint
    from ottava.train.config import load_config

    folder = path.parent.parent if path.is_file() or path.parent.name == "checkpoints" else path
    if not path.exists() or not folder.is_dir():
        raise CheckpointError(f"{path}: does not exist; needs a run folder or a checkpoint of `ottava train`")
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{folder}: has no config.yaml, so it is no run of `ottava train`. For a model of your own, call "
            "ottava.debug.bisect(model, batch, loss)"
        )
    if path == folder and not any(folder.glob("checkpoints/step-*")):
        raise CheckpointError(f"{folder}: has no checkpoint yet; train some steps, or lower checkpoint.every")
    return whole_checkpoint(path), load_config(folder / "config.yaml")


def _load(
    checkpoint: Checkpoint, config: TrainConfig, step: int | None, dumped: Path | None
) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any, dict[str, Tensor], int]:
    """The model of a checkpoint, its loss, a batch, the random states of the checkpoint, and the step of the batch."""
    import torch

    from ottava.nn.convert import convert
    from ottava.record.dumps import BatchDump, DumpError, read_dump
    from ottava.train.checkpoint import fitting
    from ottava.train.data import ByteCorpus
    from ottava.train.model import ByteTransformer
    from ottava.train.model import loss as loss_of

    available = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(available if config.device == "auto" else config.device)
    if device.type == "cuda" and available == "cpu":
        typer.echo(
            f"the run was on {device}; this machine has no GPU, so the CPU replays it with emulated GEMMs", err=True
        )
        device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        model = ByteTransformer(config.model, config.sequence_length)
    convert(model, config.build_recipe())
    with fitting(checkpoint.path):
        model.load_state_dict(checkpoint.part("model."))
    model.to(device)
    states = {n.removeprefix("random."): t for n, t in checkpoint.tensors.items() if n == "random.cpu"}
    position = checkpoint.step + 1 if step is None else step
    if dumped is not None:
        dump = read_dump(dumped)
        if not isinstance(dump, BatchDump):
            raise DumpError(f"{dumped}: is a dump of a tensor, not of a batch")
        data, position = dump.batch, dump.step
    else:
        last = max(config.steps, checkpoint.step + 1)
        if not 1 <= position <= last:
            raise ValueError(f"--step {position}: is no step of the run; needs 1 to {last}")
        corpus = ByteCorpus.load(config.data)
        corpus.require(config.sequence_length)
        data = corpus.batch(
            seed=config.seed, step=position, batch_size=config.batch_size, length=config.sequence_length
        )

    def loss(net: nn.Module, pair: Any) -> Tensor:
        inputs, targets = pair
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            return loss_of(net, inputs.to(device), targets.to(device))

    return model, loss, data, states, position


def _operands(path: Path, accumulator: str | None) -> tuple[dict[str, Any], str]:
    """The error of each GEMM of a dump, with one operand cast and with both."""
    from ottava.experiments.bisect import probe_gemms
    from ottava.record.dumps import DumpError, GemmDump, read_dump

    dump = read_dump(path)
    if not isinstance(dump, GemmDump):
        raise DumpError(f"{path}: is not a dump of GEMM operands; dump a layer's x, w and dy with Dumper.dump_gemms")
    probes = probe_gemms(dump, dump.recipe if accumulator is None else dump.recipe.under(accumulator))
    facts = {"layer": dump.layer, "step": dump.step, "recipe": dump.recipe.name}
    return facts | {"gemms": [probe.to_dict() for probe in probes]}, _table(dump, probes)


def _table(dump: GemmDump, probes: list[Any]) -> str:
    lines = [f"{dump.layer}, step {dump.step}, recipe {dump.recipe.name}: SQNR of each GEMM's result in dB", ""]
    lines.append(f"{'gemm':6}  {'only lhs':>8}  {'only rhs':>8}  {'both':>8}  {'native':>8}  {'row p50':>8}  operands")
    for p in probes:
        cells = (p.only_lhs_db, p.only_rhs_db, p.both_db, p.native_db, p.row_p50_db)
        lines.append(f"{p.gemm:6}  " + "  ".join(f"{value:8.2f}" for value in cells) + f"  {p.lhs} x {p.rhs}")
    if probes and all(p.emulated for p in probes):
        lines += [
            "",
            "native GEMMs are emulated here, with fp32 sums: they say nothing about a tensor core's accumulator "
            "(--accumulator hopper emulates one)",
        ]
    return "\n".join(lines)


def what_if(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a watched run.")],
    recipes: Annotated[str | None, Option(metavar="A,B", help="Recipes by name; default: every FP8 recipe.")] = None,
    layers: Annotated[
        str | None, Option(metavar="PATTERN", help="Only these layers, with numbers of every tensor: *.down_proj")
    ] = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Predict the error of every recipe in every tensor of a run, without another run.

    what-if computes underflow, SQNR and element SQNR (every element has the same weight) from the recorded histograms.
    A recipe clears a layer if no tensor misses a floor in a recorded step: at most 1 % underflow, SQNR of 25 dB in E4M3
    and 20 in E5M2, element SQNR 5 dB below that. The last table names the cheapest recipe that clears each layer.
    Recipes with transforms or rules for block scales are cast for real, on tensors that the watch has dumped whole
    (dump: {steps: [100, 500], rows: 0}).

    Exit code 0; 1 if no recipe clears some layer; 2 for an unknown recipe or a pattern that matches no layer; 4 if the
    folder has no histograms.
    """
    from ottava.diagnose.what_if import cheapest, default_recipes, predict, recast, summary
    from ottava.recipe import get_recipe
    from ottava.record.amaxes import recorded
    from ottava.record.reader import Run
    from ottava.record.schema import RunError

    candidates = [get_recipe(name.strip()) for name in recipes.split(",")] if recipes else list(default_recipes())
    opened = Run.open(run)
    table = opened.table(phase=None)
    if layers is not None:
        names = {name for name in table["layer"] if fnmatchcase(name, layers)}
        if not names:
            own = list(dict.fromkeys(table["layer"]))
            examples = ", ".join(own[:8]) + ", ..." * (len(own) > 8)
            raise ValueError(f"--layers {layers!r} matches no layer of {run}; it has {examples}")
        table = table.where(layer=names)
    predictions = recast(run, predict(table, candidates, recording=recorded(run)), candidates)
    if not predictions:
        reason = opened.not_recorded() or "of other layers only"
        raise RunError(f"{run}: holds no histograms to predict from ({reason})")
    best = cheapest(predictions)
    values = {
        "run_dir": str(run),
        "recipes": summary(predictions),
        "cheapest": best,
        "predictions": [prediction.to_dict() for prediction in predictions],
    }
    answer(as_json, values, _predicted(run, predictions, best, detailed=layers is not None), language)
    return 1 if None in best.values() else 0


def _predicted(run: Path, predictions: list[Prediction], best: dict[str, str | None], *, detailed: bool) -> str:
    from ottava.diagnose.what_if import HIGH_PRECISION, summary
    from ottava.measure.layer_names import symbol

    steps = max(prediction.steps for prediction in predictions)
    lines = [f"{run}: {steps:,} recorded steps, {len(best)} layers; predicted from histograms", ""]
    head = f"{'underflow':>9}  {'SQNR':>7}  {'element':>7}"
    lines.append(f"{'recipe':18}  {'clears':>7}  {'worst tensor':22}  {head}")
    for row in summary(predictions):
        share = f"{row['clears']}/{row['layers']}"
        numbers = _numbers(row["underflow_pct"], row["sqnr_db"], row["element_sqnr_db"])
        lines.append(f"{row['recipe']:18}  {share:>7}  {_short(row['worst'] or '-', 22):22}  {numbers}")
    lines += ["(clears: of all layers; SQNR in dB; element: every element weighted alike)"]
    lines += ["", "cheapest recipe that clears the floors in every recorded step:"]
    groups = grouped((name or "none: keep in BF16", layer) for layer, name in best.items())
    for name, members in groups.items():
        shown = ", ".join(members[:6]) + (f", ... ({len(members)} layers)" if len(members) > 6 else "")
        lines.append(f"  {name}: {shown}")
    if detailed:
        lines += ["", f"{'layer':32}  {'tensor':6}  {'recipe':20}  {head}"]
        lines += [_row(prediction) for prediction in predictions if prediction.spec != HIGH_PRECISION]
    elif any(not prediction.clears for prediction in predictions):
        lines += ["", "floors missed (worst first):"]
        misses = sorted((p for p in predictions if not p.clears and p.steps), key=lambda p: p.element_sqnr_db)
        lines += [f"  {p.layer} {symbol(p.tensor, p.direction)}  {p.recipe}: {p.why}" for p in misses[:8]]
        lines += [f"  ... {len(misses) - 8} more; see --layers PATTERN or --json"] if len(misses) > 8 else []
    return "\n".join(lines)


def _row(p: Prediction) -> str:
    from ottava.measure.layer_names import symbol

    mark = "ok" if p.clears else p.why
    numbers = _numbers(p.underflow_pct, p.sqnr_db, p.element_sqnr_db)
    return f"{_short(p.layer, 32):32}  {symbol(p.tensor, p.direction):6}  {p.recipe:20}  {numbers}  {mark}"


def _numbers(underflow: float | None, *decibels: float | None) -> str:
    cells = [f"{underflow:7.2f} %" if underflow is not None and not math.isnan(underflow) else f"{'-':>9}"]
    cells += [f"{value:7.1f}" if value is not None and not math.isnan(value) else f"{'-':>7}" for value in decibels]
    return "  ".join(cells)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
