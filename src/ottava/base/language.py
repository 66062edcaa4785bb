"""Sentences of ottava in another language: a catalog keyed by the English templates, read when somebody asks for it.

The rooms speak English, with f-strings. `Language` finds the template that a finished sentence was made of, and says it
in the other language, with the same numbers and names. What no template made stays English. So no room knows of
languages, and no sentence is lost; a test reads the templates from the source and asks the catalog for each.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

from ottava.base.errors import need_known
from ottava.base.text import columns_of

LANGUAGES = ("en", "zh")
_WORD = re.compile(r"(?<![\w./`=])(?!(?:fprop|dgrad|wgrad)\b)[A-Za-z]{2,}(?![\w/`=(]|\.\w)")
_HOLE = re.compile(r"\{\d*\}")
_CELL = re.compile(r"\S+(?: \S+)*")
_GAP = re.compile(r"(?:\\ ){2,}")
_MARGIN = re.compile(r"\s*(?:(?:\d+\.|[a-h]\)|[A-Z]\d+[a-z]?) +)?")
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_UNTOUCHED = re.compile(r"(<(script|style|code|pre)\b.*?</\2>)", re.DOTALL)

_SURE = 20
_TOOLTIPS = re.compile(r'data-chart="([^"]*)"')


class _Said(NamedTuple):
    text: str
    left: int
    """How many letters stayed English. A text is translated if at most half of its letters stay, or if _SURE of them
    are translated: then the rest quotes something, such as an error of torch."""


class Language:
    """Translates finished English sentences.

    Args:
        name: one of LANGUAGES; "en" changes nothing.
    Raises:
        ValueError: another name.

    Example:
        >>> say = Language("zh")
        >>> say("The learning rate is too high"), say("Lower the learning rate to 1e-4, and warm it up.")
        ('学习率太高', '把学习率降到 1e-4，并做 warm-up。')
        >>> Language("en")("The learning rate is too high"), say("No such sentence.")
        ('The learning rate is too high', 'No such sentence.')
    """

    def __init__(self, name: str) -> None:
        need_known("", "language", name, LANGUAGES)
        self.name = name
        self._catalog = catalog(name)
        self._known: dict[str, _Said | None] = {}
        self._templates = [
            (max(english.split("{}"), key=len), _pattern(english), other)
            for english, other in sorted(self._catalog.items(), key=_least)
        ]

    def __call__(self, text: str) -> str:
        """The text in this language, line by line; what is not known stays as it is."""
        return text if self.name == "en" else "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        start = _MARGIN.match(line)
        said = begun = start[0] if start else ""
        gaps = len(re.findall(r"\S {2,}(?=\S)", body := line[len(said) :].rstrip()))
        rows = (one for words, one, _ in self._templates if words in body and len(_GAP.findall(one.pattern)) == gaps)
        if gaps and not any(one.fullmatch(body) for one in rows):
            return self._row(line)
        for sentence in _SENTENCE.split(body):
            found, title = self._whole(sentence), self._whole(sentence.removesuffix("."))
            if title is not None and (found is None or title.left < found.left) and sentence.endswith("."):
                found = _Said(title.text + "。", title.left)
            said += ("" if said == begun or said.endswith("。") else " ") + (found.text if found else sentence)
        return said

    def _row(self, line: str) -> str:
        """A row of a table: its phrases, its last word, and those of a head, which has no number. Columns stay."""
        said, head = "", not re.search(r"\d", line)
        for cell in _CELL.finditer(line):
            found = self._whole(cell[0]) if head or " " in cell[0] or cell.end() == len(line.rstrip()) else None
            told = found.text if found and re.search("[\u4e00-\u9fff]", found.text) else cell[0]
            said += " " * max(2 * bool(said), cell.start() - columns_of(said)) + told
        return said

    def _whole(self, text: str) -> _Said | None:
        """The text if templates make all of it, one or several; of all ways the one that leaves the least English."""
        text = text.strip()
        if text not in self._known:
            self._known[text] = None  # a template within itself ends here
            near = ((pattern, other) for words, pattern, other in self._templates if words in text)
            ways = [way for pattern, other in near for way in self._ways(text, pattern, other)]
            best = min([*ways, *self._clauses(text)], key=lambda way: way.left, default=None)
            much = best is not None and (2 * best.left <= (whole := _letters(text)) or whole - best.left >= _SURE)
            self._known[text] = best if much else None
        return self._known[text]

    def _clauses(self, text: str) -> Iterator[_Said]:
        """The text as clauses or names, each said by itself; brackets are not torn."""
        for joint, mark in (("; ", "；"), (", ", "、")):
            parts = text.split(joint)
            if len(parts) > 1 and all(part.count("(") == part.count(")") for part in parts):
                said = [self._whole(part) or _Said(part, _letters(part)) for part in parts]
                yield _Said(mark.join(one.text for one in said), sum(one.left for one in said))

    def _ways(self, text: str, pattern: re.Pattern[str], other: str) -> Iterator[_Said]:
        if (whole := pattern.fullmatch(text)) is not None:
            yield self._filled(whole, other)
        elif (found := pattern.match(text)) is not None and not pattern.pattern.endswith("*?)"):
            tail = text[found.end() :]
            if (
                not re.match(r"\w|\.\w", tail)
                and (rest := _Said("。", 0) if tail == "." else self._whole(tail)) is not None
            ):
                first = self._filled(found, other)
                yield _Said(first.text + rest.text, first.left + rest.left)

    def _filled(self, found: re.Match[str], other: str) -> _Said:
        code = [f"`{{{i}}}`" in other and "`" not in part for i, part in enumerate(found.groups())]  # names stay
        parts = [
            _Said(part, 0) if raw else self._whole(part) or _Said(part, _letters(part))
            for part, raw in zip(found.groups(), code, strict=True)
        ]
        return _Said(_HOLE.sub(lambda hole: parts[int(hole[0][1:-1])].text, other), sum(part.left for part in parts))

    def page(self, page: str) -> str:
        """A page of HTML: text between tags and labels for screen readers, but not scripts, styles and code.

        The words of its pictures, which a script draws, go along as #words: pairs of an English template and ours.

        Example:
            >>> Language("zh").page('<html lang="en"><h2>Tried</h2><code>Tried</code>')
            '<html lang="zh"><h2>做过的试验</h2><code>Tried</code>'
        """
        if self.name == "en":
            return page
        parts = _UNTOUCHED.split(page)  # text, what stays, its tag, text, ...
        for i in range(0, len(parts), 3):
            parts[i] = re.sub(
                r"((?:^|>)|(?:aria-label|title)=\")([^<>\"]*[^<>\"\s][^<>\"]*)(?=[<\"]|$)", self._node, parts[i]
            )
        kept = [part for i, part in enumerate(parts) if i % 3 != 2]
        words = json.dumps(self._of_scripts("".join([*parts[1::3], *_TOOLTIPS.findall(page)]))).replace("<", "\\u003c")
        script = f'</main>\n<script type="application/json" id="words">{words}</script>'
        translated = "".join(kept).replace('<html lang="en"', f'<html lang="{self.name}"', 1)
        return translated.replace("</main>", script, 1)

    def _of_scripts(self, code: str) -> list[tuple[str, str]]:
        """The templates whose words all stand in the code, the longest first."""
        found = []
        for english, other in sorted(self._catalog.items(), key=_least):
            parts = [part.strip(" :;,.") for part in english.split("{}") if re.search("[A-Za-z]", part)]
            found += [(english, other)] if parts and all(part in code for part in parts) else []
        return found

    def _node(self, found: re.Match[str]) -> str:
        text = html.unescape(found[2])
        words = " ".join(text.split())
        said = self._line(words) if re.search("[A-Za-z]", words) else words
        if said == words:
            return found[0]
        before, after = (" " if text[:1].isspace() else ""), (" " if text[-1:].isspace() else "")
        return f"{found[1]}{before}{html.escape(said, quote=False)}{after}"


def _least(entry: tuple[str, str]) -> int:
    """The template of most letters first: of two ways to say a sentence that leave as much, the first counts."""
    return -len(entry[0].replace("{}", ""))


def _letters(text: str) -> int:
    """Letters of plain words: a name such as layers.0.mlp is the same in every language."""
    return sum(map(len, _WORD.findall(text)))


def _pattern(english: str) -> re.Pattern[str]:
    """Holes within a sentence; of two holes side by side the first is a word."""
    parts = english.split("{}")
    holes = [
        r"([^ ,;:]*)" if not after and i < len(parts) - 2 else r"((?:(?![.!?] ).)*?)"
        for i, after in enumerate(parts[1:])
    ]
    return re.compile("".join(part for pair in zip(map(re.escape, parts), [*holes, ""], strict=True) for part in pair))


def catalog(name: str) -> dict[str, str]:
    """English template -> its translation; {} in the one are {0}, {1}, ... in the other. Empty for English."""
    if name == "en":
        return {}
    import yaml

    known: dict[str, str] = yaml.safe_load(files("ottava.base").joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return known
