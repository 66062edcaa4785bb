"""Runs the prose: Python blocks of README and docs, the commands they show, every docstring example.

A ```python block runs unless an HTML comment `<!-- not run: reason -->` stands right above it; the blocks of one page
share a namespace and run in order. A ```text block right below one is what it prints ("..." stands for anything). Every
`ottava WORD` and `./x WORD` in a ```console block or in backticks must exist.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ottava
from ottava.cli.app import main
from ottava.measure.statistics import STATISTICS
from ottava.recipe import GEMMS, RECIPES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
TWINS = [page for page in PAGES if page.name.endswith(".zh-CN.md")]
"""Their code blocks are those of the English pages, letter by letter: they run once."""
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(ottava.__path__, "ottava.") if "__main__" not in module.name
)
NOT_BUILT = ("not built", "尚未实现")
KERNELS = re.compile(r"\b(native_gemm|bf16_mm|reference)\b")
"""Which of them runs is the machine's affair: its CPU, and whether it has a compiler."""
X_WORDS = ("test", "mutate", "fuzz", "torture", "sanitize", "soak", "docs", "lint", "house", "help")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Line of its first line in the page, from 1."""
    not_run: str
    """Why it is not run; empty if it is."""


def read_blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order. An unclosed fence is an error."""
    blocks: list[Block] = []
    reason, opened, lines = "", None, text.splitlines()
    for number, line in enumerate(lines, 1):
        if opened is not None and line.strip() == "```":
            language, start = opened
            blocks.append(Block(language, "\n".join(lines[start - 1 : number - 1]) + "\n", start, reason))
            reason, opened = "", None
        elif opened is None and line.startswith("```"):
            opened = (line[3:].strip(), number + 1)
        elif opened is None and line.strip():
            comment = re.fullmatch(r"<!-- not run: (.+) -->", line.strip())
            reason = comment[1] if comment else ""
    assert opened is None, f"a fence opened on line {opened[1] - 1} is never closed"
    return blocks


def run_python_blocks(text: str, page: str) -> int:
    """Runs a page's Python blocks in one namespace, tracebacks showing the page's lines; returns how many ran."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = read_blocks(text)
    runnable = [index for index, block in enumerate(blocks) if block.language == "python" and not block.not_run]
    for index in runnable:
        block, below = blocks[index], blocks[index + 1 : index + 2]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), namespace)
        if below and below[0].language == "text" and below[0].line == block.line + block.text.count("\n") + 3:
            wanted, got = (KERNELS.sub("KERNEL", said) for said in (below[0].text, printed.getvalue()))
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # a shorter name makes narrower columns
            same = doctest.OutputChecker().check_output(wanted, got, options)
            assert same, f"{page}:{below[0].line} promises\n{below[0].text}but this is printed:\n{printed.getvalue()}"
    return len(runnable)


def commands(text: str) -> list[str]:
    """The ottava commands a page shows, in console blocks and in backticks: `train` for `$ ./x train CONFIG.yaml`.

    A line that says that something is not built yet may name it.
    """
    shown = [line[2:] for block in read_blocks(text) if block.language == "console" for line in block.text.splitlines()]
    built = [line for line in text.splitlines() if not any(words in line for words in NOT_BUILT)]
    shown += [code for line in built for code in re.findall(r"`([^`]+)`", line)]
    matches = [re.match(r"(ottava|\./x|py x) ([a-z][\w-]*)", code) for code in shown]
    return sorted({match[2] for match in matches if match and (match[1] == "ottava" or match[2] not in X_WORDS)})


def command_exists(word: str) -> bool:
    """Whether `ottava WORD --help` answers."""
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()):
        main([*word.split(), "--help"])
    return ended.value.code == 0


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TWINS], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page shows as Python runs as it stands."""
    monkeypatch.chdir(tmp_path)
    run_python_blocks(page.read_text(encoding="utf-8"), page.name)


@pytest.mark.parametrize(
    "word", sorted({word for page in PAGES for word in commands(page.read_text(encoding="utf-8"))})
)
def test_shown_commands_exist(word: str) -> None:
    """A command that a page shows can be asked for help."""
    assert command_exists(word)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docstring examples print what they say."""
    if name.startswith("ottava.kernels.triton.") and name.endswith("device_code"):
        pytest.importorskip("triton", reason="Triton has no build for this machine")
    monkeypatch.chdir(tmp_path)
    if name.startswith("ottava.doors."):
        pytest.importorskip(name, reason="its host is not installed", exc_type=ImportError)
    module = importlib.import_module(name)
    if ">>>" in inspect.getsource(module):  # to look for examples takes longer than to run them
        failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        assert failed == 0, "see the output above"


PACKAGES = ("ottava", "ottava.debug", "ottava.nn", "ottava.optim", "ottava.distributed")


def shows_an_example(thing: object) -> bool:
    """Whether a docstring has an example, or says whose example shows the thing, and that one has it."""
    text = inspect.getdoc(thing) or ""
    elsewhere = re.search(r"Example: see `(?:ottava\.)?(\w+)`", text)
    if ">>>" in text or elsewhere is None:
        return ">>>" in text
    named = [getattr(module, elsewhere[1], None) for word, module in sorted(sys.modules.items()) if "ottava" in word]
    return any(one is not thing and callable(one) and ">>>" in (inspect.getdoc(one) or "") for one in named)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example_that_runs(package: str) -> None:
    """`test_docstring_examples` runs them. A constant is shown by an example of another name or by a page."""
    module = importlib.import_module(package)
    ran = "".join(inspect.getsource(importlib.import_module(name)) for name in MODULES if name in sys.modules)
    shown = "\n".join(line for line in ran.splitlines() if ">>>" in line or "... " in line)
    shown += "".join(b.text for p in PAGES for b in read_blocks(p.read_text("utf-8")) if b.language == "python")
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing):
            assert shows_an_example(thing), f"{package}.{name} shows no example"
        elif not inspect.ismodule(thing):
            assert re.search(rf"\b{name}\b", shown), f"no example shows {package}.{name}"


PYTHON_FILE = re.compile(r"`([a-z_0-9/]+\.py)`")


def headings(text: str) -> list[int]:
    """Levels of a page's headings, in order."""
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [len(marks) for marks in re.findall(r"^(#+) ", fenced, flags=re.MULTILINE)]


