"""Builds the site: `./x docs` (in an environment of its own; warnings are errors).

./x docs                      build runs/site and llms.txt; print time and sizes; fail on a resource from elsewhere
./x docs --out FOLDER         build it there
./x docs --llms               write llms.txt alone (python docs/website.py --llms needs no environment)
./x docs --notebooks [NAME]   execute the notebooks and save their outputs in them

The sources are the pages as they lie in the repository (README, docs/*.md with their Chinese twins, notebooks) and
docstrings. docs/index.md alone says which pages there are and in which order: the contents of the site and llms.txt are
made of its tables. The site opens with the explorer, and each page of words begins with a link to it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("ottava", "ottava.debug", "ottava.nn", "ottava.optim", "ottava.distributed")
"""Packages whose `__all__` is the reference, a page each."""
_ROW = re.compile(r"^\| (?P<question>.+?) \| \[(?P<name>\w+)\]\((?P<path>[^)]+)\)(?P<twin> 中文)? \|$")
_HOUSE_SECTION = re.compile(r"^([A-Z][A-Za-z, ]{2,30}): (\S.*)$")
"""A section of our docstrings that begins on its own line, such as "Shapes: ..."; napoleon knows none of these."""
_FROM_ELSEWHERE = re.compile(
    r"""(?:<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=|<link\b[^>]*\bhref=|@import\s+(?:url\()?|url\()"""
    r"""\s*["']?((?:https?:)?//[^"')\s>]+)"""
)


class Entry(NamedTuple):
    """A row of docs/index.md."""

    section: str
    question: str
    path: str
    """From the repository's root, such as docs/debugging.md."""
    twin: bool
    """Whether a Chinese page stands beside it."""

    @property
    def chinese(self) -> str:
        """The path of the twin."""
        return self.path.removesuffix(".md") + ".zh-CN.md"


def entries() -> list[Entry]:
    """The rows of docs/index.md, in order."""
    found, section = [], ""
    for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines():
        row = _ROW.match(line)
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if row:
            path = os.path.relpath(DOCS / row["path"], ROOT).replace(os.sep, "/")
            found.append(Entry(section, row["question"], path, row["twin"] is not None))
    return found


def llms() -> str:
    """llms.txt, a map of the pages for language models (llmstxt.org); its links hold in a checkout and on the site."""
    about = re.search(r"^\*\*(.+?)\*\* (.+?)\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert about is not None, "README.md begins with a bold sentence"
    lines = ["# ottava", "", "> " + " ".join(f"{about[1]} {about[2]}".split())]
    for entry in [
        Entry("Start", "What is it, how do I install it, which commands are there?", "README.md", True),
        *entries(),
    ]:
        if f"## {entry.section}" not in lines:
            lines += ["", f"## {entry.section}", ""]
        lines.append(f"- [{Path(entry.path).stem}]({entry.path}): {entry.question}")
    return "\n".join(lines) + "\n"


# --- what Sphinx asks -------------------------------------------------------------------------------------------------


def contents() -> str:
    """The site's contents as directives, for README: a list a section, the reference, and the Chinese pages."""
    lists: dict[str, list[str]] = {"Start": ["docs/index"]}
    for entry in entries():
        lists.setdefault(entry.section, []).append(entry.path.rpartition(".")[0])
    lists["Names"] = [*(f"docs/api/{package}" for package in PACKAGES), "All names <genindex>"]
    lists["中文"] = ["README.zh-CN", *(entry.chinese.removesuffix(".md") for entry in entries() if entry.twin)]
    blocks = (f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n" + "\n".join(pages) for name, pages in lists.items())
    return "\n\n" + "\n".join(f"{block}\n```\n" for block in blocks)


def read_source(app: Any, page: str, source: list[str]) -> None:
    """Adds the contents to README, and to a page with a twin the way to it."""
    twin = page.removesuffix(".zh-CN") if page.endswith(".zh-CN") else f"{page}.zh-CN"
    if page.startswith("docs/") and (ROOT / f"{twin}.md").exists():
        word = "English" if page.endswith(".zh-CN") else "中文"
        source[0] = re.sub(r"^(# .+\n)", rf"\1\n[{word}]({Path(twin).name}.md)\n", source[0], count=1)
    if page in ("README", "README.zh-CN", "docs/explorer", "docs/explorer.zh-CN"):
        up, chinese = "../" * page.count("/"), page.endswith("zh-CN")
        said = "在浏览器里试一试：探索页" if chinese else "Try it in your browser: the explorer"
        link = f'<p><a href="{up}explorer.html#lang={"zh" if chinese else "en"}">{said}</a></p>'
        source[0] = re.sub(r"^(# .+\n)", rf"\1\n{link}\n", source[0], count=1, flags=re.MULTILINE)
    if page == "README":
        source[0] += contents()


def docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turns what only our docstrings have into what napoleon reads: one-line sections and indented code."""
    old, new = list(lines), list[str]()
    if what in ("data", "attribute", "property"):  # before a colon napoleon expects a type
        old[0] = "`".join(
            part.replace(": ", " \u2013 ") if i % 2 == 0 else part for i, part in enumerate(old[0].split("`"))
        )
    section = prose = ""
    for line in old:
        started = _HOUSE_SECTION.match(line)
        if line and not line.startswith(" "):
            section, prose = (line if line.endswith(":") else ""), line
        if started and prose is not old[0]:
            new += ["", f"**{started[1]}:** {escaped(started[2])}"]
            section = "**"
        elif section == "**" and line.startswith("  "):
            new.append(escaped(line.strip()))
        elif not section and line.startswith("    ") and not (new and (new[-1].startswith("    ") or new[-1] == "::")):
            new += ["", "::", "", line] if not new or new[-1] else ["::", "", line]
        else:
            code = section.startswith("Example") or (not section and line.startswith("    "))
            new += ["", line] if section and line == section and new and new[-1] else [line if code else escaped(line)]
    lines[:] = new


def escaped(line: str) -> str:
    """Stars outside quoted code, such as those of a product, mean no emphasis."""
    parts = line.split("`")
    return "`".join(part.replace("*", r"\*") if i % 2 == 0 else part for i, part in enumerate(parts))


def write_api() -> None:
    """A page for each package: its public names in the order of `__all__`."""
    shutil.rmtree(DOCS / "api", ignore_errors=True)
    (DOCS / "api").mkdir()
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines = [package, "=" * len(package), "", f".. automodule:: {package}", "   :no-members:", ""]
        for name in module.__all__:
            thing = getattr(module, name)
            if not isinstance(thing, ModuleType):
                lines += [name, "-" * len(name), "", *directive(package, name, thing), ""]
        (DOCS / "api" / f"{package}.rst").write_text("\n".join(lines), encoding="utf-8")


def directive(package: str, name: str, thing: Any) -> list[str]:
    """What documents one public name; a constant where it is defined, for only there autodoc finds its words."""
    if isinstance(thing, type):
        again = package != "ottava" and name in importlib.import_module("ottava").__all__
        return [f".. autoclass:: {package}.{name}", *([] if again else ["   :members:"])]
    if callable(thing):
        return [f".. autofunction:: {package}.{name}"]
    homes = (module for word, module in sorted(sys.modules.items()) if word.startswith("ottava.") and module.__file__)
    assigned = re.compile(rf"^{name}(?:: .+)? = ", re.MULTILINE)
    home = next(m for m in homes if getattr(m, name, None) is thing and assigned.search(inspect.getsource(m)))
    return [f".. autodata:: {home.__name__}.{name}", "   :no-value:"]


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("builder-inited", lambda _: write_api())
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # napoleon comes with 500


# --- the command ------------------------------------------------------------------------------------------------------


def from_elsewhere(folder: Path) -> Iterator[str]:
    """Each resource that a built page or style would load from another place; links to click are none."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".css"):
            for found in _FROM_ELSEWHERE.finditer(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(folder)}: {found[1]}"


def write_explorer(out: Path) -> None:
    """The explorer, with the way to the pages of words; the site opens with it."""
    from ottava.explorer import explorer_page

    links = (
        '<p><a href="README.html">ottava: what it is, and all pages</a> · <a href="README.zh-CN.html">中文文档</a></p>'
    )
    (out / "explorer.html").write_text(explorer_page().replace("<main>", f"<main>\n{links}", 1), encoding="utf-8")
    (out / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>ottava</title>'
        '<meta http-equiv="refresh" content="0;url=explorer.html"><a href="explorer.html">ottava</a>\n'
    )


def write_llms() -> None:
    """Writes llms.txt; each build does."""
    (ROOT / "llms.txt").write_text(llms(), encoding="utf-8")


def build(out: Path) -> int:
    """Builds the site from nothing; returns the exit code."""
    started = time.perf_counter()
    write_llms()
    shutil.rmtree(out, ignore_errors=True)
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html", "-d", f"{out}.doctrees"]
    code = subprocess.call([sys.executable, *words, "-c", str(DOCS), str(ROOT), str(out)], cwd=ROOT)
    shutil.rmtree(f"{out}.doctrees", ignore_errors=True)
    if code:
        return code
    for name in ("llms.txt", *(page for entry in entries() for page in (entry.path, entry.chinese))):
        if (ROOT / name).exists() and not name.endswith(".ipynb"):  # beside its page, for readers of llms.txt
            shutil.copyfile(ROOT / name, out / name)
    shutil.copyfile(ROOT / "README.md", out / "README.md")
    write_explorer(out)
    files = [path for path in out.rglob("*") if path.is_file()]
    pages = [path for path in files if path.suffix == ".html"]
    size = sum(path.stat().st_size for path in files)
    print(
        f"{len(pages)} pages, {len(files)} files, {size / 1e6:.1f} MB in {time.perf_counter() - started:.0f} s: {out}"
    )
    largest = max(pages, key=lambda path: path.stat().st_size)
    print(f"the largest page: {largest.relative_to(out)}, {largest.stat().st_size / 1e3:.0f} kB")
    bad = list(from_elsewhere(out))
    print("\n".join(bad) or "no page loads anything from elsewhere")
    return 1 if bad else 0


def digest(sources: Iterable[str]) -> str:
    """SHA-256 of a notebook's code: with it a test knows outputs of other code."""
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def execute(name: str) -> None:
    """Runs one notebook in a fresh kernel and saves it with its outputs; an error ends the command."""
    import nbclient
    import nbformat

    os.environ["PYTHONPATH"] = str(ROOT / "src")  # of the kernel, which starts elsewhere
    path = DOCS / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    started = time.perf_counter()
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr", f"{name}: {output['text']}"
    notebook.metadata.pop("language_info", None)
    notebook.metadata["executed"] = digest(cell.source for cell in notebook.cells if cell.cell_type == "code")
    nbformat.write(notebook, path)
    print(f"{name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./x docs", description="Builds the site, or executes its notebooks.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "site")
    parser.add_argument("--llms", action="store_true")
    parser.add_argument("--notebooks", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.llms:
        write_llms()
        return 0
    if arguments.notebooks is None:
        return build(arguments.out.resolve())
    known = [Path(entry.path).stem for entry in entries() if entry.path.endswith(".ipynb")]
    for name in arguments.notebooks or known:
        if name not in known:
            parser.error(f"no notebook {name!r}; there are {', '.join(known)}")
        execute(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
