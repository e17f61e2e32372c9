"""The file: one that holds everything, small, with everything that users supply escaped."""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from markupsafe import escape

import depthscope
from depthscope.extras import MissingExtra
from depthscope.report import Subject, read, write
from depthscope.report.page import _script, render
from profiles_made_up import made_up
from report_samples import Measured

HOSTILE = "</script><script>alert(1)</script>\n<img src=x onerror=alert(2)>'\"&amp;\u2028{{ 7*7 }}"
LIMIT = 1_500_000  # bytes: what a mail server takes, and a phone opens


@pytest.fixture(scope="module")
def hundred_blocks() -> depthscope.Profile:
    """As many numbers as `--measures all --stations all` gives for 100 blocks and 12 heads, none of them round."""
    from depthscope.measures import MEASURES
    from depthscope.stations import ALL

    rows = []
    for block in range(101):
        for station in ALL[:8]:
            for place, name in enumerate(MEASURES):
                heads = range(12) if MEASURES[name].of == "attention" else (-1,)
                where = "attention" if MEASURES[name].of == "attention" else station
                if where == "attention" and station != "output":
                    continue
                value = (block * 37 + place * 11) % 97 / 97.123 + 0.01
                rows += [(block, where, head, name, sample, value + head / 1e3) for head in heads for sample in (0, 1)]
    frame = pd.DataFrame(rows, columns=["block", "station", "head", "measure", "sample", "value"])
    about = made_up({"token_similarity": [0.1, 0.2]}).metadata | {"blocks": 100}
    return depthscope.Profile(frame, about)


def test_a_hundred_blocks_are_under_a_megabyte_and_a_half(hundred_blocks: depthscope.Profile, tmp_path: Path):
    page = write(tmp_path / "page.html", hundred_blocks)
    assert 900_000 < page.stat().st_size < LIMIT


