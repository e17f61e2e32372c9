"""Where people read: rich's console, laid out in the letters that the terminal has."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from depthscope.cli.plain_letters import legible

_WIDEST = 100  # longer lines are hard to read


class Screen(Console):
    """Strings are spelled before they are laid out, since τ is shorter than tau. No name is taken for markup."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False):
        super().__init__(highlight=False, markup=False, stderr=stderr, soft_wrap=soft_wrap)

    def legible(self, text: str) -> str:
        """In letters of this terminal."""
        return legible(text, self.encoding)

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        """rich calls it for every string, also for those in tables."""
        return super().render_str(self.legible(text), **options)

    @property
    def reading_width(self) -> int:
        """Of prose and code."""
        return min(self.width, _WIDEST)

    def wrapped(self, text: str, indent: str = "") -> str:
        """A paragraph, broken between words; `indent` stands before its first line."""
        return textwrap.fill(
            self.legible(text),
            self.reading_width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_long_words=False,
            break_on_hyphens=False,
        )

    def styled(self, line: str, styles: Mapping[str, str]) -> Text:
        """A line in which some words have a style."""
        shown = Text(line)
        for words, style in styles.items():
            shown.highlight_words([words], style)
        return shown

    def say(self, text: str, indent: str = "", styles: Mapping[str, str] | None = None) -> None:
        """Prints a paragraph; `styles` are of words in it."""
        self.print(self.styled(self.wrapped(text, indent), styles or {}))

    def has_room_for(self, table: Table) -> bool:
        """Whether a table can be shown as it is, with nothing wrapped or cut."""
        return Measurement.get(self, self.options.update(max_width=10_000), table).maximum <= self.width
