"""The documents are true: commands parse, code runs, quoted lines exist, links lead somewhere.

Bash itself splits each block into commands; those of the README are run by
tests/examples/test_readme_commands.py.
"""

import ast
import math
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from openrlhf.cli.main import COMMANDS
from openrlhf.config.cli import WITHOUT_EFFECT, Reading, parse_config
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.utils.user_code import split_name
from tests.helpers.configs import CONFIGS
from tests.helpers.documents import DOCUMENTS, FENCE, Block, blocks, commands, named
from tests.source import ROOT, modules

README = DOCUMENTS[0].read_text()
OF_LAUNCHERS = {"nproc_per_node", "module", "address"}
OTHER_PROGRAMS = {"venv", "vllm.entrypoints.openai.api_server"}  # python -m ... that is not ours


def cases(language: str) -> list[object]:
    return [pytest.param(block, id=block.where) for block in blocks(language)]


def training_command(words: list[str]) -> tuple[str, list[str]] | None:
    """Module in openrlhf.cli and flags of a command that trains; None for any other."""
    program, *rest = words
    if program == "python" and rest[0].endswith(".py"):
        return None
    if program == "openrlhf":
        rest = rest[1:] if rest[0] == "check" else rest
        return COMMANDS[rest[0]][0], rest[1:]
    if program == "ray" and rest[:2] == ["job", "submit"]:
        return training_command(rest[rest.index("--") + 1 :])
    if program in ("python", "python3", "deepspeed", "torchrun"):
        at = next(i for i, word in enumerate(rest) if word in ("-m", "--module"))
        if rest[at + 1] in OTHER_PROGRAMS:
            return None
        package, _, name = rest[at + 1].rpartition(".")
        assert package == "openrlhf.cli", words
        return name, rest[at + 2 :]
    return None


def parse(module: str, flags: list[str]) -> Reading:
    """What the command itself makes of its flags."""
    return parse_config(import_module(f"openrlhf.cli.{module}").main.config_class, flags)


def check_other(words: list[str]) -> None:
    """A command that does not train: make, pip, ray start, venv."""
    program, *rest = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert rest and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in rest)
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        wanted = re.fullmatch(r"\.(?:\[([\w,]+)\])?", rest[-1])
        assert rest[0] == "install" and wanted, "install from the checkout only"
        for extra in (wanted[1] or "vllm").split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    elif program in ("bash", "python"):
        assert (ROOT / rest[0]).is_file()
    else:
        assert (program, rest[0]) in {
            *(("ray", "start"), ("ray", "stop")),
            *(("python3", "-m"), ("lm_eval", "run")),
        }


@pytest.mark.parametrize("block", cases("bash"))
def test_every_command_is_one_that_works(block: Block, checkout: Path) -> None:
    found = commands(block, checkout)
    assert found
    for words in found:
        training = training_command(words)
        if training is None:
            check_other(words)
        elif "--help" in training[1]:
            assert find_spec(f"openrlhf.cli.{training[0]}")
        else:
            parsed = parse(*training)
            # What a document shows should run without a word of advice.
            assert all(line.startswith("--advantage_estimator") for line in parsed.notices)
            if isinstance(parsed.config, PPOConfig):
                for place in parsed.config.reward.functions:
                    assert Path(split_name(place)[0]).is_file()


@pytest.mark.parametrize("block", cases("python"))
def test_every_reward_function_scores(block: Block, checkout: Path) -> None:
    from openrlhf.rewards.base import RewardBatch
    from openrlhf.rewards.function import UserFunctions

    name = named(block)
    assert name is not None, "say the file's name in the first line"
    batch = RewardBatch(
        queries=["1+1=2", "1+1=3", "2+2=4"],
        prompts=["1+1=", "1+1=", "2+2="],
        responses=["2", "3", "4"],
        labels=["2", "2", "4"],
        columns={"answer": ["2", "2", "4"], "datasource": ["sums"] * 3},
    )
    rewards = UserFunctions.load(name).answer(batch).rewards
    assert all(map(math.isfinite, rewards))
    assert rewards[0] == rewards[2] > rewards[1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "AGENTS.md"], ids=lambda path: path.name)
