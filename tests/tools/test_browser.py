"""The pages of docs/ and of a study in a real browser: quiet, complete in themselves, and readable on a phone."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.tools.reproduce.html_page import fenced, write_html
from experiments.tools.shared.markdown import table
from tests.tools.browser import CHROMIUM, Browser, browser

ROOT = Path(__file__).parents[2]
PHONE = 390  # pixels across
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make system-packages")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.send("Emulation.setDeviceMetricsOverride", width=PHONE, height=844, deviceScaleFactor=1, mobile=True)
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as ``make docs`` builds them; MICRO_SITE names the folder where it has just done so."""
    if built := os.environ.get("MICRO_SITE"):
        return Path(built)
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, of the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study with a wide figure, a wide table and a long command."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copy(ROOT / "docs/images/where_it_pays.png", folder / "wide.png")
    names = [f"column {number}" for number in range(30)]
    command = "sweep wide " + " ".join(f"some.long.key{number}=value" for number in range(20))
    blocks = ["# Wide things", "## What is wide", fenced(command), "![wide](wide.png)", table(names, [names])]
    blocks += [table(["run", "method"], [["name" * 30, "micro"]]), fenced("key: " + "value" * 40, "yaml"), "long" * 60]
    return write_html("\n\n".join(blocks), "Wide", folder / "index.html")


def prefer(tab: Browser, scheme: str) -> None:
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def look(tab: Browser, path: Path, home: Path) -> list[str]:
    """Open a page as a phone does, light and dark; return what is wrong with it."""
    wrong, backgrounds = [], set()
    prefer(tab, "light")
    tab.open(path.as_uri())
    for scheme in ("light", "dark"):
        prefer(tab, scheme)
        for _ in range(60):  # a page hears of it a little later
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            if background not in backgrounds:
                break
            tab.evaluate("new Promise(done => setTimeout(done, 50))")
        backgrounds.add(background)
        width = tab.evaluate("document.documentElement.scrollWidth")
        if width > PHONE:
            wrong.append(f"{scheme}: {width} pixels wide on a screen of {PHONE}")
    if len(backgrounds) < 2:
        wrong.append(f"light and dark have the same background, {backgrounds}")
    wrong += [f"asked for {address}" for address in tab.requests if not address.startswith((home.as_uri(), "data:"))]
    return wrong + tab.complaints


SEARCH = """new Promise(found => {
  const query = document.querySelector("[data-md-component=search-query]")
  query.focus()
  query.value = "residual"
  query.dispatchEvent(new Event("input", {bubbles: true}))
  query.dispatchEvent(new Event("keyup", {bubbles: true}))
  const until = performance.now() + 10000
  const look = () => {
    const count = document.querySelectorAll(".md-search-result__item").length
    count || performance.now() > until ? found(count) : setTimeout(look, 20)
  }
  look()
})"""


@pytest.mark.timeout(1200)
def test_every_page_is_quiet_complete_and_fits_a_phone_and_search_needs_no_server(tab: Browser, site: Path) -> None:
    pages = sorted(set(site.rglob("*.html")) - {site / "404.html"})  # a server shows that one, under any address
    assert len(pages) > 30
    wrong = {str(page.relative_to(site)): said for page in pages if (said := look(tab, page, site))}
    assert not wrong
    tab.open((site / "index.html").as_uri())
    assert tab.evaluate(SEARCH) > 0
    assert tab.complaints == []


def test_the_page_of_a_study_is_quiet_complete_and_fits_a_phone(tab: Browser, study: Path) -> None:
    assert look(tab, study, study.parent) == []
