"""Expert training: its arithmetic by value, that it learns and resumes to the same numbers, and that what it records is what it says."""

import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Counter, Interrupted, assert_close, box, generator, interrupt_file, same

from utils import train_expert as module
from utils.demos import load, record, save
from utils.envs import make_env
from utils.train_expert import Args, Policy, RunningNorm, advantages, clone, log_density, record_demonstrations, returns, train

ARGS = Args(env_id="Pendulum-v1", total_timesteps=192, eval_every=2, n_demos=2, n_envs=2, n_steps=16, n_epochs=2, batch_size=16, learning_rate=1e-3)


class Rightward(Counter):
    """The action is the reward, and nothing ends the episode but its 5 steps: the best policy always moves right, for a return of 5."""

    def step(self, action):
        return self.set_state([self.count + 1, np.clip(self.position + 0.1 * action[0], -1, 1)]), float(action[0]), False, False, {}


gym.register("Rightward-v0", Rightward, max_episode_steps=5)


# ------------------------------------------------------------------------------------------------------------------------------------- pieces


def test_advantages_by_hand():
    """gamma = lambda = 0.5, three environments with the same numbers; in the middle step the first terminates, the second is truncated, the third goes on.

    The temporal differences are 1 + 0.5 * 2 - 1 = 1, then 5 + 0.5 * 3 - 2 = 4.5 (or 5 - 2 = 3 where that next state is worth nothing), then
    3 + 0.5 * 4 - 3 = 2; each estimate is its own and a quarter of the next one's, where the episode has a next one.
    """
    rewards, values, next_values = (torch.tensor(column)[:, None].repeat(1, 3) for column in ([1.0, 5, 3], [1.0, 2, 3], [2.0, 3, 4]))
    terminated, ended = torch.zeros(3, 3), torch.zeros(3, 3)
    terminated[1, 0] = 1
    ended[1, :2] = 1
    expected = torch.tensor([[1 + 0.25 * 3, 1 + 0.25 * 4.5, 1 + 0.25 * 5], [3, 4.5, 4.5 + 0.25 * 2], [2, 2, 2]])
    assert_close(advantages(rewards, values, next_values, terminated, ended, 0.5, 0.5), expected)
    # lambda = 1 is the discounted sum of rewards up to the end, bootstrapped where it is the horizon's, less the value.
    first = advantages(rewards, values, next_values, terminated, ended, 0.5, 1.0)[0]
    assert_close(first, torch.tensor([1 + 0.5 * 5, 1 + 0.5 * 5 + 0.25 * 3, 1 + 0.5 * 5 + 0.25 * 3 + 0.125 * 4]) - 1)


def test_running_norm_is_that_of_all_rows():
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(300, 3)) * [1, 5, 0.1] + [0, -20, 3]).astype(np.float32)
    norm = RunningNorm(3)
    for chunk in np.split(rows, [1, 17, 200]):
        norm.update(torch.from_numpy(chunk))
    everything = rows.astype(np.float64)
    assert_close(norm.mean, everything.mean(0), rtol=1e-5)
    assert_close(norm.var, everything.var(0), rtol=1e-3)  # the count starts at 1e-4
    assert norm.count.item() == pytest.approx(300)
    assert_close(norm(torch.from_numpy(rows[:50])), ((rows[:50] - everything.mean(0)) / everything.std(0)).astype(np.float32), rtol=1e-3, atol=1e-3)
    assert norm(torch.tensor([[1e6, -1e6, 3.0]]))[0, :2].tolist() == [10, -10]

    other, scalar = RunningNorm(3), RunningNorm()
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other(torch.from_numpy(rows)), norm(torch.from_numpy(rows)))
    for chunk in np.split(rows[:, 1], [4, 100]):
        scalar.update(torch.from_numpy(chunk))
    assert scalar.var.item() == pytest.approx(everything[:, 1].var(), rel=1e-3)


