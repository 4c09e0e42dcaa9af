"""Expert training: it resumes to the same numbers, and what it records is what it says."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from utils import train_expert as module
from utils.demos import load
from utils.envs import make_env
from utils.train_expert import Args, record_demonstrations, returns, train

ARGS = Args(env_id="Pendulum-v1", total_timesteps=400, eval_every=100, n_demos=2, learning_starts=64, train_freq=32, gradient_steps=4, batch_size=16)


def finish(out):
    train(ARGS, out)
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return checkpoint, [{name: value for name, value in row.items() if name != "steps_per_second"} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("expert")
    return out, *finish(out)


@pytest.mark.parametrize("interrupted", ["policy.pt", "checkpoint.pt"])
def test_resumes_to_the_same_numbers(uninterrupted, tmp_path, monkeypatch, interrupted):
    """Killed at the second evaluation, before and after its policy was saved: the same metrics, each row once, and the same weights."""
    _, checkpoint, rows = uninterrupted
    saved, save_atomically = [], module.save_atomically

    def killed(path, content):
        saved.append(path.name)
        if saved.count(interrupted) == 2:
            raise KeyboardInterrupt
        save_atomically(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "save_atomically", killed)
        train(ARGS, tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 100
    resumed, resumed_rows = finish(tmp_path)
    assert resumed_rows == rows and [row["step"] for row in rows] == [100, 200, 300, 400]
    for name, value in checkpoint["agent"]["actor"].items():
        assert torch.equal(value, resumed["agent"]["actor"][name]), name
    assert torch.equal(checkpoint["buffer"]["rows"], resumed["buffer"]["rows"]) and torch.equal(checkpoint["rng"], resumed["rng"])


def test_learns_from_the_true_reward(uninterrupted):
    """The buffer's last column is the environment's reward: Pendulum's lies in [-16.3, 0] and follows from observation and action."""
    _, checkpoint, _ = uninterrupted
    cos, sin, speed, action = checkpoint["buffer"]["rows"][:, :4].double().T
    reward = -(torch.atan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * action**2)
    untrembled = (reward - checkpoint["buffer"]["rows"][:, -1]).abs() < 1e-4  # a trembled step pays for another action
    assert 0.8 < untrembled.double().mean() < 1


def test_records_what_it_says(uninterrupted, monkeypatch):
    out, _, _ = uninterrupted
    monkeypatch.setattr(module, "returns", lambda args, actor, p, n, seed: returns(args, actor, p, 2, seed))  # 2 episodes instead of 100
    record_demonstrations(ARGS, out)
    demos = load(out / "Pendulum-v1.npz", make_env("Pendulum-v1"))
    assert demos.n_episodes == 2 and demos.p_tremble == 0 and np.array_equal(demos.actions, demos.executed_actions)
    notes = json.loads((out / "Pendulum-v1.json").read_text())
    assert notes["steps"] == 400 and set(notes["returns"]) == {"0", "0.1"} and notes["args"]["exp_name"] == "train_expert" and "out" not in notes["args"]
    actor = module.Actor(3, make_env("Pendulum-v1").action_space)
    actor.load_state_dict(torch.load(out / "policy.pt", weights_only=True)["actor"])
    assert notes["returns"]["0.1"]["mean"] == returns(ARGS, actor, 0.1, 2, (ARGS.seed, 27)).mean()


def test_refuses_to_go_on_with_other_arguments(tmp_path, monkeypatch):
    other = dataclasses.replace(ARGS, out=str(tmp_path), gamma=0.5)
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(other, gamma=0.98))))
    monkeypatch.setattr(module.tyro, "cli", lambda cls: other)
    with pytest.raises(SystemExit, match="another gamma"):
        module.main()
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"]
