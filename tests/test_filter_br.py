"""algos/filter_br.py by value: every piece against numbers that are computed independently here, then whole tiny trainings, killed and resumed."""

import copy
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    HOPPER,
    HORIZON,
    Counter,
    Interrupted,
    assert_close,
    box,
    checkpoint,
    chi_square,
    column,
    command,
    constant_evaluation,
    flags,
    generator,
    interrupt,
    interrupt_file,
    learned,
    metrics,
    run,
    same,
)
from torch import nn

from algos import filter_br
from algos.filter_br import (
    SAC,
    Actor,
    Args,
    Generators,
    OptimisticAdam,
    ReplayBuffer,
    Reward,
    TwinQ,
    describe_run,
    deterministic,
    flatten,
    gradient_penalty,
    label,
    moment_gap,
    reward_shift,
    sampler,
    start_episode,
    train,
    update_reward,
    write_atomically,
)
from utils.demos import ValidationError, load, record, save, verify
from utils.envs import ResettableEnv, evaluate, get_state, make_env, roll_out

# --------------------------------------------------------------------------------------------------------------------------- optimistic Adam


def oadam(w, gradients, rates, port=False):
    """The cited paper's update, in double precision. `port`: as a widespread port has it, with the last moments under the present bias correction."""
    w, m, v, d_last, steps = np.array(w, dtype=np.float64), 0.0, 0.0, 0.0, []
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m_last, v_last = m, v
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        d = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        if port:
            d_last = m_last / (1 - 0.9**t) / (np.sqrt(v_last / (1 - 0.999**t)) + 1e-8)
        w = w - 2 * rate * d + rate * d_last
        d_last = d
        steps.append(w)
    return np.array(steps)


def set_gradient(module, g):
    """Through the parameters, as backward() does."""
    i = 0
    for p in module.parameters():
        p.grad += torch.as_tensor(np.array(g)[i : i + p.numel()], dtype=torch.float32).view_as(p)
        i += p.numel()


def values(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def test_optimistic_adam_is_the_papers():
    module, rng = nn.Linear(3, 2), np.random.default_rng(0)
    gradients, rates = rng.normal(size=(8, 8)) * np.geomspace(1, 50, 8)[:, None], np.linspace(0.1, 0.01, 8)
    expected = oadam(values(module), gradients, rates)
    port = oadam(values(module), gradients, rates, port=True)
    optimizer = OptimisticAdam(module)
    for g, rate, step, other in zip(gradients, rates, expected, port, strict=True):
        set_gradient(module, g)
        optimizer.step(rate)
        np.testing.assert_allclose(values(module), step, rtol=1e-5, atol=1e-6)
        assert all((p.grad == 0).all() for p in module.parameters())  # cleared for the next backward()
    assert np.abs(values(module) - other).max() > 0.01  # the port's numbers are others


def test_optimistic_adam_first_step_is_twice_adams():
    module = nn.Linear(2, 1)
    before = values(module)
    optimizer = OptimisticAdam(module)
    set_gradient(module, np.array([3.0, -0.02, 700.0]))
    optimizer.step(0.01)
    np.testing.assert_allclose(values(module) - before, [-0.02, 0.02, -0.02], atol=1e-6)


def test_optimistic_adam_converges_where_adam_circles():
    """min_x max_y x y from (1, 1), both at once, at a constant rate: the last iterate. Without momentum: with beta1 = 0.9 neither converges."""
    x, y = (nn.ParameterList([nn.Parameter(torch.tensor(1.0))]) for _ in range(2))
    players = [(x, OptimisticAdam(x, beta1=0.0)), (y, OptimisticAdam(y, beta1=0.0))]
    adam, v = np.ones(2), 0
    for t in range(1, 501):
        for (player, optimizer), g in zip(players, (y[0].item(), -x[0].item()), strict=True):
            set_gradient(player, [g])
            optimizer.step(0.1)
        g = np.array([adam[1], -adam[0]])
        v = 0.999 * v + 0.001 * g**2
        adam = adam - 0.1 * g / np.sqrt(v / (1 - 0.999**t))
    assert math.hypot(x[0].item(), y[0].item()) < 1e-3 and np.linalg.norm(adam) > 1


def test_optimistic_adam_goes_on_from_its_state():
    rng, modules = np.random.default_rng(0), [nn.Linear(3, 2) for _ in range(2)]
    gradients = rng.normal(size=(6, 8))
    optimizers = [OptimisticAdam(module) for module in modules]
    for i, g in enumerate(gradients):
        if i == 3:
            modules[1].load_state_dict(copy.deepcopy(modules[0].state_dict()))
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for module, optimizer in list(zip(modules, optimizers, strict=True))[: 2 if i >= 3 else 1]:
            set_gradient(module, g)
            optimizer.step(0.1 / (i + 1))
    np.testing.assert_array_equal(values(modules[0]), values(modules[1]))


def test_optimistic_adam_lets_no_average_decay_into_denormal_numbers():
    """A third of the averages did in a run of 200,000 interactions, and made an update 1.4 times slower. The simulator's numbers stay as they are."""
    module = nn.ParameterList([nn.Parameter(torch.ones(2))])
    optimizer = OptimisticAdam(module)
    for t in range(1100):
        module[0].grad.copy_(torch.tensor([float(t == 0), 1.0]))
        optimizer.step(1e-3)
    assert optimizer.m[0] == 0 and optimizer.m[1] > 0.999  # 0.1 * 0.9^1099 is 5e-52; the least normal number is 1.2e-38
    assert torch.tensor(1e-40) / 2 > 0


def test_flatten():
    """The module computes what it did, and vector and parameters are one memory, gradients too."""
    module, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(5, 3)
    before, output = values(module).copy(), module(x).detach().clone()
    vector, gradient = flatten(module)
    np.testing.assert_array_equal(vector.numpy(), before)
    assert torch.equal(module(x), output)
    module(x).sum().backward()
    assert torch.equal(gradient, torch.cat([p.grad.reshape(-1) for p in module.parameters()])) and (gradient != 0).any()
    vector.zero_()
    assert (module(x) == 0).all()
    module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert (vector == 1).all()


# ------------------------------------------------------------------------------------------------------------------------------------ networks


def plain_sample(actor, observations, noise):
    """Actions, log-probabilities and u from torch.distributions, in the actor's own precision. `noise` is standard normal."""
    h = actor.hidden(observations)
    mean = actor.mean(h)
    if actor.gsde:
        mean, std = mean.clamp(-2, 2), (h.detach() ** 2 @ torch.exp(2 * actor.log_std) + 1e-6).sqrt()
        u = mean + h.detach() @ (noise * actor.log_std.exp())
    else:
        std = actor.log_std(h).clamp(-20, 2).exp()
        u = mean + std * noise
    tanh = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, std), torch.distributions.TanhTransform(cache_size=1))
    squashed = torch.distributions.TanhTransform()(u)
    log_prob = torch.distributions.Normal(mean, std).log_prob(u) - torch.log(1 - squashed**2)
    if not torch.is_grad_enabled():  # the same number once more, by the library alone
        assert_close(tanh.log_prob(squashed), log_prob, rtol=1e-6, atol=1e-6)
    return actor.scale * squashed + actor.bias, log_prob.sum(1)


@pytest.fixture(params=[True, False], ids=["gsde", "no gsde"])
def actor(request):
    torch.manual_seed(0)
    actor = Actor(4, box([-2, -1], [2, 3]), gsde=request.param)
    with torch.no_grad():  # so that means differ from 0, and features are large enough for the noise to matter
        for p in (actor.mean.weight, actor.hidden[1].weight, actor.hidden[3].weight):
            p.mul_(3)
    return actor


def normal_noise(actor, n, rng):
    return torch.randn((256, 2) if actor.gsde else (n, 2), generator=rng)


@torch.no_grad()
def test_actor_log_prob(actor):
    """Against torch.distributions in double precision. It is the density of tanh(u), whatever the bounds: that of the action is log(scale) less."""
    observations = torch.randn(200, 4)
    actions, log_prob = actor.sample(observations, generator(3))
    noise, plain = normal_noise(actor, 200, generator(3)), copy.deepcopy(actor).double()
    expected_actions, expected_log_prob = plain_sample(plain, observations.double(), noise.double())
    assert_close(actions.double(), expected_actions, rtol=1e-4, atol=1e-5)
    assert_close(log_prob.double(), expected_log_prob, rtol=1e-4, atol=1e-3)
    assert log_prob.shape == (200,) and log_prob.std() > 0.1


