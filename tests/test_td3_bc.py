"""TD3+BC, standardised inputs, and what is different in the mazes: by value, then whole tiny trainings on PointMaze and on the Counter."""

import copy
import dataclasses
import importlib
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from conftest import (
    HOPPER,
    ROOT,
    Counter,
    Interrupted,
    assert_close,
    box,
    checkpoint,
    chi_square,
    column,
    constant_evaluation,
    generator,
    interrupt_file,
    learned,
    metrics,
    run,
    same,
)
from torch import nn

from algos import bc, filter_br, nrmm_dual
from algos.filter_br import TD3BC, Actor, Args, DeterministicActor, ReplayBuffer, Reward, Standardize, TwinQ, expert_transitions, sampler
from utils import envs
from utils.demos import load
from utils.envs import ResettableEnv, make_env

MAZE = "PointMaze_Large-v0"
SCRIPTS = ("mm_gail_ipm", "filter_br", "filter_nr", "nrmm_dual")
ALL = ("bc", *SCRIPTS)


def scripts(*names):
    return pytest.mark.parametrize("module", [importlib.import_module(f"algos.{name}") for name in names], ids=names)


# -------------------------------------------------------------------------------------------------------------------------- standardised inputs


def test_standardize_by_hand():
    """The spread is the sample's, of n - 1, and at least 0.1; actions, behind the observations, are left alone."""
    layer = Standardize(5)
    x = torch.randn(7, 5)
    assert torch.equal(layer(x), x)
    layer.fit(torch.tensor([[1.0, 4.0, 7.0], [3.0, 4.0, 7.01], [8.0, 4.0, 7.02]]))
    assert_close(layer.center, [4, 4, 7.01, 0, 0])
    assert_close(layer.spread, [math.sqrt((9 + 1 + 16) / 2), 0.1, 0.1, 1, 1])
    assert_close(layer(torch.tensor([[17.0, 4.3, 7.11, -0.7, 50.0]])), [[13 / math.sqrt(13), 3, 1, -0.7, 50]], atol=1e-4)


