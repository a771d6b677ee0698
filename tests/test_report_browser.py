"""Reports in a browser: no request, no error; keys move slider and theme; a phone need not scroll sideways."""

from __future__ import annotations

import shutil

import pytest

import report_cases
from dapcal.report import write

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to open reports with")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CASES = {
    "moons": report_cases.two_moons,
    "table": report_cases.table,
    "images": report_cases.images,
    "amounts": report_cases.with_amounts,
    "classes": report_cases.with_classes,
}
WIDE, PHONE = 1100, 360


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, make in CASES.items():
        write(make(), folder / f"{name}.html")
    return {name: (folder / f"{name}.html").as_uri() for name in CASES}


@pytest.fixture
def opened(browser, files):
    """Opens a report, and checks at the end that nothing was asked of a network and nothing went wrong."""
    contexts, requests, troubles = [], [], []

    def open_page(name, width=WIDE, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(files[name])
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def brightness(colour):
    return sum(int(part) for part in colour.strip("rgb()").split(",")[:3])


@pytest.mark.parametrize("name", CASES)
def test_a_phone_needs_no_sideways_scrolling(opened, name):
    page = opened(name, width=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    assert page.evaluate("document.body.scrollWidth") <= PHONE


@pytest.mark.parametrize("name", CASES)
def test_light_and_dark_are_drawn(opened, name):
    shots = {}
    for scheme in ("light", "dark"):
        page = opened(name, scheme=scheme)
        assert page.locator("h1").is_visible()
        assert page.locator("svg.chart").count() >= 5
        assert (brightness(background(page)) > 384) == (scheme == "light")
        shots[scheme] = page.screenshot()
        assert len(shots[scheme]) > 20_000  # a blank page compresses to a fraction of that
    assert shots["light"] != shots["dark"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_changes_by_keyboard_and_back(opened, scheme):
    page = opened("table", scheme=scheme)
    before = background(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    words = page.locator("#theme").inner_text()
    page.keyboard.press("Enter")
    after = background(page)
    assert (brightness(after) > 384) != (brightness(before) > 384)
    assert page.locator("#theme").inner_text() != words
    page.keyboard.press("Space")
    assert background(page) == before


def test_the_slider_changes_the_map_by_keyboard(opened):
    page = opened("moons")
    shown = page.locator("image.frame.on")
    slider = page.locator("#phi-range")
    slider.focus()
    first, words, picture = shown.get_attribute("href"), page.locator("#phi-output").inner_text(), _map(page)
    assert "the calibrated one" in words
    page.keyboard.press("ArrowRight")
    assert shown.count() == 1
    assert shown.get_attribute("href") != first
    assert page.locator("#phi-output").inner_text() != words
    assert _map(page) != picture
    page.keyboard.press("Home")
    assert "the model as it was" in page.locator("#phi-output").inner_text()
    assert slider.get_attribute("aria-valuetext") == page.locator("#phi-output").inner_text()
    page.keyboard.press("ArrowLeft")  # stays at the end
    assert shown.count() == 1
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert shown.get_attribute("href") == first
    assert _map(page) == picture


def _map(page):
    return page.locator("#plane svg.chart").screenshot()


def test_pictures_are_shown(opened):
    page = opened("images")
    sizes = page.evaluate("[...document.querySelectorAll('.pictures img')].map(image => image.naturalWidth)")
    assert sizes == [8] * 24  # six, and three neighbours of each


def test_words_do_not_become_markup(opened):
    page = opened("table")
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert "<script>alert(1)</script>" in page.locator("main").inner_text()


@pytest.mark.parametrize("name", ["moons", "amounts", "classes"])
def test_labels_do_not_overlap(opened, name):
    """No two tick labels of one axis may touch, on a phone either."""
    page = opened(name, width=PHONE)
    overlaps = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].flatMap(chart => {
            const labels = [...chart.querySelectorAll("text.tick")]
                .map(label => [label.textContent, label.getBoundingClientRect()]);
            return labels.flatMap(([one, a], i) => labels.slice(i + 1)
                .filter(([, b]) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
                .map(([other]) => [chart.getAttribute("aria-label"), one, other]));
        })"""
    )
    assert overlaps == []


def test_tables_of_new_targets_fit_a_phone(opened):
    for name, sections in (("amounts", ["new-quality", "new-categories"]), ("classes", ["new-quality"])):
        page = opened(name, width=PHONE)
        for section in sections:
            box = page.locator(f"#{section} .scroll")
            assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("name", ["table", "amounts", "classes"])
def test_labels_stay_inside_their_chart(opened, name):
    page = opened(name, width=PHONE)
    outside = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].flatMap(chart => {
            const box = chart.getBoundingClientRect();
            return [...chart.querySelectorAll("text")].filter(label => {
                const own = label.getBoundingClientRect();
                return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1;
            }).map(label => label.textContent);
        })"""
    )
    assert outside == []


def test_paper_is_light_and_has_no_controls(opened):
    page = opened("moons", scheme="dark")
    page.emulate_media(media="print")
    assert brightness(background(page)) > 384
    assert not page.locator("#theme").is_visible()
    assert not page.locator("#phi-range").is_visible()
