"""Imports point down, siblings are blind to each other, and heavy libraries stay at home."""

import ast
import graphlib
import re
import sys

from tests.source import ROOT, Import, Module, modules

MODULES = modules()

LAYERS = {
    "errors": 1,
    "algorithms": 1,
    "config": 2,
    "utils": 3,
    "models": 4,
    "engines": 4,
    "distributed": 4,
    "datasets": 4,
    "rewards": 4,
    "report": 4,
    "rollout": 5,
    "trainer": 6,
    "commands": 7,
    "cli": 8,
    "api": 9,
}

# Third-party libraries a module may import at its top; the longest matching name counts.
HOMES = {
    "openrlhf.errors": set(),
    "openrlhf.config": {"pydantic", "pydantic_core", "yaml"},
    "openrlhf.algorithms": {"torch", "numpy"},
    "openrlhf.utils": {"torch", "rich"},
    "openrlhf.utils.tokenizer": {"torch", "transformers", "huggingface_hub"},
    "openrlhf.utils.worker_process": {"psutil"},
    "openrlhf.utils.images": {"torch", "transformers", "PIL"},
    "openrlhf.utils.rollout": {"torch", "numpy"},
    "openrlhf.rewards.remote": {"httpx"},
    "openrlhf.rewards.math_expressions": {"math_verify", "mpmath", "sympy"},
    "openrlhf.datasets": {"torch", "datasets", "pyarrow", "filelock"},
    "openrlhf.models": {"torch", "transformers", "peft", "huggingface_hub"},
    "openrlhf.engines": {"torch"},
    "openrlhf.engines.vllm": {"torch", "vllm"},
    "openrlhf.engines.weight_receiver": {"torch", "vllm"},
    "openrlhf.engines.own_generate": {"torch", "transformers"},
    "openrlhf.distributed": {"torch", "deepspeed", "numpy"},
    "openrlhf.distributed.folders": {"torch", "psutil"},
    "openrlhf.distributed.weights": {"torch", "transformers"},
    "openrlhf.distributed.export": {"torch", "deepspeed", "safetensors", "transformers"},
    "openrlhf.report": {"jinja2", "matplotlib", "pyarrow", "yaml"},
    "openrlhf.report.sample_index": {"duckdb", "pyarrow"},
    "openrlhf.report.server": {"fastapi", "uvicorn"},
    "openrlhf.rollout": {"torch"},
    "openrlhf.rollout.agents.episodes": {"torch", "pydantic"},
    "openrlhf.rollout.agents.openai_server": {"fastapi", "pydantic", "pydantic_core", "uvicorn"},
    "openrlhf.trainer": {"torch"},
    "openrlhf.commands.check": {"torch", "transformers", "psutil", "rich"},
    "openrlhf.commands": {"torch", "transformers"},
    "openrlhf.commands.doctor": {"torch", "psutil", "packaging"},
    "openrlhf.commands.serve_rm": {"torch", "fastapi", "pydantic", "starlette", "uvicorn"},
    "openrlhf.trainer.ppo_utils": {"torch", "numpy"},
    "openrlhf.trainer.ray": {"torch", "ray", "psutil"},
    "openrlhf.cli": set(),
    "openrlhf.api": set(),
}
LIGHT = {"openrlhf"} | set(sys.stdlib_module_names)


def package_of(name: str) -> str:
    """`openrlhf.trainer.ray.launcher` -> `trainer`."""
    return [*name.split("."), ""][1]


def trainer_part(name: str) -> str:
    """Which part of layer 6 a module is: a key of PARTS_BELOW."""
    part = name.split(".")[2] if name.count(".") >= 2 else ""
    if part in ("ray", "ppo_utils", "workers"):
        return part
    if part in ("local_cluster", "device_phases"):
        return "cluster"
    return "ppo_trainer" if part.startswith("ppo_") else "supervised"


PARTS_BELOW = {
    "supervised": {"supervised"},
    "ppo_trainer": {"ppo_trainer", "cluster", "ray", "workers", "ppo_utils"},
    "ray": {"ray", "cluster", "workers", "ppo_utils"},
    "cluster": {"cluster", "workers", "ppo_utils"},
    "workers": {"workers", "ppo_utils"},
    "ppo_utils": {"ppo_utils"},
}


def is_allowed(importer: str, imported: str) -> bool:
    """Whether a module may import another of this package."""
    above, below = package_of(importer), package_of(imported)
    if above == below == "trainer":
        return trainer_part(imported) in PARTS_BELOW[trainer_part(importer)]
    return above == below or below == "" or LAYERS[below] < LAYERS.get(above, 0)


def own_imports(module: Module) -> list[Import]:
    return [item for item in module.imports if item.name.split(".")[0] == "openrlhf"]