@torch.no_grad()
def test_actor_density_is_a_density(actor):
    """Sampled actions are distributed as log_prob says: E[1 / p(a)] over samples is the volume of the squashed actions' square, 2 x 2."""
    if actor.gsde:
        actor.log_std.fill_(-2.0)  # wide enough for the samples to reach everywhere
    else:
        actor.log_std.weight.zero_()
        actor.log_std.bias.fill_(0.0)
    actor.mean.weight.mul_(0.1)
    observation, rng, draws = torch.randn(1, 4), generator(5), []
    n = 20_000
    if actor.gsde:
        h = actor.hidden(observation)
        std = (h.square() @ actor.log_std.exp().square()).sqrt()
        draws = h @ torch.stack([actor.sample_noise(rng) for _ in range(2000)])[:, :, :]
        assert_close(draws.std(0)[0], std[0], rtol=0.06, atol=0)  # the noise has the variance that the density says
        assert draws.mean(0).abs().max() < 4 * std.max() / math.sqrt(2000)
        return
    actions, log_prob = actor.sample(observation.expand(n, -1), rng)
    inside = ((actions - actor.bias) / actor.scale).abs().amax(1) < 0.9  # where 1 / p has a small variance
    assert (inside / log_prob.exp()).mean().item() == pytest.approx(1.8**2, rel=0.05)


@torch.no_grad()
def test_actor_stays_within_bounds(actor):
    for p in actor.parameters():
        p.mul_(5)
    observations = 10 * torch.randn(2000, 4)
    for actions in (actor.sample(observations, generator())[0], actor(observations)):
        assert ((actions >= torch.tensor([-2.0, -1.0])) & (actions <= torch.tensor([2.0, 3.0]))).all()
        assert (actions.amax(0) > torch.tensor([1.9, 2.9])).all() and (actions.amin(0) < torch.tensor([-1.9, -0.9])).all()  # both bounds are used


@pytest.mark.parametrize("mean", [0.3, 3.0])
@torch.no_grad()
def test_actor_deterministic_head(actor, mean):
    """What is evaluated is the middle of what is sampled, where gSDE clips the mean too."""
    actor.mean.weight.mul_(0.1)
    actor.mean.bias.fill_(mean)
    if actor.gsde:
        actor.log_std.fill_(-12.0)
    else:
        actor.log_std.weight.zero_()
        actor.log_std.bias.fill_(-12.0)
    observations = torch.randn(64, 4)
    assert_close(actor(observations), actor.sample(observations, generator())[0], rtol=0, atol=2e-3)
    assert_close(deterministic(actor)(observations[0].numpy()), actor(observations)[0].numpy(), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_gsde_noise_is_linear_in_the_features():
    """One matrix for the whole batch, and for as many steps as it is held."""
    torch.manual_seed(0)
    actor, observations = Actor(4, box([-1] * 3, [1] * 3), gsde=True), torch.randn(50, 4)
    noise = actor.sample_noise(generator())
    assert noise.shape == (256, 3) and noise.std().item() == pytest.approx(math.exp(-3), rel=0.1)
    u = torch.atanh(actor.sample(observations, None, noise)[0])
    h = actor.hidden(observations)
    assert_close(u - actor.mean(h), h @ noise, rtol=1e-3, atol=1e-5)

    # Held for 3 steps, then drawn anew; in between, the same observation gives the same action.
    act = sampler(actor, generator(1), hold=3)
    actions = np.array([act(observations[0].numpy()) for _ in range(9)])
    assert (actions[0:9:3] == actions[1:9:3]).all() and (actions[0:9:3] == actions[2:9:3]).all() and len(np.unique(actions, axis=0)) == 3


def test_noise_does_not_shape_the_features(actor):
    """With the mean cut off from the features, only the noise's part of log_prob is left: none of it with gSDE, and some without."""
    actor.mean.weight.data.zero_()
    _, log_prob = actor.sample(torch.randn(20, 4), generator())
    log_prob.sum().backward()
    gradients = [p.grad for p in actor.hidden.parameters()]
    if actor.gsde:
        assert all(g is None or (g == 0).all() for g in gradients) and (actor.log_std.grad != 0).any()
    else:
        assert any((g != 0).any() for g in gradients)


def test_twin_q_is_two_networks():
    torch.manual_seed(0)
    twin, x = TwinQ(5, hidden=16), torch.randn(9, 5)
    q = twin(x)
    assert q.shape == (2, 9) and not torch.allclose(q[0], q[1])
    for k in range(2):
        layers = [nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 1)]
        for layer, w, b in zip(layers, (twin.w1, twin.w2, twin.w3), (twin.b1, twin.b2, twin.b3), strict=True):
            layer.weight.data, layer.bias.data = w[k].T, b[k, 0]
            limit = 1 / math.sqrt(layer.in_features)  # torch's own initialisation
            assert w[k].abs().max() <= limit and (w[k].abs().max() > 0.8 * limit or w[k].numel() < 20)
        expected = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])(x)[:, 0]
        assert_close(q[k], expected)


# --------------------------------------------------------------------------------------------------------------------------------- policy player


def make_sac(gsde=True, seed=0, **changes):
    torch.manual_seed(seed)
    options = {"gamma": 0.9, "tau": 0.02, "gsde": gsde, "init_temperature": 0.2} | changes
    return SAC(4, box([-2, -1], [2, 3]), rng=generator(seed), **options)


def random_batch(n=32):
    batch = torch.randn(n, 12, generator=generator(9))  # 4 + 2 + 4 + 1 + 1
    batch[:, -2] = (torch.arange(n) % 3 == 0).float()
    return batch


def test_target_by_hand():
    """Q = 10 and 12, r = 1, gamma = 0.9: 1 after a termination, and 1 + 0.9 (10 - temperature log pi) after a truncation, as anywhere else."""
    sac, seen = make_sac(), []
    sac.actor = SimpleNamespace(sample=lambda observations, rng: (observations[:, :2] + 100, torch.tensor([-1.5, -1.5, 2.0])))
    sac.target_critic = lambda x: seen.append(x) or torch.tensor([[10.0, 10.0, 12.0], [12.0, 12.0, 10.0]])
    sac.critic = None  # not the one to ask
    next_observations = torch.arange(12.0).view(3, 4)
    target = sac.target(next_observations, torch.tensor([1.0, 0.0, 0.0]), torch.ones(3))
    assert_close(target, torch.tensor([1.0, 1 + 0.9 * (10 + 0.2 * 1.5), 1 + 0.9 * (10 - 0.2 * 2)]))
    assert_close(seen[0], torch.cat([next_observations, next_observations[:, :2] + 100], 1))
    sac.log_temperature[0].data.fill_(-100.0)  # without entropy: 10, as 1 + 0.9 * 10
    assert_close(sac.target(next_observations, torch.tensor([1.0, 0.0, 0.0]), torch.ones(3)), torch.tensor([1.0, 10.0, 10.0]))


def plain_q(critic, x):
    layers = [(critic.w1[k], critic.b1[k], critic.w2[k], critic.b2[k], critic.w3[k], critic.b3[k]) for k in (0, 1)]
    return torch.stack([((x @ w1 + b1).relu() @ w2 + b2).relu() @ w3 + b3 for w1, b1, w2, b2, w3, b3 in layers])[..., 0]


