"""The report in headless Chromium, as a person uses it.

OPENRLHF_SCREENSHOTS names a folder for a picture of each view.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.report.report import write_report
from openrlhf.utils.images import read_picture
from openrlhf.utils.rollout_files import write_rollouts
from tests.browser import NEEDS_CHROMIUM, Browser
from tests.helpers import tiny_vision
from tests.report.large_run import served, write_large_run
from tests.report.run_folders import (
    ATTACK,
    SEARCHES,
    make_run,
    sample,
    training_record,
    write_metrics,
)

pytestmark = NEEDS_CHROMIUM
VIEWS = ("overview", "curves", "time", "samples", "settings")


def picture(browser: Browser, name: str) -> None:
    if folder := os.environ.get("OPENRLHF_SCREENSHOTS"):
        browser.picture(Path(folder) / f"report_{name}.png")


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
    with served(runs) as address:
        yield address


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_draws_without_a_complaint_or_a_request(browser, url, view):
    browser.open(url, view)
    shown = {
        "overview": ("#extremes .card", 12),
        "curves": ("#view-curves .plot-container", 5),
        "time": ("#view-time .plot-container", 3),
        "samples": ("#table .tabulator-row", 3),
        "settings": ("tr.setting:not([hidden])", 1),
    }
    selector, count = shown[view]
    browser.wait(lambda: len(browser.texts(selector)) >= count)
    assert browser.texts("section:not([hidden])")[0].strip()
    assert browser.complaints() == []
    assert browser.requests() == {url}
    picture(browser, view)


@pytest.mark.parametrize("view", VIEWS)
def test_runs_without_samples_or_without_a_step_draw_without_a_complaint(browser, tmp_path, view):
    phases = {"data": 0.1, "forward_backward": 2.0, "optimizer": 0.25, "step_total": 2.5}
    timings = {f"timing/{name}": seconds for name, seconds in phases.items()}
    records = [
        {"step": step, "time": 100.0 + step, "gpt_loss": 2.0 / step, "acc": 0.1 * step, **timings}
        for step in (1, 2, 3)
    ]
    records.append({"step": 3, "time": 104.0, "eval/gpt_loss": 0.5, "eval/gpt_loss_stderr": 0.1})
    write_metrics(tmp_path / "sft", records)
    write_metrics(tmp_path / "failed", [])
    for name in ("sft", "failed"):
        write_report([tmp_path / name], tmp_path / f"{name}.html")
        browser.open((tmp_path / f"{name}.html").as_uri(), view)
        browser.wait(lambda: browser.texts("section:not([hidden])")[0].strip())
        assert browser.complaints() == []
        picture(browser, f"{name}_{view}")


def test_the_first_view_shows_curves_samples_and_what_was_run(browser, tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    browser.wait(lambda: len(browser.texts("#extremes .card")) == 6)
    assert len(browser.texts("#view-overview .plot-container")) == 2
    # Of each of three prompts one sample; the reward is its number and 0.25 for the second sample.
    assert [text.split("\n")[0] for text in browser.texts("#extremes .card b")] == [
        *("reward 2.25", "reward 1.25", "reward 0.25"),
        *("reward 0", "reward 1", "reward 2"),
    ]
    facts = dict(row.split("\t") for row in browser.texts("#run tr"))
    assert (facts["state"], facts["pretrain"]) == ("at step 3, not finished", "tiny")
    browser.click("#extremes .card", 0)
    browser.wait(lambda: "2.25" in browser.texts("#sample td"))
    assert cells(browser, "reward")[-1] == "2.25"
    assert browser.complaints() == []


def traces(browser: Browser, field: str) -> list:
    """A field of each curve of the panel of rewards, which has two metrics."""
    places = "[...document.querySelectorAll('#view-curves .panel')]"
    found = f"{places}.find(e => e.innerText.startsWith('reward')).querySelector('.js-plotly-plot')"
    return browser.run(f"return {found}.data.map((trace) => trace.{field})")


def test_curves_have_a_clock_and_are_smoothed(browser, tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri(), "curves")
    browser.wait(lambda: browser.texts("#view-curves .plot-container"))
    assert traces(browser, "x") == [[1, 2, 3]] * 2
    choose(browser, "axis", "time")
    assert traces(browser, "x") == [[1, 2, 3]] * 2  # a second a step, from the evaluation at 0 on
    title = browser.run("return document.querySelector('#view-curves .xtitle').textContent")
    assert title == "seconds"
    choose(browser, "smoothing", "0.5")
    # 0.25; (0.25 / 4 + 0.5 / 2) / (3 / 4); (0.3125 / 2 + 0.75 / 2) / (7 / 8)
    raw, smooth = traces(browser, "y")[:2]
    assert raw == [0.25, 0.5, 0.75]
    assert smooth == pytest.approx([0.25, 0.3125 / 0.75, 0.53125 / 0.875])
    picture(browser, "smoothed")


def test_settings_are_filtered_by_flag_value_and_what_differs(browser, url):
    def names() -> list[str]:
        return browser.texts("tr.setting:not([hidden]) th")

    browser.open(url, "settings")
    browser.wait(lambda: names() == ["actor.adam.lr"])
    choose(browser, "which", "changed")
    assert names() == ["actor.adam.lr", "actor.model_name_or_path"]
    choose(browser, "which", "all")
    assert names() == ["actor.adam.lr", "actor.model_name_or_path", "seed"]
    choose(browser, "text", "--actor_learning_rate")
    assert names() == ["actor.adam.lr"]
    choose(browser, "text", "tiny")
    assert names() == ["actor.model_name_or_path"]
    assert browser.texts("#num-settings") == ["1 of 3 settings"]


def test_a_dark_page_has_dark_charts_and_tables_and_a_narrow_one_does_not_scroll(browser, url):
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    narrow = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        for view in VIEWS:
            browser.open(url, view)
            browser.wait(lambda: browser.texts("section:not([hidden])")[0].strip())
            picture(browser, f"dark_narrow_{view}")
            assert browser.run("return document.documentElement.scrollWidth") <= 420, view
        browser.open(url, "samples")
        browser.wait(lambda: cells(browser, "prompt"))
        style = "return getComputedStyle(document.querySelector('{}')).{}"
        paper = browser.run(style.format("body", "backgroundColor"))
        assert paper == "rgb(20, 24, 29)"
        assert browser.run(style.format("#table .tabulator-row", "backgroundColor")) == paper
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


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
    picture(browser, f"group_{place}")
    browser.click("#table .tabulator-row", 1)
    browser.wait(lambda: browser.texts("#tokens span"))
    picture(browser, f"sample_{place}")
    # Texts of a model are text: no element, no script, no new title.
    assert browser.texts("#tokens span")[2] == ATTACK
    assert ATTACK in browser.texts("#sample td")
    assert browser.run("return document.title") == "a, b – openrlhf report"
    assert browser.complaints() == []


def colours(browser: Browser, name: str) -> list[str]:
    browser.click(f"#colours [value={name}]")
    picture(browser, f"tokens_{name}")
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
    browser.run(
        "for (const token of shown.tokens.filter((t) => t.mismatch != null))"
        "  Object.assign(token, { mismatch: 1e-3, ratio: 1.001 })"
    )  # a tenth of the least reach
    for name in ("ratio", "mismatch"):
        assert colours(browser, name) == ["", "", red.format(0.075), "", red.format(0.075)]
    assert browser.texts("#scale span") == ["-0.01", "0.01 (no colour: 0)"]

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
    for search, expected in SEARCHES.items():
        choose(browser, "search", "no such text")
        browser.wait(lambda: cells(browser, "reward") == [])
        choose(browser, "search", search)
        browser.wait(lambda expected=expected: cells(browser, "reward") == expected)
    choose(browser, "search", "reward>0.5")
    browser.wait(lambda: len(cells(browser, "reward")) == 12)
    picture(browser, f"search_{place}")
    choose(browser, "search", "")
    browser.wait(lambda: len(cells(browser, "reward")) == 18)
    browser.run("return table.setSort('label', 'desc')")
    browser.wait(lambda: cells(browser, "label")[:7] == ["11"] * 6 + ["10"])
    assert browser.complaints() == []


def test_a_served_page_asks_its_own_server_only(browser, address):
    browser.open(address, "samples")
    browser.wait(lambda: len(cells(browser, "prompt")) == 3)
    assert browser.requests() == {address, address + "groups"}
    browser.open(address)
    browser.wait(lambda: len(browser.texts("#extremes .card")) == 12)
    assert browser.requests() == {address, address + "samples"}


def test_a_hundred_thousand_samples_are_paged_through(browser, tmp_path):
    with served([write_large_run(tmp_path)]) as address:
        browser.open(address, "samples")
        choose(browser, "file", "")
        browser.wait(
            lambda: browser.texts(".tabulator-page-counter") == ["Showing 1-20 of 12500 rows"]
        )
        first = cells(browser, "prompt")
        browser.run("return table.nextPage()")
        browser.wait(
            lambda: len(cells(browser, "prompt")) == 20 and first != cells(browser, "prompt")
        )
        choose(browser, "view", "samples")
        browser.wait(lambda: "of 100000 rows" in "".join(browser.texts(".tabulator-page-counter")))
        picture(browser, "large")
        browser.click("#table .tabulator-row", 1)
        browser.wait(lambda: browser.texts("#tokens span"))
        picture(browser, "large_sample")
        assert browser.complaints() == []


def run_with_images(path: Path) -> Path:
    """A run of a step of one sample, with two images of one and of two tokens side by side."""
    pictures = [tiny_vision.noise(28, 28 * size, size) for size in (1, 2)]
    images = [read_picture(picture) for picture in pictures]
    texts = ["<img>", "<pad>", "<pad>", "<pad>", "?", "red"]
    row = sample(1, 0, 0) | {
        "prompt": "<img><pad><pad>?",  # as a data set has it: a place for each
        "token_ids": [1, 2, 2, 2, 3, 4],
        "token_texts": texts,
        "action_mask": [False] * 5 + [True],
        "images": [
            {"sha256": image.sha256, "width": image.width, "height": 28} | place
            for image, place in zip(
                images, ({"start": 1, "num_tokens": 1}, {"start": 2, "num_tokens": 2}), strict=True
            )
        ],
    }
    write_metrics(path, [training_record(1, 0)])
    write_rollouts(path, 1, [row], num_kept=9, images=images)
    return path


@pytest.mark.parametrize("place", ["file", "server"])
def test_a_sample_shows_its_images_and_words_in_place_of_their_tokens(browser, tmp_path, place):
    run_dir = run_with_images(tmp_path / "run")
    (tmp_path / "moved").mkdir()
    write_report([run_dir], tmp_path / "moved" / "report.html")
    with served([run_dir]) as address:
        url = (tmp_path / "moved" / "report.html").as_uri() if place == "file" else address
        browser.open(url, "samples")
        browser.wait(lambda: browser.texts("#table .tabulator-row"))
        browser.click("#table .tabulator-row", 0)
        browser.wait(lambda: browser.texts("#table .tabulator-row"))
        browser.click("#table .tabulator-row", 0)
        browser.wait(lambda: browser.texts("#tokens span"))
        words = ["[image 1: 28x28, 1 token]", "[image 2: 56x28, 2 tokens]"]
        assert browser.texts("#images figcaption") == words
        assert browser.texts("#tokens span") == ["<img>", *words, "?", "red"]
        assert f"<img>{words[0]}{words[1]}?" in browser.texts("#sample td")
        sizes = "return [...document.images].map((image) => [image.naturalWidth, image.complete])"
        assert browser.run(sizes) == [[28, True], [56, True]]
        assert browser.complaints() == []
        picture(browser, f"images_{place}")