def allowed_libraries(name: str) -> set[str]:
    homes = [home for home in HOMES if name == home or name.startswith((home + ".", home + "_"))]
    return HOMES[max(homes, key=len)] if homes else set()


def test_every_package_has_a_layer():
    assert {package_of(module.name) for module in MODULES} - {""} <= set(LAYERS)


def test_imports_point_down_and_siblings_are_blind():
    wrong = [
        f"{module.where}:{item.line} imports {item.name}"
        for module in MODULES
        for item in own_imports(module)
        if not is_allowed(module.name, item.name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_run_in_a_circle():
    """Those of functions and of TYPE_CHECKING count too."""
    names = {module.name for module in MODULES}
    graph = {
        module.name: {
            item.name if item.name in names else item.name.rpartition(".")[0]
            for item in own_imports(module)
        }
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names a circle


def test_heavy_libraries_stay_at_home():
    wrong = []
    for module in MODULES:
        allowed = allowed_libraries(module.name) | LIGHT
        for item in module.imports:
            library = item.name.split(".")[0]
            if item.is_at_top and library not in allowed:
                wrong.append(f"{module.where}:{item.line} imports {library} at its top")
    assert not wrong, "\n".join(wrong)


ONLY_IN = {
    "ray": ("openrlhf/trainer/ray/",),
    "vllm": ("openrlhf/engines/",),
    "deepspeed": ("openrlhf/distributed/",),
    "peft": ("openrlhf/models/adapters.py", "openrlhf/distributed/weights.py"),
}


def test_one_folder_imports_a_heavy_library_in_functions_too():
    wrong = [
        f"{module.where}:{item.line} imports {item.name}"
        for module in MODULES
        for item in module.imports
        if (homes := ONLY_IN.get(item.name.split(".")[0])) and not module.where.startswith(homes)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_runs_on_ray_import_it():
    """`ppo-local`, check and eval work where Ray is not installed."""
    wrong = [
        f"{module.where}:{item.line} imports {item.name} at its top"
        for module in MODULES
        for item in own_imports(module)
        if item.is_at_top
        and item.name.startswith("openrlhf.trainer.ray")
        and not module.name.startswith("openrlhf.trainer.ray")
    ]
    assert not wrong, "\n".join(wrong)


def test_package_files_are_empty_but_for_the_name_that_users_files_import_from_utils():
    full = [m.where for m in MODULES if m.path.name == "__init__.py" and m.text.strip()]
    assert full == ["openrlhf/utils/__init__.py"]


def test_what_is_imported_from_the_package_is_there():
    """Benchmarks and GPU tests run rarely, and would be found broken late."""
    tops = {module.name: names_at_top(module) for module in MODULES}
    wrong = [
        f"{module.where}:{item.line} imports {item.name}"
        for folder in ("benchmarks", "examples", "tests")
        for module in modules(folder)
        for item in own_imports(module)
        if item.name not in tops
        and item.name.rpartition(".")[2] not in tops.get(item.name.rpartition(".")[0], ())
    ]
    assert not wrong, "\n".join(wrong)


def test_what_several_tests_need_stands_in_no_test_module():
    wrong = [
        f"{module.where}:{item.line} imports {item.name}"
        for folder in ("benchmarks", "tests")
        for module in modules(folder)
        for item in module.imports
        if item.name.startswith("tests.") and ".test_" in item.name
    ]
    assert not wrong, "\n".join(wrong)


def names_at_top(module: Module) -> set[str]:
    names = {item.name.rpartition(".")[2] for item in module.imports if item.is_at_top}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


DEVICE = re.compile(
    r"is_cuda|is_cpu|has_gpu|cuda\.is_available|device_type|device\.type|'cpu'|'cuda'"
)
SEAMS = {
    "engines/vllm_cpu.py",
    "models/packing.py",
    "distributed/collectives.py",
    "engines/weight_transfer.py",
    "engines/weight_receiver.py",
}
# Files that read the device for a default, for what a machine has or for a random generator.
READS_DEVICE = {
    "algorithms/tokens.py",
    "commands/check.py",
    "commands/check_memory.py",
    "distributed/checkpoints.py",
    "distributed/train_engine.py",
    "models/loading.py",
    "models/own_numbers.py",
    "models/support.py",
    "trainer/local_cluster.py",
    "trainer/ppo_utils/demands.py",
    "trainer/ray/cluster.py",
    "trainer/ray/placement.py",
    "utils/gpus.py",
}


def test_a_device_is_a_value_and_branches_on_it_are_where_they_are_known():
    found = {
        path.relative_to(ROOT / "openrlhf").as_posix()
        for path in (ROOT / "openrlhf").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.If | ast.IfExp) and DEVICE.search(ast.unparse(node.test))
    }
    assert found == SEAMS | READS_DEVICE