def first_gradients(optimizer):
    return optimizer.m.double() / 0.1  # Adam's average after one step


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def assert_gradients_close(actual, expected):
    assert_close(actual, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("gsde", [True, False])
def test_update_against_plain_torch(gsde):
    """One whole update, in double precision with nothing of SAC's own code: three gradients, three steps, the soft update and what is logged."""
    sac, batch, rate = make_sac(gsde), random_batch(), 1e-3
    actor, critic, target_critic = (copy.deepcopy(module).double() for module in (sac.actor, sac.critic, sac.target_critic))
    assert torch.equal(flat(sac.critic.parameters()), sac.critic_optimizer.vector)
    assert torch.equal(sac.target_vector, sac.critic_optimizer.vector), "the target network starts as a copy"
    with torch.no_grad():  # else the next two lines would hold for any target network
        sac.target_vector.mul_(1.1)
        for p in target_critic.parameters():
            p.mul_(1.1)
    logs = sac.update(batch, rate)

    rng, b = generator(0), batch.double()
    s, a, s_next, terminated, r = b[:, :4], b[:, 4:6], b[:, 6:10], b[:, 10], b[:, 11]
    with torch.no_grad():
        a_next, log_prob_next = plain_sample(actor, s_next, normal_noise(actor, 32, rng).double())
        q_next = plain_q(target_critic, torch.cat([s_next, a_next], 1)).min(0).values
        target = torch.where(terminated == 1, r, r + 0.9 * (q_next - 0.2 * log_prob_next))
    q = plain_q(critic, torch.cat([s, a], 1))
    critic_loss = 0.5 * (((q[0] - target) ** 2).mean() + ((q[1] - target) ** 2).mean())
    critic_gradient = flat(torch.autograd.grad(critic_loss, list(critic.parameters())))
    assert_gradients_close(first_gradients(sac.critic_optimizer), critic_gradient)

    with torch.no_grad():  # the actor's loss sees the critic after its step
        for p, new in zip(critic.parameters(), sac.critic.parameters(), strict=True):
            assert (new - p).abs().max().item() == pytest.approx(2 * rate, rel=1e-3)
            p.copy_(new)
    actions, log_prob = plain_sample(actor, s, normal_noise(actor, 32, rng).double())
    actor_loss = (0.2 * log_prob - plain_q(critic, torch.cat([s, actions], 1)).min(0).values).mean()
    assert_gradients_close(first_gradients(sac.actor_optimizer), flat(torch.autograd.grad(actor_loss, list(actor.parameters()))))

    entropy = -log_prob.mean().item()
    temperature_gradient = entropy - -2.0  # of log_temperature (entropy - target): positive, so the temperature falls, where there is too much
    assert first_gradients(sac.temperature_optimizer).item() == pytest.approx(temperature_gradient, rel=1e-3)
    expected_logs = {"critic_loss": critic_loss.item(), "actor_loss": actor_loss.item(), "q": q.mean().item(), "entropy": entropy, "temperature": 0.2}
    assert {name: value.item() for name, value in logs.items()} == pytest.approx(expected_logs, rel=1e-3, abs=1e-5)
    assert not any(value.requires_grad for value in logs.values())

    soft = 0.98 * flat(target_critic.parameters()) + 0.02 * flat(critic.parameters())
    assert_close(sac.target_vector.double(), soft.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat(sac.target_critic.parameters()), sac.target_vector)
    for optimizer in (sac.critic_optimizer, sac.actor_optimizer, sac.temperature_optimizer):
        assert (optimizer.gradient == 0).all()  # nothing, such as the actor's loss in the critic, is left for the next update


@pytest.mark.parametrize(("target_entropy", "factor"), [(1000.0, math.exp(0.02)), (-1000.0, math.exp(-0.02))], ids=["too little", "too much"])
def test_temperature_moves_the_right_way(target_entropy, factor):
    sac = make_sac()
    assert sac.target_entropy == -2.0
    sac.target_entropy = target_entropy
    sac.update(random_batch(), 0.01)
    assert sac.log_temperature[0].exp().item() == pytest.approx(0.2 * factor, rel=1e-4)


def test_sac_goes_on_from_its_state():
    a, b, batch = make_sac(seed=0), make_sac(seed=1), random_batch()
    a.update(batch, 1e-3)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    b.rng.set_state(a.rng.get_state())
    for sac in (a, b):
        for rate in (1e-3, 5e-4):
            logs = sac.update(batch, rate)
    for name in ("actor_optimizer", "critic_optimizer", "temperature_optimizer"):
        assert torch.equal(getattr(a, name).vector, getattr(b, name).vector)
    assert torch.equal(a.target_vector, b.target_vector) and torch.equal(flat(b.target_critic.parameters()), b.target_vector)
    assert logs["temperature"] != 0.2


# ----------------------------------------------------------------------------------------------------------------------------------------- buffer


def fill(buffer, n, first=0):
    """Rows that say in every entry which transition they are."""
    for i in range(first, first + n):
        buffer.add(np.array([i, i + 0.1]), np.array([i + 0.2]), np.array([i + 0.3, i + 0.4]), i % 2 == 0)


def test_buffer_is_a_ring_of_rows():
    buffer = ReplayBuffer(8, 2, 1)
    fill(buffer, 5)
    assert len(buffer) == 5
    fill(buffer, 8, first=5)
    assert len(buffer) == 8
    held = [8, 9, 10, 11, 12, 5, 6, 7]
    expected = [[i, i + 0.1, i + 0.2, i + 0.3, i + 0.4, i % 2 == 0, 0] for i in held]
    assert_close(buffer.rows, torch.tensor(expected, dtype=torch.float32))

    other = ReplayBuffer(8, 2, 1)
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    for b in (buffer, other):
        fill(b, 2, first=13)
    assert torch.equal(buffer.rows, other.rows) and len(other) == 8 and (other.numpy_rows == other.rows.numpy()).all()


def test_buffer_samples_uniformly_from_the_runs_generator():
    buffer = ReplayBuffer(50, 2, 1)
    fill(buffer, 20)  # the 30 empty rows must never come
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    batches = buffer.sample(100, 64, generator(1))
    assert len(batches) == 100 and all(batch.shape == (64, 7) for batch in batches)
    counts = np.bincount(torch.cat(batches)[:, 0].int(), minlength=20)
    assert len(counts) == 20 and chi_square(counts, np.full(20, 1 / 20)) < 5
    again, other = buffer.sample(100, 64, generator(1)), buffer.sample(100, 64, generator(2))
    assert torch.equal(torch.cat(batches), torch.cat(again)) and not torch.equal(torch.cat(batches), torch.cat(other))
    assert torch.equal(state[0], torch.get_rng_state()) and (state[1] == np.random.get_state()[1]).all()


def test_checkpoint_holds_the_rows_in_use_alone(tmp_path):
    """A slice of a tensor is saved with the whole of its memory: 40 MB at each iteration, for Hopper's empty buffer."""
    buffer = ReplayBuffer(100_000, 15, 3)
    buffer.add(np.zeros(15), np.zeros(3), np.zeros(15), False)
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")
    assert (tmp_path / "buffer.pt").stat().st_size < 100_000


# --------------------------------------------------------------------------------------------------------------------------------- reward player


def test_moment_gap_by_hand():
    """Horizon 10. The expert lasts 8 steps with f = 0.5, the learner falls after 2 with f = 0.9: the trajectories' sums are 4 and 1.8."""
    f_expert, f_learner = torch.full((7,), 0.5), torch.full((9,), 0.9)
    assert moment_gap(f_expert, f_learner, 0.8, 0.2).item() == pytest.approx((4 - 1.8) / 10)  # the expert is the better one
    assert moment_gap(f_expert, f_learner, 1.0, 1.0).item() == pytest.approx(0.5 - 0.9)  # the mean does not see the fall, and says the opposite
    assert moment_gap(f_expert + 0.1, f_learner, 0.8, 0.2).item() == pytest.approx(0.22 + 0.08)  # f higher on the expert: a greater gap
    # A constant added to f pays off against a learner that falls, and not in the mean.
    assert moment_gap(f_expert + 0.1, f_learner + 0.1, 0.8, 0.2).item() == pytest.approx(0.22 + 0.06)
    assert moment_gap(f_expert + 0.1, f_learner + 0.1, 1.0, 1.0).item() == pytest.approx(-0.4)


class Function:
    """A reward player that is `function`, in coordinates of this spread."""

    def __init__(self, function, spread=(1.0, 1.0, 1.0)):
        self.function, self.standardize = function, SimpleNamespace(spread=torch.tensor(spread))

    def __call__(self, x):
        return self.function(x)


def test_gradient_penalty_of_a_linear_function():
    """Its gradient is w in each of the 8 rows, so the penalty is (|w| - target)^2 exactly, and so is its own gradient."""
    w = torch.tensor([2.0, -1.0, 2.0], requires_grad=True)  # |w| = 3
    expert, learner = torch.randn(8, 3), torch.randn(8, 3)
    penalty = gradient_penalty(Function(lambda x: x @ w), expert, learner, 0.4, generator())
    assert penalty.item() == pytest.approx((3 - 0.4) ** 2, rel=1e-6)
    penalty.backward()
    assert_close(w.grad, 2 * (3 - 0.4) * w.detach() / 3)
    assert expert.grad is None and learner.grad is None and not expert.requires_grad and not learner.requires_grad


def test_gradient_penalty_in_standardised_coordinates():
    """f is w x = (w spread) z + constant in z = (x - center) / spread, whatever the center: the norm is that of w spread. f being a network, alike."""
    w, spread = torch.tensor([2.0, -1.0, 2.0], requires_grad=True), (3.0, 1.0, 0.5)
    expert, learner = torch.randn(8, 3), torch.randn(8, 3)
    penalty = gradient_penalty(Function(lambda x: x @ w, spread), expert, learner, 0.4, generator())
    norm = math.sqrt(36 + 1 + 1)
    assert penalty.item() == pytest.approx((norm - 0.4) ** 2, rel=1e-6)
    penalty.backward()
    assert_close(w.grad, 2 * (norm - 0.4) / norm * w.detach() * torch.tensor(spread).square())

    f, observations = Reward(3), 5 + torch.tensor([3.0, 0.5]) * torch.randn(400, 2)
    plain = copy.deepcopy(f)  # which is given standardised pairs
    f.standardize.fit(observations)
    expert, learner = (torch.cat([observations[rows], torch.randn(8, 1)], 1) for rows in (slice(8), slice(8, 16)))
    expected = gradient_penalty(plain, f.standardize(expert), f.standardize(learner), 0.4, generator())
    assert_close(gradient_penalty(f, expert, learner, 0.4, generator()), expected, rtol=1e-4)


def test_gradient_penalty_of_every_row():
    """f = |x|^2 / 2 has the gradient x: all rows count, each with a mixture of its own."""
    expert, learner, seen = torch.randn(8, 3), torch.randn(8, 3), []
    penalty = gradient_penalty(Function(lambda x: seen.append(x) or x.square().sum(1) / 2), expert, learner, 0.4, generator())
    mixture = seen[0].detach()
    u = ((mixture - learner) / (expert - learner)).numpy()  # the same in all entries of a row
    np.testing.assert_allclose(u, u[:, :1].repeat(3, 1), rtol=1e-3, atol=1e-4)
    assert len(np.unique(u[:, 0].round(4))) == 8 and (u > 0).all() and (u < 1).all()
    assert penalty.item() == pytest.approx(((mixture.norm(dim=1) - 0.4) ** 2).mean().item(), rel=1e-6)


def toy_pairs():
    """Expert and learner pairs that f can tell apart, with unequal numbers of rows."""
    rng = generator(2)
    return torch.randn(60, 5, generator=rng) + 0.7, torch.randn(45, 5, generator=rng) - 0.7


def test_update_reward_raises_the_gap():
    torch.manual_seed(0)
    f, (expert, learner) = Reward(5), toy_pairs()
    args = Args(disc_steps=40, disc_batch_size=64, gradient_penalty=1.0)
    before = moment_gap(f(expert), f(learner), 1.0, 0.5)
    update_reward(f, OptimisticAdam(f), expert, learner, (1.0, 0.5), 2e-3, args, generator())
    after = moment_gap(f(expert), f(learner), 1.0, 0.5)
    assert after > before + 0.3 and f(expert).mean() > f(learner).mean() + 0.2
    far = f(1000 * torch.randn(500, 5)).detach()  # in [-1, 1], and both ends are reached
    assert -1 <= far.min() < -0.999 and 0.999 < far.max() <= 1


def test_update_reward_step_against_plain_torch():
    """The gradient of -(gap) + 10 penalty, on rows drawn with replacement from each side."""
    torch.manual_seed(0)
    f, (expert, learner) = Reward(5), toy_pairs()
    net, optimizer = copy.deepcopy(f.net).double(), OptimisticAdam(f)
    args = Args(disc_steps=1, disc_batch_size=100)  # more than there are rows
    logs = update_reward(f, optimizer, expert, learner, (0.9, 0.3), 1e-3, args, generator(4))

    rng = generator(4)
    rows = torch.randint(60, (100,), generator=rng), torch.randint(45, (100,), generator=rng)
    e, p, u = expert[rows[0]].double(), learner[rows[1]].double(), torch.rand(100, 1, generator=rng).double()

    def value(x):
        return torch.tanh(net(x)[:, 0])

    mixtures = (u * e + (1 - u) * p).requires_grad_()
    norms = torch.stack([torch.autograd.grad(value(mixtures[i : i + 1]), mixtures, create_graph=True)[0][i].norm() for i in range(100)])
    gap, penalty = 0.9 * value(e).sum() / 100 - 0.3 * value(p).sum() / 100, ((norms - 0.4) ** 2).mean()
    loss = -gap + 10 * penalty
    gradient = flat(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True))
    assert_gradients_close(first_gradients(optimizer), gradient)
    expected = {"gap": gap, "penalty": penalty, "f_expert": value(e).mean(), "f_expert_std": value(e).std()}
    expected |= {"f_learner": value(p).mean(), "f_learner_std": value(p).std()}
    assert {name: x.item() for name, x in logs.items()} == pytest.approx({name: x.item() for name, x in expected.items()}, rel=1e-4, abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------------------------------- label


def test_reward_shift_by_hand():
    """f is 1, 2 and 6 on the expert's pairs: 3 on average, which is shifted to the level asked for. The paper's payoff leaves f as it is."""
    expert_pairs = torch.tensor([[1.0, 0], [2, 0], [6, 0]])
    assert reward_shift(lambda x: x[:, 0], expert_pairs, Args(payoff="mean", reward_level=0.5)) == pytest.approx(0.5 - 3)
    assert reward_shift(lambda x: x[:, 0], expert_pairs, Args(payoff="mean", reward_level=-1.0)) == pytest.approx(-1 - 3)
    assert reward_shift(lambda x: x[:, 0], expert_pairs, Args(payoff="sum", reward_level=0.5)) == 0


@torch.no_grad()
def test_label_recomputed_and_recorded():
    """f of the row's own (s, a), shifted: once, when it was collected ("recorded"), or with each new f ("recomputed": nothing counts as labelled)."""
    buffer = ReplayBuffer(8, 2, 1)
    fill(buffer, 3)
    label(buffer, lambda x: x.sum(1), 0.0)
    assert buffer.n_labelled == 3
    fill(buffer, 2, first=3)
    label(buffer, lambda x: -x.sum(1), 10.0)
    sums = 3 * torch.arange(5.0) + 0.3
    assert_close(buffer.rows[:5, -1], sums * torch.tensor([1.0, 1, 1, -1, -1]) + torch.tensor([0.0, 0, 0, 10, 10]))
    label(buffer, lambda x: x.sum(1) * math.nan, 0.0)  # nothing is left to do
    assert_close(buffer.rows[:5, -1], sums * torch.tensor([1.0, 1, 1, -1, -1]) + torch.tensor([0.0, 0, 0, 10, 10]))
    buffer.n_labelled = 0
    label(buffer, lambda x: 2 * x.sum(1), -1.0)
    assert_close(buffer.rows[:, -1], torch.cat([2 * sums - 1, torch.zeros(3)]))
    assert_close(buffer.rows[:5, :-1], torch.tensor([[i, i + 0.1, i + 0.2, i + 0.3, i + 0.4, i % 2 == 0] for i in range(5)]))


@pytest.mark.parametrize("n_new", [3, 5, 8, 9, 30])
@torch.no_grad()
def test_label_around_the_end_of_the_ring(n_new):
    buffer = ReplayBuffer(8, 2, 1)
    fill(buffer, 6)
    label(buffer, lambda x: x[:, 0] * 0 - 1, 0.0)
    fill(buffer, n_new, first=6)
    label(buffer, lambda x: x[:, 0], 0.0)
    index = buffer.rows[:, 0]  # the transition's number; the first 6 keep the value that they had
    used = index[: len(buffer)]
    assert_close(buffer.rows[: len(buffer), -1], torch.where(used < 6, -torch.ones_like(used), used))
    assert buffer.n_labelled == 6 + n_new


@torch.no_grad()
def test_label_more_rows_than_one_batch():
    buffer, f = ReplayBuffer(20_000, 2, 1), Reward(3)
    buffer.rows[:, :3], buffer.n_added = torch.randn(20_000, 3, generator=generator()), 20_000
    label(buffer, f, 0.25)
    assert_close(buffer.rows[:, -1], f(buffer.rows[:, :3]) + 0.25, rtol=1e-4, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------------------------- expert resets


def test_expert_resets_are_uniform(monkeypatch):
    """A demonstration uniformly, then one of its steps uniformly: a step of a short demonstration comes more often than one of a long one."""
    demos = SimpleNamespace(n_episodes=3, episode_starts=np.array([0, 2, 5, 20]), states=np.arange(20))
    monkeypatch.setattr(filter_br, "set_state", lambda env, state: state)
    rng = np.random.default_rng(0)
    drawn = [start_episode(None, demos, 1.0, rng) for _ in range(6000)]
    assert all(is_expert for _, is_expert in drawn)
    counts = np.bincount([row for row, _ in drawn], minlength=20)
    assert chi_square(counts, np.repeat([1 / 3 / 2, 1 / 3 / 3, 1 / 3 / 15], [2, 3, 15])) < 4
    assert chi_square(counts, np.full(20, 1 / 20)) > 50


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
def test_expert_resets_come_with_probability_alpha(monkeypatch, alpha):
    demos = SimpleNamespace(n_episodes=1, episode_starts=np.array([0, 4]), states=np.arange(4))
    monkeypatch.setattr(filter_br, "set_state", lambda env, state: "expert")
    env, rng = SimpleNamespace(reset=lambda: ("start", {})), np.random.default_rng(0)
    drawn = [start_episode(env, demos, alpha, rng) for _ in range(3000)]
    assert set(drawn) <= {("start", False), ("expert", True)}
    share = np.mean([is_expert for _, is_expert in drawn])
    assert share == alpha if alpha in (0, 1) else abs(share - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / 3000)


def test_expert_reset_is_exact_and_free(hopper_demos, monkeypatch):
    """The recorded observation to the bit, at the recorded time, with not one step of the environment or of the physics; then the recorded future."""
    env, rng, steps = make_env(HOPPER, seed=3), np.random.default_rng(0), []
    env.reset()
    monkeypatch.setattr(env.unwrapped._p, "stepSimulation", lambda: steps.append("physics"), raising=False)
    monkeypatch.setattr(type(env.unwrapped), "step", lambda self, action: steps.append("step"))
    starts = {state.tobytes(): row for row, state in enumerate(hopper_demos.states)}
    assert len(starts) == len(hopper_demos.states)
    rows = []
    for _ in range(50):
        observation, is_expert = start_episode(env, hopper_demos, 1.0, rng)
        state = get_state(env)
        rows.append(starts[state.tobytes()])
        np.testing.assert_array_equal(observation, hopper_demos.observations[rows[-1]])
        assert is_expert and observation.dtype == np.float32
        assert env.t == rows[-1] - hopper_demos.episode_starts[hopper_demos.episode_starts <= rows[-1]][-1]
    assert not steps and len(set(rows)) > 20
    monkeypatch.undo()
    np.testing.assert_array_equal(env.step(hopper_demos.actions[rows[-1]])[0], hopper_demos.next_observations[rows[-1]])


def test_time_left_after_an_expert_reset():
    """Put back to t, a Pendulum of horizon 200 is truncated after 200 - t steps, every time, and never terminated."""
    env, rng = make_env("Pendulum-v1", seed=1), np.random.default_rng(0)
    demos = record(env, lambda observation: np.zeros(1), 1, "a test")
    for _ in range(10):
        start_episode(env, demos, 1.0, rng)
        t, n = env.t, 0
        truncated = False
        while not truncated:
            _, _, terminated, truncated, _ = env.step(np.zeros(1))
            n += 1
            assert not terminated
        assert n == 200 - t


# ------------------------------------------------------------------------------------------------------------------- validation and evaluation


def as_demos(episodes):
    """Demonstrations of these pairs, the action last."""
    pairs = np.concatenate(episodes)
    return SimpleNamespace(observations=pairs[:, :-1], actions=pairs[:, -1:], n_episodes=len(episodes))


def test_validation_error():
    rng = np.random.default_rng(0)
    expert = [rng.normal(size=(n, 3)).astype(np.float32) * [1, 5, 0] for n in (20, 12)]  # one entry is constant
    error = ValidationError(as_demos(expert), horizon=20)
    assert error(expert) == 0
    assert error([expert[1], expert[0]]) == pytest.approx(0, abs=1e-12)
    assert error([expert[0][:5], expert[1][:5]]) > 0.1  # an episode that ends early has fewer terms, and what it lacks counts
    near, far = error([x + 0.1 for x in expert]), error([x + 2 for x in expert])
    assert 0 < near < far
    assert error([expert[0]]) > 0

    # sup over the unit ball of (E_expert[sum f] - E_pi[sum f]) / T, feature by feature.
    other = [rng.normal(size=(n, 3)) for n in (3, 20, 7)]
    both = np.concatenate(expert)
    center, spread = both.mean(0), np.maximum(both.std(0), 0.1)

    def moments(episodes):
        total = np.zeros(513)
        for episode in episodes:
            for pair in episode:
                total[:512] += math.sqrt(2 / 512) * np.cos(((pair - center) / spread) @ error.frequencies + error.phases) / len(episodes)
            total[512] += (20 - len(episode)) / len(episodes)  # the steps after its end
        return total / 20

    difference = moments(expert) - moments(other)
    assert error(other) == pytest.approx(math.sqrt((difference**2).sum()), rel=1e-6)
    best_f = difference / np.linalg.norm(difference)
    assert error(other) == pytest.approx(best_f @ difference, rel=1e-6)
    assert ValidationError(as_demos(expert), 20)(other) == error(other) != ValidationError(as_demos(expert), 20, n_features=64)(other)  # one for every run


def test_validation_error_does_not_prefer_a_fall():
    """The expert stays for all 20 steps. Falling at once is worse than staying far away from it, where no feature is alike."""
    rng = np.random.default_rng(0)
    error = ValidationError(as_demos([rng.normal(size=(20, 3)) for _ in range(3)]), horizon=20)
    far, fallen = error([50 + 30 * rng.normal(size=(20, 3)) for _ in range(20)]), error([rng.normal(size=(1, 3)) for _ in range(20)])
    assert fallen > 0.95 and far < 0.9 * fallen


def test_roll_out_and_evaluate(demo_files):
    """The Counter pays 1 a step: a policy that stands still lasts 5 steps from each start state, one that runs right leaves after 1 to 3."""
    still, right = (lambda observation, a=a: np.array([a], dtype=np.float32) for a in (0.0, 1.0))

    def score(act, seed=(1, 4, 0), p_tremble=0.0, validation_error=None):
        return evaluate(make_env("Counter-v0", p_tremble=p_tremble, seed=seed), act, 40, validation_error)

    result = score(still)
    assert (result["return"], result["return_std"], result["length"]) == (5.0, 0.0, 5.0) and "validation_error" not in result
    episodes, returns = roll_out(make_env("Counter-v0", seed=(1, 4, 0)), right, 40)
    assert all(episode.dtype == np.float32 and episode.shape[1] == 3 for episode in episodes)
    lengths = [len(episode) for episode in episodes]
    assert set(lengths) == {1, 2, 3} and returns == lengths
    for episode in episodes:  # whole episodes, from the environment's own start states: the count goes from 0 up, the last observation is not a pair
        np.testing.assert_array_equal(episode[:, 0], np.arange(len(episode)))
        assert abs(episode[0, 1]) < 0.5 and (np.abs(episode[:, 1]) < 1).all() and (episode[:, 2] == 1).all()
    result = score(right, validation_error=ValidationError(as_demos(episodes), HORIZON))
    assert result["return"] == np.mean(lengths) and result["return_std"] == pytest.approx(np.std(lengths)) and result["validation_error"] == 0
    assert score(right, (1, 4, 1), validation_error=ValidationError(as_demos(episodes), HORIZON))["validation_error"] > 0  # other start states
    trembling = score(right, p_tremble=1.0)
    assert trembling["return"] > result["return"]  # random actions do not run right


# ------------------------------------------------------------------------------------------------------------------------------ whole trainings


COLUMNS = ["charts/timesteps", "charts/all_timesteps", "charts/seconds"]
COLUMNS += ["eval/return", "eval/return_std", "eval/length", "eval/validation_error"]
COLUMNS += ["disc/gap", "disc/penalty", "disc/f_expert", "disc/f_expert_std", "disc/f_learner", "disc/f_learner_std"]
COLUMNS += ["disc/shift", "disc/learner_length"]
COLUMNS += ["losses/critic_loss", "losses/actor_loss", "losses/q", "losses/entropy", "losses/temperature"]
COLUMNS += ["resets/alpha", "resets/episodes", "resets/expert_fraction"]


@pytest.fixture(scope="session")
def hopper_run(tiny, tmp_path_factory):
    """A tiny training on Hopper with all that it writes; its agent and reward as they were at the start, and its last checkpoint."""
    folder, start = tmp_path_factory.mktemp("hopper_run"), {}
    args = tiny(HOPPER)

    class SpySAC(SAC):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            start["agent"] = copy.deepcopy(self.state_dict())

    class SpyReward(Reward):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            start["f"] = copy.deepcopy(self.state_dict())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filter_br, "SAC", SpySAC)
        patch.setattr(filter_br, "Reward", SpyReward)
        began = time.time()
        train(args, folder)
    return SimpleNamespace(args=args, folder=folder, start=start, end=checkpoint(folder), seconds=time.time() - began)


def test_training_moves_everything(hopper_run):
    pairs = [(hopper_run.start["agent"][name], hopper_run.end["agent"][name]) for name in ("actor", "critic", "target_critic", "log_temperature")]
    for before, after in [*pairs, (hopper_run.start["f"], hopper_run.end["f"])]:
        assert all((before[name] != after[name]).any() for name in learned(before))
        assert all(torch.isfinite(after[name]).all() for name in learned(before))
    assert hopper_run.end["agent"]["critic_optimizer"]["t"] == 16 * 4  # bursts at 96, 128 ... 576: the first 64 actions are random
    assert hopper_run.end["f_optimizer"]["t"] == 3 * hopper_run.args.disc_steps


def test_training_writes_what_it_says(hopper_run, tiny):
    folder, rows = hopper_run.folder, metrics(hopper_run.folder, without=())
    names = {path.name for path in folder.iterdir() if not path.name.startswith("events.")}
    assert names == {"metrics.csv", "checkpoint.pt", "policy.pt", "final_policy.pt", "scores.json", "learning_curve.png"}
    assert [list(row) for row in rows] == [COLUMNS] * 3
    assert column(folder, "charts/timesteps").tolist() == [200, 400, 600]
    # All interactions: the discriminator's roll-outs, 4 episodes an iteration, come on top.
    rolled_out = np.cumsum(4 * column(folder, "disc/learner_length"))
    np.testing.assert_allclose(column(folder, "charts/all_timesteps"), [200, 400, 600] + rolled_out, rtol=1e-9)
    assert np.isfinite([[float(value) for value in row.values()] for row in rows]).all()
    n_expert = column(folder, "resets/expert_fraction") * column(folder, "resets/episodes")
    np.testing.assert_allclose(n_expert, n_expert.round(), atol=1e-9)
    assert 0.2 < n_expert.sum() / column(folder, "resets/episodes").sum() < 0.8
    assert (column(folder, "resets/alpha") == 0.5).all()
    assert (np.diff([0, *column(folder, "charts/seconds"), hopper_run.seconds]) > 0).all()
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")

    # scores.json: both policies on new episodes, and what to compare them with.
    scores, args = json.loads((folder / "scores.json").read_text()), hopper_run.args
    assert scores["references"] == hopper_run.end["references"] and set(scores) == {"selected", "final", "references"}
    for what, name in (("selected", "policy.pt"), ("final", "final_policy.pt")):
        saved = torch.load(folder / name, weights_only=True)
        actor = Actor(15, make_env(HOPPER).action_space)
        actor.load_state_dict(saved["actor"])
        score = evaluate(make_env(HOPPER, p_tremble=args.p_tremble, seed=(args.seed, 11)), deterministic(actor), 3)
        assert scores[what] == {"step": saved["step"], "episodes": 3} | {key: score[key] for key in ("return", "return_std", "length")}
        assert saved["evaluation"]["return"] != score["return"]  # training's own episodes were others
    assert scores["final"]["step"] == 600

    # What they are compared with is the mean over whole episodes of uniformly random actions.
    env, rng, total, n_episodes = make_env(HOPPER, p_tremble=args.p_tremble, seed=(args.seed, 9, 1)), np.random.default_rng((args.seed, 9, 1)), 0.0, 0
    env.reset()
    while n_episodes < args.eval_episodes:
        _, reward, terminated, truncated, _ = env.step(rng.uniform(-1, 1, 3).astype(np.float32))
        total += reward
        if terminated or truncated:
            n_episodes += 1
            env.reset()
    assert scores["references"]["random policy"] == pytest.approx(total / n_episodes)


def test_selected_policy_has_the_least_validation_error(tiny, tmp_path, monkeypatch):
    """The true return, which says the opposite here, has no say."""
    scripted = [(0.0, math.nan), (2.0, 0.3), (1.0, 0.1), (3.0, 0.2)]  # random policy, and after each iteration
    actors, names = [], ("return", "validation_error", "return_std", "length")
    monkeypatch.setattr(filter_br, "evaluate", lambda *arguments: dict(zip(names, (*scripted[len(actors)], 0.0, 0.0), strict=True)))
    monkeypatch.setattr(filter_br, "deterministic", lambda actor: actors.append(copy.deepcopy(actor.state_dict())))
    monkeypatch.setattr(filter_br, "report", lambda *arguments: {})
    end = run(tiny(), tmp_path / "run")
    selected, final = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("policy.pt", "final_policy.pt"))
    assert selected["step"] == 400 and selected["evaluation"]["validation_error"] == end["counts"]["best_error"] == 0.1
    assert final["step"] == 600 and final["evaluation"]["return"] == 3.0
    assert same(selected["actor"], actors[1]) and same(final["actor"], actors[2]) and not same(actors[1], actors[2])
    assert same(final["actor"], end["agent"]["actor"])