def test_files_and_flags_named_in_the_text_exist(document: Path) -> None:
    text = FENCE.sub("", document.read_text())
    roots = (ROOT, ROOT / "openrlhf", document.parent)
    for name in re.findall(r"`([\w/]+/[\w/]+\.py)`", text):
        assert any((root / name).is_file() for root in roots), name
    from openrlhf.config.cli import flag_table

    known = {"config", "debug", "help", "flag", *WITHOUT_EFFECT}.union(*map(flag_table, CONFIGS))
    for flag in re.findall(r"(?<![\w-])--([a-z][\w.-]*)", text):
        assert flag.rstrip(".-") in known | OF_LAUNCHERS, flag


def test_names_of_the_architecture_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "openrlhf").rglob("*.py"))
    names = re.findall(r"`(\w+)`", FENCE.sub("", (ROOT / "docs/architecture.md").read_text()))
    assert set(names) <= set(re.findall(r"\w+", source))


def test_the_readme_lists_the_commands() -> None:
    for name, (module, _) in COMMANDS.items():
        assert f"`openrlhf {name}`" in README
        assert f"`python -m openrlhf.cli.{module}`" in README
        assert find_spec(f"openrlhf.cli.{module}"), "or torchrun -m finds nothing"


@pytest.mark.parametrize(
    ("page", "cell"),
    [
        ("training", r"\[`openrlhf {}`\]\(methods/{}\.md\)"),
        ("training", r".*`{}`.* \| `\w+` \|"),  # and the metrics of its best model
        ("configuration", r".*`{}`.* \| `deepspeed --module"),
        ("python-api", r".*`{}`.* \| .* \| .*Trainer`"),
        ("reference/python", r".*(?:\.|`){}`.* \| `Supervised`"),
    ],
)
def test_every_method_is_in_the_tables_of_commands(page: str, cell: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for name in METHODS:
        assert re.search(rf"^\| {cell.replace('{}', name)}", text, re.MULTILINE), name


def test_settings_of_trl_are_settings_that_it_has() -> None:
    import dataclasses

    import transformers
    import trl

    kinds = (
        trl.ModelConfig,
        trl.ScriptArguments,
        trl.SFTConfig,
        trl.DPOConfig,
        trl.KTOConfig,
        trl.GRPOConfig,
    )
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    known |= {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    text = (ROOT / "docs" / "from-trl.md").read_text()
    cells = re.findall(r"^\| (`[a-z].*?) \|", text[text.index("## Flags of all") :], re.MULTILINE)
    names = {re.findall(r"`([\w]+)`", cell)[0] for cell in cells}
    assert len(names) > 40
    assert names <= known | {"reward_funcs"}, "an argument of the trainer, not of its settings"


def test_the_site_builds_with_strict_links_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(DOCUMENTS)
    for page in pages:
        tags = re.findall(r"<(?:script|img|link|iframe)\b[^>]*>", page.read_text())
        loaded = [tag for tag in tags if "canonical" not in tag and 'rel="next"' not in tag]
        assert not [tag for tag in loaded if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag)], (
            page
        )
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_nothing_says_that_it_is_still_to_be_built():
    texts = {module.where: module.text for module in modules("openrlhf")}
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
    words = re.compile(r"not[ _]built|not (?:yet )?implemented|not supported yet", re.IGNORECASE)
    assert [where for where, text in texts.items() if words.search(text)] == []


def test_nobody_is_told_to_install_the_name_on_the_index() -> None:
    others = [ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *(ROOT / "openrlhf").rglob("*.py")]
    for document in [*DOCUMENTS, *others]:
        assert not re.search(r"pip install\s+(-U\s+)?[\"']?openrlhf", document.read_text())


def columns_that_are_logged(source: str) -> set[str]:
    """Names that stand in a dictionary of a function that logs each of its columns."""
    names: set[str] = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
        if not any(call.startswith(("metrics.add(name,", "add_means(")) for call in calls):
            continue
        keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
        keys += [
            node.slice
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        ]
        names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return names


def test_the_page_of_metrics_names_what_is_logged():
    text = (ROOT / "docs" / "metrics.md").read_text()
    sources = [path.read_text() for path in (ROOT / "openrlhf").rglob("*.py")]
    logged = {name for s in sources for name in re.findall(r'etrics\.add\(\s*"([\w/]+)"', s)}
    logged |= {f"timing/{name}" for s in sources for name in re.findall(r'timed\("(\w+)"', s)}
    by_column = {name for source in sources for name in columns_that_are_logged(source)}
    assert {"reward", "values", "vllm_kl", "gpt_loss"} <= by_column
    logged |= by_column - {"is_ratio"}  # of a staleness only, which the page names as <name>
    assert len(logged) > 40
    assert sorted(name for name in logged if f"`{name}`" not in text) == []
