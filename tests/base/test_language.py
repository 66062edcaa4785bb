"""Every sentence of a diagnosis has its Chinese: the English side is read from the source, so none can be forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ottava
from command import ended
from ottava.base.language import Language, catalog
from ottava.cli.app import app
from ottava.prove import explain, hypotheses
from ottava.record.writer import RunWriter
from ottava.serving import attribution, causes

SOURCE = Path(ottava.__file__).parent
ROOMS = (
    *(f"diagnose/{name}" for name in ("laws", "remedies", "diagnose", "loss", "trials", "ranks", "compare", "calls")),
    *("diagnose/difference", "diagnose/what_if", "report/sections", "measure/statistics"),
    *(f"experiments/{name}" for name in ("laboratory", "program", "shadow")),
    *("remedy/cure", "remedy/fallback", "remedy/guard", "watching/adapters", "watching/modules", "watching/operands"),
    *("serving/causes", "serving/parity"),
)
"""Modules that make answers, findings, remedies, comparisons, events, and reasons why something was not seen."""
NO_SENTENCES = re.compile(r"\\|\|Transpose\||^entry \(|^--|^trigger nonfinite, no|^watch: (an experiment|the step's)")
"""Patterns, options, keys, and lines of the log."""
ZH = catalog("zh")


def template(node: ast.Constant | ast.JoinedStr) -> list[str]:
    """What a string leaves open as {}; a choice between two words makes two templates."""
    made = [""]
    for part in [node] if isinstance(node, ast.Constant) else node.values:
        value = part.value if isinstance(part, ast.FormattedValue) else None
        if isinstance(part, ast.Constant):
            choices = [re.sub(r"\$?\{[^}]*\}", "{}", str(part.value))]
        elif isinstance(value, ast.IfExp) and all(isinstance(x, ast.Constant) for x in (value.body, value.orelse)):
            choices = [str(ast.literal_eval(value.body)), str(ast.literal_eval(value.orelse))]
        elif isinstance(value, ast.BinOp) and ast.unparse(value.left) == "'s'":
            choices = ["", "s"]  # 's' * (count != 1)
        else:
            choices = ["{}"]
        made = [begun + choice for begun in made for choice in choices]
    return made


def sentences(module: str) -> Iterator[str]:
    """Templates of a module, sentence by sentence; not docstrings, patches of code, nor what it raises."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))
    left_out: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.JoinedStr):
            parts = [node, *(inner for one in node.values for inner in ast.walk(one))]
            left_out |= {id(part) for part in parts[1:] if isinstance(part, ast.Constant)}
            continue
        if (
            isinstance(node, ast.Raise)
            or (isinstance(node, ast.FunctionDef) and node.name == "__repr__")
            or (isinstance(node, ast.keyword) and node.arg == "patch")
        ):
            parts = [*ast.walk(node)]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts = [node.value]
        left_out |= {id(part) for part in parts}
    for node in ast.walk(tree):
        if id(node) in left_out or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            continue
        for whole in template(node):
            for one in re.split(r"(?<=[.!?]) (?=[A-Z{])|(?<=\{\}) (?=[A-Z])", whole):
                said = re.sub(r"^(?:\{\})+(?=[:.] [A-Z])|(?<=[.:])(?:\{\})+$", "", one).strip()
                words = re.findall(r"(?<![\w.])[A-Za-z]{2,}(?!\w)", said)
                if len(words) >= 3 and "\n" not in said and not re.search(r"[\w]=[^']|\(model", said):
                    yield said


def test_every_sentence_of_a_diagnosis_has_its_chinese() -> None:
    """What is missing is printed as lines for src/ottava/base/zh.yaml."""
    found = [one for module in ROOMS for one in sentences(module)]
    assert len(found) > 400
    missing = sorted({one for one in found if one not in ZH and not NO_SENTENCES.search(one)})
    assert not missing, "\n" + "\n".join(f'"{one}": ""' for one in missing)


def test_every_heading_of_the_report_has_its_chinese() -> None:
    """Headings and summaries that are no variables."""
    pages = "".join((SOURCE / "report" / name).read_text("utf-8") for name in ("report.html.j2", "frame.html.j2"))
    found = [head.strip() for head in re.findall(r"<(?:h[123]|summary)\b[^>]*>([^<{]+)<", pages)]
    assert len(found) > 10
    assert sorted({head for head in found if head and head not in ZH}) == []


def test_every_cause_of_certify_and_parity_has_its_chinese() -> None:
    """What a kernel does wrong and where, why an engine multiplies other numbers, why a rollout differs."""
    say = Language("zh")
    found = {one.sentence for one in hypotheses.all_hypotheses()} | {*causes.CAUSES.values()}
    found |= {*attribution.CAUSES.values(), *(probe.partition(": ")[2] for probe in explain._PROBES)}
    found |= {text for one in hypotheses.all_hypotheses() for kind in one.kinds for text, _ in explain._of_one(kind)}
    assert len(found) > 1000
    missing = [one for one in found if not re.search("[一-鿿]", say(one)) or re.search(r"(?:[a-z]{3,} ){3}", say(one))]
    assert sorted(missing) == []


def test_both_sides_leave_the_same_open() -> None:
    for english, chinese in ZH.items():
        holes = sorted(int(hole) for hole in re.findall(r"\{(\d+)\}", chinese))
        assert holes == [*range(english.count("{}"))], english
        assert "{}" not in chinese, english


