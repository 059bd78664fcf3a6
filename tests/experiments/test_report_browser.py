"""A report in a real browser, without a network: drawn, without errors, and it reacts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.report.page import page, write_report
from sarathi_sim.experiments.report.palette import BLUE, dark_colour
from sarathi_sim.experiments.report.sections import sections_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
if CHROMIUM is None:
    pytest.skip("needs chromium (apt-get install chromium)", allow_module_level=True)

TIMEOUT_MS = 120_000
COLOUR = "window.getComputedStyle(document.body).backgroundColor"
# Whether a chart has drawn anything: a pixel of its canvas that is not clear.
DRAWN = """place => {
  const canvases = [];
  const seek = node => {
    if (node.tagName === "CANVAS") canvases.push(node);
    for (const child of node.children) seek(child);
    if (node.shadowRoot) seek(node.shadowRoot);
  };
  seek(document.getElementById(place));
  return canvases.some(canvas => canvas.width && canvas.getContext("2d")
    .getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0));
}"""
# What the boxes beside the pointer say.
TOOLTIPS = """() => [...document.body.children].filter(e => e.className.includes("bk-Tooltip"))
  .map(e => e.shadowRoot.textContent).join(" ")"""

# Where on the screen the first point of a chart is.
FIRST_POINT = """place => {
  const box = document.getElementById(place);
  for (const view of Object.values(Bokeh.index)) {
    if (!box.contains(view.el)) continue;
    const drawn = view.model.renderers.find(r => r.glyph.type === "Scatter").data_source.data;
    const ground = view.canvas_view.el.getBoundingClientRect(), {x_scale, y_scale} = view.frame;
    return [ground.x + x_scale.compute(drawn.x[0]), ground.y + y_scale.compute(drawn.y[0])];
  }
}"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report_file(reported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of results in one page."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(path, page("All of them", sections_of(list(reported.values()))))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        found = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """The page, and what it logged and asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.tab = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", self._console)
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri(), timeout=TIMEOUT_MS)
        self.tab.wait_for_selector("body[data-drawn]", timeout=TIMEOUT_MS)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def until(self, condition: str) -> None:
        """Wait for it. The page's own policy forbids the browser's way, which is eval."""
        for _ in range(TIMEOUT_MS // 50):
            if self.tab.evaluate(condition):
                return
            self.tab.wait_for_timeout(50)
        raise AssertionError(condition)

    def places(self) -> list[str]:
        found: list[str] = self.tab.eval_on_selector_all(
            ".chart > div", "all => all.map(d => d.id)"
        )
        return found


@pytest.fixture(scope="module")
def opened(browser: Any, report_file: Path) -> Iterator[Opened]:
    found = Opened(browser, report_file, viewport={"width": 1200, "height": 900})
    yield found
    found.context.close()


def test_every_chart_is_drawn_without_errors_or_requests(opened: Opened, report_file: Path) -> None:
    places = opened.places()
    assert len(places) >= 12
    assert opened.tab.evaluate("document.body.dataset.drawn") == str(len(places))
    for place in places:
        opened.until(f"({DRAWN})('{place}')")
    assert opened.errors == []
    asked = [url for url in opened.requests if not url.startswith(("data:", "blob:"))]
    assert asked == [report_file.as_uri()]


def test_no_script_of_a_user_runs(browser: Any, report_file: Path, tmp_path: Path) -> None:
    """Not even where one got into the page: its policy names the scripts that may run."""
    path = tmp_path / "evil.html"
    evil = "<img src=x onerror=\"document.title='run'\"><script>document.title = 'run'</script>"
    path.write_text(report_file.read_text("utf-8").replace("</main>", f"{evil}</main>"), "utf-8")
    found = Opened(browser, path)
    assert found.tab.title() == "All of them"
    assert any("Content Security Policy" in error for error in found.errors)
    found.context.close()


def test_a_click_on_a_heading_sorts(opened: Opened) -> None:
    """By the tokens/s per user of every probe of the capacity, which fall in the order of the page,
    deployment by deployment."""
    table = opened.tab.locator("table", has_text="all limits of the SLO").first
    heading = table.locator("th", has_text="tokens/s per user")
    place = int(heading.evaluate("heading => heading.cellIndex")) + 1

    def speeds() -> list[float]:
        return [float(t) for t in table.locator(f"tbody td:nth-child({place})").all_inner_texts()]

    rising = sorted(speeds())
    assert len(set(rising)) == 6 and speeds() != rising
    for wanted, sort in ((rising, "ascending"), (rising[::-1], "descending")):
        heading.locator("button").click()
        assert speeds() == wanted
        assert heading.get_attribute("aria-sort") == sort
    assert table.locator("tbody td:nth-child(1)").all_inner_texts() == ["TP 2"] * 3 + ["TP 8"] * 3


def test_a_pointer_over_the_timeline_says_what_is_there(opened: Opened) -> None:
    chart = opened.tab.locator("figure.chart", has_text="Timeline of the stages")
    chart.evaluate("chart => chart.scrollIntoView()")
    box = chart.locator("> div").bounding_box()
    assert box is not None
    for step in range(1, 40):  # somewhere along the second row there is a box
        x = box["x"] + 60 + step * (box["width"] - 80) / 40
        opened.tab.mouse.move(x, box["y"] + 30 + 33)
        opened.tab.wait_for_timeout(50)
        said = opened.tab.evaluate(TOOLTIPS)
        if "prompt tokens" in said:
            assert "from (s)" in said
            return
    raise AssertionError("no box has a tooltip")


def test_a_click_on_a_point_leads_to_its_row(opened: Opened) -> None:
    place = opened.tab.locator("figure.chart", has_text="output tokens/s per GPU against").first
    place.evaluate("chart => chart.scrollIntoView()")
    x, y = opened.tab.evaluate(FIRST_POINT, place.locator("> div").get_attribute("id"))
    opened.tab.mouse.click(x, y)
    opened.until("document.querySelector('tr:target') !== null")
    row = opened.tab.locator("tr:target")
    assert row.locator("td").nth(0).inner_text() == "TP 2"
    assert row.bounding_box()["y"] < 900
    assert opened.errors == []


@pytest.mark.parametrize("look", [(1400, "light"), (390, "dark")])
def test_nobody_is_shut_out(browser: Any, report_file: Path, look: tuple[int, str]) -> None:
    """axe-core finds nothing serious, everything opened; and each chart is there in words, too."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    width, scheme = look
    view = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    found = Opened(browser, report_file, bypass_csp=True, **view)
    found.tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    seen = axe.Axe().run(found.tab, options={"resultTypes": ["violations", "passes"]}).response
    assert {"color-contrast", "heading-order"} <= {rule["id"] for rule in seen["passes"]}
    grave = [one for one in seen["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"]) for one in grave] == []
    for chart in found.tab.locator("figure.chart").all():
        told = found.tab.locator(f"#{chart.get_attribute('aria-describedby')}").inner_text()
        assert re.search(r": .*\d", told), told
    found.context.close()


