"""The page as a person has it, in headless Chromium: filter, fold, copy, hover, keyboard, two widths, axe-core; one session.

Needs chromium and chromedriver (Debian: chromium-driver) and for the rules of WCAG 2 axe.min.js of npm's axe-core in
AXE_PATH. What is absent is skipped and said, unless E2E_REQUIRE_BROWSER=1 (.ci/run).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasks.report import compare, html, serve
from tasks.workspace import Workspace
from tests import report_samples as samples
from tests.test_report_compare import NEW, OLD, write_attempt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280)


def absent(what: str) -> None:
    """Skip, or fail where the browser is promised."""
    if os.environ.get("E2E_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{what} is absent, and E2E_REQUIRE_BROWSER=1")
    pytest.skip(f"{what} is absent")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve index.html of one of everything, and compare.html, as `doit report open=1` does."""
    root = tmp_path_factory.mktemp("workspace")
    earlier = {"earlier": [1.01, 1.02, 1.6], "history": "usually 1.02 (3 earlier records), now 3.207"}
    bad = samples.failing_case(checks=[samples.check(verdict="Fail", value=3.2071, **earlier)])
    report = samples.full_report()
    report["cases"][0] = bad
    samples.write_evidence(root, report)
    for sha in (OLD, NEW):
        write_attempt(root, "level0.a", f"at-{sha[:2]}", sha, bad=sha == NEW)
    folder = root / "report"
    folder.mkdir()
    (folder / "index.html").write_text(html.render(report, root))
    (folder / "compare.html").write_text(compare.render(Workspace("w", root, demo=False), "at-0a,at-f9"))
    with serve.server(folder) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    """One headless Chromium with its console and network logged."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        absent("chromium or chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(program)
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    made.set_script_timeout(60)
    try:
        yield made
    finally:
        made.quit()


def look(browser: Chrome, address: str, *, width: int = 1280, dark: bool = False) -> None:
    """Open a page at a width, light or dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(address)


def js(browser: Chrome, text: str, *args: Any) -> Any:
    return browser.execute_script(text, *args)


@pytest.fixture(scope="module")
def page(browser: Chrome, address: str) -> Chrome:
    look(browser, f"{address}/index.html")
    return browser


def find(page: Chrome, selector: str) -> Any:
    return page.find_element("css selector", selector)


SHOWN = "return [...document.querySelectorAll('tr[data-row]')].filter(r => r.offsetParent).map(r => r.dataset.verdict)"


def test_filter_by_verdict_and_by_word(page: Chrome) -> None:
    everything = js(page, SHOWN)
    find(page, "[data-v=Blocked]").click()
    assert js(page, SHOWN) == ["Blocked", "Blocked"]
    assert find(page, "#shown").text == f"2 of {len(everything)} shown"
    assert find(page, "[data-v=Blocked]").get_attribute("aria-pressed") == "true"
    assert len([card for card in page.find_elements("css selector", "details.card") if card.is_displayed()]) == 2
    find(page, "#find").send_keys("RESUME")
    assert js(page, SHOWN) == ["Blocked"]
    find(page, "#find").clear()
    find(page, "[data-v='']").click()
    find(page, "#find").send_keys("x")
    find(page, "#find").clear()
    find(page, "#find").send_keys(" ")
    assert js(page, SHOWN) == everything


def test_cards_fold_and_links_unfold_them(page: Chrome) -> None:
    card = "#" + js(page, "return document.querySelector('details.card:not([open])').id")
    find(page, f"{card} > summary").click()
    assert find(page, card).get_property("open")
    find(page, "#unfold").click()
    assert js(page, "return document.querySelectorAll('details.card:not([open])').length") == 0
    find(page, "#unfold").click()
    assert js(page, "return document.querySelectorAll('details.card[open]').length") == 0
    link = find(page, "ul.why a[href*='-L']")  # the root error, at its line of the log
    target = link.get_attribute("href").partition("#")[2]
    link.click()
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert find(page, f"#{target}").is_displayed()
    assert "AssertionError: token_mult_prob_error" in find(page, f"#{target}").text
    top = js(page, "return arguments[0].getBoundingClientRect().top", find(page, f"#{target}"))
    assert 0 <= top < 900


