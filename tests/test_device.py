"""`--device`: on the meta device, whose tensors have a shape and a place but no numbers, on any machine; and for real where there is a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Interrupted, interrupt_file, metrics, run, same
from gymnasium.spaces import Box

from algos import bc, filter_br, filter_nr, mm_gail_ipm, nrmm_dual

GAMES = (filter_br, filter_nr, mm_gail_ipm, nrmm_dual)


def by_name(*modules):
    return pytest.mark.parametrize("module", modules, ids=lambda module: module.__name__.split(".")[-1])


@pytest.fixture
def elsewhere():
    """New tensors are not on the CPU. An operation on tensors of two devices is an error, here as on a GPU."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_devices_do_not_mix(elsewhere):
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(2) + torch.zeros(2, device="cpu")


@by_name(*GAMES)
@pytest.mark.parametrize("learner", ["sac", "gsde", "td3_bc"])
def test_no_step_of_training_leaves_the_device(module, learner, elsewhere, monkeypatch):
    """Every tensor of a step on f, of labelling and of a gradient step is on the device, and stays there."""
    args, box = module.Args(disc_batch_size=8, disc_steps=2), Box(-1, 1, (2,), np.float32)
    f = module.Reward(6)
    pairs = torch.as_tensor(np.zeros((20, 6), np.float32))
    logs = module.update_reward(f, module.OptimisticAdam(f), pairs, pairs, (1.0, 1.0), 1e-3, args, None)
    buffer, expert_buffer = module.ReplayBuffer(16, 4, 2), module.ReplayBuffer(16, 4, 2)
    for some in (buffer, expert_buffer):
        for _ in range(20):
            some.add(np.ones(4), np.ones(2), np.ones(4), False)
        module.label(some, f, 0.5)
    if learner == "td3_bc":
        agent = module.TD3BC(4, box, 0.99, 0.005, 0, 2.5, expert_buffer, None)
        agent.clone(2, 8, 1e-3)
    else:
        agent = module.SAC(4, box, 0.99, 0.005, learner == "gsde", 1.0, None)
    for network in (f, *agent.networks):
        network.standardize.fit(pairs[:, :4])
    for coin in (0.4, 0.6):  # TD3+BC's: demonstrations or learner
        if learner == "td3_bc":
            monkeypatch.setattr(torch, "rand", lambda *_, coin=coin, **__: coin)
        for batch in buffer.sample(2, 8, None):
            logs |= agent.update(batch, 1e-3)
    tensors = [value for network in (f, *agent.networks) for value in network.state_dict().values()]
    assert {tensor.device.type for tensor in [*tensors, buffer.rows, expert_buffer.rows, *logs.values()]} == {"meta"}


def test_rows_reach_the_device_when_they_are_labelled():
    """With two sides of a buffer, as on a GPU: what `add` wrote on its side is on the other once labelled, the ring's wrap included; recorded labels stay."""
    buffer, f = filter_br.ReplayBuffer(8, 1, 1), lambda pairs: pairs.sum(1)
    device = SimpleNamespace(type="a GPU")

    class Rows(torch.Tensor):
        @property
        def device(self):
            return device

    buffer.rows = buffer.rows.clone().as_subclass(Rows)
    for i in range(1, 7):
        buffer.add([i], [10 * i], [i + 1], i == 3)
    assert (buffer.rows.as_subclass(torch.Tensor) == 0).all()
    filter_br.label(buffer, f, 0.5)
    for i in range(7, 11):  # two of them over the oldest
        buffer.add([i], [10 * i], [i + 1], i == 3)
    filter_br.label(buffer, lambda pairs: -pairs.sum(1), 0.5)
    expected = [[i, 10 * i, i + 1, i == 3, (11 * i if i < 7 else -11 * i) + 0.5] for i in (9, 10, 3, 4, 5, 6, 7, 8)]
    assert torch.equal(buffer.rows.as_subclass(torch.Tensor), torch.tensor(expected, dtype=torch.float32))


@by_name(*GAMES)
def test_the_demonstrations_are_on_the_device_before_cloning(module, monkeypatch):
    make = module.ReplayBuffer.__init__

    def make_with_two_sides(self, *arguments):
        make(self, *arguments)
        self.rows = self.rows.clone()

    monkeypatch.setattr(module.ReplayBuffer, "__init__", make_with_two_sides)
    column = np.array([[1.0], [2.0]], np.float32)
    demos = SimpleNamespace(observations=column, actions=10 * column, next_observations=column + 1, terminated=[False, True])
    assert torch.equal(module.expert_transitions(demos).rows, torch.tensor([[1.0, 10, 2, 0, 0], [2, 20, 3, 1, 0]]))


@by_name(bc, *GAMES)
def test_a_device_that_is_not_there_is_refused(module, tiny):
    for device in ("gpu", "cuda:77", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(SystemExit, match=f"--device is {device}, which torch does not find here: give cpu"):
            module.check_args(tiny(module=module, device=device))


@by_name(*GAMES)
def test_a_graphed_update_is_fed_every_batch(module, monkeypatch):
    """With a stand-in for CUDA's graphs, whose replay works, as theirs does, on what the recorded tensors hold at that moment."""
    recording, done, rng = [], [], object()

    class Graph:
        def register_generator_state(self, generator):
            assert generator is rng

        def replay(self):
            done.append([tensor.tolist() for tensor in self.inputs])

    @contextmanager
    def record(graph):
        recording.append(graph)
        yield
        recording.pop()

    def update(*inputs):
        if recording:
            recording[0].inputs = inputs
        else:
            done.append([tensor.tolist() for tensor in inputs])
        return "logs"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    graphed = module.GraphedUpdate(SimpleNamespace(update=update, rng=rng))
    fed = [[torch.full((2, 3), float(i)), torch.tensor(0.5**i)] for i in range(8)]
    assert [graphed(*inputs) for inputs in fed] == ["logs"] * 8
    assert done == [[tensor.tolist() for tensor in inputs] for inputs in fed]


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@by_name(*GAMES)
@pytest.mark.parametrize("gsde", [False, True], ids=["", "gsde"])
def test_a_graphed_update_is_the_update(module, gsde, gpu):
    """The same weights, averages and random numbers, with batches and learning rates that change."""
    ends = []
    for graphed in (False, True):
        torch.manual_seed(0)
        rng = torch.Generator("cuda").manual_seed(1)
        agent = module.SAC(4, Box(-2, 2, (3,), np.float32), 0.98, 0.02, gsde, 0.5, rng)
        update = module.GraphedUpdate(agent) if graphed else agent.update
        for batch, rate in zip(torch.rand(20, 64, 13), torch.linspace(1e-2, 1e-3, 20), strict=True):
            logs = {name: value.clone() for name, value in update(batch, rate).items()}
        ends.append([agent.state_dict(), logs, rng.get_state()])
    assert same(*ends)


@by_name(bc, *GAMES)
@pytest.mark.parametrize("learner", ["sac", "td3_bc"])
def test_trains_on_a_gpu(module, learner, tiny, tmp_path, gpu):
    """A whole training, and the same interrupted and resumed. Its numbers are not a CPU's, since the random streams are not."""
    args = tiny(module=module, device="cuda", **({} if module is bc else {"learner": learner}))
    end = run(args, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_file(patch, "checkpoint.pt", 3)
        with pytest.raises(Interrupted):
            run(args, tmp_path / "resumed")
    assert same(run(args, tmp_path / "resumed"), end)
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    assert all(np.isfinite(float(row["eval/return"])) for row in metrics(tmp_path / "whole"))
