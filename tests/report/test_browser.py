"""The page in a real browser: it works, complains of nothing, and asks no network."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthscope.report import Subject, write
from depthscope.report.drawings import Material
from depthscope.report.page import drawings_of, render
from profiles_made_up import made_up
from report_samples import Measured, Opened

HOSTILE = "</script><script>window.hit=1</script>\n<img src=x onerror='window.hit=2'>\"&lt;"
Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def page(everything: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(everything.subjects, title="everything"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shown(page: Path, opened: Open) -> Opened:
    """Opened once, for the tests that leave it as it was."""
    return opened(page)


def test_every_chart_is_there_and_nothing_is_asked_for(page: Path, shown: Opened, everything: Material):
    found = shown
    assert found.page.get_attribute("html", "data-ready") == "yes"
    assert found.complaints == []
    assert found.requests == [page.as_uri()]
    charts = found.page.locator(".chart")
    assert charts.count() == len(drawings_of(everything))
    for number in range(charts.count()):
        marks = charts.nth(number).locator("svg .mark-line path, svg .mark-rect path, svg .mark-symbol path")
        assert marks.count() > 0, charts.nth(number).get_attribute("data-chart")


def test_a_block_under_the_pointer_is_marked_everywhere_and_shows_its_value(shown: Opened):
    found = shown.page
    box = found.locator("#chart-similarity svg").bounding_box()
    assert box is not None
    point = found.locator("#chart-similarity svg .mark-symbol.role-mark path").nth(3)
    point.hover(force=True)
    found.wait_for_selector("#vg-tooltip-element.visible")
    assert "value" in found.locator("#vg-tooltip-element").inner_text()
    block = int(found.get_attribute("html", "data-block") or -1)
    assert block > 0
    for chart in ("ranks", "steps"):
        rule = found.locator(f"#chart-{chart} svg .mark-rule.role-mark line").first
        assert float(rule.get_attribute("opacity") or 1) > 0, chart
    edged = found.locator("#chart-heads svg .mark-rect path[stroke='currentColor']")
    assert edged.count() == 4  # one cell for each head of the block


def test_the_pointer_beside_a_chart_marks_nothing(shown: Opened):
    found = shown.page
    found.locator("#chart-steps svg .mark-symbol.role-mark path").nth(3).hover(force=True)
    assert found.get_attribute("html", "data-block") != "-1"
    found.locator("h1").hover()
    found.wait_for_selector("html[data-block='-1']")


def test_a_click_on_the_legend_shows_one_line_only(page: Path, opened: Open):
    found = opened(page).page
    lines = found.locator("#chart-similarity svg .mark-line.role-mark path")
    before = [lines.nth(number).get_attribute("opacity") for number in range(lines.count())]
    found.locator("#chart-similarity svg .role-legend-label text").first.click()
    found.wait_for_timeout(200)
    after = [lines.nth(number).get_attribute("opacity") for number in range(lines.count())]
    assert "0.08" not in before
    assert "0.08" in after
    assert len(set(after)) == 2


def cells(page: Any, column: int) -> list[str]:
    return page.locator(f"#rows tbody tr td:nth-child({column})").all_inner_texts()


def test_the_table_is_searched_and_sorted(shown: Opened):
    found = shown.page
    found.fill("#search", "")
    total = int(found.locator("#count").inner_text().split()[2])
    assert total > 1000
    assert found.locator("#rows tbody tr").count() < 60  # only those that can be seen
    found.fill("#search", "effective_rank station=output")
    shown = int(found.locator("#count").inner_text().split()[0])
    assert 0 < shown < 20
    assert set(cells(found, 5)) == {"effective_rank"}
    heading = found.locator("#rows th", has_text="value").first
    heading.click()
    rising = [float(value) for value in cells(found, 6)]
    assert rising == sorted(rising)
    found.locator("#rows th", has_text="value").first.click()
    assert [float(value) for value in cells(found, 6)] == sorted(rising, reverse=True)
    found.fill("#search", "no such row")
    assert found.locator("#count").inner_text().startswith("0 of")


def test_scrolling_reaches_the_last_row(shown: Opened):
    found = shown.page
    found.select_option("#table", "steps")  # a change of the table forgets the order
    found.select_option("#table", "numbers")
    found.fill("#search", "")
    found.evaluate("() => { const rows = document.getElementById('rows'); rows.scrollTop = rows.scrollHeight; }")
    found.wait_for_timeout(100)
    last = found.evaluate("() => Object.values(page.table('numbers').at(-1)).slice(0, 5).map(String)")
    last = ["" if cell == "-1" else cell for cell in last]  # no head
    assert found.locator("#rows tbody tr").last.locator("td").all_inner_texts()[:5] == last


def test_numbers_can_be_downloaded(shown: Opened):
    found = shown.page
    found.fill("#search", "effective_rank station=output run=other")
    with found.expect_download() as kept:
        found.click("#csv")
    lines = Path(kept.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("run,block,station,head,measure,value")
    assert len(lines) == 1 + int(found.locator("#count").inner_text().split()[0])
    with found.expect_download() as kept:
        found.click("#json")
    rows = json.loads(Path(kept.value.path()).read_text(encoding="utf-8"))
    assert rows[0]["measure"] == "effective_rank"


def test_hostile_names_stay_text(tmp_path: Path, opened: Open, measured: Measured):
    profile = made_up({"token_similarity": [0.1, 0.5, 0.9]}, [(b, s, 1, 50.0) for b in (1, 2) for s in (0, 1)])
    profile.sinks["text"] = HOSTILE
    profile.metadata["model"] = HOSTILE
    claim = dict.fromkeys(("claim", "paper", "ours", "tolerance", "note"), HOSTILE) | {"verdict": "reproduced"}
    subjects = [
        Subject(HOSTILE, profile, commands={HOSTILE: HOSTILE}),
        Subject(f"2{HOSTILE}", replace(profile), claims=()),
        Subject("study", claims=(claim,)),
    ]
    path = tmp_path / f"{'<b>&'}.html"
    path.write_text(render(subjects, title=HOSTILE), encoding="utf-8")
    found = opened(path)
    assert found.complaints == []
    assert found.page.evaluate("() => window.hit === undefined")
    assert found.page.locator("img").count() == 0
    assert found.page.locator("h1").inner_text().startswith("</script><script>")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page: Path, opened: Open, scheme: str, tmp_path: Path):
    found = opened(page, scheme=scheme).page
    assert found.get_attribute("html", "data-theme") == scheme
    ground = found.evaluate("() => getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) > 380
    assert light == (scheme == "light")
    letters = found.evaluate("() => getComputedStyle(document.querySelector('.chart svg text')).fill")
    assert letters != ground
    found.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    found.click("#theme")
    assert found.get_attribute("html", "data-theme") != scheme


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Path, opened: Open, tmp_path: Path):
    found = opened(page, width=390)
    assert found.complaints == []
    assert found.page.evaluate("() => document.documentElement.scrollWidth") <= 390
    widths = found.page.evaluate("() => [...document.querySelectorAll('.chart svg')].map((svg) => svg.clientWidth)")
    assert max(widths) <= 390
    assert min(widths) > 200


def test_the_first_screen_has_the_verdict_one_chart_and_what_was_found(
    measured: Measured, opened: Open, tmp_path: Path
):
    path = write(tmp_path / "page.html", measured.profile, measured.use, measured.spectra)
    for width in (1400, 390):
        page = opened(path, width=width, unfolded=False).page
        assert page.locator(".chart:visible").count() == 1
        assert page.locator(".said li:visible").count() == 3
        last = page.locator(".said li:visible").first.bounding_box()
        assert last is not None
        assert last["y"] + last["height"] <= 900
    page.locator("nav a, .said a").last.evaluate("link => link.click()")
    page.wait_for_function("() => document.querySelectorAll('details[open]').length > 0")


def test_runs_have_colours_and_models_of_several_depths_one_axis(measured: Measured, opened: Open, tmp_path: Path):
    short = made_up({"token_similarity": [0.1, 0.5, 0.9]})
    path = tmp_path / "page.html"
    path.write_text(render([Subject("six", measured.profile), Subject("two", short)], title="two"), encoding="utf-8")
    found = opened(path)
    assert found.complaints == []
    assert found.page.locator("#chart-similarity .role-legend-label text").all_text_contents() == ["six", "two"]
    assert "share of the blocks" in str(found.page.locator("#chart-similarity svg").text_content())
    assert found.page.locator("#chart-similarity select").count() == 1
    lines = found.page.locator("#chart-similarity svg .mark-line.role-mark path")
    assert len({lines.nth(number).get_attribute("stroke") for number in range(lines.count())}) == 2
    labels = found.page.locator("#chart-similarity svg .role-axis-label text").all_text_contents()
    assert {"0", "1", "100%"} <= {label.removesuffix(".0") for label in labels}


def test_a_long_name_needs_no_sideways_scrolling(opened: Open, tmp_path: Path):
    profile = made_up({"token_similarity": [0.1, 0.5, 0.9]})
    subjects = [Subject(f"{number}{'x' * 300}", replace(profile)) for number in (1, 2)]
    path = tmp_path / "long.html"
    path.write_text(render(subjects, title="x" * 300), encoding="utf-8")
    assert opened(path, width=390).page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_it_can_be_printed(page: Path, opened: Open):
    found = opened(page, scheme="dark").page
    assert len(found.pdf()) > 20_000
    found.emulate_media(media="print")
    assert found.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not found.locator("#search").is_visible()


def test_claims_are_filtered_by_verdict(tmp_path: Path, opened: Open):
    verdicts = ("reproduced", "not reproduced", "not testable here")
    claims = [
        dict.fromkeys(("claim", "paper", "ours", "tolerance", "note"), f"about {v}") | {"verdict": v} for v in verdicts
    ]
    subjects = [Subject(f"study {number}", claims=(claim,)) for number, claim in enumerate(claims)]
    path = tmp_path / "index.html"
    path.write_text(render(subjects, title="index"), encoding="utf-8")
    found = opened(path)
    assert found.complaints == []
    assert found.page.locator(".study:visible").count() == 3
    found.page.click("button[data-verdict='not reproduced']")
    assert found.page.locator(".study:visible h3").all_inner_texts() == ["study 1"]
    found.page.click("button[data-verdict='not reproduced']")
    found.page.fill("#claim-search", "testable")
    assert found.page.locator(".study:visible h3").all_inner_texts() == ["study 2"]


def test_code_can_be_copied(measured: Measured, tmp_path: Path, opened: Open):
    found = opened(write(tmp_path / "page.html", measured.fixed)).page
    found.locator(".copy").first.click()
    found.wait_for_selector(".copy:has-text('copied')")