NETWORKS = {
    "actor": lambda: Actor(3, box([-2, -1], [2, 3])),
    "gsde": lambda: Actor(3, box([-2, -1], [2, 3]), gsde=True),
    "deterministic": lambda: DeterministicActor(3, box([-2, -1], [2, 3])),
    "bc": lambda: bc.Actor(3, box([-2, -1], [2, 3])),
    "critic": lambda: TwinQ(5),
    "reward": lambda: Reward(5),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_standardize_is_the_first_layer_of_every_network(name):
    """Before it is fitted every network computes, to the bit, what it does without it; then, what it does on standardised observations.

    Its parameters, which the optimiser lays in one vector, are none of its numbers, and they come back with the network's state.
    """
    torch.manual_seed(0)
    network, (observations, actions) = NETWORKS[name](), (20 + 7 * torch.randn(40, 3), torch.randn(40, 2))
    x = torch.cat([observations, actions], 1) if name in ("critic", "reward") else observations
    plain = copy.deepcopy(network)
    for part, layers in plain.named_children():
        if isinstance(layers, nn.Sequential):
            setattr(plain, part, layers[1:])
    plain.standardize = nn.Identity()
    assert torch.equal(network(x), plain(x))
    n_parameters = sum(p.numel() for p in network.parameters())
    network.standardize.fit(observations)
    assert sum(p.numel() for p in network.parameters()) == n_parameters and not any("standardize" in part for part, _ in network.named_parameters())
    standard = x.clone()
    standard[:, :3] = (observations - observations.mean(0)) / observations.std(0)
    assert_close(network(x), plain(standard), rtol=1e-4, atol=1e-5)
    assert (network(x) - plain(x)).abs().max() > 0.01
    other = NETWORKS[name]()
    other.load_state_dict(copy.deepcopy(network.state_dict()))
    assert torch.equal(other(x), network(x))


# -------------------------------------------------------------------------------------------------------------------------------------- TD3+BC


LOW, HIGH = [-2.0, -1.0], [2.0, 3.0]  # of the actions: scale 2 and 2, bias 0 and 1


def make_td3(n_expert=50, seed=0, **changes):
    """With demonstrations whose reward is 1 in every row, and whose action is linear in the observation."""
    torch.manual_seed(seed)
    expert, rng = ReplayBuffer(n_expert, 4, 2), generator(7)
    expert.rows[:], expert.n_added = torch.randn(n_expert, 12, generator=rng), n_expert
    expert.rows[:, 4:6] = (0.3 * expert.rows[:, :2] + torch.tensor([0.0, 1.0])).clamp(torch.tensor(LOW), torch.tensor(HIGH))
    expert.rows[:, -2], expert.rows[:, -1] = (torch.arange(n_expert) % 4 == 0).float(), 1.0
    settings = {"gamma": 0.9, "tau": 0.02, "critic_warmup": 0, "q_weight": 2.5, "expert_buffer": expert, "rng": generator(seed)}
    return TD3BC(4, box(LOW, HIGH), **(settings | changes))


def learner_batch(n=32):
    """Its reward is 0 in every row."""
    batch = torch.randn(n, 12, generator=generator(9))
    batch[:, -2], batch[:, -1] = (torch.arange(n) % 3 == 0).float(), 0.0
    return batch


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def plain_action(actor, observations, noise=0.0):
    h = (observations @ actor.hidden[1].weight.T + actor.hidden[1].bias).relu()
    h = (h @ actor.hidden[3].weight.T + actor.hidden[3].bias).relu()
    u = torch.tanh(h @ actor.mean.weight.T + actor.mean.bias)
    return 2 * torch.minimum(torch.maximum(u + noise, torch.tensor(-1.0)), torch.tensor(1.0)) + torch.tensor([0.0, 1.0])


def plain_q(critic, x):
    layers = [(critic.w1[k], critic.b1[k], critic.w2[k], critic.b2[k], critic.w3[k], critic.b3[k]) for k in (0, 1)]
    return torch.stack([((x @ w1 + b1).relu() @ w2 + b2).relu() @ w3 + b3 for w1, b1, w2, b2, w3, b3 in layers])[..., 0]


@torch.no_grad()
def test_the_policy_that_explores():
    """Gaussian noise of 0.1 of half the range, within the bounds, without a density; the deterministic head is its middle."""
    torch.manual_seed(0)
    actor, observations = DeterministicActor(4, box(LOW, HIGH)), torch.randn(1, 4).expand(20_000, -1)
    assert_close(actor(observations[:1]), plain_action(actor, observations[:1]))
    actions, density = actor.sample(observations, generator())
    noise = (actions - actor(observations)) / 2
    assert density is None and actor.sample_noise(generator()) is None
    assert_close(noise.mean(0), [0, 0], atol=0.003)
    assert_close(noise.std(0), [0.1, 0.1], rtol=0.02)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.03 and (noise.abs() > 0.3).float().mean() < 0.006
    act = sampler(actor, generator(), hold=64)  # of which nothing is held
    assert len({tuple(act(observations[0].numpy())) for _ in range(5)}) == 5
    actor.mean.bias.copy_(torch.tensor([9.0, -9.0]))
    actions = actor.sample(observations, generator())[0]
    assert (actions <= torch.tensor(HIGH)).all() and (actions >= torch.tensor(LOW)).all() and actions[:, 0].max() == 2 and actions[:, 1].min() == -1


def test_target_by_hand():
    """Q = 10 and 12, r = 1, gamma = 0.9: 1 after a termination, else 1 + 0.9 * 10. Of the target networks alone, with noise on the action."""
    td3, seen = make_td3(), []
    td3.actor = td3.critic = None  # not the ones to ask
    td3.target_actor = lambda observations, noise: seen.append(noise) or observations[:, :2] + 100
    td3.target_critic = lambda x: seen.append(x) or torch.tensor([[10.0, 10.0, 12.0], [12.0, 12.0, 10.0]])
    next_observations = torch.arange(12.0).view(3, 4)
    assert_close(td3.target(next_observations, torch.tensor([1.0, 0.0, 0.0]), torch.ones(3)), [1, 10, 10])
    assert_close(seen[1], torch.cat([next_observations, next_observations[:, :2] + 100], 1))
    assert seen[0].shape == (3, 2)


def test_target_noise_is_clipped():
    """Standard deviation 0.2, kept within 0.5, which is 2.5 of them: 1.24 % of the numbers are there."""
    td3, seen = make_td3(), []
    td3.target_actor = lambda observations, noise: seen.append(noise) or torch.zeros(len(observations), 2)
    td3.target(torch.zeros(20_000, 4), torch.zeros(20_000), torch.zeros(20_000))
    (noise,) = seen
    assert noise.abs().max() == 0.5 and (noise.abs() == 0.5).float().mean().item() == pytest.approx(math.erfc(2.5 / math.sqrt(2)), abs=0.0024)
    inside = noise[noise.abs() < 0.3].numpy()  # 1.5 of them
    assert inside.std() / 0.2 == pytest.approx(0.7426, abs=0.02) and abs(noise.mean()) < 0.004  # of a Gaussian cut off there
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.03


@pytest.mark.parametrize("q_weight", [2.5, 0.25])
@pytest.mark.parametrize("is_expert", [True, False], ids=["demonstrations", "learner"])
def test_update_against_plain_torch(is_expert, q_weight):
    """A second update, in double precision with nothing of TD3BC's own code: two gradients, two steps, both soft updates and what is logged."""
    seed = next(seed for seed in range(20) if (torch.rand((), generator=generator(seed)) < 0.5) == is_expert)
    td3, batch, rate = make_td3(seed=seed, q_weight=q_weight), learner_batch(), 1e-3
    td3.critic_optimizer.t = 1
    for vector, online in ((td3.target_vector, td3.critic_optimizer.vector), (td3.target_actor_vector, td3.actor_optimizer.vector)):
        assert torch.equal(vector, online), "target networks start as copies"
        vector.mul_(1.1)  # else nothing below told them from the others
    actor, target_actor, critic, target_critic = (copy.deepcopy(network).double() for network in (td3.actor, td3.target_actor, td3.critic, td3.target_critic))
    logs = td3.update(batch, rate)

    rng = generator(seed)
    torch.rand((), generator=rng)
    if is_expert:
        batch = td3.expert_buffer.rows[torch.randint(50, (32,), generator=rng)]
    noise, b = (0.2 * torch.randn(32, 2, generator=rng)).clamp(-0.5, 0.5).double(), batch.double()
    s, a, s_next, terminated, r = b[:, :4], b[:, 4:6], b[:, 6:10], b[:, 10], b[:, 11]
    assert (r == (1 if is_expert else 0)).all() and 0 < terminated.sum() < 32
    with torch.no_grad():
        q_next = plain_q(target_critic, torch.cat([s_next, plain_action(target_actor, s_next, noise)], 1)).min(0).values
        target = torch.where(terminated == 1, r, r + 0.9 * q_next)
    q = plain_q(critic, torch.cat([s, a], 1))
    critic_loss = 0.5 * (((q[0] - target) ** 2).mean() + ((q[1] - target) ** 2).mean())
    gradient = flat(torch.autograd.grad(critic_loss, list(critic.parameters())))
    assert_close(td3.critic_optimizer.m.double() / 0.1, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())

    with torch.no_grad():  # the policy's loss sees the critic after its step
        for p, new in zip(critic.parameters(), td3.critic.parameters(), strict=True):
            direction = (0.1 / (1 - 0.9**2)) / math.sqrt(0.001 / (1 - 0.999**2))  # Adam's at its second step, had the first gradient been 0
            assert (new - p).abs().max().item() == pytest.approx(2 * rate * direction, rel=1e-3)
            p.copy_(new)
    actions = plain_action(actor, s)
    value = plain_q(critic, torch.cat([s, actions], 1))[0]  # the first of the two alone
    actor_loss = -q_weight / value.abs().mean().item() * value.mean()
    if is_expert:
        actor_loss = actor_loss + (((actions - a) / 2) ** 2).mean()  # half the range is 2
    gradient = flat(torch.autograd.grad(actor_loss, list(actor.parameters())))
    assert_close(td3.actor_optimizer.m.double() / 0.1, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())
    expected = {"critic_loss": critic_loss.item(), "q": q.mean().item(), "actor_loss": actor_loss.item()}
    assert {name: value.item() for name, value in logs.items()} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert not any(value.requires_grad for value in logs.values())

    for vector, old, new in ((td3.target_vector, target_critic, td3.critic), (td3.target_actor_vector, target_actor, td3.actor)):
        assert_close(vector.double(), (0.98 * flat(old.parameters()) + 0.02 * flat(new.parameters())).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat(td3.target_critic.parameters()), td3.target_vector) and torch.equal(flat(td3.target_actor.parameters()), td3.target_actor_vector)
    for optimizer in (td3.critic_optimizer, td3.actor_optimizer):
        assert (optimizer.gradient == 0).all()  # nothing, such as the policy's loss in the critic, is left for the next update


def test_policy_and_targets_move_at_every_second_update():
    td3 = make_td3()
    for i in range(1, 7):
        before = [vector.clone() for vector in (td3.critic_optimizer.vector, td3.actor_optimizer.vector, td3.target_vector, td3.target_actor_vector)]
        logs = td3.update(learner_batch(), 1e-3)
        after = (td3.critic_optimizer.vector, td3.actor_optimizer.vector, td3.target_vector, td3.target_actor_vector)
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False] + 3 * [i % 2 == 1] and ("actor_loss" in logs) == (i % 2 == 0)
    assert td3.actor_optimizer.t == 3 and td3.critic_optimizer.t == 6