@pytest.mark.parametrize("change", ["nothing", "no evaluations in between", "noise for true rewards", "videos", "another seed"])
def test_what_training_depends_on(change, hopper_run, tiny, tmp_path, monkeypatch):
    """Its seed, and neither evaluations nor a single true reward, of the environment or of the demonstrations: the weights are equal to the bit."""
    changes = {"no evaluations in between": {"eval_every": 100}, "videos": {"capture_video": True}, "another seed": {"seed": 2}}.get(change, {})
    if change == "videos":
        pytest.importorskip("moviepy")
    if change == "noise for true rewards":
        step, rng = ResettableEnv.step, np.random.default_rng(0)

        def step_noise(env, action):
            observation, _, *rest = step(env, action)
            return observation, 1000 * rng.normal(), *rest

        def load_noise(source, env):
            demos = load(source, env, check_dynamics=False)
            return dataclasses.replace(demos, rewards=1000 * rng.normal(size=len(demos.rewards)))

        monkeypatch.setattr(ResettableEnv, "step", step_noise)
        monkeypatch.setattr("utils.demos.load", load_noise)
    end = run(tiny(HOPPER, **changes), tmp_path / "run")
    parts = ("agent", "f", "f_optimizer", "buffer", "env", "rollout_env", "rngs")
    assert [same(end[name], hopper_run.end[name]) for name in parts] == [change != "another seed"] * len(parts)
    if change in ("nothing", "videos"):
        assert metrics(tmp_path / "run") == metrics(hopper_run.folder)
    if change == "videos":
        assert len(list((tmp_path / "run" / "videos").glob("*.mp4"))) == 3
    if change == "no evaluations in between":
        assert [row["eval/return"] != "" for row in metrics(tmp_path / "run")] == [False, False, True]
        assert metrics(tmp_path / "run")[-1] == metrics(hopper_run.folder)[-1]
    if change == "noise for true rewards":
        assert np.abs(column(tmp_path / "run", "eval/return")).max() > 1000  # the noise did arrive
        selected, other = (torch.load(folder / "policy.pt", weights_only=True) for folder in (tmp_path / "run", hopper_run.folder))
        assert selected["step"] == other["step"] and same(selected["actor"], other["actor"])


