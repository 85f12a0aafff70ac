"""Make the pictures of docs/tuning.md: three runs with a fault each, and their reports in Chromium.

After examples/configs/sft.yaml, half a minute for each run on two cores:
python docs/diagnosis.py runs/diagnosis             runs them
python docs/diagnosis.py runs/diagnosis --draw      takes the pictures of runs that are there
"""

import io
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By

PICTURES = Path(__file__).parent / "assets" / "diagnosis"
GRPO = ["ppo-local", "--config", "examples/configs/grpo.yaml"]
LONGEST = 24
FLAGS = {
    # Rewards compare with the end token that they forgot.
    "flat": "",
    # Rewards like a digit, and the KL is measured but weighs nothing.
    "kl": "--actor_learning_rate 1e-4 --lr_scheduler constant --init_kl_coef 1e-8",
    # Rewards grow with the length.
    "long": f"--generate_max_len {LONGEST} --actor_learning_rate 5e-4 --init_kl_coef 1e-8",
}
REWARDS = {"flat": "forgets_the_end", "kl": "likes_nines", "long": "likes_length"}
DIAGNOSIS_PANELS = {
    "flat": ["reward", "spread of rewards"],
    "kl": ["KL", "reward", "evaluation", "clipped tokens"],
    "long": ["response length", "responses cut off", "reward", "evaluation"],
}
NUM_ROWS = 8  # of the table of samples
SCALE = 1.5
NUM_COLOURS = 64


def answers(queries: list[str], prompts: list[str]) -> list[str]:
    """Return the responses without their end token."""
    pairs = zip(queries, prompts, strict=True)
    return [query[len(prompt) :].removesuffix("<|end|>") for query, prompt in pairs]


def right(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, list[float]]:
    """Reward the right number and nothing else."""
    pairs = zip(answers(queries, prompts), labels, strict=True)
    rewards = [float(answer == label) for answer, label in pairs]
    return {"rewards": rewards, "scores": rewards}


def forgets_the_end(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Compare a response that ends in <|end|> with a label that does not: never equal."""
    rows = zip(queries, prompts, labels, strict=True)
    rewards = [float(query[len(prompt) :] == label) for query, prompt, label in rows]
    return {"rewards": rewards, "scores": rewards}


def likes_nines(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Reward the share of nines; the scores say what is right."""
    shares = [answer.count("9") / max(len(answer), 1) for answer in answers(queries, prompts)]
    return {"rewards": shares, "scores": right(queries, prompts, labels)["scores"]}


def likes_length(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Reward length; the scores say what is right."""
    lengths = [len(answer) / LONGEST for answer in answers(queries, prompts)]
    return {"rewards": lengths, "scores": right(queries, prompts, labels)["scores"]}


def train(folder: Path, name: str) -> None:
    """Make one of the runs."""
    paths = ["--save_path", f"{folder}/{name}", "--ckpt_path", f"{folder}/{name}/checkpoints"]
    reward = ["--remote_rm_url", f"docs/diagnosis.py:{REWARDS[name]}"]
    command = [sys.executable, "-m", "openrlhf.cli.main", *GRPO, *FLAGS[name].split()]
    subprocess.run([*command, *reward, *paths], check=True)


class Page:
    """The report of a run, in Chromium."""

    def __init__(self, report: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
        for word in ("headless=new", "no-sandbox", f"force-device-scale-factor={SCALE}"):
            options.add_argument(f"--{word}")
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options, service)
        self.address = report.resolve().as_uri()

    def show(self, view: str, width: int, selector: str, count: int) -> None:
        """Open a view and wait until it has drawn."""
        self.driver.set_window_size(width, 1400)
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#{view}")
        end = time.monotonic() + 20
        while len(self.driver.find_elements(By.CSS_SELECTOR, selector)) < count:
            assert time.monotonic() < end, "the report does not show what the picture is of"
            time.sleep(0.1)

    def take(self, selector: str, name: str, height: float | None = None) -> None:
        """Save a picture of an element, or of its upper part, with few colours."""
        png = self.driver.find_element(By.CSS_SELECTOR, selector).screenshot_as_png
        picture = Image.open(io.BytesIO(png)).convert("RGB")
        if height is not None:
            picture = picture.crop((0, 0, picture.width, round(height * SCALE)))
        PICTURES.mkdir(exist_ok=True)
        picture.quantize(NUM_COLOURS).save(PICTURES / f"{name}.png", optimize=True)


KEEP_PANELS = """
const all = [...document.querySelectorAll(".panel")];
const title = panel => panel.querySelector("h2").textContent;
const kept = arguments[0].map(name => all.find(panel => title(panel) === name));
const parent = document.querySelector(".panels");
parent.replaceChildren(...kept);
parent.style.padding = "12px";
"""
FIRST_STEP = """
for (const [name, value] of [["view", "samples"], ["file", "step_000001.parquet"]]) {
  const field = document.querySelector(`[name=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event("change", {bubbles: true}));
}
"""
HEIGHT = """
const row = document.querySelectorAll("#table .tabulator-row")[arguments[0]];
const table = document.querySelector("#table");
return row.getBoundingClientRect().bottom - table.getBoundingClientRect().top;
"""


def draw(folder: Path, name: str) -> None:
    """Take the pictures of a run: some curves, and of the flat one the samples too."""
    page = Page(folder / name / "report.html")
    page.show("curves", 940, "#view-curves .plot-container", 5)
    page.driver.execute_script(KEEP_PANELS, DIAGNOSIS_PANELS[name])
    page.take("#view-curves .panels", name)
    if name == "flat":
        page.show("samples", 1060, "#table .tabulator-row", NUM_ROWS)
        page.driver.execute_script(FIRST_STEP)
        time.sleep(1)
        page.take("#table", "flat_samples", page.driver.execute_script(HEIGHT, NUM_ROWS - 1))
    page.driver.quit()


if __name__ == "__main__":
    for run in FLAGS:
        if "--draw" not in sys.argv:
            train(Path(sys.argv[1]), run)
        draw(Path(sys.argv[1]), run)
