"""The page in a real browser: headless Chromium, as Debian's package `chromium` installs it.

Skipped where there is none. Nothing outside this machine is asked for anything.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from evals.compare import compare
from evals.html import comparison_html, report_html
from evals.report_file import report_json
from evals.results import EvalReport

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: chromium)")

PHONE, DESK = (360, 800), (1280, 900)
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_OPENED = "<script>document.querySelectorAll('details').forEach(it => it.open = true)</script>"
_MEASURE = """
<script>
addEventListener("load", function () {
  var width = document.documentElement.clientWidth, wide = [];
  document.querySelectorAll("body *").forEach(function (it) {
    if (it.closest(".scroll") && !it.matches(".scroll")) return;
    if (it.getBoundingClientRect().right > width + 0.5) wide.push(it.tagName + "." + it.className);
  });
  parent.postMessage([width, document.documentElement.scrollWidth, wide.join(" ")].join(), "*");
});
</script>
"""
# A window is never narrower than 500 pixels, a frame is.
_FRAME = """<!doctype html><html><script>
addEventListener("message", it => document.documentElement.setAttribute("data-found", it.data));
</script><body><iframe src="{page}" style="width:{width}px;height:800px;border:0"></iframe></html>
"""
_PRINT = """
<script>
function closed() { return document.querySelectorAll("details:not([open])").length; }
addEventListener("load", function () {
  var before = closed();
  dispatchEvent(new Event("beforeprint"));
  var during = closed();
  dispatchEvent(new Event("afterprint"));
  document.documentElement.setAttribute("data-closed", [before, during, closed()].join(" "));
});
</script>
"""


@dataclass(frozen=True)
class Chromium:
    """Runs the browser once, with a profile of its own."""

    profile: Path

    def run(self, *arguments: str, size: tuple[int, int] = DESK, dark: bool = False) -> str:
        """What it printed, its log after the page."""
        assert BROWSER is not None
        done = subprocess.run(
            [
                BROWSER,
                *_SWITCHES,
                f"--user-data-dir={self.profile}",
                f"--window-size={size[0]},{size[1]}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout + done.stderr

    def picture(self, page: Path, size: tuple[int, int], dark: bool) -> NDArray[np.float32]:
        """A screenshot, ``[height, width, channels]`` from 0 to 1."""
        image = self.profile / "picture.png"
        self.run(f"--screenshot={image}", page.as_uri(), size=size, dark=dark)
        pixels: NDArray[np.float32] = imread(image)
        return pixels

    def widths(self, page: Path, width: int) -> tuple[int, int, str]:
        """Of a page in a frame so wide: its width, what it scrolls over, what sticks out."""
        frame = self.profile.with_name("frame.html")
        frame.write_text(_FRAME.format(page=page.as_uri(), width=width))
        dom = self.run("--virtual-time-budget=3000", "--dump-dom", frame.as_uri())
        inner, scrolled, wide = attribute(dom, "found").split(",")
        return int(inner), int(scrolled), wide

    def dom(self, page: Path, fragment: str = "") -> str:
        """The page after its scripts ran, and the log."""
        return self.run("--dump-dom", page.as_uri() + fragment)


@pytest.fixture
def chromium(tmp_path: Path) -> Chromium:
    return Chromium(tmp_path / "profile")


@pytest.fixture(scope="module")
def pages(
    eval_report: EvalReport, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Writes a page, with a script at its end that its policy would not allow."""
    both = compare(["before", "after"], [eval_report, eval_report])
    # Names and titles without a place to break a line at.
    named = report_json(eval_report)
    for name in ("int4@base-scales", "hf:quanto", eval_report.origin.title, "multikey"):
        named = named.replace(name, name.replace(" ", "_").replace("-", "_") * 6)
    long = EvalReport.from_dict(json.loads(named))
    sources = {
        "report": report_html(eval_report),
        "long names": report_html(long),
        "comparison": comparison_html(both),
    }

    def write(name: str, script: str = "") -> Path:
        source = sources[name]
        if script:
            source = re.sub(r"<meta http-equiv[^>]+>", "", source)
            source = source.replace("</body>", f"{script}</body>")
        path = tmp_path_factory.mktemp("page") / f"{name}.html"
        path.write_text(source, encoding="utf-8")
        return path

    return write