def test_truncation_is_never_stored_as_termination(tiny, tmp_path):
    """Every row of the buffer, by its numbers: the count goes up by one within a row, the mask is the fall and not the horizon, and no row joins two
    episodes."""
    buffer = run(tiny(buffer_size=1000, p_tremble=0.0, learning_starts=400), tmp_path / "run")["buffer"]
    assert buffer["n_added"] == len(buffer["rows"]) == 600
    count, x, a, count_next, x_next, terminated, _ = buffer["rows"].numpy().T
    np.testing.assert_array_equal(count_next, count + 1)
    np.testing.assert_allclose(x_next, x + 0.6 * a, atol=1e-6)
    np.testing.assert_array_equal(terminated, np.abs(x_next) >= 1)
    at_horizon = (count_next == HORIZON) & (terminated == 0)
    assert at_horizon.sum() > 10 and terminated.sum() > 10  # both kinds of end did happen
    ends = (count_next == HORIZON) | (terminated == 1)
    np.testing.assert_array_equal(count[1:][~ends[:-1]], count_next[:-1][~ends[:-1]])  # elsewhere the next row goes on
    np.testing.assert_array_equal(x[1:][~ends[:-1]], x_next[:-1][~ends[:-1]])
    assert (count[1:][ends[:-1]] < HORIZON).all()
    assert ends.sum() == column(tmp_path / "run", "resets/episodes").sum()


