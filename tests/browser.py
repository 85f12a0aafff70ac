"""Headless Chromium for tests of pages."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
NEEDS_CHROMIUM = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs apt-get install chromium chromium-driver"
    ),
]


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

    def open(self, url: str, view: str = "") -> None:
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

    def type(self, selector: str, text: str) -> None:
        self.wait(lambda: self.driver.find_element("css selector", selector).is_displayed())
        self.driver.find_element("css selector", selector).send_keys(text)

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

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))
