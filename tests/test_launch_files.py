"""The launch files of the documents: what a shell and a YAML parser read is what is meant."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from meshwright.trainer.settings import read_settings

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/guides/clusters.md").read_text(encoding="utf-8")


def block(kind):
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return found


def test_the_slurm_file_is_a_script_that_trains():
    text = block("bash")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1" and "requeue" in options and options["signal"].startswith("TERM@")
    assert "srun --kill-on-bad-exit=1 meshwright train " in text


def test_the_kubernetes_file_starts_as_many_processes_as_it_says():
    yaml = pytest.importorskip("yaml", reason="the launch file is YAML")
    service, job = yaml.safe_load_all(block("yaml"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["JAX_NUM_PROCESSES"]["value"])
    host, port = variables["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}" and port.isdigit()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert "job-completion-index" in variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["command"][:2] == ["meshwright", "train"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*_*.toml")), ids=lambda path: path.stem)
def test_the_recipes_have_settings_that_exist(path):
    found = read_settings(path, {})
    assert found.folder == f"runs/{path.stem}" and found.rows % 8 == 0
    for line in re.findall(r"--set (\S+?)=", path.read_text(encoding="utf-8")):
        table, _, name = line.rpartition(".")
        owner = getattr(found, table) if table else found
        assert isinstance(owner, dict) or hasattr(owner, name), line
    assert tomllib.loads(path.read_text(encoding="utf-8"))["data"]["path"] == "corpus"