def test_buffer_holds_the_policys_own_actions(tiny, tmp_path):
    """Half of the executed actions are random here; the stored ones are those that were asked for."""
    rows = run(tiny(p_tremble=0.5, buffer_size=1000), tmp_path / "run")["buffer"]["rows"].numpy()
    assert 0.4 < np.isclose(rows[:, 4], rows[:, 1] + 0.6 * rows[:, 2], atol=1e-6).mean() < 0.6
    assert (np.abs(rows[:, 2]) <= 1).all()


@pytest.mark.parametrize(("changes", "alphas"), [({"alpha": 0.0}, [0, 0, 0]), ({"alpha": 1.0}, [1, 1, 1]), ({"anneal_alpha": True}, [1, 0.5, 0])])
def test_start_states_of_training(tiny, tmp_path, monkeypatch, changes, alphas):
    """alpha as given or annealed from 1 to 0; roll-outs for the reward player start from the environment's own start states whatever it is."""
    learner, starts = [], []
    monkeypatch.setattr(filter_br, "roll_out", lambda *arguments: learner.append(roll_out(*arguments)) or learner[-1])
    monkeypatch.setattr(filter_br, "start_episode", lambda *arguments: starts.append((arguments[2], *start_episode(*arguments))) or starts[-1][1:])
    run(tiny(**changes), tmp_path / "run")
    assert starts[0][0] == alphas[0]  # of the first episode of all, which no row of the metrics counts
    assert column(tmp_path / "run", "resets/alpha").tolist() == alphas
    fractions = column(tmp_path / "run", "resets/expert_fraction")
    assert (fractions * column(tmp_path / "run", "resets/episodes")).sum() == pytest.approx(sum(is_expert for _, _, is_expert in starts[1:]))
    assert all(fraction == alpha if alpha in (0, 1) else 0.2 < fraction < 0.8 for fraction, alpha in zip(fractions, alphas, strict=True))
    for episodes, _ in learner:
        for episode in episodes:
            np.testing.assert_array_equal(episode[:, 0], np.arange(len(episode)))


@pytest.mark.parametrize("rewards", ["recomputed", "recorded"])
def test_rewards_in_training(rewards, tiny, tmp_path, monkeypatch):
    """What SAC is given is f of the row and its shift: of the present f, or of the one under which the row was collected, and never an unlabelled 0."""
    fs, batches = [], []

    def spy_update_reward(f, optimizer, expert_pairs, *arguments):
        logs = update_reward(f, optimizer, expert_pairs, *arguments)
        f = copy.deepcopy(f)
        fs.append(lambda x: f(x) + 0.3 - f(expert_pairs).mean())
        return logs

    def spy_update(self, batch, learning_rate):
        batches.append((len(fs), batch.clone()))
        return SAC_update(self, batch, learning_rate)

    SAC_update = SAC.update
    monkeypatch.setattr(filter_br, "update_reward", spy_update_reward)
    monkeypatch.setattr(SAC, "update", spy_update)
    rows = run(tiny(rewards=rewards, payoff="mean", reward_level=0.3, buffer_size=1000), tmp_path / "run")["buffer"]["rows"]
    with torch.no_grad():
        by_iteration = torch.stack([f(rows[:, :3]) for f in fs])
        collected_in = torch.arange(600) // 200
        right = by_iteration[2] if rewards == "recomputed" else by_iteration[collected_in, torch.arange(600)]
        assert (by_iteration[2] - by_iteration[0]).abs().mean() > 0.01  # else nothing is told apart
        assert np.abs(column(tmp_path / "run", "disc/shift")).min() > 0.01
        assert_close(rows[:, -1], right, rtol=1e-4, atol=1e-6)
        for iteration, batch in batches:
            candidates = torch.stack([f(batch[:, :3]) for f in fs[:iteration]])
            errors = (candidates - batch[:, -1]).abs()
            assert (errors[-1] if rewards == "recomputed" else errors.amin(0)).max() < 1e-5