def test_density_is_that_of_the_exploring_policy():
    """u = mean(s) + h(s) E is Gaussian with the mean and variance that the density is told, and so is the density."""
    torch.manual_seed(0)
    policy, rng = Policy(4, box([-2, -1], [2, 3]), log_std_init=-1.0), generator(1)
    with torch.no_grad():
        policy.log_std += 0.3 * torch.randn(policy.log_std.shape, generator=rng)
        h, mean, variance = policy.distribution(torch.randn(6, 4, generator=rng))
        matrices = policy.log_std.exp() * torch.randn(4000, *policy.log_std.shape, generator=rng)
        u = mean + torch.einsum("bh,nha->nba", h, matrices)
        assert_close(u.mean(0), mean, rtol=0, atol=5 * variance.max().sqrt().item() / 4000**0.5)
        assert_close(u.var(0), variance, rtol=0.12, atol=0)
        expected = torch.distributions.Normal(mean.double(), variance.double().sqrt()).log_prob(u[:20].double()).sum(-1)
        assert_close(log_density(u[:20], mean, variance).double(), expected, rtol=1e-4, atol=1e-4)
        # The task's actions are u in units of its range, clipped to it.
        assert_close(policy.to_action(torch.tensor([[0.5, -0.5], [3.0, -3.0]])), torch.tensor([[1.0, 0.0], [2.0, -1.0]]))
        observation = np.float32([1, 2, 3, 4])
        policy.norm.update(torch.randn(50, 4, generator=rng))
        expected = policy.to_action(policy.distribution(policy.norm(torch.from_numpy(observation)[None]))[1])[0]
        assert_close(policy.act(observation), expected)


# ----------------------------------------------------------------------------------------------------------------------------------- training


def one_episode(args, policy, p_tremble, n_episodes, seed):
    return returns(args, policy, p_tremble, 1, seed)


