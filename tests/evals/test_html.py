"""The page: what is on it, that text stays text, that it stays small, and that it can be read."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evals.html import check_report_tools, report_html, write_html
from evals.page import LISTED
from evals.results import (
    Answer,
    Arm,
    Cell,
    Check,
    Continuation,
    EvalReport,
    Interval,
    Retrieval,
    Verdict,
)
from kvquant.errors import InputError

_VOID = {"meta", "br", "img", "link", "input", "hr", "path"}
_STYLE = Path(sys.modules[report_html.__module__].__file__ or "").parent / "templates/report.css"


class Page(HTMLParser):
    """Elements of a page, its text, and whether every tag is closed where it has to be."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        self.wrong += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def count(self, tag: str) -> int:
        return sum(it == tag for it, _ in self.elements)

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.elements if attribute in attrs]

    @property
    def text(self) -> str:
        """What people read, blanks joined."""
        shown = " ".join(it for tag, it in self.texts if tag not in ("style", "script", "title"))
        return " ".join(shown.split())


@pytest.fixture(scope="module")
def source(eval_report: EvalReport) -> str:
    return report_html(eval_report)


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_begins_with_the_verdict(page: Page) -> None:
    heading = next(text for tag, text in page.texts if tag == "h1")

    assert heading.startswith("int8 and int4@ft-scales pass, int4@base-scales and int3 fail")
    assert page.text.index(heading) < 120


def test_every_part_is_there(page: Page) -> None:
    titles = [text for tag, text in page.texts if tag == "h2"]

    assert titles == [
        "Arms",
        "Needles",
        "Perplexity and divergence",
        "Error by layer",
        "Continuations",
        "Self-checks",
        "Gate",
        "Provenance",
    ]
    assert sum(attrs.get("class") == "chart" for _, attrs in page.elements) == 4


@pytest.mark.parametrize(
    "expected",
    [
        "int4@base-scales another model's scales",
        "scales/base-scales.safetensors measured on SmolLM2-135M-Instruct, 7f3a91c2d4e5",
        "17 of 20 at most 60.0 %, p 7.6e-06",
        "0.193 0.17 – 0.22",
        "+18.97 % +14.47 – +24.85 %",
        "first other token: 2 of 32; 6 % the same in its place",
        "bytes there is no formula for a cache of Transformers",
        "not enough trials: 40 of 59 needed",
        "SHA-256 beefbeef",
        "sha256 c0ffee",
        "kvquant 0.4.0, torch 2.13.0",
        "kvquant evaluate --model ft-model",
        "weights 7f3a91c2d4e5, adapter support-lora 19c0de77, tokenizer 5be1",
        "numba, 8 lanes; dequantized, then SDPA",
        "22 more lost answers in the JSON",
    ],
)
def test_it_says(page: Page, expected: str) -> None:
    assert expected in page.text


def test_is_whole_and_for_everybody(page: Page) -> None:
    ids = page.values("id")

    assert page.wrong == []
    assert page.elements[0] == ("html", {"lang": "en"})
    assert page.count("h1") == page.count("main") == 1
    assert next(it for tag, it in page.texts if tag == "title").endswith("kvquant evaluation")
    heat = sum(attrs.get("class") == "heat" for _, attrs in page.elements)
    assert (heat, page.count("caption")) == (10, page.count("table") - 10)
    assert all("scope" in attrs for tag, attrs in page.elements if tag == "th")
    assert max(Counter(ids).values()) == 1
    assert {link.removeprefix("#") for link in page.values("href")} <= set(ids)
    assert page.values("tabindex") == ["0"] * page.values("role").count("region")


def test_every_red_square_leads_to_an_answer(page: Page) -> None:
    squares = [attrs for tag, attrs in page.elements if tag == "td"]
    red = [it for it in squares if str(it.get("class")).startswith("lost-")]
    links = [link for link in page.values("href") if link.startswith("#lost-")]

    assert len(red) == len(links) == 31


