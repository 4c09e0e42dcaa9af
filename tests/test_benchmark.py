"""The benchmark: exclusive times by value, runs that take turns, the replaying reset, and tables."""

import importlib.util
import itertools
import sys
import threading

import numpy as np
import pytest
import torch

from utils.benchmark import EVALUATION, PARTS, REST, ROLLOUTS, Args, ReplayingReset, Timers, Turns, main, products_per_second, report, sb3_run, script_run
from utils.demos import record
from utils.envs import make_env


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


def test_a_moment_belongs_to_the_innermost_timed_call():
    clock = Clock()
    timers = Timers(clock)
    inner = timers.wrap("act", lambda: clock.work(2) or "action")

    def outer():
        clock.work(1)
        assert inner() == "action"
        clock.work(4)

    clock.work(8)
    timers.wrap("update", outer)()
    clock.work(16)
    timers.lap()
    assert timers.seconds == {"act": 2, "update": 5, REST: 24}


@pytest.mark.parametrize("whole", [ROLLOUTS, EVALUATION])
def test_roll_outs_and_evaluation_keep_what_is_inside_them(whole):
    clock = Clock()
    timers = Timers(clock)
    act = timers.wrap("act", lambda: clock.work(2))
    timers.wrap(whole, timers.wrap(ROLLOUTS, lambda: (clock.work(1), act())))()
    act()
    assert timers.seconds == {REST: 0, whole: 3, "act": 2}


def test_an_error_inside_a_timed_call_ends_its_time():
    clock = Clock()
    timers = Timers(clock)
    with pytest.raises(ZeroDivisionError):
        timers.wrap("act", lambda: (clock.work(2), 1 / 0))()
    clock.work(1)
    timers.lap()
    assert timers.seconds == {"act": 2, REST: 1}


def test_runs_take_turns_and_no_time_is_charged_to_one_that_stands_still():
    clock, order = Clock(), []

    def run(name, seconds):
        def loop(tick):
            for i in itertools.count():
                clock.work(seconds)
                order.append(f"{name}{i}")
                tick()

        return Turns(loop, Timers(clock))

    a, b = run("a", 1), run("b", 10)
    assert [a.chunk(2), b.chunk(1), a.chunk(1), b.chunk(2)] == [{REST: 2}, {REST: 10}, {REST: 1}, {REST: 20}]
    assert order == ["a0", "a1", "b0", "a2", "b1", "b2"]


def test_a_run_that_fails_fails_the_benchmark(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # prints the traceback
    with pytest.raises(threading.BrokenBarrierError):
        Turns(lambda tick: 1 / 0, Timers()).chunk(1)


def test_the_replaying_reset_arrives_at_the_recorded_observation():
    plain = make_env("Pendulum-v1", seed=1)
    rng = np.random.default_rng(0)
    demos = record(plain, lambda observation: plain.random_action(rng), n_episodes=2, made_by="test")
    env = ReplayingReset(make_env("Pendulum-v1", p_tremble=1.0, seed=2), demos, alpha=1.0, seed=3)
    for _ in range(5):
        observation, _ = env.reset()
        np.testing.assert_array_equal(observation, demos.observations[env.row])
        assert env.env.t == env.row % 200 and env.env.p_tremble == 1.0
    env.alpha = 0.0
    env.reset()
    assert env.env.t == 0


def test_tables():
    chunks = [dict.fromkeys(PARTS, 0.0) | {"update": 30.0, EVALUATION: 10.0}, dict.fromkeys(PARTS, 0.0) | {"update": 40.0, EVALUATION: 10.0}]
    faster = [{part: seconds / 2 for part, seconds in chunk.items()} for chunk in chunks]
    case = {
        "case": "filter_br",
        "task": "T",
        "peak_mib": [100.0, 120.0],
        "iteration": 5000,
        "products": [300.0, 320.0],
        "chunks": {"SB3": chunks, "filter_br": faster},
    }
    text = report([case], "a machine")
    assert (
        "| filter_br | T | SB3, filter_br | 112 (100 to 125) | 225 (200 to 250) | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 310 (300 to 320) | 100 | 120 |"
        in text
    )
    shares = text.splitlines()[-1].split(" | ")
    assert len(shares) == 3 + len(PARTS) and shares[2:4] == ["filter_br", "77.8"] and shares[-1] == "22.2 |"
    assert len(text.splitlines()) == 11


def test_products_of_an_update(monkeypatch):
    """20 updates of 16 products each, in the 5 seconds that this clock says."""
    calls, times = [], iter([7.0, 12.0])
    monkeypatch.setattr(torch, "mm", lambda a, b, out: calls.append((a.shape, b.shape, out.shape)))
    assert products_per_second(lambda: next(times), "cpu") == 4.0 and calls == [((256, 256),) * 3] * 320


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--interactions 100", "--interactions is 100: give a multiple of 64"),
        ("--pairs 0", "--pairs is 0: give at least 1"),
        ("--scripts bc", "--scripts bc: give some of filter_br, filter_nr, mm_gail_ipm, nrmm_dual"),
        ("--env-ids Hopper-v5", "--env-ids Hopper-v5: give some of HalfCheetahBulletEnv-v0, HopperBulletEnv-v0"),
        ("--out old", "old.json is there already, and is not overwritten: give another --out"),
    ],
)
def test_refused_before_anything_is_measured(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words.split()])
    with pytest.raises(SystemExit, match=f"^{message}"):
        main()
    assert (tmp_path / "old.json").read_text() == "{}"


@pytest.mark.parametrize("script", ["filter_br", "nrmm_dual"])
def test_a_script_takes_turns(script, tmp_path, monkeypatch):
    """From the start, and with a full buffer behind it; in a maze, whose learner is TD3+BC. Every part of the loop is there."""
    pytest.importorskip("mujoco")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    args, changes = Args(interactions=64, pairs=1), {"cloning_steps": 1, "critic_warmup": 0, "n_rollouts": 1, "horizon": 310, "disc_batch_size": 64}
    for later in (0, 640):
        run = script_run(args, script, "PointMaze_Large-v0", later=later, **changes)
        first, second = run.chunk(64), run.chunk(64)
        assert {part for part in second if second[part] > 0} >= set(PARTS) - {"resets"} and "resets" in first.keys() | second.keys()


@pytest.mark.skipif(importlib.util.find_spec("stable_baselines3") is None, reason="stable-baselines3 is not installed")
def test_stable_baselines3_takes_turns():
    run = sb3_run(Args(interactions=64, pairs=1, later=0), "HopperBulletEnv-v0", alpha=0.5)
    assert sum(run.chunk(10).values()) > 0