def finish(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "returns", one_episode)
        train(ARGS, out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return torch.load(out / "checkpoint.pt", weights_only=True), [{name: row[name] for name in row if name != "steps_per_second"} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("expert")
    return out, *finish(out)


@pytest.mark.parametrize("interrupted", ["policy.pt", "checkpoint.pt"])
def test_resumes_to_the_same_numbers(uninterrupted, tmp_path, interrupted):
    """Killed at the second evaluation, before and after its policy was saved: the same metrics, each row once, and the same weights."""
    _, expected, rows = uninterrupted
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, interrupted, 2)
        finish(tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 64
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    resumed, resumed_rows = finish(tmp_path)
    assert resumed_rows == rows and [row["step"] for row in rows] == [64, 128, 192]
    assert same(resumed, expected)
    assert {"policy", "return_norm", "optimizer", "rng", "envs"} <= set(expected) and same(finish(tmp_path)[0], expected)  # a finished run stays as it is


def test_everything_moves(uninterrupted):
    out, end, rows = uninterrupted
    torch.manual_seed(int(np.random.SeedSequence((ARGS.seed, 21)).generate_state(1)[0]))
    start = Policy(3, make_env("Pendulum-v1").action_space)
    for name, value in start.named_parameters():
        assert (value != end["policy"][name]).any() and torch.isfinite(end["policy"][name]).all(), name
    assert end["policy"]["norm.count"].item() == pytest.approx(192 + 6 * 2)  # the observations after each step, and those that an iteration starts from
    assert same(end["policy"], torch.load(out / "policy.pt", weights_only=True)["policy"])
    assert end["optimizer"]["param_groups"][0]["lr"] == 0 and end["optimizer"]["state"][0]["step"].item() == 6 * 2 * 2
    assert all(np.isfinite(list(row.values())).all() for row in rows) and {"return_p_tremble_0", "return_p_tremble_0.1"} <= set(rows[0])


def test_learns(tmp_path):
    """From a mean action of about 0 to the right: the sign of gradient, advantage and ratio, in one number."""
    args = Args(env_id="Rightward-v0", total_timesteps=1280, eval_every=20, n_envs=4, n_steps=16, n_epochs=4, batch_size=32, learning_rate=1e-3)
    train(args, tmp_path)
    (row,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    torch.manual_seed(int(np.random.SeedSequence((args.seed, 21)).generate_state(1)[0]))
    start = returns(args, Policy(2, Counter.action_space), 0.0, 20, 0).mean()
    assert abs(start) < 1.5 and row["return_p_tremble_0"] > 3 and row["return_p_tremble_0"] >= row["return_p_tremble_0.1"] > 1


def test_trembling_grows_as_asked(tmp_path, monkeypatch):
    """From a quarter of 192 steps to three quarters: 0 until step 48, then linear, 0.4 from step 144 on. Evaluations tremble with 0.4 throughout."""
    args = dataclasses.replace(ARGS, p_tremble=0.4, tremble_from=0.25, tremble_until=0.75)
    seen, make = [], module.make_env

    def make_watched(*arguments, **options):
        env = make(*arguments, **options)
        step = env.step
        env.step = lambda action: (seen.append(env.p_tremble), step(action))[1]
        return env

    monkeypatch.setattr(module, "make_env", make_watched)
    monkeypatch.setattr(module, "returns", lambda args, policy, p_tremble, n_episodes, seed: np.array([p_tremble]))
    train(args, tmp_path)
    assert_close(seen[::32], [0, 0, 0.4 * (64 - 48) / 96, 0.4 * (96 - 48) / 96, 0.4 * (128 - 48) / 96, 0.4])  # an iteration is 32 steps
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["return_p_tremble_0.4"] for row in rows] == [0.4] * 3


def test_random_actions_do_not_move_the_policy(tmp_path):
    """Where the hand always trembles nothing that happens is the policy's doing: it keeps its first weights, while the value function learns."""
    train(dataclasses.replace(ARGS, p_tremble=1.0, total_timesteps=64), tmp_path)
    end = torch.load(tmp_path / "policy.pt", weights_only=True)["policy"]
    torch.manual_seed(int(np.random.SeedSequence((ARGS.seed, 21)).generate_state(1)[0]))
    for name, value in Policy(3, make_env("Pendulum-v1").action_space).named_parameters():
        assert torch.equal(value, end[name]) != name.startswith("value"), name


def test_clone_acts_as_the_demonstrations_and_waits_for_its_value_function(tmp_path):
    """Its actions are a linear policy's; the noise has the standard deviation that was asked for; six iterations change the value function alone."""
    save(tmp_path / "demos.npz", record(make_env("Pendulum-v1", seed=3), lambda o: np.clip([1.5 * o[0] - 0.5 * o[2]], -2, 2).astype(np.float32), 4, "test"))
    demos = load(tmp_path / "demos.npz", make_env("Pendulum-v1"))
    torch.manual_seed(0)
    policy = Policy(3, make_env("Pendulum-v1").action_space)
    clone(policy, demos, generator(1), n_steps=1500, std=0.2)
    acted = np.array([policy.act(observation) for observation in demos.observations])
    assert np.abs(acted - demos.actions).mean() < 0.05 < np.abs(demos.actions).mean()
    with torch.no_grad():
        _, _, variance = policy.distribution(policy.norm(torch.from_numpy(demos.observations)))
    assert variance.mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "returns", one_episode)
        envs, make = [], module.make_env
        patch.setattr(module, "make_env", lambda *arguments, **options: envs.append(make(*arguments, **options)) or envs[-1])

        def clone_briefly(policy, demos, rng):
            assert [env.t for env in envs[: ARGS.n_envs]] == [0] * ARGS.n_envs  # what reads the demonstrations moves none of training's environments
            clone(policy, demos, rng, n_steps=20)

        patch.setattr(module, "clone", clone_briefly)
        ends = []
        for total in (32, 192, 256):  # an iteration is 32 steps, and the last one has a learning rate of 0
            args = dataclasses.replace(ARGS, clone=str(tmp_path / "demos.npz"), total_timesteps=total)
            (tmp_path / str(total)).mkdir()
            envs.clear()
            train(args, tmp_path / str(total))
            ends.append(torch.load(tmp_path / str(total) / "policy.pt", weights_only=True)["policy"])
    for name in ("mean.weight", "hidden.0.weight", "log_std"):
        assert torch.equal(ends[0][name], ends[1][name]) and not torch.equal(ends[1][name], ends[2][name])
    assert not torch.equal(ends[0]["value.0.weight"], ends[1]["value.0.weight"])


# ---------------------------------------------------------------------------------------------------------------------------------- recording


def test_records_what_it_says(uninterrupted, monkeypatch):
    out, _, _ = uninterrupted
    monkeypatch.setattr(module, "returns", lambda args, policy, p, n, seed: returns(args, policy, p, 2, seed))  # 2 episodes instead of 100
    record_demonstrations(ARGS, out)
    demos = load(out / "Pendulum-v1.npz", make_env("Pendulum-v1"))
    assert demos.n_episodes == 2 and demos.p_tremble == 0 and np.array_equal(demos.actions, demos.executed_actions)
    notes = json.loads((out / "Pendulum-v1.json").read_text())
    assert notes["steps"] == 192 and set(notes["returns"]) == {"0", "0.1"} and notes["args"]["exp_name"] == "train_expert" and "out" not in notes["args"]
    policy = Policy(3, make_env("Pendulum-v1").action_space)
    policy.load_state_dict(torch.load(out / "policy.pt", weights_only=True)["policy"])
    assert notes["returns"]["0.1"]["mean"] == returns(ARGS, policy, 0.1, 2, (ARGS.seed, 27)).mean() != notes["returns"]["0"]["mean"]
    assert_close(np.array([policy.act(observation) for observation in demos.observations[:50]]), demos.actions[:50])


def test_refuses_to_go_on_with_other_arguments(tmp_path, monkeypatch):
    other = dataclasses.replace(ARGS, out=str(tmp_path), gamma=0.5)
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(other, gamma=0.98))))
    monkeypatch.setattr(module.tyro, "cli", lambda cls: other)
    with pytest.raises(SystemExit, match="another gamma"):
        module.main()
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"]