def test_critic_warms_up_alone():
    """The policy stays as it was cloned for `critic_warmup` updates, while the critic and its target move as ever; then it moves too."""
    td3 = make_td3(critic_warmup=4)
    for i in range(1, 9):
        before = [vector.clone() for vector in (td3.critic_optimizer.vector, td3.target_vector, td3.actor_optimizer.vector, td3.target_actor_vector)]
        logs = td3.update(learner_batch(), 1e-3)
        after = (td3.critic_optimizer.vector, td3.target_vector, td3.actor_optimizer.vector, td3.target_actor_vector)
        moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
        assert moved == [True, i % 2 == 0, i in (6, 8), i in (6, 8)] and ("actor_loss" in logs) == (i in (6, 8))


def test_half_of_the_batches_are_the_demonstrations(monkeypatch):
    """Each of them whole, with as many rows as the learner's, any of the demonstrations' rows; in no order, for the critic and the policy alike."""
    td3, rows, cloned = make_td3(n_expert=20), [], []
    q, cloning_loss = td3.critic, td3.cloning_loss
    td3.critic = lambda x: rows.append(x[:, :4].clone()) or q(x)
    monkeypatch.setattr(td3, "cloning_loss", lambda batch, actions: cloned.append(len(rows)) or cloning_loss(batch, actions))
    batch = learner_batch(4)
    for _ in range(600):
        td3.update(batch, 0.0)
    assert [len(x) for x in rows] == [4] * 900
    critics = [x for i, x in enumerate(rows) if i % 3 != 2]  # of two updates, the second has the policy's as well
    is_expert = np.array([not torch.equal(x, batch[:, :4]) for x in critics])
    assert abs(is_expert.mean() - 0.5) < 4 * 0.5 / math.sqrt(600) and abs(np.corrcoef(is_expert[:-1], is_expert[1:])[0, 1]) < 4 / math.sqrt(600)
    index = [int(torch.where((td3.expert_buffer.rows[:, :4] == row).all(1))[0]) for x, expert in zip(critics, is_expert, strict=True) if expert for row in x]
    assert chi_square(np.bincount(index, minlength=20), np.full(20, 1 / 20)) < 5
    assert cloned == [3 * i + 3 for i in range(300) if is_expert[2 * i + 1]]  # the policy's batch is the critic's
    assert all(torch.equal(rows[3 * i + 1], rows[3 * i + 2]) for i in range(300))