def test_a_command_is_copied(page: Chrome, address: str) -> None:
    granted = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": address}
    page.execute_cdp_cmd("Browser.grantPermissions", granted)
    js(page, "document.querySelectorAll('details.card').forEach(d => d.open = true)")
    button = find(page, "details.card.Fail button.copy")
    button.click()
    told = "const [b, done] = arguments; (function look() { b.textContent === 'Copied' ? done(true) : setTimeout(look, 20) })()"
    assert page.execute_async_script(told, button)
    copied = page.execute_async_script("navigator.clipboard.readText().then(arguments[0], arguments[0])")
    assert copied == js(page, "return arguments[0].previousElementSibling.textContent", button)
    assert copied.startswith("./doitw ")


def test_single_values_by_pointer_and_by_keyboard(page: Chrome) -> None:
    from selenium.webdriver import ActionChains, Keys

    js(page, "document.querySelectorAll('details.card').forEach(d => d.open = true)")
    drawing = find(page, "details.card svg[data-points]")
    now = "return arguments[0].parentNode.querySelector('.now').textContent"
    points = json.loads(drawing.get_attribute("data-points"))
    ActionChains(page).move_to_element(drawing).perform()
    middle = min(points, key=lambda p: abs(p[2] - 160))
    assert js(page, now, drawing) == f"step {middle[0]}: {middle[1]}"
    ActionChains(page).move_to_element(find(page, "h1")).perform()
    assert "step" not in js(page, now, drawing)
    js(page, "arguments[0].focus()", drawing)
    drawing.send_keys(Keys.ARROW_LEFT)
    assert js(page, now, drawing) == f"step {points[-1][0]}: {points[-1][1]}"
    drawing.send_keys(Keys.ARROW_LEFT)
    assert js(page, now, drawing) == f"step {points[-2][0]}: {points[-2][1]}"


def test_everything_is_reached_with_the_keyboard(page: Chrome) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    page.refresh()
    focused = "const a = document.activeElement; return a.id || a.className || a.tagName"
    press(Keys.TAB)
    assert js(page, focused) == "skip"
    press(Keys.ENTER)
    assert js(page, focused) == "cases"
    press(Keys.TAB, Keys.TAB)
    press(Keys.ENTER)
    assert js(page, "return document.activeElement.getAttribute('aria-pressed')") == "true"
    assert set(js(page, SHOWN)) == {"Pass"}
    outline = js(page, "return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    js(page, "document.querySelector('details.card:not([open]):not([hidden]) > summary').focus()")
    press(Keys.SPACE)
    assert js(page, "return document.activeElement.parentNode.open")


@pytest.mark.parametrize("name", ["index", "compare"])
def test_nothing_scrolls_sideways_and_axe_finds_nothing(browser: Chrome, address: str, name: str) -> None:
    path = os.environ.get("AXE_PATH")
    axe = Path(path).read_text(encoding="utf-8") if path else ""
    for width in WIDTHS:
        for dark in (False, True):
            look(browser, f"{address}/{name}.html", width=width, dark=dark)
            js(browser, "document.querySelectorAll('details').forEach(d => d.open = true)")
            assert js(browser, "return document.documentElement.scrollWidth") <= width
            if not axe or dark != (width == WIDTHS[0]):
                continue  # each layout and each set of colours once: axe takes seconds
            js(browser, axe)
            rules = {"runOnly": ["wcag2a", "wcag2aa"], "resultTypes": ["violations"]}
            found = browser.execute_async_script(
                "const [rules, done] = arguments; axe.run(document, rules).then(r => done(r.violations.map(v =>"
                " [v.id, v.nodes.length, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary])))",
                rules,
            )
            assert found == [], (width, dark)
    if not axe:
        absent("axe.min.js (AXE_PATH)")


def test_no_request_and_no_error_in_all_of_this(browser: Chrome, address: str) -> None:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    pages = {f"{address}/index.html", f"{address}/compare.html"}
    assert {url.partition("#")[0] for url in asked if not url.startswith("data:")} == pages
    assert browser.get_log("browser") == []
