"""The files around the code: continuous integration, images, and the wheel's constraints."""

import os
import re
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mage_services.cli.main import COMMANDS, command_tree

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CLUSTER = ROOT / "docs" / "cluster"
OTHERS = {
    "docker",
    "ray",
    "hostname",
    "grep",
    "sleep",
    "mkdir",
    "chown",
    "useradd",
    "apt-get",
    "rm",
}
"""Programs that the project does not bring along."""


def parts() -> list[str]:
    """The parts of `.ci/run`, in its order."""
    found = re.search(r"^PARTS=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert found
    return found[1].split()


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in WORKFLOWS:
        yield from yaml.safe_load(file.read_text())["jobs"].items()


def test_every_part_of_ci_is_a_function_and_an_unknown_one_is_refused():
    text = (ROOT / ".ci" / "run").read_text()
    assert all(re.search(rf"^{part}\(\)", text, re.MULTILINE) for part in parts())
    done = subprocess.run([ROOT / ".ci" / "run", "lnit"], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"there is no part 'lnit'; the parts are: {' '.join(parts())}" in done.stderr


def test_the_workflows_run_every_part_of_ci_and_nothing_else_of_it():
    run = set[str]()
    for _, job in jobs():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            script, *arguments = shlex.split(
                re.sub(r"\$\{\{ *([\w.]+) *\}\}", r"\1", step.get("run", ": :"))
            )
            if script != ":":
                assert (ROOT / script).stat().st_mode & 0o100, script
            if script == ".ci/run":
                run |= set(matrix["part"] if arguments == ["matrix.part"] else arguments)
    assert run == {*parts()}


def test_the_workflows_try_exactly_the_supported_pythons():
    pythons = {
        each
        for _, job in jobs()
        for each in job.get("strategy", {}).get("matrix", {}).get("python", ())
    }
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    assert pythons == {f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in supported}
    named = "Programming Language :: Python :: 3."
    assert pythons == {
        each[len(named) - 2 :]
        for each in PROJECT["project"]["classifiers"]
        if each.startswith(named)
    }


def test_the_hooks_of_a_commit_use_what_the_extra_dev_installs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    names = {Requirement(each).name for each in PROJECT["project"]["optional-dependencies"]["dev"]}
    assert "pre-commit" in names
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert program in names
        assert all((ROOT / each).is_file() for each in arguments if "/" in each)


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands of a shell text, and those whose output they use."""
    inner = re.compile(r"\$\$?\(([^()]*)\)")
    for part in (*inner.findall(text), inner.sub("x", text.replace("\\\n", " "))):
        for command in re.split(r"&&|\|\||[;|\n]", part):
            words = [each for each in shlex.split(command) if each not in ("until", "do", "done")]
            if words and words[0] != "[":
                yield words


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_an_image_names_files_extras_and_commands_that_exist(name):
    text = (CLUSTER / name).read_text()
    assert "has not been built or run" in text
    lines = text.replace("\\\n", " ").splitlines()
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "RUN":
            for words in commands_of(rest):
                assert words[0] in {"pip", "python3"} | OTHERS, words
                for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
                    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}
                if "-c" in words:
                    assert (ROOT / words[words.index("-c") + 1]).is_file()
        if instruction == "CMD":
            command_tree().parse_args(yaml.safe_load(rest))
    assert {line.split()[0] for line in lines if line and line[0] not in "# "} <= {
        "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD",
    }  # fmt: skip


def test_the_two_nodes_of_compose_and_of_kuberay_run_commands_that_exist():
    nodes = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    assert len(nodes) == 2
    build = nodes["head"]["build"]
    assert (CLUSTER / build["context"] / build["dockerfile"]).is_file()
    kuberay = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    texts = [kuberay["spec"]["entrypoint"], *(node["command"][0] for node in nodes.values())]
    found = [words for text in texts for words in commands_of(text)]
    assert {words[0] for words in found} <= {"mage"} | OTHERS
    for words in found:
        if words[0] == "mage":
            assert words[1] in COMMANDS
            command_tree().parse_args(words[1:])


SLURM = {
    "scontrol": "echo node-1",
    "srun": 'case "$*" in *hostname*) echo 10.0.0.1;; esac',
    "ray": 'echo " 1 node_1"',
    "mage": """echo "$@"
[ "$1" = doctor ] && exit
trap "exit 143" TERM
sleep 0.3  # until the job has its trap
kill $PPID
sleep 5 >/dev/null 2>&1 & wait""",
}
"""Scripts that stand for the programs of a cluster; `mage train` sends SIGTERM to its job."""


def test_a_slurm_job_that_is_preempted_ends_its_run_and_goes_on_with_it_later(tmp_path):
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "node-1", "JOB_NUM_NODES": "1", "JOB_ID": "7", "CPUS_PER_TASK": "2"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", CLUSTER / "slurm.sh", "--config", "gpu8"],
        env=variables | path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    command = "train --cluster 10.0.0.1:6379 --resume --run-dir runs/slurm-7 --config gpu8"
    assert ended.stdout.splitlines()[-1] == command


def test_the_constraints_pin_every_dependency_within_its_bounds():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    pinned = dict(line.split("==") for line in lines)
    for each in map(Requirement, PROJECT["project"]["dependencies"]):
        name = each.name.lower().replace("_", "-")
        assert each.specifier.contains(pinned[name], prereleases=True), each
