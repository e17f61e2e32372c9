"""What mkdocs is told beside mkdocs.yml: pages and files of the site that stand outside of docs/.

README, CONTRIBUTING and CHANGELOG are pages of the site too, and the examples are files of it. Links are written as
GitHub reads them, from file to file of the repository; here they are turned into links from page to page of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FILES = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.[pi][yp]*")))
IN_REPOSITORY = {site: repository for repository, site in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]*)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return links_of_the_site(markdown, page.file.src_uri)


def links_of_the_site(markdown: str, page: str) -> str:
    """The text of a page (named as in the site) with its links from file to file made links from page to page."""
    pieces = _FENCED.split(markdown)  # every second piece is code
    pieces[::2] = (
        _LINK.sub(lambda link: target_in_site(link[1], page) + (link[2] or ""), piece) for piece in pieces[::2]
    )
    return "".join(pieces)


def target_in_site(link: str, page: str) -> str:
    """A link of a page as the site has it; what is no file of the site stays as it is, and mkdocs refuses it."""
    here = posixpath.dirname(IN_REPOSITORY.get(page, f"docs/{page}"))
    target = posixpath.normpath(posixpath.join(here, link))
    if target in PAGES or target in FILES:
        in_site = PAGES.get(target, target)
    elif target.startswith("docs/"):
        in_site = target.removeprefix("docs/")
    else:
        return link
    return posixpath.relpath(in_site, posixpath.dirname(page) or ".")