def test_pre_training_fits_a_linear_expert():
    """To a hundredth of the range; the target policy follows at once, and no other network moves. 0 steps leave all as it is."""
    td3 = make_td3(n_expert=400)
    before, critic = td3.actor_optimizer.vector.clone(), copy.deepcopy(td3.critic.state_dict())
    td3.clone(0, 256, 1e-3)
    assert torch.equal(td3.actor_optimizer.vector, before) and torch.equal(td3.target_actor_vector, before)
    td3.clone(500, 256, 1e-3)
    rows = td3.expert_buffer.rows
    with torch.no_grad():
        errors = (td3.actor(rows[:, :4]) - rows[:, 4:6]) / 2
        assert td3.cloning_loss(rows, td3.actor(rows[:, :4])).item() == pytest.approx(errors.square().mean().item(), rel=1e-5)
    assert errors.square().mean() < 1e-4 < 0.01 < (rows[:, 4:6] / 2).var()
    assert torch.equal(td3.target_actor_vector, td3.actor_optimizer.vector) and not torch.equal(td3.target_actor_vector, before)
    assert same(td3.critic.state_dict(), critic) and td3.critic_optimizer.t == 0 and td3.actor_optimizer.t == 500


def test_goes_on_from_its_state():
    """After an odd number of updates, so that the count matters."""
    a, b, batch = make_td3(seed=0), make_td3(seed=1), learner_batch()
    for _ in range(3):
        a.update(batch, 1e-3)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    b.rng.set_state(a.rng.get_state())
    for td3 in (a, b):
        for rate in (1e-3, 5e-4, 1e-4):
            td3.update(batch, rate)
    assert same(a.state_dict(), b.state_dict()) and torch.equal(flat(b.target_actor.parameters()), b.target_actor_vector)
    assert torch.equal(flat(b.target_critic.parameters()), b.target_vector)


@pytest.mark.parametrize("env_id", ["Counter-v0", HOPPER])
def test_expert_transitions(env_id, demo_files):
    """Row by row: after a step comes the next row's observation, and at an episode's end its final one, never the next episode's first."""
    demos = load(demo_files[env_id], make_env(env_id))
    buffer, d, k = expert_transitions(demos), demos.observations.shape[1], demos.actions.shape[1]
    assert len(buffer) == len(buffer.rows) == demos.lengths.sum() and buffer.n_labelled == 0
    i = 0
    for episode in range(demos.n_episodes):
        for step in range(demos.lengths[episode]):
            last = step == demos.lengths[episode] - 1
            expected = [*demos.observations[i], *demos.actions[i], *(demos.final_observations[episode] if last else demos.observations[i + 1])]
            np.testing.assert_array_equal(buffer.rows[i], np.float32([*expected, demos.terminated[i], 0]))
            i += 1
    assert d + k == buffer.sa_dim
    if env_id == "Counter-v0":  # whose numbers say it themselves
        count, x, a, count_next, x_next, terminated, _ = buffer.rows.numpy().T
        np.testing.assert_array_equal(count_next, count + 1)
        np.testing.assert_allclose(x_next, x + 0.6 * a, atol=1e-6)
        np.testing.assert_array_equal(terminated, np.abs(x_next) >= 1)


# ------------------------------------------------------------------------------------------------------------------------------------ arguments


