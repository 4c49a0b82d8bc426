"""Templates: text that is shown and never obeyed, and the frame of a page."""

import re

import pytest
from markupsafe import Markup

from mage_async.pages.templating import Frame, fill, progress_note, visible

FRAME = Frame("/token/", "title")


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;owned\x07", "␛]0;owned␇"),
        ("a\u202eb\u2066", "a⟨U+202E⟩b⟨U+2066⟩"),
        ("line\n\ttab", "line\n\ttab"),
        ("\x9b31m", "⟨U+009B⟩31m"),
    ],
)
def test_what_a_terminal_or_a_reader_would_obey_is_shown(hostile, shown):
    assert visible(hostile) == shown
    assert visible(Markup("<b>")) == "<b>"


def test_a_text_is_never_markup_in_any_page():
    assert "&lt;b&gt;" in fill("sentence.html", frame=FRAME, sentence="<b>")


def test_a_small_rest_of_the_index_is_not_worth_a_word():
    assert progress_note(99_000_000, 100_000_000) == ""
    assert progress_note(10_000_000, 100_000_000).startswith("10 %")


def test_the_title_of_a_tab_names_the_run():
    frames = (Frame("/token/", "step 2", run="mine"), Frame("/token/", "mine", run="mine"))
    titles = [
        re.search("<title>(.*)</title>", fill("sentence.html", frame=frame, sentence=""))[1]
        for frame in frames
    ]
    assert titles == ["step 2 · mine · mage view", "mine · mage view"]
