"""Commands about checkpoints: `ottava inspect`, `consolidate`, `export` and `parity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ottava.cli.console import SpeaksOption, answer, print_table, spoken

if TYPE_CHECKING:
    from ottava.serving.answers import View
    from ottava.serving.attribution import Attribution
    from ottava.serving.evaluate import Evaluation
    from ottava.serving.parity import Certificate
    from ottava.serving.sides import Model, Text
    from ottava.serving.source import Source


def inspect(
    path: Annotated[
        Path, Argument(metavar="FILE|FOLDER", help="A checkpoint of Hugging Face, torch, PEFT or ottava; or a run.")
    ],
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Show each tensor of a checkpoint: type, shape, amax and scales; and check the FP8 scaling state in it.

    FILE is a safetensors file or one of torch.save; FOLDER holds such files, also many with an index, a LoRA adapter or
    the shards of several processes. amax is that of the numbers as they are stored; scales are the smallest and largest
    of those beside codes. The numbers of a checkpoint are read once, so a large one takes as long as copying it.

    Recipes that predict scales (delayed, guarded; TransformerEngine's, too) keep a state: for each tensor how full the
    amax history is, its newest and largest amax, the scale, and how the scale follows from the history.

    No code of a file is executed; a pickle that would run code is refused.

    Exit code 0; 1 if a scaling state contradicts itself; 4 if the file is damaged or refused, or holds no tensor.
    """
    from rich.console import Console

    from ottava.interop.contents import read_contents

    found = read_contents(path)
    problems = found.state is not None and bool(found.state.problems)
    if as_json:
        answer(True, found.to_dict(), "")
        return int(problems)
    lines = [found.summary, *(f"  {name}: {value}" for name, value in found.settings.items()), ""]
    typer.echo(spoken("\n".join(lines), language))
    rows = [
        (
            one.name,
            one.dtype,
            "x".join(map(str, one.shape)) or "scalar",
            "-" if one.amax is None else f"{one.amax:.4g}",
            "-" if one.scale_min is None else f"{one.scale_min:.4g}..{one.scale_max:.4g}",
        )
        for one in found.tensors
    ]
    header = ("tensor", "dtype", "shape", "amax", "scales")
    print_table(Console(), header, rows, left=("tensor", "dtype"), language=language)
    if found.state is not None:
        typer.echo(spoken(f"\n{found.state}", language))
    return int(problems)


def export(
    source: Annotated[
        Path, Argument(metavar="SOURCE", help="A run of ottava train, one of its checkpoints, or a checkpoint.")
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="A new folder.")],
    layout: Annotated[
        str | None,
        Option(
            "--layout",
            "-l",
            metavar="L",
            help="bf16, compressed-tensors-{block,channel,tensor,mxfp8,mxfp4,nvfp4}, fp8-block, fp8-block-ue8m0, "
            "mxfp8, modelopt, modelopt-nvfp4.",
        ),
    ] = None,
    static: Annotated[bool, Option("--static", help="Write scales of activations, from histories.")] = False,
    keep: Annotated[
        list[str] | None, Option(metavar="P", help="Linears that stay in BF16: '*.down_proj'; repeatable.")
    ] = None,
    recast: Annotated[
        bool, Option("--recast", help="Cast the weights anew where the layout does not hold their cast.")
    ] = False,
    engine: Annotated[
        str | None,
        Option("--engine", "-e", metavar="E", help="vllm, sglang, transformers or trtllm, which will serve it."),
    ] = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the report as one JSON object.")] = False,
) -> int:
    """Write an FP8 or FP4 checkpoint for transformers, vLLM, SGLang or TensorRT-LLM, with the trained numbers.

    Without --layout it is the first layout that holds the codes of training. A layout that does not hold them is an
    error, unless --recast asks for other codes. A run of `ottava train` becomes a Llama of Hugging Face's. The report
    says for each group of linears what was written, whether training multiplied these numbers, and if not, why.

    Exit code 0; 1 if numbers differ from those that training multiplied; 2 for a wrong layout, engine or pattern; 4 for
    a folder that cannot be read.
    """
    from ottava.serving.export import export as write

    opened, _ = _source(source)
    report = write(opened, out, layout=layout, static=static, keep=keep or (), recast=recast, engine=engine)
    answer(as_json, asdict(report), report, language)
    return int(bool(report.changed))


