"""SLURM and Docker scripts: understood as they stand, and run where `srun` is this very machine."""

import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.supervised import DPOConfig
from openrlhf.utils.tracker import read_metrics
from tests.helpers.processes import wait_for_a_step, wait_until
from tests.helpers.scripts import SCRIPTS, TINY_RL
from tests.integration.heads import free_ports
from tests.source import ROOT

JOB = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
RECORDER = '#!/bin/sh\nprintf "%s\\n" "$@" > "$RECORD"\n'
# Two nodes that are both this machine. A step without --nodelist has a task on each of them.
SCONTROL = r"""#!/bin/sh
if [ "$1" = requeue ]; then
    echo "requeued $2" >> "$RECORD"
else
    printf 'localhost\nlocalhost\n'
fi
"""
SRUN = """#!/bin/bash
if [[ -n ${RECORD:-} ]]; then echo $$ > "$RECORD.pid"; fi
count=$SLURM_NNODES
while [[ $1 == --* ]]; do
    if [[ $1 == --nodelist=* ]]; then count=1; fi
    shift
done
tasks=()
trap 'kill "${tasks[@]}" 2> /dev/null; wait; exit 143' TERM
for ((task = 0; task < count; task++)); do
    "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
HOSTNAME = "#!/bin/sh\necho 127.0.0.1\n"


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., str]:
    """Puts commands before all others, and returns the search path that finds them."""

    def put(**commands: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in commands.items():
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])

    return put


def run_script(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    command = ["bash", str(SCRIPTS / name), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=560, cwd=ROOT)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_bash_and_says_what_it_is(path):
    subprocess.run(["bash", "-n", path], check=True)
    first, second = path.read_text().splitlines()[:2]
    assert first == "#!/usr/bin/env bash" or path.name == "offline_steps.sh"
    assert second.startswith("#")
    assert os.access(path, os.X_OK) == (path.name != "offline_steps.sh")


def test_the_document_lists_every_script_and_shows_jobs_that_can_be_submitted():
    text = (ROOT / "docs" / "examples.md").read_text()
    listed = re.findall(r"\(\.\./examples/scripts/([\w.]+)\)", text[: text.index("## SLURM")])
    files = [path.name for path in SCRIPTS.glob("*.sh") if not path.is_symlink()]
    assert sorted(listed) == sorted(files)
    nodes = (ROOT / "docs" / "nodes.md").read_text()
    jobs = re.findall(r"^.*\bsbatch .*\.sh$", nodes, re.MULTILINE)
    assert len(jobs) == 3
    for job in jobs:
        for name in re.findall(r"\S*examples/scripts/\S+", job):
            assert (ROOT / name.rpartition("=")[2]).is_file()
        assert "slurm" in job.split()[-1].rpartition("/")[2]


def test_slurm_starts_torchrun_on_every_node_with_flags_that_are_understood(install, tmp_path):
    record = tmp_path / "words"
    path = install(srun=RECORDER, scontrol=SCONTROL)
    run_script(
        "train_llama_slurm.sh", PATH=path, RECORD=str(record), GPUS="4", **JOB
    ).check_returncode()
    words = record.read_text().splitlines()
    at = words.index("-m")
    assert words[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    assert dict(zip(words[2:at:2], words[3:at:2], strict=True)) == {
        "--nnodes": "2",
        "--nproc_per_node": "4",
        "--rdzv_id": "12345",
        "--rdzv_backend": "c10d",
        "--rdzv_endpoint": "localhost:22345",
    }
    assert words[at + 1] == "openrlhf.cli.train_dpo"
    config = parse_config(DPOConfig, words[at + 2 :]).config
    assert config.ckpt.load_enable  # what SLURM requeues goes on


RUN = """#!/bin/bash
trap 'sleep 0.5; echo saved >> "$RECORD"; exit 130' TERM
echo $$ > "$RECORD.pid"
echo runs >> "$RECORD"
while true; do sleep 0.1; done
"""
SCANCEL = """#!/bin/sh
if [ "$*" = "--signal=TERM 12345" ]; then kill -TERM "$(cat "$RECORD.pid")"; fi
"""


def test_a_run_whose_time_is_over_saves_before_slurm_queues_it_again(install, tmp_path):
    record = tmp_path / "record"
    record.touch()
    # The run is the step of one script, and a command in that of the other one, where Ray is up.
    (tmp_path / "rl.sh").write_text("set -e\ntraining\necho not reached >> $RECORD\n")
    quick = {"srun": RUN, "scontrol": SCONTROL, "scancel": SCANCEL}
    with_ray = {"scontrol": SCONTROL, "srun": "#!/bin/sh\n", "python": "#!/bin/sh\n"}
    for name, commands in (
        ("train_llama_slurm.sh", quick),
        ("train_ppo_llama_ray_slurm.sh", with_ray | {"training": RUN}),
    ):
        more = {"PATH": install(**commands), "RECORD": str(record)}
        env = os.environ | JOB | more | {"SCRIPT": str(tmp_path / "rl.sh")}
        with subprocess.Popen(["bash", str(SCRIPTS / name)], env=env, cwd=ROOT) as job:
            wait_until(lambda: "runs" in record.read_text())
            job.send_signal(signal.SIGUSR1)
            assert job.wait(20) == 0
        assert record.read_text().splitlines() == ["runs", "saved", "requeued 12345"]
        record.write_text("")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_queued_again_goes_on_where_its_run_saved(install, tiny_variables, tmp_path):
    path, record = install(srun=SRUN, scontrol=SCONTROL, scancel=SCANCEL), tmp_path / "record"
    data, run = Path(tiny_variables["DATA"]).parent / "pairs.jsonl", tmp_path / "run"
    flags = "--train_batch_size 4 --micro_train_batch_size 4 --max_len 64 --max_epochs 100"
    env = {**os.environ, **tiny_variables, **JOB, "SLURM_NNODES": "1", "PATH": path}
    env |= {"CHOSEN_KEY": "chosen", "REJECTED_KEY": "rejected", "EXTRA_ARGS": flags}
    env |= {"DATA": str(data), "OUT": str(run), "RECORD": str(record), "OMP_NUM_THREADS": "1"}
    job = ["bash", str(SCRIPTS / "train_llama_slurm.sh")]
    with subprocess.Popen(job, env=env, cwd=ROOT) as process:
        wait_for_a_step(run, process, metric="loss")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(200) == 0
    assert record.read_text() == "requeued 12345\n"
    [saved] = [int(path.name.removeprefix("global_step")) for path in run.glob("checkpoints/g*")]
    assert 1 <= saved < 200
    subprocess.run(job, env=env, cwd=ROOT, check=True, timeout=300)
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if "lr" in line]
    assert steps == list(range(1, 201)) and (run / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rl_trains_on_a_ray_cluster_of_the_nodes_of_a_slurm_job(install, tiny_variables, tmp_path):
    path = install(srun=SRUN, scontrol=SCONTROL, hostname=HOSTNAME)
    result = run_script(
        "train_ppo_llama_ray_slurm.sh",
        **tiny_variables,
        **JOB,
        SCRIPT="examples/scripts/train_grpo_hybrid.sh",
        PATH=path,
        PORT=str(free_ports(1)[0]),
        RAY_ARGS="--num-cpus 4 --object-store-memory 100000000 --dashboard-agent-listen-port 0",
        OUT=str(tmp_path / "run"),
        EXTRA_ARGS=TINY_RL,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "0 GPU(s), 8 core(s)" in result.stdout  # 4 of each node
    assert not Path(f"/tmp/ray-{JOB['SLURM_JOB_ID']}").exists()
    assert (tmp_path / "run" / "model.safetensors").is_file()


DOCKER = """#!/bin/sh
printf '%s\\n' "$@" >> "$RECORD"
if [ "$1" = images ]; then printf '%s' "$IMAGE_ID"; fi
"""


@pytest.mark.parametrize("image_id", ["", "0123abcd"])
def test_docker_builds_the_image_once_and_runs_the_command_in_this_folder(
    install, tmp_path, image_id
):
    record = tmp_path / "words"
    variables = {"PATH": install(docker=DOCKER), "RECORD": str(record), "IMAGE_ID": image_id}
    script = ["bash", "examples/scripts/train_sft.sh"]
    cache = {"HF_HOME": str(tmp_path / "hf"), "DOCKER_ARGS": "--env MODEL=m"}
    run_script("docker_run.sh", *script, **variables, **cache).check_returncode()
    words = record.read_text().splitlines()
    assert ("build" in words) == (image_id == "")
    if not image_id:
        assert words[words.index("--file") + 1] == str(ROOT / "dockerfile" / "Dockerfile")
    assert words[-5:] == ["--env", "MODEL=m", "openrlhf", *script]
    assert f"{ROOT}:/work" in words and f"{tmp_path / 'hf'}:/hf" in words


def test_the_dockerfile_copies_what_is_there_and_installs_extras_that_exist():
    text = (ROOT / "dockerfile" / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert [source for source in sources if not (ROOT / source).exists()] == []
    named = re.findall(r"EXTRAS=([\w,]+)", text)
    assert len(named) == 2  # the default, and the example
    extras = {extra for names in named for extra in names.split(",")}
    assert extras <= project["optional-dependencies"].keys()
    # What the build of the package reads is copied before it.
    before = text[: text.index("RUN pip install")]
    for needed in ("pyproject.toml", project["readme"], *project["license-files"]):
        assert needed in before
    assert re.search(r"PYTHON_IMAGE=python:3\.1[1-9]", text)  # vLLM needs 3.11
