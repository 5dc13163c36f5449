"""The pages in a real browser: they load clean, follow what they show, and fit a phone, the dark and a keyboard."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect

from tests.browser import screenshots, stage
from tests.browser.screenshots import SCALE

REQUIRED = os.environ.get("FEDTTA_BROWSER") == "required"
CHECKS = Path(__file__).with_name("checks.js").read_text()
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
WAIT = 60_000  # milliseconds for what another process has to do
CONTRAST = 4.5  # WCAG 2.2, level AA
#: Name → address on the server; the report is a file.
PAGES = {
    "report": "",
    "run that has ended": f"/runs/{stage.ENDED}",
    "run that goes on": f"/runs/{stage.RUNNING}",
    "runs": "/",
    "devices": "/devices",
    "device": "/devices/ward-1",
}
FOLLOWS = [name for name in PAGES if name != "report"]

pytestmark = pytest.mark.skipif(not (REQUIRED or stage.chromium()), reason="no chromium on this machine")


@dataclass
class Site:
    """The pages, and the run that goes on."""

    report: Path
    address: str
    run: stage.Run

    def url(self, name: str) -> str:
        return self.report.as_uri() if name == "report" else self.address + PAGES[name]


@dataclass
class Opened:
    """A page with everything that it asked for and complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        def failed(request: Request) -> None:
            self.complaints.append(f"{request.url}: {request.failure}")

        def response(answer: Response) -> None:
            if answer.status >= 400:
                self.complaints.append(f"{answer.url}: status {answer.status}")

        self.page.on("console", console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", failed)
        self.page.on("response", response)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    results = stage.results(tmp_path_factory.mktemp("results"))
    with stage.served(results) as address, stage.Run(results) as run:
        yield Site(stage.report(tmp_path_factory.mktemp("report")), address, run)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with stage.browser() as made:
        yield made


@pytest.fixture(scope="module", params=PAGES)
def opened(request: pytest.FixtureRequest, site: Site, browser: Browser) -> Iterator[tuple[str, Opened]]:
    """A page that several tests look at, in the order of the file."""
    with browser.new_context(viewport=DESKTOP, color_scheme="light") as context:  # type: ignore[arg-type]
        context.add_init_script(CHECKS)
        found = Opened(context.new_page())
        answer = found.page.goto(site.url(request.param), timeout=WAIT)  # the first look at a run draws its report
        assert answer is not None
        yield request.param, found


def test_a_page_loads_clean_and_asks_for_nothing_from_elsewhere(site: Site, opened: tuple[str, Opened]) -> None:
    name, found = opened
    assert found.page.title().endswith("· FedTTA")
    assert found.page.locator("h1").count() == 1
    assert found.page.evaluate("checks.texts()") > 5
    if name in FOLLOWS:
        expect(found.page.locator("#connection")).not_to_be_empty()
    own = site.address if name in FOLLOWS else "file://"
    assert [url for url in found.requests if not url.startswith((own, "data:"))] == []
    assert found.complaints == []
    assert found.page.evaluate("window.injected ?? null") is None  # by names and texts of devices
    assert found.page.locator("main img, main script").count() == 0
    links = set(found.page.locator("a[href]").evaluate_all("all => all.map(one => one.href)"))
    for link in sorted(link for link in links if link.startswith(("http", "file")) and "#" not in link):
        assert link.startswith(own)
        assert found.page.request.get(link).ok, link


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(opened: tuple[str, Opened], scheme: str) -> None:
    _, found = opened
    found.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    found.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    luminance = found.page.evaluate("checks.luminance()")
    assert luminance < 0.05 if scheme == "dark" else luminance > 0.8
    assert found.page.evaluate(f"checks.contrast({CONTRAST})") == []


def test_a_phone_shows_all_without_scrolling_sideways(opened: tuple[str, Opened]) -> None:
    name, found = opened
    found.page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    assert found.page.evaluate("checks.wide()") == []
    if name == "run that has ended":
        assert found.page.evaluate("checks.scrolling()") > 0  # wide tables, in boxes of their own
    found.page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]


def test_a_keyboard_reaches_everything_and_shows_where_it_is(opened: tuple[str, Opened]) -> None:
    _, found = opened
    found.page.reload()
    stops = found.page.evaluate("checks.mark()")
    for _ in range(stops + 40):  # boxes that scroll are stops, too
        if not found.page.evaluate("checks.unreached().length"):
            break
        found.page.keyboard.press("Tab")
    assert found.page.evaluate("checks.unreached()") == []
    assert found.page.evaluate("checks.unseen()") == []


def test_a_script_that_is_placed_in_a_page_does_not_run(opened: tuple[str, Opened]) -> None:
    """But for the report, which is a file without a policy: there the same script runs, so that the test sees it."""
    name, found = opened
    assert found.page.evaluate("checks.inject()") == (None if name in FOLLOWS else 2)
    assert any("Content Security Policy" in one for one in found.complaints) == (name in FOLLOWS)