PYBULLET = {"p_tremble": 0.1, "horizon": None, "eval_episodes": 10, "final_eval_episodes": 10, "alpha": 0.5, "reward_level": 0.5, "disc_learning_rate": 2e-3}
PYBULLET |= {"standardize": False, "learner": "sac", "gamma": 0.98, "tau": 0.02, "learning_rate": 7.3e-4, "learning_starts": 1000}
MAZES = {"p_tremble": 0.0, "horizon": 700, "eval_episodes": 25, "final_eval_episodes": 100, "alpha": 1.0, "reward_level": -0.1, "disc_learning_rate": 8e-4}
MAZES |= {"standardize": True, "learner": "td3_bc", "gamma": 0.99, "tau": 0.005, "learning_rate": 3e-4, "learning_starts": 0}


@scripts(*ALL)
def test_defaults_by_task(module):
    """Those of the table, for just the flags that say nothing by themselves."""
    names = {field.name for field in dataclasses.fields(module.Args)}
    if module is nrmm_dual:  # whose alpha is the paper's on every task
        assert module.Args(env_id=HOPPER).alpha == module.Args(env_id=MAZE).alpha == 1
        names -= {"alpha"}
    assert module.DEFAULTS.keys() == names & PYBULLET.keys() == {field.name for field in dataclasses.fields(module.Args) if field.default in (None, "auto")}
    for env_id, table in ((HOPPER, PYBULLET), ("Counter-v0", PYBULLET), (MAZE, MAZES), ("antmaze-large-play-v2", MAZES), ("antmaze-umaze-v2", MAZES)):
        args = module.Args(env_id=env_id)
        assert {name: getattr(args, name) for name in module.DEFAULTS} == {name: table[name] for name in module.DEFAULTS}
        assert tyro.cli(module.Args, args=["--env-id", env_id]) == args
        assert module.Args(**json.loads(json.dumps(dataclasses.asdict(args)))) == args  # as a resumed run reads them


@pytest.mark.parametrize("env_id", [HOPPER, MAZE])
def test_explicit_flags_win(env_id):
    """Also where they are zero, or what another task's default is; and they last through args.json."""
    for table in (PYBULLET, MAZES, {name: 0 if isinstance(value, float) else value for name, value in MAZES.items()} | {"standardize": False}):
        given = {name: value for name, value in table.items() if value is not None}
        args = Args(env_id=env_id, **given)
        assert {name: getattr(args, name) for name in given} == given
        words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        assert tyro.cli(Args, args=["--env-id", env_id, *words]) == args == Args(**json.loads(json.dumps(dataclasses.asdict(args))))


@scripts(*SCRIPTS)
def test_the_policy_of_a_run_is_of_its_learner(module):
    env = make_env("Counter-v0")
    for learner, gsde, kind in (("sac", False, module.Actor), ("sac", True, module.Actor), ("td3_bc", False, module.DeterministicActor)):
        args = module.Args(env_id="Counter-v0", learner=learner, gsde=gsde)
        saved = kind(2, Counter.action_space, **({"gsde": True} if gsde else {}))
        saved.standardize.fit(torch.randn(9, 2))
        actor, x = module.load_actor(args, env, saved.state_dict()), torch.randn(5, 2)
        assert type(actor) is kind and torch.equal(actor(x), saved(x)) and getattr(actor, "gsde", False) is gsde


REFUSED = {
    "gsde": ({"gsde": True}, "--gsde is SAC's way to explore, and TD3+BC has its own: leave it out, or add --learner sac"),
    "horizon": ({"horizon": 100}, "has 303 steps and the horizon is 100"),
    "no step": ({"horizon": 0}, "--horizon is 0: give at least 1"),
    "episodes": ({"final_eval_episodes": 0}, "--final-eval-episodes is 0: give at least 1"),
    "steps": ({"cloning_steps": -1}, "--cloning-steps is -1: give at least 0"),
    "warm-up": ({"critic_warmup": -1}, "--critic-warmup is -1: give at least 0"),
    "never acts": ({"total_timesteps": 10_000}, "--critic-warmup is 10000, and the run ends before the policy may learn"),
    "learns late": ({"total_timesteps": 20_000, "learning_starts": 15_000}, "--critic-warmup is 10000, and the run ends before the policy may learn"),
    "weight of Q": ({"q_weight": -0.1}, "--q-weight is -0.1: give at least 0"),
}


@pytest.mark.parametrize("case", REFUSED)
@scripts(*SCRIPTS)
def test_refused_in_one_sentence(case, module):
    pytest.importorskip("mujoco")
    changes, sentence = REFUSED[case]
    with pytest.raises(SystemExit) as refusal:
        module.check_args(module.Args(env_id=MAZE, **changes))
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_accepted():
    pytest.importorskip("mujoco")
    for changes in ({}, {"gsde": True, "learner": "sac"}, {"cloning_steps": 0}, {"horizon": 1000}, {"alpha": 0, "p_tremble": 0}):
        filter_br.check_args(Args(env_id=MAZE, **changes))


# ------------------------------------------------------------------------------------------------------------------- whole trainings: the Counter