def test_a_filled_template_is_said_with_its_numbers() -> None:
    """All templates, with a number in each hole: the numbers arrive in their places, and no English is left."""
    say = Language("zh")
    for english, chinese in ZH.items():
        numbers = [str(1001 + 7 * i) for i in range(english.count("{}"))]
        text = filled(english, numbers)
        if "{}{}" in english or re.fullmatch(r"[\W\d]*", re.sub(r"\{\}", "", english)):
            continue  # two holes side by side, or no word: which hole has what is not told by the text
        assert say(text).rstrip("。") == chinese.format(*numbers).rstrip("。"), english


def filled(english: str, numbers: list[str]) -> str:
    for number in numbers:
        english = english.replace("{}", number, 1)
    return english


def test_sentences_made_of_several_templates_are_found() -> None:
    say = Language("zh")
    answer = (
        "No fault found in 16 steps. FP8 is innocent: 2 shadow steps: with casts the gradient differs by at most "
        "8.17 % from that without (level 15 %). The watch saw 100 % of the linear layers."
    )
    assert say(answer) == (
        "16 步里没有发现故障。不是 FP8 的责任：2 个 shadow step："
        "带 cast 与不带 cast 的梯度最多相差 8.17 %（门限 15 %）。"
        "watch 看到了线性层的 100 %。"
    )
    assert (
        say("   a) Run layers.1.mlp in BF16. Nobody knows this.") == "   a) 让 layers.1.mlp 用 BF16。Nobody knows this."
    )
    assert say("Look at good_bad_run.py: Run a.py in BF16.") == "Look at good_bad_run.py: Run a.py in BF16."
    assert (
        say("Step 1: `f` at a.py:47 gets 1, in the good run 2.")
        == "第 1 步：`f` 在 a.py:47 得到 1，在好的那次训练里是 2。"
    )
    assert say("1. The learning rate is too high  (critical, step 3)") == "1. 学习率太高（严重，第 3 步）"
    assert Language("en")(answer) == answer


def test_a_page_keeps_its_code_and_its_data() -> None:
    page = (
        '<html lang="en"><h1>The learning rate is too high</h1><script>"Tried"</script><code>Tried</code> <b>Tried</b>'
    )
    assert Language("zh").page(page) == (
        '<html lang="zh"><h1>学习率太高</h1><script>"Tried"</script><code>Tried</code> <b>做过的试验</b>'
    )
    assert Language("zh").page("<p>Run a&lt;b in BF16.</p>") == "<p>让 a&lt;b 用 BF16。</p>"
    assert Language("en").page(page) == page


def test_the_switch_is_an_option_or_a_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.describe(cast={"ran": False})
        for step in range(1, 13):
            writer.step(step, loss=2.5, lr=0.0)
    said = {}
    for name, words in (("en", []), ("zh", ["--lang", "zh"])):
        assert ended("diagnose", str(tmp_path / "run"), "--fail-on", "never", *words) == 0
        said[name] = capsys.readouterr().out
    assert "The learning rate is 0" in said["en"]
    assert "学习率为 0" in said["zh"]
    assert "The learning rate is 0" not in said["zh"]
    monkeypatch.setenv("OTTAVA_LANG", "zh")
    assert ended("diagnose", str(tmp_path / "run"), "--fail-on", "never") == 0
    assert capsys.readouterr().out == said["zh"]
    assert ended("report", str(tmp_path / "run")) in (0, 1)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert '<html lang="zh"' in page
    assert "学习率为 0" in page
    assert ended("diagnose", str(tmp_path / "run"), "--lang", "fr") == 2
    assert "'en', 'zh'" in capsys.readouterr().err


def test_every_command_of_sentences_speaks_chinese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mechanism: each has the option, and prints its answer through it."""
    silent = {"formats", "recipes", "explorer", "plot", "bench"}  # numbers, and no verdict
    for name in {one.name or str(one.callback.__name__) for one in app.registered_commands if one.callback} - silent:
        assert ended(name, "--help") == 0
        assert "--lang" in capsys.readouterr().out, name
    monkeypatch.chdir(tmp_path)
    Path("nothing.py").write_text("print(1)\n")
    assert ended("watch", "--lang", "zh", "--out", "run", "--", "nothing.py") == 0
    said = capsys.readouterr().err
    assert "ottava watch：0 步，看到 0 个线性层中的 0 个" in said
    assert "什么都没有记录。它不会跟进" in said
    assert ended("plan", "llama-1b", "--memory", "--lang", "zh") == 0
    assert "线性层为反向保存" in capsys.readouterr().out
    assert ended("order", "torch.sum", "-k", "8", "--lang", "zh") == 0
    assert "次试探" in capsys.readouterr().out


def test_a_row_keeps_its_columns_and_its_last_word_is_said() -> None:
    """The rows of check, and the first line of certify, which has two gaps as its template has."""
    say = Language("zh")
    assert say("  output of 1     0.0002    1.9e-05  wrong") == "  1 的输出        0.0002    1.9e-05  错误"
    assert say("my_kernel:encode  encode  wrong") == "my_kernel:encode  encode  错误"
    assert say("layers.0  0.1  scales") == "layers.0  0.1  scales"
