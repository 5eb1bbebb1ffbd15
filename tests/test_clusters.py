"""The files of docs/clusters: their fields, and what `surojax train` takes from the environment that they make."""

import argparse
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small import quick_at

from surojax.cluster.early import STOPPED
from surojax.cluster.hosts import Hosts, detect
from surojax.command_line import split_flags
from surojax.config.fields import FIELDS
from surojax.errors import EXIT_CODES, REFUSED, exit_codes
from surojax.planner.gpus import POOL

DOCS = Path(__file__).parents[1] / "docs"
FILES = DOCS / "clusters"


def loaded(name: str) -> dict:
    return yaml.safe_load((FILES / name).read_text())


def environment(container: dict) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


SET = {"NCCL_DEBUG": "WARN", "XLA_PYTHON_CLIENT_MEM_FRACTION": str(POOL)}


def check_pod(pod: dict) -> None:
    """The pod's container mounts all volumes of the pod; one is its shared memory, in memory."""
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys() and set(mounted.values()) == {"/shared", "/dev/shm"}
    assert volumes["memory"]["emptyDir"]["medium"] == "Memory" and mounted["memory"] == "/dev/shm"
    assert pod["terminationGracePeriodSeconds"] >= 300


def check_command(words: list[str]) -> None:
    """A command trains on all GPUs, into a folder that is shared, with a config that exists."""
    assert words[:2] == ["surojax", "train"]
    rest, overrides = split_flags(words[2:], argparse.ArgumentParser(), FIELDS)
    assert rest[0] == "--config" and (DOCS.parent / rest[1]).is_file()
    fields = dict(overrides)
    assert fields["gpus"] == "0"
    shared = ("/shared/", "$HOME/")
    assert all(fields[name].startswith(shared) for name in ("output_dir", "data", "tokenizer"))


PUBLISHED = json.loads((Path(__file__).parent / "fixtures/cluster_fields.json").read_text())
PYTHON = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict, "any": object}


def unknown(fields: dict[str, dict[str, str]], value: dict, path: str = "") -> list[str]:
    """Fields of an object, and of those in it, that its schema does not have, or has with another type."""
    if path not in fields:  # any keys, as those of limits
        return []
    found = []
    for name, part in value.items():
        inner = f"{path}.{name}".lstrip(".")
        kinds = tuple(PYTHON[kind] for kind in fields[path].get(name, "").split(" or ") if kind in PYTHON)
        if not isinstance(part, kinds):
            found.append(inner)
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, dict):
                found += unknown(fields, each, inner + "[]" * isinstance(part, list))
    return found


@pytest.mark.parametrize("file", PUBLISHED)
def test_the_published_schemas_have_every_field(file):
    """Those of Kubeflow's and SkyPilot's packages; fixtures/make_cluster_fields.py read them."""
    fields = PUBLISHED[file]["fields"]
    found = loaded(file)
    assert unknown(fields, found) == []
    assert unknown(fields, found | {"replicas": 2, "metadata": "x"})[-1] in ("replicas", "metadata")  # it would notice


def test_the_jobset():
    """Its fields agree with each other, and with what JobSet makes of them."""
    found = loaded("jobset.yaml")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (workers,) = found["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0 and workers["replicas"] == 1
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["command"] + container["args"])
    n = job["parallelism"]
    assert job["completions"] == n and environment(container)["JAX_NUM_PROCESSES"] == str(n)
    check_pod(pod)
    assert SET.items() <= environment(container).items()
    # The name that JobSet gives to the first pod: <jobset>-<job>-<replica>-<index>.<jobset>
    name = found["metadata"]["name"]
    address = f"{name}-{workers['name']}-0-0.{name}:8476"
    taken = detect(environment(container) | {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert taken == Hosts("Kubeflow", address, n, 1)


def test_the_trainjob():
    found = loaded("trainjob.yaml")
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert found["spec"]["runtimeRef"]["name"] == "jax-distributed"
    trainer = found["spec"]["trainer"]
    check_command(trainer["command"] + trainer["args"])
    assert environment(trainer) == SET
    (patch,) = found["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    check_pod(pod)
    assert job["name"] == pod["containers"][0]["name"] == "node"  # as the runtime names them


def test_the_skypilot_file():
    found = loaded("skypilot.yaml")
    assert found["num_nodes"] == 2 and re.fullmatch(r"\w+:\d", found["resources"]["accelerators"])
    check_command(shlex.split(found["run"].replace("\\\n", " ")))
    assert found["envs"] == SET and found["config"]["docker"]["run_options"] == ["--shm-size=16g"]


SRUN = """#!{python}
# Starts the tasks of the step as Slurm would, with its variables; returns the highest exit code.
import os, subprocess, sys
command = sys.argv[1:]  # an option of srun's, such as --kill-on-bad-exit, which 75 would set off, is no command
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}}
tasks = [subprocess.Popen(command, env=os.environ | step | {{"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)}})
         for i in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""
TASK = """#!{python}
import os, pathlib, sys
from surojax.cluster.hosts import detect, local_gpus
found = detect(os.environ)
folder = pathlib.Path(os.environ["HOME"])
(folder / f"task-{{found.process_id}}").write_text(repr((tuple(found), local_gpus(found, {{}}, 8), sys.argv[1:])))
sys.exit({code})
"""


@pytest.mark.full
@pytest.mark.parametrize("code, requeued", quick_at([(0, False), (1, False), (75, True)], 2))
def test_the_sbatch_file_with_an_srun_of_its_own(tmp_path, code, requeued):
    """Each task is one of two processes with all GPUs of its node; only 75 requeues; the code is the job's."""
    programs = {
        "srun": SRUN.format(python=sys.executable),
        "surojax": TASK.format(python=sys.executable, code=code),
        "scontrol": '#!/bin/sh\necho "$@" > "$HOME/requeued"\n',
    }
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").write_text("")
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "4097",
        "SLURM_NTASKS": "2",
    }
    script = FILES / "train.sbatch"
    done = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    for i in range(2):
        found = (tmp_path / f"task-{i}").read_text()
        assert found.startswith(f"(('Slurm', 'node1:61441', 2, {i}, 0, 1), None, ['train', '--config'")
        assert f"--config.output_dir={tmp_path}/runs" in found and "'--config.gpus=0'" in found
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 4097\n"
    options = re.findall(r"#SBATCH --([\w-]+)", script.read_text())
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal", "output"} <= set(options)
    exported = dict(re.findall(r"^export (\w+)=(\S+)", script.read_text(), re.MULTILINE))
    assert exported == SET


def test_the_page_names_every_file():
    text = (DOCS / "clusters.md").read_text()
    assert {p.name for p in FILES.iterdir()} == set(re.findall(r"\(clusters/([\w.]+)\)", text))


def test_exit_codes_are_those_of_help_and_of_the_page(capsys):
    rows = re.findall(r"^\| (\d{1,3}) \| (.+) \|$", (DOCS / "clusters.md").read_text(), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
    assert EXIT_CODES.keys() == {0, 1, REFUSED, STOPPED, 128 + signal.SIGINT}
    for command in ("train", "launch"):
        with pytest.raises(SystemExit):
            importlib.import_module(f"surojax.{command}").main(["--help"])
        assert exit_codes() in capsys.readouterr().out