@pytest.mark.parametrize("payoff", ["sum", "mean"])
def test_payoff_weights_in_training(payoff, tiny, tmp_path, monkeypatch, demo_files):
    """Each side's mean episode length over the horizon, or 1."""
    seen = []

    def spy_update_reward(f, optimizer, expert_pairs, learner_pairs, weights, *rest):
        seen.append((len(expert_pairs), (learner_pairs[:, 0] == 0).sum().item(), len(learner_pairs), weights))
        return update_reward(f, optimizer, expert_pairs, learner_pairs, weights, *rest)

    monkeypatch.setattr(filter_br, "update_reward", spy_update_reward)
    run(tiny(payoff=payoff, n_rollouts=20, p_tremble=1.0), tmp_path / "run")  # random actions: the learner falls, and the expert never did
    lengths = load(demo_files["Counter-v0"], make_env("Counter-v0")).lengths[:3]
    assert len(seen) == 3
    for (n_expert, n_episodes, n_learner, weights), logged in zip(seen, column(tmp_path / "run", "disc/learner_length"), strict=True):
        assert n_expert == lengths.sum() and n_episodes == 20 and logged == pytest.approx(n_learner / 20) and 2 < logged < 4.9
        assert weights == pytest.approx((lengths.mean() / HORIZON, n_learner / 20 / HORIZON) if payoff == "sum" else (1, 1))


def test_learns_in_the_right_direction(tiny, tmp_path):
    """End to end: the expert moves right, so does the learner, and f says so. One wrong sign, of any player, and it runs left."""
    args = tiny(learning_starts=100, gradient_steps=16, batch_size=64, eval_every=100, buffer_size=1000, p_tremble=0.0)
    args = dataclasses.replace(args, learning_rate=2e-3, disc_learning_rate=5e-3, init_temperature=0.1)
    end = run(args, tmp_path / "run")
    actor = Actor(2, Counter.action_space)
    actor.load_state_dict(end["agent"]["actor"])
    f = Reward(3)
    f.load_state_dict(end["f"])
    start = torch.tensor([[0.0, x] for x in np.linspace(-0.5, 0.3, 5)], dtype=torch.float32)
    with torch.no_grad():
        assert actor(start).mean() > 0.3
        values = [f(torch.cat([start, torch.full((5, 1), a)], 1)).mean().item() for a in (-1.0, 0.8)]
    assert values[1] > values[0]


# -------------------------------------------------------------------------------------------------------------------------- interrupted, resumed


@pytest.fixture(scope="session")
def counter_run(tiny, tmp_path_factory):
    """A training that nothing interrupts, as long as those that are."""
    folder = tmp_path_factory.mktemp("counter_run")
    return folder, run(tiny(gsde=True), folder)


# In an iteration: update_reward, label and start_episode often, evaluate, save_atomically of final_policy.pt and mostly of policy.pt, Log.write,
# save_atomically of checkpoint.pt.
MOMENTS = [("start_episode", 1), ("start_episode", 30), ("save_atomically", 2), ("Log.write", 1), ("save_atomically", 3), ("update_reward", 2)]
MOMENTS += [("evaluate", 3), ("save_atomically", 5), ("Log.write", 3), ("report", 1), ("scores.json", 1)]


@pytest.mark.parametrize(("name", "nth"), MOMENTS)
def test_resume_at_chosen_moments(name, nth, tiny, tmp_path, counter_run):
    """Every file between two writes: before the first checkpoint, between a row of the metrics and its checkpoint, in the midst of an iteration."""
    folder, end = counter_run
    with pytest.MonkeyPatch.context() as patch:
        (interrupt_file if name == "scores.json" else interrupt)(patch, name, nth)
        with pytest.raises(Interrupted):
            run(tiny(gsde=True), tmp_path / "run")
    assert not (tmp_path / "run" / "scores.json").exists()  # which says that a run is finished
    resumed = run(tiny(gsde=True), tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(folder)
    assert (tmp_path / "run" / "scores.json").read_text() == (folder / "scores.json").read_text()
    assert same(resumed, end)
    for policy in ("policy.pt", "final_policy.pt"):
        assert same(*(torch.load(path / policy, weights_only=True) for path in (tmp_path / "run", folder)))


def test_generators_go_on_from_their_state():
    """torch's and numpy's, each with its own numbers; through a file, as in a checkpoint. One too few is noticed."""
    rngs = generator(1), np.random.default_rng(2), generator(3), np.random.default_rng(4)
    saved = copy.deepcopy(Generators(*rngs).state_dict())

    def draw(rngs):
        return [torch.rand(3, generator=rng).tolist() if isinstance(rng, torch.Generator) else rng.random(3).tolist() for rng in rngs]

    drawn, others = draw(rngs), (generator(5), np.random.default_rng(6), generator(7), np.random.default_rng(8))
    Generators(*others).load_state_dict(saved)
    assert draw(others) == drawn and len({numbers[0] for numbers in drawn}) == 4
    with pytest.raises(ValueError):
        Generators(*others[:3]).load_state_dict(saved)


def test_write_atomically(tmp_path):
    path = tmp_path / "scores.json"
    write_atomically(path, "old")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, "scores.json", 1)
        write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["scores.json"]


def test_schedules_and_warm_up_across_a_resume(tiny, tmp_path, monkeypatch):
    """Learning rates follow the whole run, and random actions come once, at its start: a resume restarts neither."""
    rates, disc_rates, random_actions = [], [], []
    sac_update, random_action = SAC.update, ResettableEnv.random_action
    monkeypatch.setattr(SAC, "update", lambda self, batch, rate: rates.append(rate) or sac_update(self, batch, rate))
    monkeypatch.setattr(filter_br, "update_reward", lambda *arguments: disc_rates.append(arguments[5]) or update_reward(*arguments))
    monkeypatch.setattr(filter_br, "evaluate", constant_evaluation)
    monkeypatch.setattr(ResettableEnv, "random_action", lambda env, rng: random_actions.append(1) or random_action(env, rng))
    args = tiny(p_tremble=0.0, learning_starts=70)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, "update_reward", 3)
        with pytest.raises(Interrupted):
            run(args, tmp_path / "run")
    n_before = len(rates)
    run(args, tmp_path / "run")
    bursts = range(96, 601, 32)  # multiples of 32 that follow more than 70 interactions
    assert 0 < n_before < len(rates)
    np.testing.assert_allclose(rates, np.repeat([args.learning_rate * (1 - t / 600) for t in bursts], 4), rtol=1e-7, atol=1e-12)  # float32's
    np.testing.assert_allclose(disc_rates, args.disc_learning_rate * np.array([1, 2 / 3, 1 / 3]))
    assert len(random_actions) == 70


def test_finished_run_stays_as_it_is(tiny, tmp_path):
    args = tiny(total_timesteps=200)
    run(args, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if not path.name.startswith("events")}
    run(args, tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if not path.name.startswith("events")} == before


# -------------------------------------------------------------------------------------------------------------------------------- command line


def test_killed_and_resumed(tiny, tmp_path, checkout, capsys):
    """kill -9 at a random moment after the first checkpoint, and --resume in a new process: the numbers of a run that nothing interrupted.

    And --eval prints what training printed.
    """
    args = tiny(HOPPER, total_timesteps=1200)
    script = [sys.executable, "algos/filter_br.py"]
    process = subprocess.Popen([*script, *flags(args)], cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline, runs = time.time() + 300, []
    while not runs and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)
        runs = list(checkout.glob("runs/*/checkpoint.pt"))
    delay = random.uniform(0, 0.5)
    time.sleep(delay)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended by itself"
    (folder,) = checkout.glob("runs/*")
    n_done = checkpoint(folder)["counts"]["iteration"]
    moment = f"killed {delay:.3f} s after the first checkpoint was seen, in iteration {n_done + 1} of 6"
    assert 1 <= n_done < 6, moment

    resume = subprocess.run([*script, "--resume", folder], cwd=checkout, capture_output=True, text=True, timeout=300, check=False)
    assert resume.returncode == 0, resume.stderr
    end = run(args, tmp_path / "uninterrupted")
    assert metrics(folder) == metrics(tmp_path / "uninterrupted") and len(metrics(folder)) == 6, moment
    assert (np.diff(column(folder, "charts/seconds")) > 0).all()  # the clock goes on
    assert same(checkpoint(folder), end), moment
    for name in ("policy.pt", "final_policy.pt"):
        assert same(*(torch.load(path / name, weights_only=True) for path in (folder, tmp_path / "uninterrupted")))
    assert (folder / "scores.json").read_text() == (tmp_path / "uninterrupted" / "scores.json").read_text()

    # What training printed at its end is what --eval prints.
    printed = [line for line in resume.stdout.splitlines() if " policy, " in line]
    capsys.readouterr()
    assert command(checkout, "--eval", folder) is None
    assert [line for line in capsys.readouterr().out.splitlines() if " policy, " in line] == printed
    assert len(printed) == 2 and printed[0].startswith("selected policy, ")
    assert printed[1].startswith("final policy, 1200 interactions used for policy optimisation: return ")

    # TensorBoard holds each row once, up to the last one.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("charts/timesteps")] == [200 * i for i in range(1, 7)]
    np.testing.assert_allclose([event.value for event in events.Scalars("disc/gap")], column(folder, "disc/gap"), rtol=1e-5)


