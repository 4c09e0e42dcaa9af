"""The READMEs' commands are ones that the scripts accept, and their links lead somewhere."""

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import tyro
from conftest import ROOT

READMES = [ROOT / "README.md", ROOT / "runs" / "results" / "README.md"]
COMMANDS = sorted({line.split("  #")[0].strip() for path in READMES for line in re.findall(r"^ {4,}python ((?:algos|utils)/\w+\.py.*)$", path.read_text(), re.M)})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, monkeypatch):
    """Every flag exists, and of a training check_args finds no fault, demonstrations included: what it does before the first step."""
    script, *words = shlex.split(command)
    if script == "utils/demos.py" or "--help" in words:
        assert words == ["--help"] or words[0] in ("inspect", "verify") and (words[1].startswith("d4rl:") or (ROOT / words[1]).exists())
        return
    monkeypatch.setattr(sys, "argv", [script, *words])
    module = importlib.import_module(script[:-3].replace("/", "."))
    split = words.index("--") if "--" in words else len(words)
    args = tyro.cli(module.Args, args=words[:split])
    if script == "utils/sweep.py":
        assert len(module.plan(args, words[split + 1 :])) == len(args.algos) * len(args.env_ids) * len(args.seeds)
    elif hasattr(module, "check_args") and not {"runs/RUN", "..."} & set(words) and (getattr(args, "device", "cpu") == "cpu" or torch.cuda.is_available()):
        if args.env_id.startswith(("antmaze", "PointMaze")):
            pytest.importorskip("mujoco")
        module.check_args(args)


@pytest.mark.parametrize("script", ["algos/bc.py", "utils/demos.py", "utils/plot.py"])
def test_another_package_of_the_name_utils_is_not_taken_for_ours(script, tmp_path):
    """As some installed packages leave one at the top."""
    for name in ("utils", "algos"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    run = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "usage: " in run.stdout.lower(), run.stderr


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    """Each to a file that is there, and where it names a heading, to one of that file's."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, target
