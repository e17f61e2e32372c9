"""What the tests of the page share: a small model that was measured in every way, and one browser."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import depthscope
from depthscope.report import Material, Subject
from depthscope.report.subjects import subjects_of
from report_samples import Measured, Opened, compared, training, watched

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def measured() -> Measured:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()
    batch = torch.randn(3, 12, 32)
    batch[:, 0] *= 30  # an outlier, so that there is a sink
    return Measured(
        depthscope.probe(model, batch, measures="all", stations="all", gradients=True),
        depthscope.fix(model, batch, tau=0.5),
        depthscope.paths(model, batch),
        depthscope.spectra(model),
        depthscope.depth_use(model, batch),
    )


@pytest.fixture(scope="session")
def everything(measured: Measured) -> Material:
    """Two runs that have all there is."""
    full = subjects_of([measured.profile, measured.shares, measured.spectra, measured.use])
    other = subjects_of([measured.fixed.after])
    trained = Subject(
        "trained", training=training("post", "pre"), watched=watched("post"), compared=compared("post", "pre")
    )
    return Material([*full, *(Subject("other", item.profile, item.diagnosis) for item in other), trained])


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests of a process; without one they are skipped."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture(scope="module")
def opened(browser: Any) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def open_page(path: Path, *, width: int = 1100, scheme: str = "light", unfolded: bool = True) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        found = Opened(context.new_page(), [], [])
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri())
        found.page.wait_for_selector("html[data-ready]", timeout=60_000)
        if unfolded:
            found.page.evaluate("() => document.querySelectorAll('details').forEach((item) => { item.open = true; })")
        return found

    yield open_page
    for context in contexts:
        context.close()