@pytest.mark.parametrize("change, says", [
    ({"env_id": "CartPole-v1"}, "--env-id CartPole-v1 has discrete actions"),
    ({"env_id": "Pendulm-v1"}, "unknown environment 'Pendulm-v1'"),
    ({"n_demos": 0}, "--n-demos is 0: give at least 1"),
    ({"eval_every": 0}, "--eval-every is 0: give at least 1"),
    ({"seed": -1}, "--seed is -1: give at least 0"),
    ({"p_tremble": 2.0}, "p_tremble is a probability, between 0 and 1, not 2.0"),
    ({"tremble_from": 0.5}, "--tremble-from 0.5 --tremble-until 0.0: give fractions of the run"),
    ({"clone": "missing.npz"}, "missing.npz"),
])  # fmt: skip
def test_refuses_what_can_not_be_before_anything_is_written(change, says, tmp_path, monkeypatch):
    monkeypatch.setattr(module.tyro, "cli", lambda cls: dataclasses.replace(ARGS, out=str(tmp_path / "out"), **change))
    with pytest.raises(SystemExit, match=f"^{says}"):
        module.main()
    assert list(tmp_path.iterdir()) == []


def test_refuses_to_overwrite_demonstrations(tmp_path, monkeypatch):
    (tmp_path / "Pendulum-v1.npz").write_text("precious")
    monkeypatch.setattr(module.tyro, "cli", lambda cls: dataclasses.replace(ARGS, out=str(tmp_path)))
    with pytest.raises(SystemExit, match="already holds demonstrations"):
        module.main()
    assert (tmp_path / "Pendulum-v1.npz").read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


def test_files_of_a_task_of_ones_own_lie_in_one_folder():
    assert module.file_name(dataclasses.replace(ARGS, env_id="own_tasks:own/Counter-v0")) == "own_tasks-own-Counter-v0"
