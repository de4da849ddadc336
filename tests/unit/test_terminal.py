"""Text of the user's is shown as it was written, whatever it looks like to rich or matplotlib."""

import io

import pytest

from trainer.common.terminal import new_console
from trainer.report import Progress
from trainer.report.tables import Table

TEXTS = ["T/a[/b]c", "[plus],[minus]", "[bold]x", "a:bear:b", "$x_{$", "\\[red]"]


def shown(thing: object) -> str:
    file = io.StringIO()
    new_console(file=file, width=200, _environ={}).print(thing, soft_wrap=True)
    return file.getvalue()


@pytest.mark.parametrize("text", TEXTS)
def test_a_console_prints_what_it_is_given(text):
    assert shown(f"report: {text}") == f"report: {text}\n"


@pytest.mark.parametrize("text", TEXTS)
def test_so_does_a_table_in_its_title_columns_cells_and_totals(text):
    lines = shown(Table(title=text, columns=(text,), rows=[(text,)], totals=[(text,)])).splitlines()
    assert [line.strip() for line in lines if text in line] == [text] * 4


@pytest.mark.parametrize("text", TEXTS)
def test_so_does_a_note_above_the_progress(text, capsys):
    with Progress(1) as progress:
        progress.note(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_so_does_the_legend_of_a_figure():
    import matplotlib

    from trainer.report.drawing import STYLE, new_figure, png_of

    with matplotlib.rc_context(STYLE):
        figure = new_figure(height_inches=2)
        figure.subplots().set_title("tags=[$x_{$]")  # no formula that could be parsed
        assert png_of(figure).startswith(b"\x89PNG")
