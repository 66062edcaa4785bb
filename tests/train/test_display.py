"""What a person sees while runs train, in a terminal and in a log file."""

import io
import itertools
import math
from collections.abc import Sequence

import pytest
from rich.console import Console

from ottava.train.display import LiveDisplay, PlainDisplay, RunView, live_table, open_display, plain_line, sparkline


def view(recipe: str = "bf16", seed: int = 0, step: int = 50, **changes: object) -> RunView:
    """A run half done."""
    fields: dict[str, object] = {
        "steps": 100,
        "loss": 2.031,
        "delta": None if recipe == "bf16" else 0.003,
        "tokens_per_second": 20_480.0,
        "curve": [5.0 - 0.05 * i for i in range(step)],
    }
    return RunView(recipe=recipe, seed=seed, step=step, **(fields | changes))  # type: ignore[arg-type]


VIEWS = (view(), view(seed=1), view("tensorwise"), view("nvfp4", loss=math.nan, delta=None, curve=[5.0, 4.0, math.nan]))


def console(**options: object) -> Console:
    """A console that writes into a string."""
    return Console(file=io.StringIO(), width=120, **options)  # type: ignore[arg-type]


def written(screen: Console) -> str:
    """Everything that came out of it."""
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_pipe_gets_plain_lines_and_a_terminal_the_table() -> None:
    assert isinstance(open_display(console()), PlainDisplay)
    for encoding, term, tty in itertools.product(("utf-8", "ascii"), ("xterm", "dumb"), (True, False)):
        file = io.TextIOWrapper(io.BytesIO(), encoding)
        file.isatty = lambda tty=tty: tty  # type: ignore[method-assign,misc]  # a pipe may want colours, too
        kind = LiveDisplay if (encoding, term, tty) == ("utf-8", "xterm", True) else PlainDisplay
        assert isinstance(open_display(Console(file=file, force_terminal=True, _environ={"TERM": term})), kind)


def test_a_plain_line_says_share_step_losses_and_time_left() -> None:
    line = plain_line(VIEWS, 41.2)
    assert line == " 50 %  step 50/100  bf16 2.031  tensorwise 2.031 (+0.003)  nvfp4 diverged  41 s left"


def test_plain_lines_come_every_few_seconds_and_once_at_the_end() -> None:
    times = iter([0.0, 0.0, 3.0, 6.0, 6.0, 7.0])
    screen = console()
    with PlainDisplay(screen, every=5.0, clock=lambda: next(times)) as display:
        for step in (10, 20, 30, 40):
            display.show([view(step=step)], None)
    assert [line.split()[3] for line in written(screen).splitlines()] == ["10/100", "30/100", "40/100"]


def test_plain_lines_are_never_wrapped_or_coloured() -> None:
    screen = Console(file=io.StringIO(), width=20)
    with PlainDisplay(screen) as display:
        display.show(VIEWS, 41.2)
        display.say("a line much longer than the twenty columns of this screen [not markup]")
    lines = written(screen).splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("[not markup]")
    assert "\x1b" not in written(screen)


def test_the_live_table_has_a_row_for_each_run_and_needs_no_colour() -> None:
    screen = console()
    screen.print(live_table(VIEWS, 83.0, width=120))
    text = written(screen)
    rows = [line.split() for line in text.splitlines()]
    assert ["tensorwise", "0", "50/100", "2.031", "+0.003", "20,480"] in [row[:6] for row in rows]
    assert any("nvfp4" in row and "diverged" in row for row in rows)
    assert "50 %  1 min 23 s left" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_live_table_fits_its_console(width: int) -> None:
    """Nothing cut, nothing wrapped, from the 80 columns of a plain terminal on."""
    screen = Console(file=io.StringIO(), width=width)
    screen.print(live_table([*VIEWS, view("rowwise_with_gw_hp", step=100, tokens_per_second=1e6)], 83.0, width=width))
    assert "…" not in written(screen)
    rows = [line for line in written(screen).splitlines() if "rowwise_with_gw_hp" in line]
    assert len(rows) == 1
    assert "1,000,000" in rows[0]
    assert "▁" in rows[0]


def test_no_color_is_honoured_in_a_terminal() -> None:
    screen = console(force_terminal=True, _environ={"NO_COLOR": "1", "TERM": "xterm-256color"}, color_system="256")
    with LiveDisplay(screen) as display:
        display.show(VIEWS, None)
        display.say("a line that stays")
    assert "a line that stays" in written(screen)
    assert "38;5" not in written(screen)
    assert "\x1b[31m" not in written(screen)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0, 2.0, 1.0], "█▄▁"), ([1.0, math.nan, 1.0], "▁!▁"), ([], ""), ([float(i) for i in range(8)], "▁▁▂▃▃▄▅▅")],
)
def test_sparkline_maps_low_to_the_lowest_block(values: Sequence[float], expected: str) -> None:
    low, high = (0.0, 10.5) if len(values) == 8 else (1.0, 3.0)
    assert sparkline(values, low=low, high=high) == expected


def test_a_long_sparkline_is_thinned_out_and_ends_with_the_last_value() -> None:
    line = sparkline([float(i) for i in range(100)], low=0.0, high=99.0, width=10)
    assert len(line) == 10
    assert line[-1] == "█"
    assert list(line) == sorted(line)