def _source(folder: Path) -> tuple[Source, Path | None]:
    """The checkpoint in a folder of Hugging Face's, or that of a run and the receipt of the run."""
    if (run := _run_of(folder)) is not None:
        receipt = run / "receipt.json"
        return _of_run(folder), receipt if receipt.is_file() else None
    from ottava.serving.source import of_folder

    return of_folder(folder), None


def _run_of(folder: Path) -> Path | None:
    """The run of ottava train that a folder is, or is a checkpoint of."""
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    return run if (run / "config.yaml").is_file() else None


def _of_run(folder: Path) -> Source:
    from ottava.train.llama import of_run

    return of_run(folder)


def consolidate(
    checkpoint: Annotated[Path, Argument(metavar="FOLDER", help="RUN/checkpoints/step-000200, for example.")],
    target: Annotated[Path, Argument(metavar="NEW", help="A folder that does not exist yet.")],
    everything: Annotated[
        bool, Option("--all", help="Also the states of the optimizer and of random generators.")
    ] = False,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Join the shards of a checkpoint to one file NEW/model.safetensors, with whole tensors.

    FOLDER is a checkpoint of `ottava train` under torchrun, or of torch.distributed.checkpoint with its
    HuggingFaceStorageWriter. Tensors keep their names in the model; FP8 weights stay codes with their scales.

    Exit code 4 if FOLDER is damaged or holds no such files.
    """
    from ottava.train.checkpoint import consolidate as join

    sizes = join(checkpoint, target, keep=everything)
    path = target / "model.safetensors"
    said = f"{path}: {sizes['tensors']} tensors, {sizes['bytes']:,} bytes"
    answer(as_json, {"path": str(path), **sizes}, said, language)
    return 0


_A = Annotated[str | None, Argument(metavar="A", help="How it should be: a run, a checkpoint, or either @RECIPE.")]
_B = Annotated[str | None, Argument(metavar="B", help="The folder that the engine reads; or as A; or FOLDER@engine.")]
_Engine = Annotated[
    str | None,
    Option("--engine", "-e", metavar="E", help="vllm, sglang, transformers, trtllm, or none: only the answers."),
]
_Recipe = Annotated[str | None, Option(metavar="R", help="Name of the training's recipe, if A is in BF16: A@R.")]
_Settings = Annotated[
    Path | None, Option("--engine-config", metavar="F", help="JSON: settings of the engine, in its own words.")
]
_Ran = Annotated[
    Path | None, Option("--receipt", metavar="F", help="receipt.json of the training; a run brings its own.")
]
_Device = Annotated[
    str | None, Option(metavar="D", help="cpu or cuda, where it runs. Default: cuda; transformers: here.")
]
_Run = Annotated[
    bool, Option("--run/--no-run", help="Run transformers on a few tokens, where it is installed and on the CPU.")
]
_Answers = Annotated[
    bool, Option("--answers", help="Compare what A and B answer to texts, too. Without an engine always.")
]
_Text = Annotated[
    list[Path] | None,
    Option(metavar="F", help="A text for answers and KL; repeatable. Default: held-out text of ottava train."),
]
_Logprobs = Annotated[
    Path | None, Option(metavar="F", help="Log-probabilities of a rollout and of training: say why they differ.")
]
_Form = Annotated[
    str | None, Option("--format", metavar="N", help="plain, nemo-rl, verl or trl. Default: by its fields.")
]
_Before = Annotated[
    list[Path] | None, Option(metavar="F", help="An earlier checkpoint, which the engine may still have; repeatable.")
]
_Out = Annotated[
    list[Path] | None, Option("--out", "-o", metavar="F", help="Write the result: a page as F.html, else JSON.")
]


def parity(
    a: _A = None,
    b: _B = None,
    engine: _Engine = None,
    recipe: _Recipe = None,
    settings: _Settings = None,
    ran: _Ran = None,
    device: _Device = None,
    run: _Run = True,
    kl: Annotated[bool, Option("--kl/--no-kl", help="Measure the KL of each linear that differs, alone.")] = True,
    answers: _Answers = False,
    text: _Text = None,
    length: Annotated[int, Option(min=2, help="Tokens of a chunk of text.")] = 128,
    chunks: Annotated[int, Option(min=2, help="Chunks of each text.")] = 64,
    tolerance: Annotated[float, Option(min=0.0, help="Nats a token of loss or KL that count as nothing.")] = 0.01,
    generate: Annotated[int, Option(min=0, help="Tokens of greedy generations.")] = 32,
    logprobs: _Logprobs = None,
    form: _Form = None,
    before: _Before = None,
    temperature: Annotated[float, Option(help="By which training divides its logits.")] = 1.0,
    out: _Out = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Compare what training multiplied with what an engine multiplies, and what both answer to text.

    The certificate: same formula, linears, codes, scales, casts of activations, heads, ties. Engines are emulated by
    their rules; transformers also runs, and its rules must be what ran. The first difference in the order of execution
    comes first, with its cause. What no rule reads, such as a new field of config.json, is "not certified".

    The answers: loss, KL and next tokens of A and B on texts, weights number by number, and a verdict: they answer
    alike; B holds other weights; wrong scales or weights are read; layers are quantized differently; serve it in FP8;
    the casts are too coarse; unexplained. Brackets hold 95 % of what a bootstrap over chunks of text gives. A run or
    PATH@RECIPE as B has no certificate, for no engine reads it. Models but those of ottava train need transformers.

    With --logprobs the KL between a rollout and training is split into causes by experiments: what A would give
    with one cause switched on. A and B may lack; then fewer causes are told apart.

    Exit code 0 if A and B are equal, answer alike, or the KL is that of rounding; 1 if not, or not certified; 2 for a
    wrong engine, recipe or text; 3 if transformers is missing and needed; 4 for what cannot be read.
    """
    if logprobs is not None:
        from ottava.serving.attribution import attribute
        from ottava.serving.rollout import read_rollout
        from ottava.serving.sides import served

        ours = None if a is None else _trained(a, recipe)
        theirs = None if b is None else served(Path(b), engine or "vllm", _object(settings), device=device)
        earlier = [(folder.name, _trained(str(folder), recipe)) for folder in before or ()]
        dump = read_rollout(logprobs, form)
        return _told(
            out, as_json, language, rollout=attribute(dump, ours, theirs, before=earlier, temperature=temperature)
        )
    if a is None or b is None:
        raise typer.BadParameter("needs A and B, or --logprobs")
    if engine is None:
        engine = "vllm" if _split(b)[1] is None and _run_of(_split(b)[0]) is None else "none"
    certificate = answered = None
    if engine != "none":
        words = {"settings": _object(settings), "device": device, "run": None if run else False}
        first = next(iter(text or ()), None)
        certificate = _certified(a, Path(b), engine, recipe, ran, first, kl=kl, **words)
    if engine == "none" or answers:
        sizes = {"length": length, "chunks": chunks, "generate": generate, "tolerance": tolerance}
        answered = _answered(a, b, recipe, text or (), engine=engine, **sizes)
    return _told(out, as_json, language, certificate, answered)


def _certified(
    a: str, b: Path, engine: str, recipe: str | None, ran: Path | None, text: Path | None, *, kl: bool, **words: Any
) -> Certificate:
    from ottava.serving.parity import parity as certify

    folder, own = _split(a)
    source, found = _source(folder)
    shown = _text(source, b, text) if kl else None
    return certify(source, b, engine, recipe=recipe or own, ran=_object(ran or found), text=shown, **words)


def _answered(a: str, b: str, recipe: str | None, texts: Sequence[Path], *, engine: str, **sizes: Any) -> Evaluation:
    from ottava.serving.evaluate import evaluate
    from ottava.train.llama import open_view, texts_of

    return evaluate(open_view(a, recipe), open_view(b) if engine == "none" else _served(b), texts_of(texts), **sizes)


def _split(given: str) -> tuple[Path, str | None]:
    """PATH@RECIPE -> both, as `open_view` reads it."""
    head, _, name = given.rpartition("@")
    return (Path(head), name) if head and not Path(given).exists() else (Path(given), None)


def _served(folder: str) -> View:
    """What an engine computes beside the codes of a folder; without FP8 weights what BF16 gives."""
    from ottava.serving.answers import ENGINE
    from ottava.train.llama import open_view

    plain = open_view(folder)
    return open_view(folder, ENGINE) if plain.casts_weights else plain


def _told(
    out: Sequence[Path] | None,
    as_json: bool,
    language: str,
    certificate: Certificate | None = None,
    answers: Evaluation | None = None,
    rollout: Attribution | None = None,
) -> int:
    """Prints and writes what was found, and returns the exit code."""
    from ottava.base.text import to_json

    parts = [one for one in (certificate, answers, rollout) if one is not None]
    if answers is None:
        said = (certificate or rollout).to_json()  # type: ignore[union-attr]
    elif certificate is None:
        said = to_json({"schema_version": 1, **answers.to_dict()}) + "\n"
    else:
        said = to_json({**certificate.to_dict(), "answers": answers.to_dict()}) + "\n"
    for path in out or ():
        from ottava.report.frame import write_page
        from ottava.serving.page import render_page

        write_page(path, render_page(certificate, answers, rollout) if path.suffix == ".html" else said, language)
    typer.echo(said.rstrip() if as_json else spoken("\n\n".join(map(str, [*parts, *(out or ())])), language))
    return int(not all(one.good for one in parts))


def _trained(given: str, recipe: str | None) -> Model:
    from ottava.recipe import get_recipe
    from ottava.serving.sides import trained, under

    folder, own = _split(given)
    source, _ = _source(folder)
    name = recipe or own
    return trained(source if name is None else under(source, get_recipe(name)))


def _object(path: Path | None) -> dict[str, Any] | None:
    from ottava.base.untrusted import UntrustedError, parse_json, read_text

    if path is None:
        return None
    try:
        found = parse_json(read_text(path))
    except UntrustedError as error:
        raise UntrustedError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    if not isinstance(found, dict):
        raise UntrustedError(f"{path}: needs one JSON object")
    return found


def _text(source: Source, checkpoint: Path, path: Path | None) -> Text:
    """Bytes for a model that reads bytes, the tokens of the checkpoint's tokenizer, or always the same tokens."""
    import torch

    from ottava.base.untrusted import UntrustedError, read_text
    from ottava.serving.sides import SAMPLE, Text, made_up

    vocabulary, length = int(source.config.get("vocab_size") or 0), 128
    if vocabulary == 256:
        raw = SAMPLE.encode() if path is None else read_text(path).encode()
        name = "a sentence of ottava's" if path is None else path.name
        return Text(torch.tensor(list(raw[:length])), f"{len(raw[:length])} bytes of {name}")
    tokenizer = checkpoint / "tokenizer.json"
    if path is not None and tokenizer.is_file():
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ImportError("--text needs a tokenizer; install it with: pip install tokenizers") from error
        said = read_text(path)
        try:
            ids = Tokenizer.from_file(str(tokenizer)).encode(said).ids[:length]
        except Exception as error:  # the Rust library raises plain exceptions
            raise UntrustedError(f"{tokenizer}: cannot be read: {error}") from error
        return Text(torch.tensor(ids), f"{len(ids)} tokens of {path.name}")
    return made_up(max(vocabulary, 1), length)