def test_loads_nothing(source: str, page: Page) -> None:
    assert all(link.startswith("#") for link in page.values("href"))
    assert not page.values("src")
    assert page.count("script") == page.count("style") == 1
    assert page.count("link") == page.count("img") == page.count("iframe") == 0
    (style,) = [text for tag, text in page.texts if tag == "style"]
    assert not re.search(r"url\(|@import|@font-face", style)


def test_may_load_nothing(page: Page) -> None:
    (script,) = [text for tag, text in page.texts if tag == "script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [it["content"] for _, it in page.elements if it.get("http-equiv")]

    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in str(
        policy
    )


def test_answers_are_text(source: str, page: Page) -> None:
    assert "<script>alert('no')</script>" in page.text
    assert "</td></table><img src=x onerror=alert(1)>" in page.text
    assert "abc‹U+202E›txt.exe" in page.text
    assert "␛[31mred␛[0m␀␇" in page.text
    assert "half a pair ‹U+D83D›" in page.text
    assert "{{ 7 * 7 }} {% raw %}" in page.text
    assert "<b>the</b>" in page.text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", source)


def hostile(value: Any, text: str) -> Any:
    """A record with `text` for every string in it, names of arms and tasks included."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return replace(value, **{name: hostile(getattr(value, name), text) for name in fields})
    if isinstance(value, dict):
        return dict.fromkeys([text], hostile(next(iter(value.values())), text)) if value else {}
    if isinstance(value, tuple):
        return tuple(hostile(it, text) for it in value)
    return text if isinstance(value, str) else value


@pytest.mark.parametrize("text", ["\"'><script>x</script>", "\x1b]0;\ud800&amp;", "", "a b", "1 2"])
def test_every_string_is_text(eval_report: EvalReport, text: str) -> None:
    page = Page(report_html(hostile(eval_report, text)))

    assert page.wrong == []
    assert page.count("script") == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\ud800]", page.text)


def test_is_small(source: str) -> None:
    assert len(source.encode()) < 200_000


def test_ten_thousand_cells_are_counted_not_listed(eval_report: EvalReport) -> None:
    right, wrong = Answer("x" * 2000, 1.0), Answer("y" * 2000, 0.0)
    cells = tuple(
        Cell("single", 1024 * (1 + number % 8), 5 * (number % 20), number, ("x",), right, arms)
        for number in range(10_000)
        for arms in [{arm.name: wrong if number % 3 else right for arm in eval_report.arms}]
    )
    report = replace(eval_report, retrieval=Retrieval("", "", False, 8, cells, ()))
    page = report_html(report)

    assert len(page.encode()) < 500_000
    assert page.count('<tr id="lost-0-') == LISTED
    assert f"{6666 - LISTED:,} more lost answers in the JSON" in page
    assert "(1,700 characters more)" in page


def test_is_the_same_every_time(eval_report: EvalReport, source: str) -> None:
    assert report_html(eval_report) == source


@pytest.mark.parametrize(
    ("part", "title"),
    [
        ({"retrieval": None}, "Needles"),
        ({"perplexity": None}, "Perplexity and divergence"),
        ({"continuations": ()}, "Continuations"),
        ({"self_checks": ()}, "Self-checks"),
        ({"verdict": None}, "Gate"),
    ],
)
def test_what_was_not_asked_for_is_not_there(
    eval_report: EvalReport, part: dict[str, Any], title: str
) -> None:
    page = Page(report_html(replace(eval_report, **part)))
    titles = [text for tag, text in page.texts if tag == "h2"]

    assert page.wrong == []
    assert title not in titles
    assert len(titles) == 7
    assert {link.removeprefix("#") for link in page.values("href")} <= set(page.values("id"))


def test_of_a_report_with_nothing_in_it(eval_report: EvalReport) -> None:
    page = Page(report_html(EvalReport(eval_report.origin, ())))

    assert "no verdict No gate was asked for: nothing was measured." in page.text
    assert [text for tag, text in page.texts if tag == "h2"] == ["Arms", "Provenance"]


def test_of_a_failed_self_check(eval_report: EvalReport) -> None:
    failed = Check("reads", "failed", "0 % were of codes")
    broken = replace(eval_report.self_checks[0], checks=(failed,), quantized_mass=None)
    page = Page(report_html(replace(eval_report, self_checks=(broken,))))

    assert "✕ self-check failed The self-check of int8 failed" in page.text
    assert "✕ int8 : self-check, reads, 0 % were of codes." in page.text


def test_of_all_passed(eval_report: EvalReport) -> None:
    assert eval_report.verdict is not None
    lines = tuple(replace(line, status="passed") for line in eval_report.verdict.lines)
    page = Page(report_html(replace(eval_report, verdict=Verdict("defaults", lines))))

    assert "✓ passed All 5 arms pass, int8, int4@ft-scales, int4@base-scales and 2 others." in (
        page.text
    )
    assert "✕" not in page.text


def test_of_odd_numbers(eval_report: EvalReport) -> None:
    assert eval_report.perplexity is not None
    nothing = Interval(math.nan, math.nan, math.nan)
    odd = replace(
        eval_report.perplexity.arms["int8"],
        delta_ln_ppl=nothing,
        kl_mean=nothing,
        kl_slope=None,
        top1_confident=None,
        buckets=(),
        nll=math.inf,
        kl_max=math.nan,
    )
    arms = (Arm("int8", "", "exact"),)
    perplexity = replace(eval_report.perplexity, arms={"int8": odd}, block=1)
    page = Page(report_html(replace(eval_report, arms=arms, perplexity=perplexity)))

    assert "one token at a time" in page.text
    assert page.wrong == []
    assert not re.search(r"\bnan\b", page.text)


@pytest.mark.parametrize(
    ("reference", "text", "same", "first", "rest"),
    [
        ("one two three", "one twelve three", "one ", "twelve", " three"),
        ("one two", "one two", "one two", "", ""),
        ("one two", "one", "one", "∎", ""),
        ("one", "one two", "one", " two", ""),
        ("one", "", "", "∎", ""),
        ("a\nb", "a\nc", "a\n", "c", ""),
        ("東" * 30 + "京", "東" * 30 + "都市", "東" * 30, "都市", ""),
    ],
)
def test_where_a_text_leaves_the_reference(
    eval_report: EvalReport, reference: str, text: str, same: str, first: str, rest: str
) -> None:
    one = Continuation(1, 2, reference, {"a": text}, {"a": 0}, {"a": 0.5})
    source = report_html(EvalReport(eval_report.origin, (), continuations=(one,)))
    mark = f"<mark>{first}</mark>" if first else ""

    assert f'<pre><span class="same">{same}</span>{mark}{rest}</pre>' in source


def test_writes_in_one_step(eval_report: EvalReport, tmp_path: Path) -> None:
    write_html(eval_report, tmp_path / "new" / "page.html")

    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").endswith("</html>\n")
    with pytest.raises(InputError, match="it is a directory"):
        write_html(eval_report, tmp_path)


def test_without_jinja(eval_report: EvalReport, monkeypatch: pytest.MonkeyPatch) -> None:
    check_report_tools()
    monkeypatch.setitem(sys.modules, "jinja2", None)

    needed = r"needs jinja2: pip install 'kvquant-toolkit\[report\]'"
    for call in (check_report_tools, lambda: report_html(eval_report)):
        with pytest.raises(InputError, match=needed):
            call()


def colours(dark: bool) -> dict[str, str]:
    """The style sheet's variables in one of its modes."""
    light, _, rest = _STYLE.read_text().partition("@media screen and (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light.partition("}")[0]))
    if dark:
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", rest.partition("}")[0]))
    return found


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
        return sum(w * it for w, it in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_right() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(dark: bool) -> None:
    found = colours(dark)
    on_page = ["ink", "soft", "passed", "failed", "undecided", "link"]
    pairs = [(name, "page") for name in on_page] + [("ink", "panel"), ("mark-ink", "mark")]
    pairs += [(f"{it}-ink", it) for it in ("kept", "lost-1", "lost-2", "lost-3", "out")]

    ratios = {pair: contrast(found[pair[0]], found[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("dark", [False, True])
def test_marks_can_be_seen(dark: bool) -> None:
    found = colours(dark)

    assert [n for n in range(8) if contrast(found[f"c{n}"], found["page"]) < 3.0] == []