def test_a_picture_is_small_and_shows_the_page(site: Site, browser: Browser) -> None:
    picture = screenshots.PICTURES[0]
    light, dark = (screenshots.take(browser, site.address, picture, scheme) for scheme in picture.schemes)
    for content, bright in ((light, True), (dark, False)):
        image = Image.open(io.BytesIO(content)).convert("L")
        assert image.size == (SCALE * picture.width, SCALE * picture.height)
        assert (image.getpixel((0, 0)) > 200) == bright
        assert len(content) < screenshots.MOST_BYTES


def test_the_checks_see_what_is_wrong(browser: Browser) -> None:
    with browser.new_context(viewport=PHONE, color_scheme="dark") as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.add_init_script(CHECKS)
        page.goto("data:text/html,<meta name=viewport content=width=device-width>")
        page.set_content("""
            <style>body { background: white } p, text { color: #777; fill: #777 } div { overflow: auto }
              .plain:focus { outline: none } pre { width: 500px; margin: 0 }</style>
            <p>4.48</p><p style="color: #767676">4.54</p><svg><text y="20">svg</text></svg>
            <p style="background: #000; opacity: 0">hidden</p><details><summary>s</summary><p>closed</p></details>
            <pre>wide</pre><div><pre>in a box</pre></div>
            <a href="#x" class="plain">no outline</a><a href="#x" tabindex="-1">not reached</a><a href="#x">good</a>""")
        page.evaluate(CHECKS)
        assert page.evaluate("checks.luminance()") == 1
        contrast = page.evaluate(f"checks.contrast({CONTRAST})")
        assert contrast == ['4.48: p "4.48"', '4.48: text "svg"']
        assert page.evaluate("checks.wide()") == ["the page is 508 wide", '508: pre "wide"']
        assert page.evaluate("checks.mark()") == 4
        for _ in range(6):
            page.keyboard.press("Tab")
        assert page.evaluate("checks.unreached()") == ['a "not reached"']
        assert page.evaluate("checks.unseen()") == ['a.plain "no outline"']


def test_a_run_is_followed_without_losing_the_readers_place(site: Site, browser: Browser) -> None:
    with browser.new_context(viewport=PHONE) as context:  # type: ignore[arg-type]
        found = Opened(context.new_page())
        page = found.page
        page.goto(site.url("run that goes on"))
        page.evaluate("window.unloaded = false")
        rounds = page.locator("#summary .lead").inner_text()
        assert f"{site.run.rounds} rounds" in rounds
        opened, closed = page.locator("#settings details"), page.locator("#now-clients")
        opened.locator("summary").click()
        closed.locator("summary").click()
        opened.scroll_into_view_if_needed()
        place = opened.bounding_box()
        site.run.next_round()
        expect(page.locator("#summary .lead")).to_contain_text(f"{site.run.rounds} rounds", timeout=WAIT)
        expect(page.locator("#now-phase")).to_contain_text(f"round {site.run.rounds + 1}", timeout=WAIT)
        assert opened.get_attribute("open") is not None
        assert closed.get_attribute("open") is None
        after = opened.bounding_box()
        assert place is not None
        assert after is not None
        assert abs(after["y"] - place["y"]) < 2
        assert page.evaluate("window.unloaded") is False
        assert page.evaluate("window.scrollY") > 0
        assert found.complaints == []


def test_devices_and_their_alerts_are_followed(site: Site, browser: Browser) -> None:
    with browser.new_context(viewport=DESKTOP) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(site.url("devices"))
        page.evaluate("window.unloaded = false")
        alerts = page.locator("#alerts")
        for words in ("silent-minutes", "guard-holding-samples", "least-estimated-accuracy", "refused by 2 devices"):
            expect(alerts).to_contain_text(words, timeout=WAIT)
        stage.keep(site.run.folder, 0, time.time())  # the guard holds no longer, and van-2 is there again
        expect(alerts).not_to_contain_text("silent-minutes", timeout=WAIT)
        expect(alerts).not_to_contain_text("guard-holding-samples")
        assert page.evaluate("window.unloaded") is False


def test_the_form_of_the_token_leads_to_the_page_that_was_asked_for(tmp_path: Path, browser: Browser) -> None:
    token, address = tmp_path / "token", "/devices"
    token.write_text("0123456789abcdef-token")
    with stage.served(tmp_path, "--token-file", str(token)) as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{server}{address}")
        page.locator("#token").fill(token.read_text())
        page.locator("button").click()
        expect(page.locator("h1")).to_have_text("Devices", timeout=WAIT)
        assert page.url == f"{server}{address}"
