"""The report in headless Chromium, as a person uses it."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from openrlhf.report.report import write_report
from openrlhf.report.server import make_app
from tests.report.run_folders import ATTACK, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs apt-get install chromium chromium-driver"
    ),
]
VIEWS = ("overview", "curves", "time", "samples", "settings")


class Browser:
    """Chromium, with what it asked of the network and what it complained of."""

    def __init__(self) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for word in ("--headless=new", "--no-sandbox", "--window-size=1400,1000"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))

    def open(self, url: str, view: str) -> None:
        self.driver.get("about:blank")
        self.driver.get_log("performance")
        self.driver.get(f"{url}#{view}")

    def run(self, script: str) -> object:
        return self.driver.execute_script(script)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
        return self.driver.execute_script(script, selector)

    def click(self, selector: str, place: int = 0) -> None:
        self.driver.execute_script(
            "document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, place
        )

    def wait(self, is_so: Callable[[], object]) -> None:
        end = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < end, "the page does not come to this"
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        """The addresses that were asked for since the page was opened."""
        entries = (json.loads(e["message"])["message"] for e in self.driver.get_log("performance"))
        sent = (e["params"] for e in entries if e["method"] == "Network.requestWillBeSent")
        return {params["request"]["url"].partition("?")[0].partition("#")[0] for params in sent}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root / "a"), make_run(root / "b", learning_rate=2e-5, seed=1)]


@pytest.fixture(scope="module")
def url(runs) -> str:
    path = runs[0].parent / "report.html"
    write_report(runs, path)
    return path.as_uri()


@pytest.fixture(scope="module")
def address(runs) -> Iterator[str]:
    """The same runs behind a server."""
    server = uvicorn.Server(uvicorn.Config(make_app(runs), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_draws_without_a_complaint_or_a_request(browser, url, view):
    browser.open(url, view)
    shown = {
        "overview": ("#view-overview .plot-container", 1),
        "curves": ("#view-curves .plot-container", 5),
        "time": ("#view-time .plot-container", 3),
        "samples": ("#table .tabulator-row", 3),
        "settings": ("#view-settings tr:not(.same)", 2),
    }
    selector, count = shown[view]
    browser.wait(lambda: len(browser.texts(selector)) >= count)
    assert browser.texts("section:not([hidden])")[0].strip()
    assert browser.complaints() == []
    assert browser.requests() == {url}


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(
        f"const field = document.querySelector('[name={name}]'); field.value = '{value}';"
        "for (const kind of ['input', 'change'])"
        "  field.dispatchEvent(new Event(kind, {bubbles: true}))"
    )


def cells(browser: Browser, field: str) -> list[str]:
    return browser.texts(f"#table .tabulator-cell[tabulator-field={field}]")


@pytest.mark.parametrize("place", ["file", "server"])
def test_a_click_leads_from_step_to_prompt_to_sample_to_token(browser, url, address, place):
    browser.open(url if place == "file" else address, "samples")
    browser.wait(lambda: cells(browser, "prompt") == ["0+3=", "1+3=", "2+3="])
    choose(browser, "file", "step_000001.parquet")
    browser.wait(lambda: cells(browser, "prompt") == ["0+1=", "1+1=", "2+1="])
    browser.click("#table .tabulator-row", 2)
    browser.wait(lambda: cells(browser, "reward") == ["2", "2.25"])
    browser.click("#table .tabulator-row", 1)
    browser.wait(lambda: browser.texts("#tokens span"))
    # Texts of a model are text: no element, no script, no new title.
    assert browser.texts("#tokens span")[2] == ATTACK
    assert ATTACK in browser.texts("#sample td")
    assert browser.run("return document.title") == "a, b – openrlhf report"
    assert browser.complaints() == []


def colours(browser: Browser, name: str) -> list[str]:
    browser.click(f"#colours [value={name}]")
    return browser.run(
        "return [...document.querySelectorAll('#tokens span')].map(e => e.style.backgroundColor)"
    )


def test_tokens_are_coloured_by_what_is_chosen(browser, url):
    browser.open(url, "samples")
    choose(browser, "view", "samples")
    choose(browser, "file", "step_000001.parquet")
    browser.wait(lambda: len(cells(browser, "reward")) == 6)
    browser.click("#table .tabulator-row", 0)
    browser.wait(lambda: browser.texts("#tokens span"))
    # Five tokens, of which the third and the last were sampled; advantages -0.5 and 2.
    blue, red, white = "rgba(31, 111, 235, {})", "rgba(218, 54, 51, {})", "rgba(218, 54, 51, 0)"
    assert colours(browser, "advantages") == ["", "", blue.format(0.19), "", red.format(0.75)]
    # ratio = exp(-1 - -1.5), and 1; engine - trainer = -1 - -1.5, and 0
    assert colours(browser, "ratio") == ["", "", red.format(0.75), "", white]
    assert colours(browser, "mismatch") == ["", "", red.format(0.75), "", white]
    mask, versions = colours(browser, "action_mask"), colours(browser, "weight_versions")
    assert [colour == mask[0] for colour in mask] == [True, True, False, True, False]
    assert versions[2] != versions[4] and versions[0] == ""
    browser.run(
        "document.querySelectorAll('#tokens span')[2]"
        ".dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    [numbers] = browser.texts("#token")
    assert "ratio 1.649 · engine − trainer 0.5 · log-prob engine -1 · old -1.5" in numbers


def test_a_file_without_tokens_says_so(browser, url):
    browser.open(url, "samples")
    choose(browser, "view", "samples")
    choose(browser, "file", "step_000002.parquet")
    browser.wait(lambda: len(cells(browser, "reward")) == 6)
    browser.click("#table .tabulator-row", 0)
    browser.wait(lambda: browser.texts("#token") == ["The file of this step has no tokens."])


@pytest.mark.parametrize("place", ["file", "server"])
def test_samples_are_searched_and_sorted(browser, url, address, place):
    browser.open(url if place == "file" else address, "samples")
    choose(browser, "view", "samples")
    choose(browser, "file", "")
    browser.wait(lambda: len(cells(browser, "reward")) == 18)
    choose(browser, "search", "IT IS 4")
    browser.wait(lambda: cells(browser, "reward") == ["1", "1.25"])
    choose(browser, "search", "")
    browser.wait(lambda: len(cells(browser, "reward")) == 18)
    browser.run("return table.setSort('label', 'desc')")
    browser.wait(lambda: cells(browser, "label")[:7] == ["11"] * 6 + ["10"])
    assert browser.complaints() == []


def test_a_served_page_asks_its_own_server_only(browser, address):
    browser.open(address, "samples")
    browser.wait(lambda: len(cells(browser, "prompt")) == 3)
    assert browser.requests() == {address, address + "groups"}
