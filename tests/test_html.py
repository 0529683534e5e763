"""The page: that it needs nothing from outside, says what the record says, and opens in a real browser, on a phone too."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forerun.bench.pages import changes, charts, html, words
from forerun.bench.pages.view import Axis, Chart, Mark, Plot, Row
from forerun.bench.records import summary
from forerun.bench.records.record import Record
from forerun.bench.records.statistics import Ratio
from forerun.train import curve
from tests import browser, training_logs
from tests.records import SWEEP, Way, as_page, fake, figures, rich, server, waiting

SVG = html.templates().get_template("svg.html.j2").module
PLAIN = {"baseline": Way(10.0), "ngram": Way(12.5, 4, (4, 1, 0, 0))}
WINDOWS = {"desktop": (1280, 900, False), "phone": (390, 844, True), "small phone": (320, 568, True)}


class Reader(HTMLParser):
    """The text, and every tag with its attributes; complains about tags that do not match."""

    EMPTY = frozenset({"meta", "link", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def pages() -> dict[str, str]:
    one, two = fake(PLAIN, ("copy", "explain")), fake(PLAIN, ("copy",), noise=0.02)
    two = dataclasses.replace(two, started="2026-11-08T12:00:00+00:00")
    return {
        "rich": as_page(rich()),
        "plain": as_page(one),
        "server": as_page(server(one)),
        "little": as_page(fake(PLAIN, repetitions=1)),
        "interrupted": as_page(dataclasses.replace(one, finished=False, batches=one.batches[:3])),
        "nothing": as_page(dataclasses.replace(one, finished=False, batches=())),
        "compared": html.page(changes.view(one, two), changes.view(one, two)),
        "training": curve.page(training_logs.rich(), training_logs.SETTINGS),
    }


PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_needs_nothing_from_outside(name: str) -> None:
    read = Reader(PAGES[name])
    kinds = {tag for tag, _ in read.tags}
    assert kinds.isdisjoint({"script", "img", "iframe", "object", "embed", "form"})
    for tag, attributes in read.tags:
        assert not any(key.startswith("on") for key in attributes), f"a handler in <{tag}>"
        for key in ("href", "src", "xlink:href", "action"):
            assert (attributes.get(key) or "data:").startswith(("data:", "#"))
    assert not re.search(r"url\(|@import", PAGES[name]), "the style sheet fetches nothing"
    assert sum(tag == "h1" for tag, _ in read.tags) == (2 if name == "compared" else 1)
    assert "nan" not in re.findall(r"\w+", PAGES[name]) and "None" not in read.text.split()


@pytest.mark.parametrize("name", PAGES)
def test_every_drawing_says_what_it_shows(name: str) -> None:
    read = Reader(PAGES[name])
    for i, (tag, attributes) in enumerate(read.tags):
        if tag == "svg" and attributes.get("role") == "img":
            assert attributes.get("aria-label") and read.tags[i + 1][0] == "title"
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in read.tags if "aria-labelledby" in a} <= set(ids)


def test_the_page_says_what_the_record_says() -> None:
    made = rich()
    text = " ".join(Reader(PAGES["rich"]).text.split())
    answer, arms = words.headline(made)
    assert text.count(f"{answer}.") == 1 and all(said in text for _, said in arms)
    for c in summary.cells(made):
        for figure in [*figures(c)[1:], *waiting(c)[1:]]:
            assert figure in text, (c.task, c.load.label, c.arm)
        if c.speedup is not None:
            assert f"{c.speedup.mean:.2f}×" in text
    for warning in words.warnings(made):
        assert warning in text
    failed = "1 of 80 requests failed: the stream ended early"
    for said in (words.command(made), "30,832", "-23 %", failed, "vllm 0.32.0", "model runner V1", "Imagined CPU"):
        assert said in text
    lengths = summary.cells(made)[1].accepted_lengths
    assert " ".join(map(str, lengths)) in text, "the histogram as a table"


def test_verdicts_are_told_by_sign_and_word_and_not_by_colour_alone() -> None:
    for sign, call in (("▲", "faster"), ("▼", "slower"), ("=", "no difference")):
        assert f"{sign} {call}" in PAGES["rich"]
    assert "? not enough data" in PAGES["little"]


def test_what_others_wrote_cannot_become_markup() -> None:
    made = fake({"baseline": Way(10.0), "<script>alert(1)</script>": Way(12.5, 4, (4,))}, ("copy",), command=("x", "<i>&"))
    made = dataclasses.replace(made, notes=("<img src=x onerror=alert(1)>",))
    for page in (as_page(made), html.page(changes.view(made, made))):
        assert "<script" not in page and "<i>&" not in page and "<img" not in page
        assert "&lt;script&gt;" in page


def test_options_in_a_sentence_stay_on_one_line() -> None:
    assert "Try <code>--repetitions 4</code>." in PAGES["little"] or "Try <code>--repetitions 8</code>." in PAGES["little"]


# drawings


@pytest.mark.parametrize(
    "axis, expected",
    [
        (Axis(0.7, 7.0, log=True), [1, 2, 3, 5]),
        (Axis(0.9, 1.3, log=True), [0.9, 1.0, 1.1, 1.2, 1.3]),
        (Axis(0, 100), [0, 20, 40, 60, 80, 100]),
        (Axis(0, 0.035), [0, 0.01, 0.02, 0.03]),
        (Axis(0.01, 1000, log=True), [0.01, 0.1, 1, 10, 100, 1000]),
    ],
)
def test_ticks_are_round_and_few(axis: Axis, expected: list[float]) -> None:
    assert axis.ticks() == pytest.approx(expected)


def test_axes() -> None:
    log = Axis(0.5, 2.0, log=True)
    assert log.at(1.0) == pytest.approx(0.5) and log.at(4.0) == 1.0 and log.at(0.1) == 0.0
    assert charts.around([3.0, 12.0]).low == 0.0 and charts.around([0.0]).high == 1.0
    assert Axis(1.0, 1.0).ticks() == [1.0] and Axis(1.0, 1.0).at(1.0) == 0.5


def drawn(axis: Axis, *marks: Mark) -> str:
    return str(SVG.row(Row("arm", "", "said", marks), axis))


def verdict(ratio: Ratio) -> Row:
    return charts.verdict_row("arm", ratio, "no difference", "said", "", "")


def test_an_interval_stands_where_its_figures_are() -> None:
    axis = Axis(0.5, 2.0, log=True)
    inside = str(SVG.row(verdict(Ratio(5, 1.0, 2**-0.5, 2**0.5)), axis))
    assert 'x1="25.00%" y1="13.0" x2="75.00%"' in inside and 'cx="50.00%"' in inside and "<title>said</title>" in inside
    beyond = str(SVG.row(verdict(Ratio(5, 1.0, 0.1, 1.1)), axis))
    assert "M5 -4L0 0L5 4" in beyond and "M-5 -4" not in beyond, "an arrow where it goes on, and only there"


def test_bars_are_as_long_as_their_values() -> None:
    assert 'x="0.00%" y="7.0" width="25.00%"' in drawn(Axis(0, 100), Mark("bar", "c1", 0.0, 25.0))
    stack = drawn(Axis(0, 100), Mark("bar", "p0", 0.0, 10.0), Mark("bar", "p1", 10.0, 40.0))
    assert re.findall(r'x="([\d.]+)%" y="7.0" width="([\d.]+)%"', stack) == [("0.00", "10.00"), ("10.00", "30.00")]
    bars = str(SVG.row(Row("arm", "", "said", histogram=[0.5, 0.25, 0.25]), None))
    lengths = [float(x) for x in re.findall(r'<rect[^>]* height="([\d.]+)"', bars)]
    assert lengths[0] == pytest.approx(2 * lengths[1]) and lengths[1] == lengths[2]


def test_requests_times_are_drawn_from_least_to_largest_with_the_middle_half() -> None:
    made = fake(PLAIN, repetitions=20, noise=0.1)
    waits = next(section for section in charts.sections(made, summary.cells(made)) if section.id == "waiting")
    row, ttft = waits.charts[0].drawings[0].rows[0], summary.cells(made)[0].ttft
    assert ttft is not None and ttft.p95 is not None
    assert [(m.kind, m.low, m.high) for m in row.marks] == [
        ("line", 1000 * ttft.least, 1000 * ttft.largest),
        ("bar", 1000 * ttft.lower, 1000 * ttft.upper),
        ("symbol", 1000 * ttft.p95, 0.0),
        ("stroke", 1000 * ttft.median, 0.0),
    ]


def test_arms_differ_by_symbol_and_not_by_colour_alone() -> None:
    shapes = [str(SVG.symbol(i, 0.5, 10)).split(' d="')[1] for i in range(len(SVG.symbols))]
    assert len(set(shapes)) == len(SVG.symbols) >= 6


def plot(made: Record, section: str) -> tuple[Chart, str]:
    """The only chart of a section, and its plot as it is drawn."""
    (chart,) = next(one.charts for one in charts.sections(made, summary.cells(made)) if one.id == section)
    assert isinstance(chart.drawings[0], Plot)
    return chart, str(SVG.plot(chart.drawings[0]))


def test_no_line_leads_from_requests_at_once_to_requests_by_the_clock() -> None:
    _, picture = plot(fake(PLAIN, loads=SWEEP), "sweep")
    assert picture.count('class="mark c1"') == 3 and picture.count('class="line c1"') == 1


def test_shares_of_a_handful_of_drafts_are_in_the_table_only() -> None:
    """A draft gets past the first position in 1 of 2 steps: of 16 steps 8 get to the second, of 160 steps 80."""
    for repetitions, shown in ((1, 1), (8, 4)):
        chart, picture = plot(fake({"baseline": Way(10.0), "ngram": Way(12.5, 4, (4, 0))}, repetitions=repetitions), "drafting")
        assert picture.count('class="hollow c1"') == shown and picture.count('class="mark c1"') == 4
        assert "–" not in chart.tables[1].rows[0]


# a real browser


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Page]:
    if browser.program() is None:
        pytest.skip("no Chromium here; install the package chromium to run the tests of the page in a browser")
    with browser.page() as opened:
        yield opened


@pytest.mark.parametrize("size", WINDOWS)
@pytest.mark.parametrize("name", ["rich", "plain", "nothing", "compared", "training"])
def test_pages_open_without_complaint_network_or_sideways_scrolling(
    window: browser.Page, tmp_path: Path, name: str, size: str
) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name], encoding="utf-8")
    width, height, phone = WINDOWS[size]
    window.open(path, width, height, phone=phone)
    assert window.value("document.documentElement.scrollWidth") == width
    assert window.value("window.innerWidth") == width, "the page did not make the window wider"
    assert window.requests() == [path.as_uri()] and window.complaints() == []
    heading = window.value("document.querySelector('h1').textContent")
    assert "Speculation" in heading or name in ("nothing", "plain", "training")


OUTSIDE = """[...document.querySelectorAll('main p, main li, main h1, main h2, main h3, main svg, main dd')]
  .filter(e => !e.closest('.scroll') && e.getClientRects().length && (e.getBoundingClientRect().right > innerWidth + 1
    || e.getBoundingClientRect().left < -1)).map(e => e.tagName + ' ' + (e.textContent || '').slice(0, 40))"""
CONTRAST = """(() => {
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b };
  const ground = e => {
    for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c } };
  const poor = new Set();
  for (const e of document.querySelectorAll('main :is(p, span, small, b, li, td, th, dt, dd, code, h1, h2, h3, h4, summary)')) {
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) poor.add(e.tagName + '.' + e.className + ' ' + ((a + .05) / (b + .05)).toFixed(2));
  }
  return [...poor] })()"""


@pytest.mark.parametrize("size", WINDOWS)
@pytest.mark.parametrize("name", ["rich", "training"])
def test_nothing_sticks_out_of_the_window(window: browser.Page, tmp_path: Path, name: str, size: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name], encoding="utf-8")
    width, height, phone = WINDOWS[size]
    window.open(path, width, height, phone=phone)
    assert window.value(OUTSIDE) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["rich", "training"])
def test_text_stands_out_in_light_and_dark(window: browser.Page, tmp_path: Path, name: str, dark: bool) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name], encoding="utf-8")
    window.open(path, 1280, 900, dark=dark)
    assert window.value("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert window.value(CONTRAST) == [], "a contrast of 4.5 to 1, as WCAG 2.2 asks for text (1.4.3)"


def test_the_browser_test_can_fail(window: browser.Page, tmp_path: Path) -> None:
    """A page that is too wide, asks for a file and throws is caught at all three."""
    path = tmp_path / "bad.html"
    path.write_text("<meta name=viewport content='width=device-width'><div style='width:900px'>x</div><img src='missing.png'>"
                    "<script>throw 1</script>", encoding="utf-8")  # fmt: skip
    window.open(path, 390, 844, phone=True)
    assert window.value("document.documentElement.scrollWidth") > 390
    assert len(window.requests()) == 2 and len(window.complaints()) >= 1