@pytest.mark.parametrize("page", TWINS, ids=lambda page: page.name)
def test_chinese_page_is_a_twin(page: Path) -> None:
    """A Chinese page has the headings of its English twin, level by level, and its code blocks, letter by letter."""
    english, chinese = (file.read_text("utf-8") for file in (page.with_name(page.name.replace(".zh-CN", "")), page))
    assert headings(english) == headings(chinese)
    shown = [[(block.language, block.text) for block in read_blocks(text)] for text in (english, chinese)]
    assert shown[0] == shown[1]
    assert len(shown[0]) >= 2 or page.name in ("glossary.zh-CN.md", "walks.zh-CN.md")


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_recipe_table_is_the_registry(page: str) -> None:
    """The table of recipes has every recipe, in the registry's order, with its own six cells."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
    )
    cells = {name: tuple(str(getattr(recipe, gemm)) for gemm in GEMMS) for name, recipe in RECIPES.items()}
    assert {name: tuple(shown) for name, *shown in rows} == cells
    assert [name for name, *_ in rows] == list(RECIPES)


@pytest.mark.parametrize("page", ["docs/debugging.md", "docs/debugging.zh-CN.md"])
def test_the_table_of_statistics_is_the_registry(page: str) -> None:
    """Every statistic has its row, in the registry's order; in English with its own words."""
    text = (
        (ROOT / page)
        .read_text(encoding="utf-8")
        .partition("Unit | Trouble when" if "zh" not in page else "单位 | 异常方向")[2]
    )
    rows = re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.+?) \|$", text.partition("\n\n")[0], re.MULTILINE)
    assert [name for name, _ in rows] == list(STATISTICS)
    if "zh" not in page:
        assert [words.replace("\\|", "|") for _, words in rows] == [one.meaning for one in STATISTICS.values()]


def test_shown_tests_exist() -> None:
    """Each `./x test FILE -k WORD` of a page selects at least one test of that file."""
    shown = {
        call for page in PAGES for call in re.findall(r"\./x test (\S+\.py)(?: -k (\w+))?", page.read_text("utf-8"))
    }
    dead = [
        (file, word)
        for file, word in shown
        if not (ROOT / file).exists() or not re.search(rf"^def test_\w*{word}", (ROOT / file).read_text("utf-8"), re.M)
    ]
    assert dead == []
    assert shown


def test_links_lead_somewhere() -> None:
    """A relative link of a page points to a file of the tree."""
    dead = [
        f"{page.name}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert dead == []


def test_the_index_has_every_page() -> None:
    """Every English page of docs has a question, and 中文 stands where a twin is."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\]\((?:\.\./|notebooks/)?(\w+)\.(?:md|ipynb)\)( 中文)? \|$", index, re.MULTILINE))
    pages = {page.stem for page in (ROOT / "docs").glob("*.md") if page not in TWINS} - {"index"}
    pages |= {notebook.stem for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert listed.keys() == pages | {"AGENTS", "CONTRIBUTING", "CHANGELOG"}
    assert {name for name, mark in listed.items() if mark} == {page.name.split(".")[0] for page in TWINS} - {"README"}


def test_the_map_names_files_that_exist() -> None:
    """AGENTS.md names rooms and files of src/ottava and folders of tests."""
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|tests/[a-z_/]+(?:\.py)?)`", text)
    assert [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "src" / "ottava"))] == []
    assert len(named) > 20


def test_files_of_ours_that_pages_name_exist() -> None:
    """A page names our own Python files, but for the log and files of others."""
    tree = "\n".join(f"{path.as_posix()}\n" for path in ROOT.rglob("*.py"))
    named = {name for page in PAGES if page.name != "LOG.md" for name in PYTHON_FILE.findall(page.read_text("utf-8"))}
    dead = {name for name in named if f"/{name}\n" not in tree}
    assert [n for n in dead if not n.startswith(("mine.", "te_llama.", "scaled_mm/deep", "compressed_tensors_"))] == []


def test_these_checks_can_fail() -> None:
    """A wrong block, a made-up command, another heading and an open fence are all noticed."""
    with pytest.raises(ZeroDivisionError):
        run_python_blocks("```python\nx = 1\n```\nthen\n```python\nx / 0\n```\n", "page.md")
    assert run_python_blocks("<!-- not run: divides by zero -->\n\n```python\n1 / 0\n```\n", "page.md") == 0
    with pytest.raises(AssertionError, match="promises"):
        run_python_blocks("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md")
    assert commands("```console\n$ ottava juggle --json\n$ ./x demo\n```\n`ottava sing` `./x train a`") == [
        "demo",
        "juggle",
        "sing",
        "train",
    ]
    assert not command_exists("juggle")
    assert headings("# a\n```python\n# no heading\n```\n## b\n") == [1, 2]
    with pytest.raises(AssertionError, match="line 1"):
        read_blocks("```python\nx = 1\n")
