"""The site: links lead somewhere, all public names are in the reference, it builds strictly and fetches nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import depthscope
from links import anchors_of, broken_links
from pages import PAGES, ROOT
from processes import ENVIRONMENT

API = ROOT / "docs" / "api"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path):
    assert broken_links(page.read_text(), page) == []


def test_broken_links_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    text = (
        "# Which τ?\n[a](page.md#which-τ) [b](#which-τ) [c](page.md)\n```\n[d](gone.md)\n```\n## The *end*, `of` it\n"
    )
    page.write_text(text)
    assert anchors_of(text) == {"which-τ", "the-end-of-it"}
    assert broken_links(text, page) == []
    for link in ("gone.md", "#which-t", "page.md#end", "../page.md"):
        assert broken_links(f"{text}[x]({link})", page) == [link]


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: depthscope\.(\w+)$", (API / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted([*named, "__version__"]) == sorted(depthscope.__all__)
    assert "`depthscope.__version__`" in (API / "README.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_fetches_nothing(site: Path):
    """Scripts, styles, fonts and pictures are its own; links to papers are links."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        fetched = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert fetched
        assert [address for address in fetched if re.match(r"(https?:)?//", address)] == [], page
    assert not any("url(http" in style.read_text() for style in site.rglob("*.css"))


def test_pages_and_files_from_outside_of_docs_are_there(site: Path):
    home = (site / "index.html").read_text()
    assert 'href="probing.html"' in home
    assert "docs/" not in re.findall(r'(?:src|href)="([^"]+)"', home)
    assert 'href="../contributing.html#how-to-add-something"' in (site / "api" / "anatomy.html").read_text()
    assert (site / "changelog.html").exists()
    assert (site / "examples" / "planted_collapse.py").exists()
    assert (site / "search" / "search_index.js").exists()


def test_the_reference_has_what_the_docstrings_say(site: Path):
    page = (site / "api" / "index.html").read_text()
    for name in set(depthscope.__all__) - {"__version__"}:
        assert f'id="depthscope.{name}"' in page, name
    assert "Measures a Transformer block by block, and leaves no trace in it." in page
