"""Every page of the documentation site in headless Chromium.

OPENRLHF_SCREENSHOTS names a folder for a picture of each page.
"""

import os
from pathlib import Path

import pytest

from tests.browser import NEEDS_CHROMIUM, Browser

pytestmark = NEEDS_CHROMIUM


@pytest.fixture
def pages(site: Path) -> list[Path]:
    """All pages but the one for a server's wrong addresses, whose links begin at its root."""
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


def test_every_page_opens_without_a_complaint_or_a_request_to_elsewhere(
    browser: Browser, site: Path, pages: list[Path]
) -> None:
    assert len(pages) > 40
    for page in pages:
        name = page.relative_to(site).with_suffix("")
        browser.open(page.as_uri())
        browser.wait(lambda: browser.run("return document.readyState") == "complete")
        assert browser.texts("h1") and not browser.texts(".katex-error"), name
        formulas = browser.run("return document.querySelectorAll('.arithmatex').length")
        browser.wait(lambda n=formulas: len(browser.texts(".arithmatex .katex-html")) >= n)
        # A picture that is lost has no width.
        lost = "return [...document.images].filter(i => i.complete && !i.naturalWidth).length"
        assert browser.run(lost) == 0, name
        if folder := os.environ.get("OPENRLHF_SCREENSHOTS"):
            browser.picture(Path(folder) / f"site_{str(name).replace('/', '_')}.png")
        assert browser.complaints() == [], name
        asked = {address for address in browser.requests() if not address.startswith("data:")}
        assert asked and all(address.startswith(site.as_uri()) for address in asked), asked


def test_formulas_are_drawn_by_katex(browser: Browser, site: Path) -> None:
    browser.open((site / "methods" / "grpo.html").as_uri())
    browser.wait(lambda: browser.texts(".arithmatex .katex-html .mfrac"))


def test_a_search_finds_a_page(browser: Browser, site: Path) -> None:
    browser.open((site / "index.html").as_uri())
    browser.click(".md-header label[for=__search]")
    browser.type(".md-search__input", "RLOO")
    links = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    browser.wait(lambda: any("methods/rloo.html" in link for link in browser.run(links)))
    assert browser.complaints() == []
    assert all(address.startswith((site.as_uri(), "data:")) for address in browser.requests())
