"""Fixtures every test may use, and the environment of tests: two threads, no hub, no accounts."""

import atexit
import importlib
import io
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import rich.console

TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    # Two OpenMP pools that spin on two cores slow each other tenfold: let idle ones sleep.
    "KMP_BLOCKTIME": "0",
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray must not empty CUDA_VISIBLE_DEVICES of actors that ask for no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
HAS_GPU = Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is not None

# A change is judged by the same examples as the one before. HYPOTHESIS_PROFILE=default: other ones.
with suppress(ModuleNotFoundError):  # tests that need a GPU do without
    from hypothesis import settings

    settings.register_profile("same", derandomize=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell's background jobs ignore it, and the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name, value in TEST_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
if "HF_DATASETS_CACHE" not in os.environ:
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="openrlhf-datasets-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
if not HAS_GPU:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is no GPU."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2 (untied, fp32) with tokenizer and chat template; do not write into it."""
    from tests.tiny import make_model

    return make_model(tmp_path_factory.mktemp("tiny") / "qwen2")


@pytest.fixture(scope="session")
def tiny_tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings."""
    from tests.tiny import make_model

    return make_model(tmp_path_factory.mktemp("tiny") / "qwen2_tied", is_tied=True)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path) -> object:
    """The tokenizer of `tiny_model_dir`."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster for the whole run: starting one takes 5 to 8 s."""
    import ray

    # Without a token of its own Ray leaves one in the home, which `ray job submit` then lacks.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    root = str(Path(__file__).resolve().parent.parent)
    search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    env_vars = {name: os.environ[name] for name in TEST_ENVIRONMENT} | {"PYTHONPATH": search_path}
    if "DS_ACCELERATOR" in os.environ:
        env_vars["DS_ACCELERATOR"] = os.environ["DS_ACCELERATOR"]
    ray.init(
        num_cpus=16,  # logical: actors share the real cores in turn
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": env_vars},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as a site, built with strict links."""
    path = tmp_path_factory.mktemp("site")
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(path)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout as a reader has it, who saved the documents' files."""
    from tests.helpers.documents import save_files

    save_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Headless Chromium, a `tests.browser.Browser`."""
    from tests.browser import Browser

    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[str, list[str]], tuple[object, str]]:
    """Runs a command that must end before it reads a weight; answers its exit code and what it
    said.
    """
    # Weights that cannot be read: a command that got as far would say so.
    monkeypatch.setattr("openrlhf.models.loading.read_model", None)

    def run(command: str, words: list[str]) -> tuple[object, str]:
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"openrlhf.cli.{command}").main(words)
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Everything that progress bars draw in one test, however short their work is."""
    from openrlhf.utils import progress

    drawn = io.StringIO()
    console = rich.console.Console(file=drawn, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(progress, "make_console", lambda: console)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(progress, "_shared", [])
    return drawn