def attribute(dom: str, name: str) -> str:
    found = re.search(rf'<html[^>]* data-{name}="([^"]*)"', dom)
    assert found is not None
    return found.group(1)


def messages(log: str) -> Iterator[str]:
    """What the page said on its console, and what the browser said about it."""
    for line in log.splitlines():
        if "CONSOLE" in line or "ERR_" in line:
            yield line


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESK])
def test_is_drawn_light_and_dark(
    chromium: Chromium, pages: Callable[..., Path], size: tuple[int, int], dark: bool
) -> None:
    pixels = chromium.picture(pages("report"), size, dark)[..., :3]
    paper = pixels[2, 2].mean()
    ink = np.abs(pixels.mean(-1) - paper) > 0.4

    assert pixels.shape[:2] == (size[1], size[0])
    assert paper < 0.2 if dark else paper > 0.9
    assert 0.01 < ink.mean() < 0.3
    # Something is written in every part of it, not only at the top.
    assert all(part.any() for part in np.array_split(ink, 4, axis=0))


@pytest.mark.parametrize("name", ["report", "long names", "comparison"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_never_scrolls_sideways(
    chromium: Chromium, pages: Callable[..., Path], name: str, width: int
) -> None:
    found = chromium.widths(pages(name, _OPENED + _MEASURE), width)

    assert found == (width, width, "")


def test_scrolling_sideways_would_be_seen(chromium: Chromium, pages: Callable[..., Path]) -> None:
    wide = '<p class="x" style="min-width:900px">x</p>'
    found = chromium.widths(pages("report", wide + _MEASURE), 360)

    assert found == (360, 900, "P.x")


def test_says_nothing_and_loads_nothing(chromium: Chromium, pages: Callable[..., Path]) -> None:
    assert list(messages(chromium.dom(pages("report")))) == []
    assert list(messages(chromium.dom(pages("comparison")))) == []


def test_complaints_would_be_seen(chromium: Chromium, pages: Callable[..., Path]) -> None:
    script = "<script>console.error('here'); nothing()</script><img src='http://example.com/x'>"
    found = "\n".join(messages(chromium.dom(pages("report", script))))

    assert "here" in found
    assert "nothing is not defined" in found


def test_the_policy_stops_what_is_not_ours(
    chromium: Chromium, eval_report: EvalReport, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    foreign = "<script>document.documentElement.setAttribute('data-ran', '1')</script></body>"
    page.write_text(report_html(eval_report).replace("</body>", foreign), encoding="utf-8")
    dom = chromium.dom(page)

    assert "data-ran=" not in dom.partition("<body>")[0]
    assert "Content Security Policy" in "\n".join(messages(dom))


def test_a_link_opens_what_it_leads_into(chromium: Chromium, pages: Callable[..., Path]) -> None:
    page = pages("report")
    (first, *_) = re.findall(r'href="(#lost-3-[^"]+)"', page.read_text())

    assert '<details id="lost-3" open="">' in chromium.dom(page, fragment=first)
    assert '<details id="lost-3">' in chromium.dom(page)


def test_everything_is_open_in_print(chromium: Chromium, pages: Callable[..., Path]) -> None:
    before, during, after = attribute(chromium.dom(pages("report", _PRINT)), "closed").split()

    assert (before, during, after) == ("5", "0", "5")


def test_prints(chromium: Chromium, pages: Callable[..., Path], tmp_path: Path) -> None:
    target = tmp_path / "page.pdf"
    chromium.run(f"--print-to-pdf={target}", "--no-pdf-header-footer", pages("report").as_uri())
    content = target.read_bytes()

    assert content.startswith(b"%PDF-")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
