"""Links between the files of the repository, as GitHub follows them: files, and headings in them."""

import re
from pathlib import Path

_FENCED = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", flags=re.MULTILINE)


def anchors_of(markdown: str) -> set[str]:
    """The names that GitHub gives to headings: small letters, hyphens for blanks, no punctuation; -1 if repeated."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", markdown)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(anchor)
    return found


def broken_links(markdown: str, page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    broken = []
    for target, anchor in _LINK.findall(_FENCED.sub("", markdown)):
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            broken.append(target)
        elif anchor and (
            file.suffix != ".md" or anchor not in anchors_of(markdown if file == page else file.read_text())
        ):
            broken.append(f"{target}#{anchor}")
    return broken