def td3_counter(tiny, module, **changes):
    """Standardised too, and with an odd number of gradient steps, so that the delay of the policy's updates goes across checkpoints."""
    return tiny(module=module, learner="td3_bc", standardize=True, gradient_steps=3, learning_starts=0, **changes)


@pytest.fixture(scope="session")
def td3_runs(tiny, tmp_path_factory):
    """A training of each script that nothing interrupts, when it is first asked for: its arguments, folder and last checkpoint."""
    done = {}

    def train_once(module):
        if module not in done:
            args, folder = td3_counter(tiny, module), tmp_path_factory.mktemp(module.__name__)
            done[module] = SimpleNamespace(args=args, folder=folder, end=run(args, folder))
        return done[module]

    return train_once


@scripts(*SCRIPTS)
def test_everything_moves_and_every_network_is_standardised(module, td3_runs, demo_files):
    """The five networks see one scale, the demonstrations': a target policy that saw another would give the critic a wrong action to value."""
    done = td3_runs(module)
    agent, demos = done.end["agent"], load(demo_files["Counter-v0"], make_env("Counter-v0")).subset(range(3))
    center, spread = demos.observations.mean(0), np.maximum(demos.observations.std(0, ddof=1), 0.1)
    networks = [agent[name] for name in ("actor", "target_actor", "critic", "target_critic")] + [done.end["f"]]
    for state in networks:
        assert_close(state["standardize.center"][:2], center, rtol=1e-4)
        assert_close(state["standardize.spread"][:2], spread, rtol=1e-4)
        assert (state["standardize.center"][2:] == 0).all() and (state["standardize.spread"][2:] == 1).all()
        assert all(torch.isfinite(state[name]).all() and state[name].abs().max() > 0 for name in learned(state))
    assert agent["critic_optimizer"]["t"] == 18 * 3 and agent["actor_optimizer"]["t"] == 20 + 24  # bursts at 32, 64 ... 576
    for name in ("actor", "critic"):
        assert any((agent[name][key] != agent[f"target_{name}"][key]).any() for key in learned(agent[name]))


@scripts(*SCRIPTS)
@pytest.mark.parametrize(("name", "nth"), [("final_policy.pt", 1), ("checkpoint.pt", 2), ("scores.json", 1)])
def test_resumes_to_the_same_numbers(module, name, nth, td3_runs, tmp_path):
    """Before the first checkpoint, where the pre-training is done again; in the midst; and after the last one."""
    done = td3_runs(module)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, name, nth)
        run(done.args, tmp_path / "run")
    assert same(run(done.args, tmp_path / "run"), done.end) and metrics(tmp_path / "run") == metrics(done.folder)
    for policy in ("policy.pt", "final_policy.pt"):
        assert same(*(torch.load(folder / policy, weights_only=True) for folder in (tmp_path / "run", done.folder)))
    assert (tmp_path / "run" / "scores.json").read_text() == (done.folder / "scores.json").read_text()


@scripts(*SCRIPTS)
def test_seconds_count_the_pre_training_and_no_pause(module, tiny, tmp_path, monkeypatch):
    """By a clock that only cloning (1000 s) and roll-outs (1 s each) move, or, between two starts, a pause of an hour."""
    now, clone, roll_out = [0.0], module.TD3BC.clone, module.roll_out

    def takes(seconds, function):
        return lambda *arguments: now.__setitem__(0, now[0] + seconds(*arguments)) or function(*arguments)

    monkeypatch.setattr(module.time, "time", lambda: now[0])
    monkeypatch.setattr(module.TD3BC, "clone", takes(lambda *arguments: 1000, clone))
    monkeypatch.setattr(module, "roll_out", takes(lambda env, act, n_episodes: n_episodes, roll_out))
    monkeypatch.setattr(module, "evaluate", constant_evaluation)
    args = td3_counter(tiny, module, total_timesteps=300, iteration_timesteps=100)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, "checkpoint.pt", 2)
        run(args, tmp_path)
    now[0] += 3600
    run(args, tmp_path)
    first, each = (12, 8) if module is nrmm_dual else (4, 4)  # NRMM tries two policies an iteration, and one before the first
    assert column(tmp_path, "charts/seconds").tolist() == [1000 + first, 1000 + first + each, 1000 + first + 2 * each]


@scripts(*SCRIPTS)
def test_pre_training_comes_first_and_once(module, tiny, tmp_path, monkeypatch):
    """Ahead of the first roll-out, with the learner's batch size and first learning rate; SAC has none, and a resumed run none more."""
    calls, clone, roll_out = [], module.TD3BC.clone, module.roll_out
    monkeypatch.setattr(module.TD3BC, "clone", lambda self, *arguments: calls.append(arguments) or clone(self, *arguments))
    monkeypatch.setattr(module, "evaluate", constant_evaluation)
    monkeypatch.setattr(module, "roll_out", lambda *arguments: calls.append("roll-out") or roll_out(*arguments))
    args = td3_counter(tiny, module, total_timesteps=200, iteration_timesteps=100)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, "final_policy.pt", 2)
        run(args, tmp_path / "run")
    run(args, tmp_path / "run")
    assert calls[0] == (20, 32, args.learning_rate) and set(calls[1:]) == {"roll-out"}
    calls.clear()
    run(dataclasses.replace(args, learner="sac"), tmp_path / "sac")
    assert set(calls) == {"roll-out"}


