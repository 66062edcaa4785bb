"""`ottava diagnose`: symptoms of a run, their causes and their remedies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.base.text import to_json

if TYPE_CHECKING:
    from ottava.diagnose.diagnose import Diagnosis, Finding
    from ottava.diagnose.rules import Rulebook
    from ottava.record.reader import Run

SCHEMA_VERSION = 1
_SEVERITIES = ("critical", "warning", "never")
_FRAMEWORKS = ("ottava", "megatron", "te", "torchao")


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a watched run.")],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="RUN", help="The same training in BF16, or a good run.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="Rules of your own, added to the shipped ones.")
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            metavar="NAME=CHOICE",
            help="Answer a question that no run folder can; repeatable; --questions lists them.",
        ),
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask me these questions, one by one.")] = False,
    questions: Annotated[bool, typer.Option("--questions", help="List the questions and exit.")] = False,
    framework: Annotated[
        str, typer.Option("--for", metavar="NAME", help="Print patches for ottava, megatron, te or torchao.")
    ] = ("ottava"),
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="NAME", help="Exit 1 from this severity on: critical, warning, never.")
    ] = "critical",
    every: Annotated[bool, typer.Option("--all", help="Name each rule that could not be tested.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Explain a run: symptoms, causes, and remedies in order of cost, each with its numbers.

    Rules are tested in this order: software bugs, configuration, numerics. If no rule fires, the answer is "no FP8
    evidence found" with the share of layers that the watch saw. A rule may lack data: the last lines count such rules
    by what they need, and --all lists them.

    Exit code 1 if a finding is at least as severe as --fail-on.
    """
    from ottava.base.errors import unknown_name
    from ottava.diagnose.diagnose import diagnose as explain
    from ottava.diagnose.rules import load_rules
    from ottava.record.reader import Run

    for option, value, choices in (("--fail-on", fail_on, _SEVERITIES), ("--for", framework, _FRAMEWORKS)):
        if value not in choices:
            raise ValueError(unknown_name(f"value of {option}", value, choices))
    book = load_rules(rules)
    if questions:
        for question in book.questions.values():
            typer.echo(f"{question.name}={'|'.join(question.choices)}\n    {question.ask}")
        return 0
    answers = _answers(answer or ())
    watched, twin = Run.open(run), None if baseline is None else Run.open(baseline)
    if ask:
        answers = _interview(watched, twin, book, answers)
    result = explain(watched, baseline=twin, rules=book, answers=answers)
    values = {"schema_version": SCHEMA_VERSION, "run": str(run), **result.to_dict()}
    typer.echo(to_json(values) if as_json else _text(result, framework, every))
    return 1 if fail_on != "never" and result.fails(fail_on) else 0


def _answers(options: list[str] | tuple[()]) -> dict[str, str]:
    answers = {}
    for text in options:
        name, sign, choice = text.partition("=")
        if not sign:
            raise ValueError(f"--answer {text!r}: needs NAME=CHOICE, such as bf16_twin_recovers=no")
        answers[name.strip()] = choice.strip()
    return answers


def _interview(run: Run, baseline: Run | None, book: Rulebook, answers: dict[str, str]) -> dict[str, str]:
    """Asks the questions of the triage tree until it has no new one. Enter leaves a question open."""
    from ottava.diagnose.diagnose import diagnose as explain

    done: set[str] = set(answers)
    while True:
        unanswered = [
            step["ask"]
            for step in explain(run, baseline=baseline, rules=book, answers=answers).questions
            if step["ask"] is not None and step["ask"] not in done
        ]
        if not unanswered:
            return answers
        name = unanswered[0]
        done.add(name)
        question = book.questions[name]
        reply = typer.prompt(f"{question.ask} [{'/'.join(question.choices)}, Enter: not known]", default="", err=True)
        if reply.strip():
            answers = {**answers, name: reply.strip()}
            book.check_answers(answers)


def _text(result: Diagnosis, framework: str, every: bool) -> str:
    measured = result.coverage_pct == result.coverage_pct  # not NaN
    coverage = f" Coverage {result.coverage_pct:.0f} %." if measured else " Coverage is not known."
    lines = [result.sentence + (coverage if result.findings else "")]
    for number, finding in enumerate(result.findings, 1):
        lines += ["", *_finding(number, finding, framework)]
    if result.notes:
        lines += ["", "Not FP8, but look at this"]
        for number, note in enumerate(result.notes, 1):
            lines += ["", *_finding(number, note, framework)]
    lines += ["", "Triage"]
    for step in result.questions:
        needs = f" (needs {'; '.join(step['needs'])})" if step["needs"] else ""
        say = f"  {step['say']}" if step["say"] else ""
        lines.append(f"  {step['id']:4} {step['question']} {step['answer']}{needs}{say}")
    if result.untested:
        lines += ["", f"Not tested: {len(result.untested)} rules" + ("" if every else " (--all lists them)")]
        lines += _list_untested(result) if every else _count_needs(result)
    return "\n".join(lines)


def _list_untested(result: Diagnosis) -> list[str]:
    return [f"  {rule['id']:4} {rule['title']}: needs {rule['needs']}" for rule in result.untested]


def _count_needs(result: Diagnosis) -> list[str]:
    """The needs of rules that could not be tested, the most frequent first."""
    counts: Counter[str] = Counter()
    for rule in result.untested:
        needs = rule["needs"].split("; ")
        counts.update({"an answer (--ask asks for it)" if need.startswith("an answer to") else need for need in needs})
    return [f"  {count:4} for want of {need}" for need, count in counts.most_common()]


def _finding(number: int, finding: Finding, framework: str) -> list[str]:
    from ottava.measure.layer_names import symbol

    steps = f", steps {finding.steps[0]} to {finding.steps[1]}" if finding.steps else ""
    lines = [
        f"{number}. {finding.severity} {finding.id}  {finding.title}  (confidence {finding.confidence:.0%}{steps})"
    ]
    for proof in finding.evidence:
        where = f"{proof.layer}.{symbol(proof.tensor)}  " if proof.layer else ""
        value, limit = (f"{v:.4g}" if isinstance(v, float) else v for v in (proof.value, proof.threshold))
        unit = f" {proof.unit}" if proof.unit else ""
        at = "" if proof.step is None else f", step {proof.step}"
        lines.append(f"     {where}{proof.metric} {value}{unit} (limit {limit}{at})")
    if len(finding.layers) > 1:
        lines.append(f"   in {len(finding.layers)} layers")
    lines.append(f"   cause: {finding.cause}")
    lines.append(f"   refuted if: {finding.refute_by}")
    if finding.also:
        lines.append(f"   explains too: {'; '.join(finding.also)}")
    for letter, remedy in zip("abcdefgh", finding.remedies, strict=False):
        lines.append(f"   {letter}) {remedy['text']} Costs: {remedy['cost']}.")
        lines += [f"        {line}" for line in remedy["patch"].get(framework, "").splitlines()]
        lines += [f"      predicted: {remedy['predicted']}"] if remedy["predicted"] else []
        lines += [f"      note: {note}" for note in remedy["notes"]]
    lines.append(f"   source: {'; '.join(finding.source)}")
    return lines