@pytest.fixture(scope="module")
def text(measured: Measured, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the profile."""
    return write(tmp_path_factory.mktemp("page") / "page.html", measured.profile).read_text(encoding="utf-8")


def test_it_asks_nothing_of_a_network(text: str):
    assert "default-src 'none'" in text
    assert "unsafe-eval" not in text
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?!data:)\w", text)


def test_every_table_is_there_once(text: str):
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    found = json.loads(data[1])
    assert "datasets" not in json.dumps(found["charts"])
    assert sum("numbers" in chart["uses"] for chart in found["charts"].values()) >= 4
    assert found["tables"]["numbers"]["length"] > 1000


def test_json_cannot_end_its_script():
    assert json.loads(_script(json.dumps({"name": HOSTILE}))) == {"name": HOSTILE}
    assert not set("<>&\u2028\u2029") & set(_script(json.dumps(HOSTILE, ensure_ascii=False)))


def test_what_users_supply_is_text(tmp_path: Path):
    profile = made_up({"token_similarity": [0.1, 0.5, 0.9]}, model=HOSTILE, notes=[HOSTILE], without=[])
    claim = dict.fromkeys(("claim", "paper", "ours", "tolerance", "note"), HOSTILE) | {"verdict": "reproduced"}
    subjects = [
        Subject(HOSTILE, profile, commands={HOSTILE: HOSTILE}),
        Subject("study", claims=(claim,), commands={HOSTILE: HOSTILE}),
    ]
    text = render(subjects, title=HOSTILE)
    outside = text[: text.index('<script type="application/json"')]
    assert "<script" not in outside
    assert "<img" not in outside
    assert "{{ 7*7 }}" in outside  # not 49
    assert outside.count("&lt;img src=x onerror=alert(2)&gt;") >= 8


def test_the_verdict_leads_to_the_charts(measured: Measured, text: str):
    diagnosis = depthscope.diagnose(measured.profile)
    assert f"{diagnosis.verdict}</strong>" in text
    links = set(re.findall(r'href="#(chart-\w+)"', text))
    assert "chart-similarity" in links
    assert {"chart-steps", "chart-energy"} & links
    for link in links:
        assert f'id="{link}"' in text


def test_each_sentence_on_the_use_of_depth_leads_to_a_chart_that_shows_it(measured: Measured, tmp_path: Path):
    text = write(tmp_path / "page.html", measured.use).read_text(encoding="utf-8")
    for finding in measured.use.findings:
        assert text.count(f'<a href="#chart-blocks_that_matter">{escape(finding.sentence)}</a>') == 1
    both = write(tmp_path / "both.html", measured.profile, measured.use).read_text(encoding="utf-8")
    assert all(str(escape(finding.sentence)) in both for finding in measured.use.findings)


def test_before_and_after_are_two_runs(measured: Measured, tmp_path: Path):
    text = write(tmp_path / "page.html", measured.fixed).read_text(encoding="utf-8")
    assert "<h2>before</h2>" in text
    assert "<h2>after</h2>" in text
    assert "The loss is" not in text  # the model has none
    assert "depthscope.apply(model, DeEscalate(tau=0.5" in text


def test_a_second_profile_is_a_second_run(measured: Measured, tmp_path: Path):
    text = write(tmp_path / "p.html", measured.profile, measured.shares, measured.profile).read_text(encoding="utf-8")
    assert text.count('<article class="said">') == 2
    with pytest.raises(ValueError, match="expected a folder"):
        write(tmp_path / "p.html", 3)
    with pytest.raises(ValueError, match="something that was measured"):
        write(tmp_path / "p.html")


def test_saved_folders_are_read_back(measured: Measured, tmp_path: Path):
    folder = tmp_path / "a"
    measured.profile.save(folder)
    measured.shares.save(folder)
    measured.spectra.save(folder)
    (subject,) = read(folder)
    assert subject.label == "a"
    assert subject.diagnosis is not None
    pd.testing.assert_frame_equal(subject.profile.frame, measured.profile.frame)
    pd.testing.assert_frame_equal(subject.shares.frame, measured.shares.frame)
    pd.testing.assert_frame_equal(subject.spectra.frame, measured.spectra.frame)
    assert subject.spectra.metadata == measured.spectra.metadata


def test_folders_of_one_name_are_told_apart(measured: Measured, tmp_path: Path):
    for parent in ("one", "two"):
        measured.spectra.save(tmp_path / parent / "out")
    labels = [subject.label for subject in read(tmp_path / "one" / "out", tmp_path / "two" / "out")]
    assert labels == [str(tmp_path / parent / "out") for parent in ("one", "two")]


def test_what_is_not_ours_or_damaged_is_refused(measured: Measured, tmp_path: Path):
    with pytest.raises(ValueError, match="expected a folder that a depthscope command wrote"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="nothing of depthscope to report"):
        read(tmp_path)
    measured.spectra.save(tmp_path)
    (tmp_path / "spectra.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="holds no spectra"):
        read(tmp_path)
    (tmp_path / "spectra.json").write_text("[]")
    with pytest.raises(ValueError, match="expected an object, got list"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"findings": 3}', '{"findings": [3], "recommendation": [], "verdict": {}}'])
def test_a_diagnosis_of_others_cannot_break_the_page(content: str, tmp_path: Path):
    made_up({"token_similarity": [0.1, 0.5, 0.9]}).save(tmp_path)
    (tmp_path / "diagnosis.json").write_text(content)
    with pytest.warns(UserWarning, match="diagnosis.json is not of what was written there"):
        text = write(tmp_path, tmp_path).read_text(encoding="utf-8")
    assert "diagnosis.json is not of what was written there" in text
    earlier = json.loads((tmp_path / "profile.json").read_text())
    del earlier["kind"], earlier["sha256"], earlier["files"]  # as an earlier version would have written it
    (tmp_path / "profile.json").write_text(json.dumps(earlier))
    hints: list[str] = []
    assert write(tmp_path, tmp_path, say=hints.append).exists()
    assert hints


def test_a_profile_that_is_saved_again_loses_its_old_verdict(measured: Measured, tmp_path: Path):
    (tmp_path / "diagnosis.json").write_text("{}")
    measured.profile.save(tmp_path)
    assert not (tmp_path / "diagnosis.json").exists()


def test_without_the_extra_one_line_says_how_to_get_it(measured: Measured, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(MissingExtra, match=r"pip install 'depthscope\[report\]'"):
        write(tmp_path / "page.html", measured.profile)


def test_a_folder_of_studies_is_one_page_with_every_claim(tmp_path: Path):
    for name, verdict in (("javascript:alert(1)", "reproduced"), ("b", "not reproduced")):
        folder = tmp_path / name
        folder.mkdir()
        claim = dict.fromkeys(("claim", "paper", "ours", "tolerance", "note"), f"of {name}") | {"verdict": verdict}
        (folder / "claims.json").write_text(json.dumps([claim]))
        (folder / "config.json").write_text(json.dumps({"study": name}))
        pd.DataFrame({"x": range(3)}).to_parquet(folder / "data.parquet")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "claims.json").write_text('[{"claim": 3}]')
    hints: list[str] = []
    text = write(tmp_path, tmp_path, say=hints.append).read_text(encoding="utf-8")
    assert len(hints) == 1
    assert "damaged holds no study" in text
    assert "of javascript:alert(1)" in text
    assert "of b" in text
    assert "1 not reproduced" in text
    assert len(text) < 100_000  # without the program that draws
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="nothing of depthscope to report"):
        write(tmp_path / "empty", tmp_path / "empty")
