"""The READMEs' commands are ones that the scripts accept, and their links lead somewhere."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT, assert_close, checkpoint, run

from algos import filter_br
from utils.envs import evaluate, make_env

READMES = [ROOT / "README.md", ROOT / "runs" / "results" / "README.md"]
COMMANDS = sorted(
    {line.split("  #")[0].strip() for path in READMES for line in re.findall(r"^ {4,}python ((?:algos|utils)/\w+\.py.*)$", path.read_text(), re.M)}
)


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
    shown = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0 and "usage: " in shown.stdout.lower(), shown.stderr


@pytest.mark.parametrize("learner", ["sac", "td3_bc"])
def test_what_was_learned_in_your_own_code(learner, tiny, tmp_path, capsys):
    """The README's lines as they stand: the selected policy, and the reward, worked out again by hand."""
    folder, args = tmp_path / "run", tiny(learner=learner, standardize=True)
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps(filter_br.describe_run(args)))
    run(args, folder)
    capsys.readouterr()
    (block,) = re.findall(r"^    import json\n(?:(?:    .*)?\n)*", READMES[0].read_text(), re.M)
    names = {}
    exec(textwrap.dedent(block).replace("runs/RUN", str(folder)), names)
    assert float(capsys.readouterr().out) == evaluate(make_env(args.env_id, p_tremble=args.p_tremble), names["policy"], 10)["return"] > 0

    saved, x = torch.load(folder / "policy.pt", weights_only=True)["actor"], np.float32([[2.0, 0.3, -0.7]])  # 2 observations, 1 action

    def layers(x, state, net):
        x = (x - state[f"{net}0.center"].numpy()) / state[f"{net}0.spread"].numpy()
        for i in (1, 3):
            x = np.maximum(x @ state[f"{net}{i}.weight"].numpy().T + state[f"{net}{i}.bias"].numpy(), 0)
        return x

    mean = layers(x[:, :2], saved, "hidden.") @ saved["mean.weight"].numpy().T + saved["mean.bias"].numpy()
    assert_close(names["policy"](x[0, :2]), np.tanh(mean[0]))
    f = checkpoint(folder)["f"]
    assert_close(names["f"](torch.from_numpy(x)), np.tanh(layers(x, f, "net.") @ f["net.5.weight"].numpy().T + f["net.5.bias"].numpy())[:, 0])


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