@pytest.mark.parametrize("rewards", ["recomputed", "recorded"])
def test_rewards_of_both_buffers(rewards, tiny, tmp_path, monkeypatch):
    """The demonstrations' rows are worth what the present f says, always; the learner's that, or what f said when they were collected."""
    fs, update_reward, update, n_seen = [], filter_br.update_reward, TD3BC.update, []

    def spy_update_reward(f, optimizer, expert_pairs, *arguments):
        logs = update_reward(f, optimizer, expert_pairs, *arguments)
        f = copy.deepcopy(f)
        fs.append(lambda x: f(x) + 0.3 - f(expert_pairs).mean())
        return logs

    @torch.no_grad()
    def spy_update(self, batch, learning_rate):
        rows, values = self.expert_buffer.rows, torch.stack([f(batch[:, :3]) for f in fs])
        assert_close(rows[:, -1], fs[-1](rows[:, :3]), rtol=1e-4, atol=1e-5)
        errors = (values - batch[:, -1]).abs()
        assert (errors[-1] if rewards == "recomputed" else errors.amin(0)).max() < 1e-5
        n_seen.append((errors[-1] > 0.001).sum().item())
        with torch.enable_grad():
            return update(self, batch, learning_rate)

    monkeypatch.setattr(filter_br, "update_reward", spy_update_reward)
    monkeypatch.setattr(TD3BC, "update", spy_update)
    run(td3_counter(tiny, filter_br, rewards=rewards, payoff="mean", reward_level=0.3), tmp_path / "run")
    assert (sum(n_seen) > 100) == (rewards == "recorded") and len(n_seen) == 18 * 3


# ----------------------------------------------------------------------------------------------------------------------- whole trainings: a maze


def maze_args(module=filter_br, **changes):
    """A short training on the shipped demonstrations, with all that the mazes have of their own but the number of episodes."""
    small = {"n_demos": 3, "n_validation_demos": 2, "total_timesteps": 128, "iteration_timesteps": 64, "eval_every": 2, "eval_episodes": 1}
    small |= {"final_eval_episodes": 3, "n_rollouts": 1, "disc_batch_size": 64, "batch_size": 32, "gradient_steps": 4, "cloning_steps": 20, "critic_warmup": 6}
    small |= {"train_freq": 32, "total_gradient_steps": 40, "iteration_gradient_steps": 20}
    names = {field.name for field in dataclasses.fields(module.Args)}
    return module.Args(env_id=MAZE, **({name: value for name, value in small.items() if name in names} | changes))


@pytest.fixture(scope="session")
def maze_run(tmp_path_factory):
    pytest.importorskip("mujoco")
    folder = tmp_path_factory.mktemp("maze_run")
    return folder, run(maze_args(), folder)


def test_horizons_and_score_of_a_maze_run(maze_run, capsys):
    """A clumsy policy never arrives: training's episodes have 700 steps, evaluation's 1000. The score is a percentage, and says of how many episodes."""
    folder, end = maze_run
    assert column(folder, "disc/learner_length").tolist() == [700, 700] and end["counts"]["rollout_timesteps"] == 1400
    first, last = metrics(folder)
    assert first["eval/success_percent"] == "" and float(last["eval/success_percent"]) == 0 and float(last["eval/length"]) == 1000
    assert list(last).index("eval/success_percent") == list(last).index("eval/validation_error") + 1
    assert float(last["resets/alpha"]) == 1
    scores = json.loads((folder / "scores.json").read_text())
    for what in ("selected", "final"):
        assert scores[what] == {"step": 128, "episodes": 3, "return": 0.0, "return_std": 0.0, "length": 1000.0, "success_percent": 0.0}
    filter_br.report(maze_args(), folder)
    (line, _) = capsys.readouterr().out.splitlines()
    assert line == "selected policy, 128 interactions used for policy optimisation: return 0.0 +- 0.0 (0 % successes) over 3 episodes, p_tremble 0"


def test_success_percent_by_hand(monkeypatch):
    """Of episodes with any reward. A task that is no maze has no such number."""

    def score(env_id, n_episodes):
        env = SimpleNamespace(close=lambda: None)
        env.unwrapped = SimpleNamespace(spec=SimpleNamespace(id=env_id))
        return envs.evaluate(env, lambda observation: None, n_episodes)

    monkeypatch.setattr(envs, "roll_out", lambda env, act, n: ([np.zeros((3, 4))] * n, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0][:n]))
    scores = score(MAZE, 8)
    assert (scores["success_percent"], scores["return"], scores["length"]) == (25, 0.25, 3)
    assert score("antmaze-large-play-v2", 2)["success_percent"] == 50
    assert "success_percent" not in score(HOPPER, 8)


