"""The tables of docs/from_transformer_engine.md are those of the code, and name every public name of theirs."""

from __future__ import annotations

from pathlib import Path

from command import script

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_are_those_of_the_code() -> None:
    """Print them anew with `python docs/te_names.py`. Tests that are named exist, and so do the names."""
    import ottava.compat.transformer_engine.pytorch as te
    from ottava.compat.transformer_engine.common import recipe

    tables = script(ROOT / "docs" / "te_names.py")
    for page in ("from_transformer_engine.md", "from_transformer_engine.zh-CN.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for make in (
            tables.counted,
            tables.compared,
            tables.names,
            tables.refused,
            tables.arguments,
            tables.environment,
        ):
            assert make() in text, f"{page} should show:\n{make()}"
    shown = {name for names in tables.OURS for name in names.replace("recipe.", "").split(", ")}
    assert set(te.__all__) <= shown
    assert all(hasattr(te, name) or hasattr(recipe, name) for name in shown - {"FP8GlobalStateManager"})
    for _, test in tables.OURS.values():
        assert (ROOT / "tests/compat/transformer_engine" / test).is_file(), test
    assert all((ROOT / test).is_file() for *_, test in tables.COMPARED)