def test_eval_needs_the_run_alone(tiny, checkout, capsys):
    """Not the demonstrations, and in the precision of training: bfloat16 products give other actions, and after some steps another episode."""
    demos = shutil.copy(tiny(HOPPER).demos, checkout)
    args = tiny(HOPPER, total_timesteps=200, matmul_precision="medium", demos=demos)
    assert command(checkout, *flags(args)) is None
    printed = [line for line in capsys.readouterr().out.splitlines() if " policy, " in line]
    torch.set_float32_matmul_precision("highest")  # as in a new process
    os.remove(demos)  # a run can be scored on another machine
    (folder,) = checkout.glob("runs/*")
    assert command(checkout, "--eval", folder) is None
    assert [line for line in capsys.readouterr().out.splitlines() if " policy, " in line] == printed
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_task_of_ones_own(tiny, checkout, monkeypatch):
    """--env-id MODULE:ID, as gymnasium.make takes it; the run's folder is one folder, whatever the id."""
    (checkout / "own_tasks.py").write_text(
        "import gymnasium\nfrom conftest import Counter\ngymnasium.register('own/Counter-v0', Counter, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(checkout)
    env_id, path = "own_tasks:own/Counter-v0", checkout / "own.npz"
    save(path, record(make_env(env_id), lambda observation: np.float32([0.8 if observation[1] < 0.5 else 0.0]), 5, "a test"))
    gym.registry.pop("own/Counter-v0")
    del sys.modules["own_tasks"]  # as in a new process
    with pytest.raises(ValueError, match="unknown environment 'own/Counter-v0'"):
        verify(path, 0.0)
    verify(path, 0.0, env_id)
    gym.registry.pop("own/Counter-v0")
    del sys.modules["own_tasks"]
    assert command(checkout, *flags(tiny(env_id, demos=str(path)))) is None
    (folder,) = checkout.glob("runs/*")
    assert folder.name.startswith("own_tasks-own-Counter-v0__filter_br__1__") and (folder / "scores.json").exists()
    assert json.loads((folder / "args.json").read_text())["env_id"] == env_id
    assert command(checkout, "--eval", folder) is None


def test_run_describes_itself(tiny, monkeypatch):
    args = tiny(HOPPER)
    described = json.loads(json.dumps(describe_run(args)))
    assert {field.name for field in dataclasses.fields(Args)} <= set(described) and described["exp_name"] == "filter_br"
    assert Args(**{field.name: described[field.name] for field in dataclasses.fields(Args)}) == args
    assert described["versions"]["torch"] == torch.__version__ and {"python", "numpy", "commit"} <= set(described["versions"])
    monkeypatch.setenv("PATH", "")  # a machine without git
    assert describe_run(args)["versions"]["commit"] == "unknown"


def test_demonstrations_longer_than_an_evaluation_are_refused_first(tmp_path):
    """Training's --horizon holds them, and the policy is selected over the task's own, which does not."""
    path = tmp_path / "long.npz"
    save(path, record(make_env("Pendulum-v1", horizon=250), lambda observation: np.zeros(1), 2, "a test"))
    with pytest.raises(SystemExit, match="has 250 steps and the horizon is 200: use data of this task"):
        filter_br.check_args(Args(env_id="Pendulum-v1", demos=str(path), n_demos=1, n_validation_demos=1, horizon=250))


def test_videos_of_a_task_that_cannot_be_drawn_are_refused_before_training(tiny):
    pytest.importorskip("moviepy")
    with pytest.raises(SystemExit, match="--capture-video: Counter-v0 can't be drawn here"):
        filter_br.check_args(tiny(capture_video=True))
    filter_br.check_args(tiny(HOPPER, capture_video=True))


REFUSED = {
    "alpha": (["--alpha", "1.5"], "--alpha is 1.5: give a number from 0 to 1"),
    "zero": (["--eval-every", "0"], "--eval-every is 0: give at least 1"),
    "rate": (["--disc-learning-rate", "-0.1"], "--disc-learning-rate is -0.1: give at least 0"),
    "not a number": (["--reward-level", "nan"], "--reward-level is nan: give a finite number"),
    "penalty": (["--gradient-penalty", "-10"], "--gradient-penalty is -10.0: give at least 0"),
    "temperature": (["--init-temperature", "0"], "--init-temperature is 0.0: give a number above 0"),
    "learns too late": (["--learning-starts", "600"], "--learning-starts is 600, and the run ends before the policy may learn: give fewer"),
    "learns at a rate of 0": (
        ["--learning-starts", "600", "--total-timesteps", "608"],
        "--learning-starts is 600, and the run ends before the policy may learn",
    ),
    "no such demonstrations": (["--demos", "nowhere.npz"], "nowhere.npz: no such file"),
    "too few demonstrations": (["--n-demos", "5"], "holds 5 demonstrations, of which --n-demos 5 and --n-validation-demos 2 take 7"),
    "demonstrations of another task": (["--env-id", "Walker2DBulletEnv-v0"], "was made in HopperBulletEnv-v0"),
    "no states": (["--demos", "STATELESS"], "has no simulator states, and --alpha 0.5"),
    "no states, annealed": (["--demos", "STATELESS", "--alpha", "0", "--anneal-alpha"], "has no simulator states, and --anneal-alpha"),
    "unknown task": (["--env-id", "Hoper-v0"], "unknown environment 'Hoper-v0'"),
    "discrete task": (["--env-id", "CartPole-v1"], "CartPole-v1 has discrete actions"),
    "nothing to resume": (["--resume", "runs/nothing"], "nothing holds no args.json"),
    "nothing to evaluate": (["--eval", "algos"], "algos holds no args.json"),
    "arguments of a resumed run": (["--resume", "algos", "--seed", "3"], "--resume takes every other argument from the run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case, tiny, checkout, hopper_demos):
    """Before anything is started: nothing is left in runs/. A string as the exit code is printed to stderr, and the status is 1."""
    arguments, sentence = REFUSED[case]
    if "STATELESS" in arguments:
        save(checkout / "stateless.npz", dataclasses.replace(hopper_demos, states=None))
        arguments = [str(checkout / "stateless.npz") if argument == "STATELESS" else argument for argument in arguments]
    if not {"--resume", "--eval"} & set(arguments):
        arguments = [*flags(tiny(HOPPER)), *arguments]
    message = command(checkout, *arguments)
    assert isinstance(message, str) and sentence in message and "\n" not in message.strip()
    assert not list(checkout.glob("runs/*"))


@pytest.mark.parametrize(("flag", "choices"), [("--payoff", "sum mean"), ("--rewards", "recomputed recorded")])
def test_unknown_choice(flag, choices, tiny, checkout, capsys):
    assert command(checkout, *flags(tiny(HOPPER)), flag, "median") == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("median", flag, *choices.split())) and not list(checkout.glob("runs/*"))


def test_alpha_0_needs_no_states(tiny, checkout, hopper_demos):
    save(checkout / "stateless.npz", dataclasses.replace(hopper_demos, states=None))
    args = tiny(HOPPER, demos=str(checkout / "stateless.npz"), alpha=0.0, total_timesteps=128, iteration_timesteps=128)
    assert command(checkout, *flags(args)) is None
    (folder,) = checkout.glob("runs/*")
    assert json.loads((folder / "args.json").read_text())["alpha"] == 0 and len(metrics(folder)) == 1


@pytest.mark.parametrize("mode", ["--resume", "--eval"])
@pytest.mark.parametrize(("change", "made_by"), [({"exp_name": "filter_nr"}, "filter_nr"), ({}, "another script")])
def test_a_run_of_another_script(change, made_by, mode, tiny, checkout):
    """FILTER(NR) has the same flags: its run would go on as FILTER(BR)'s."""
    folder = checkout / "runs" / "other"
    folder.mkdir(parents=True)
    described = {name: value for name, value in describe_run(tiny(HOPPER)).items() if name != "exp_name"}
    (folder / "args.json").write_text(json.dumps(described | change))
    assert command(checkout, mode, folder) == f"{folder} was made by {made_by}, not by filter_br: use the script that made it"
    assert os.listdir(folder) == ["args.json"]


def test_eval_before_the_first_evaluation(tiny, checkout):
    """A run that was killed early has no policy yet: a sentence, and no traceback."""
    folder = checkout / "runs" / "early"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(describe_run(tiny(HOPPER))))
    message = command(checkout, "--eval", folder)
    assert isinstance(message, str) and "early" in message
    assert os.listdir(folder) == ["args.json"]