@scripts(*SCRIPTS)
def test_evaluations_have_the_tasks_own_horizon(module, tiny, tmp_path, monkeypatch):
    """Whatever training's is: of the random policy, during the run and at its end."""
    horizons, evaluate = [], module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda env, *arguments: horizons.append((env.horizon, env.p_tremble)) or evaluate(env, *arguments))
    run(td3_counter(tiny, module, total_timesteps=200, iteration_timesteps=100, horizon=8, p_tremble=0.25), tmp_path / "run")
    assert len(horizons) > 3 and set(horizons) == {(5, 0.25)}


@scripts("bc", *SCRIPTS)
def test_columns_of_a_maze_run(module, tmp_path, monkeypatch):
    """Each number under its own name, in rows with an evaluation and in rows without."""
    pytest.importorskip("mujoco")
    values = {"return": 0.75, "return_std": 0.25, "length": 321.0, "validation_error": 0.125, "success_percent": 75.0}
    monkeypatch.setattr(module, "evaluate", lambda env, act, n, error=None: {k: v for k, v in values.items() if error or k != "validation_error"})
    monkeypatch.setattr(module, "roll_out", lambda env, act, n: ([np.zeros((9, 8), dtype=np.float32)] * n, [0.0] * n), raising=False)  # BC has none
    run(maze_args(module), tmp_path / "run")
    names = list(values) + ([f"mixture_{name}" for name in ("return", "return_std", "length", "success_percent")] if module is nrmm_dual else [])
    first, last = metrics(tmp_path / "run")
    assert list(first) == list(last) and [name for name in first if name.startswith("eval/")] == [f"eval/{name}" for name in names]
    expected = values | {"mixture_return": 0.75, "mixture_return_std": 0.0, "mixture_length": 321.0, "mixture_success_percent": 75.0}
    assert all(first[f"eval/{name}"] == "" and float(last[f"eval/{name}"]) == expected[name] for name in names)
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert all(score["success_percent"] == 75 and score["episodes"] == 3 for what, score in scores.items() if what != "references")


def test_no_true_reward_reaches_a_maze_run(maze_run, tmp_path, monkeypatch):
    """The shipped file's rewards are replaced by noise, and the maze's own too: weights, buffers and random streams are the same to the bit.

    In a file whose states are said to be not exact, as in D4RL's own, rewards are not compared with the simulator's.
    """
    h5py, path, rng, step = pytest.importorskip("h5py"), tmp_path / "demos.hdf5", np.random.default_rng(0), ResettableEnv.step
    shutil.copy(ROOT / "utils" / "data" / f"{MAZE}.hdf5", path)
    with h5py.File(path, "r+") as file:
        assert file["rewards"][:].sum() == 50
        file["rewards"][:] = 1000 * rng.normal(size=len(file["rewards"]))
        file.attrs["exact_states"] = False

    def step_noise(env, action):
        observation, _, *rest = step(env, action)
        return observation, 1000 * rng.normal(), *rest

    monkeypatch.setattr(ResettableEnv, "step", step_noise)
    (folder, end), other = maze_run, run(maze_args(demos=str(path)), tmp_path / "run")
    assert [name for name in end if not same(end[name], other[name])] == ["references"]  # where the noise did arrive
    assert abs(float(metrics(tmp_path / "run")[-1]["eval/return"])) > 100 and max(map(abs, other["references"].values())) > 100
    policies = [torch.load(path / "policy.pt", weights_only=True) for path in (folder, tmp_path / "run")]
    assert same(policies[0]["actor"], policies[1]["actor"]) and policies[0]["step"] == policies[1]["step"]


@scripts("mm_gail_ipm", "filter_nr", "nrmm_dual")
def test_no_true_reward_reaches_td3_bc(module, td3_runs, tmp_path, monkeypatch):
    """The same on the Counter, for the others."""
    done, step, rng = td3_runs(module), ResettableEnv.step, np.random.default_rng(0)

    def step_noise(env, action):
        observation, _, *rest = step(env, action)
        return observation, 1000 * rng.normal(), *rest

    def load_noise(source, env):
        demos = load(source, env, check_dynamics=False)
        return dataclasses.replace(demos, rewards=1000 * rng.normal(size=len(demos.rewards)))

    monkeypatch.setattr(ResettableEnv, "step", step_noise)
    monkeypatch.setattr("utils.demos.load", load_noise)
    end = run(done.args, tmp_path / "run")
    assert [name for name in end if not same(end[name], done.end[name])] == ["references"]


def test_a_maze_run_resumes(maze_run, tmp_path):
    folder, end = maze_run
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, "checkpoint.pt", 2)
        run(maze_args(), tmp_path / "run")
    assert checkpoint(tmp_path / "run")["counts"]["iteration"] == 1
    assert same(run(maze_args(), tmp_path / "run"), end) and metrics(tmp_path / "run") == metrics(folder)