def test_dark_and_narrow(browser: Any, report_file: Path) -> None:
    """On a phone that likes it dark, nothing is wider than the screen, and the text is light."""
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    found = Opened(browser, report_file, color_scheme="dark", **phone)
    assert found.errors == []
    assert found.tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert found.tab.evaluate(COLOUR) == "rgb(20, 23, 28)"
    inks = """() => Bokeh.documents.flatMap(d => d.roots()).flatMap(r => [...r.references()])
        .filter(m => m.type === "LinearAxis").map(m => m.axis_label_text_color)"""
    assert set(found.tab.evaluate(inks)) == {"#e3e6ea"}
    lines = """() => Bokeh.documents.flatMap(d => d.roots()).flatMap(r => [...r.references()])
        .filter(m => m.type === "Line").map(m => m.line_color.value ?? m.line_color)"""
    dark = set(found.tab.evaluate(lines))
    assert dark_colour(BLUE) in dark and BLUE not in dark
    found.tab.emulate_media(color_scheme="light")
    found.until(f"({inks})().every(ink => ink === '#1d2129')")
    assert found.tab.evaluate(COLOUR) == "rgb(255, 255, 255)"
    light = set(found.tab.evaluate(lines))
    assert BLUE in light and {dark_colour(one) for one in light} == dark
    assert found.tab.pdf()[:5] == b"%PDF-"
    found.context.close()


def test_a_dark_page_is_printed_dark_on_light(browser: Any, report_file: Path) -> None:
    """The page turns light on paper; its charts, drawn before, have their colours turned."""
    found = Opened(browser, report_file, color_scheme="dark")
    turned = "window.getComputedStyle(document.querySelector('.chart > div')).filter"
    assert found.tab.evaluate(turned) == "none"
    found.tab.emulate_media(media="print", color_scheme="dark")
    assert found.tab.evaluate(COLOUR) == "rgb(255, 255, 255)"
    assert found.tab.evaluate(turned).startswith("invert(1)")
    found.tab.emulate_media(media="print", color_scheme="light")  # as Chromium does
    assert found.tab.evaluate(turned).startswith("invert(1)")
    found.tab.emulate_media(media="screen", color_scheme="light")
    assert found.tab.evaluate(turned) == "none"
    found.context.close()
