"""`ottava diagnose`: what is wrong with a run, why, and what to do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.text import to_json

if TYPE_CHECKING:
    from ottava.debug.analysis.diagnose import Diagnosis, Finding
    from ottava.debug.analysis.rules import Rulebook
    from ottava.debug.run.reader import Run

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
            help="Answer to what no run folder knows; repeatable; --questions lists them.",
        ),
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Be asked these questions, one by one.")] = False,
    questions: Annotated[bool, typer.Option("--questions", help="List the questions and exit.")] = False,
    framework: Annotated[
        str, typer.Option("--for", metavar="NAME", help="Whose patches to print: ottava, megatron, te, torchao.")
    ] = ("ottava"),
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="NAME", help="Exit 1 from which severity on: critical, warning, never.")
    ] = "critical",
    every: Annotated[bool, typer.Option("--all", help="Name each rule that could not be tested.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Explain a run: symptoms, causes, remedies in order of cost, each with the numbers behind it.

    Rules are asked in this order: software bugs, configuration, numerics. Where none fires, the answer is "no FP8
    evidence found" with the share of layers that was seen. Rules that could not be asked are counted by what they
    need; --all lists them.

    Exit code 1 if a finding is at least as severe as --fail-on.
    """
    from ottava.debug.analysis.diagnose import diagnose as explain
    from ottava.debug.analysis.rules import load_rules
    from ottava.debug.run.reader import Run
    from ottava.errors import unknown_name

    for option, value, known in (("--fail-on", fail_on, _SEVERITIES), ("--for", framework, _FRAMEWORKS)):
        if value not in known:
            raise ValueError(unknown_name(f"value of {option}", value, known))
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


def _answers(given: list[str] | tuple[()]) -> dict[str, str]:
    answers = {}
    for text in given:
        name, sign, choice = text.partition("=")
        if not sign:
            raise ValueError(f"--answer {text!r}: needs NAME=CHOICE, such as bf16_twin_recovers=no")
        answers[name.strip()] = choice.strip()
    return answers


def _interview(run: Run, baseline: Run | None, book: Rulebook, answers: dict[str, str]) -> dict[str, str]:
    """Asks along the triage tree until it asks nothing new; Enter leaves a question open."""
    from ottava.debug.analysis.diagnose import diagnose as explain

    asked: set[str] = set(answers)
    while True:
        open_ones = [
            step["ask"]
            for step in explain(run, baseline=baseline, rules=book, answers=answers).questions
            if step["ask"] is not None and step["ask"] not in asked
        ]
        if not open_ones:
            return answers
        name = open_ones[0]
        asked.add(name)
        question = book.questions[name]
        said = typer.prompt(f"{question.ask} [{'/'.join(question.choices)}, Enter: not known]", default="", err=True)
        if said.strip():
            answers = {**answers, name: said.strip()}
            book.check_answers(answers)


def _text(result: Diagnosis, framework: str, every: bool) -> str:
    known = result.coverage_pct == result.coverage_pct  # not NaN
    seen = f" Coverage {result.coverage_pct:.0f} %." if known else " Coverage is not known."
    lines = [result.sentence + (seen if result.findings else "")]
    for number, finding in enumerate(result.findings, 1):
        lines += ["", *_finding(number, finding, framework)]
    lines += ["", "Triage"]
    for step in result.questions:
        needs = f" (needs {'; '.join(step['needs'])})" if step["needs"] else ""
        say = f"  {step['say']}" if step["say"] else ""
        lines.append(f"  {step['id']:4} {step['question']} {step['answer']}{needs}{say}")
    if result.untested:
        lines += ["", f"Not tested: {len(result.untested)} rules" + ("" if every else " (--all lists them)")]
        lines += _each(result) if every else _wants(result)
    return "\n".join(lines)


def _each(result: Diagnosis) -> list[str]:
    return [f"  {rule['id']:4} {rule['title']}: needs {rule['needs']}" for rule in result.untested]


def _wants(result: Diagnosis) -> list[str]:
    """What would let rules be tested, the need that stops most of them first."""
    wants: Counter[str] = Counter()
    for rule in result.untested:
        needs = rule["needs"].split("; ")
        wants.update({"an answer (--ask asks for it)" if need.startswith("an answer to") else need for need in needs})
    return [f"  {count:4} for want of {need}" for need, count in wants.most_common()]


def _finding(number: int, finding: Finding, framework: str) -> list[str]:
    from ottava.debug.run.schema import symbol

    steps = f", steps {finding.steps[0]} to {finding.steps[1]}" if finding.steps else ""
    lines = [
        f"{number}. {finding.severity} {finding.id}  {finding.title}  (confidence {finding.confidence:.0%}{steps})"
    ]
    for seen in finding.evidence:
        where = f"{seen.layer}.{symbol(seen.tensor)}  " if seen.layer else ""
        value, limit = (f"{v:.4g}" if isinstance(v, float) else v for v in (seen.value, seen.threshold))
        unit = f" {seen.unit}" if seen.unit else ""
        at = "" if seen.step is None else f", step {seen.step}"
        lines.append(f"     {where}{seen.metric} {value}{unit} (limit {limit}{at})")
    if len(finding.layers) > 1:
        lines.append(f"   in {len(finding.layers)} layers")
    lines.append(f"   cause: {finding.cause}")
    lines.append(f"   refuted if: {finding.refute_by}")
    if finding.also:
        lines.append(f"   explains too: {'; '.join(finding.also)}")
    for letter, remedy in zip("abcdefgh", finding.remedies, strict=False):
        lines.append(f"   {letter}) {remedy['text']} Costs: {remedy['cost']}.")
        lines += [f"        {line}" for line in remedy["patch"].get(framework, "").splitlines()]
        lines += [f"      note: {note}" for note in remedy["notes"]]
    lines.append(f"   source: {'; '.join(finding.source)}")
    return lines
