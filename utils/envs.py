"""Environments that can be put back into any recorded state, exactly.

Expert resets need two things that an ordinary gymnasium environment does not offer: reading out *everything* that decides the future, and writing it
back. This module gives both, for PyBullet locomotion, gymnasium's MuJoCo tasks, classic control and the paper's three small MDPs:

    env = make_env("HopperBulletEnv-v0", p_tremble=0.1, seed=1)
    observation, _ = env.reset()
    state = get_state(env)               # flat float64 array
    observation = set_state(env, state)  # in this or any other instance, now or later: the same future, to the bit

To use a task of your own, give its class (or a gym.Wrapper that you register around it) `get_state()`, which returns a flat array of finite numbers,
and `set_state(state)`, which returns the observation that the task gave in that state. `ClassicState` below is the shortest example. If the task is
one of gymnasium's MuJoCo kind and remembers nothing besides its physics, registering `lambda **kwargs: MujocoState(YourTask(**kwargs))` will do.
Where your module MODULE registers it as ID, `--env-id MODULE:ID` finds it in every script, as `gymnasium.make` does.

`roll_out` and `evaluate` play whole episodes in any of them.
"""

import contextlib
import ctypes
import importlib.util
import numbers
import os
import sys

import gymnasium as gym
import numpy as np

BULLET_ENVS = tuple(f"{robot}BulletEnv-v0" for robot in ("Hopper", "Walker2D", "HalfCheetah", "Ant", "Humanoid"))
MUJOCO_ENVS = ("Hopper-v5", "Walker2d-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "HumanoidStandup-v5", "Swimmer-v5", "Reacher-v5", "Pusher-v5")
MUJOCO_ENVS += ("InvertedPendulum-v5", "InvertedDoublePendulum-v5")
CLASSIC_ENVS = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")
MAZE_ENVS = ("antmaze-umaze-v2", "antmaze-umaze-diverse-v2", *(f"antmaze-{maze}-{data}-v2" for maze in ("medium", "large") for data in ("play", "diverse")))
MAZE_ENVS += ("PointMaze_UMaze-v0", "PointMaze_Medium-v0", "PointMaze_Large-v0")
MUJOCO_INSTALL = 'pip install "mujoco>=3.1.6,<4" imageio'
SMALL_MDPS = ("Tree-v0", "Cliff-v0", "Dante-v0")


class ResettableEnv(gym.Wrapper):
    """A task with a horizon, a trembling hand, and a state that can be saved and restored.

    `terminated` is the task's own ending, `truncated` is the horizon's: an episode that is put back to time t has `horizon - t` steps left. With
    probability `p_tremble` a uniformly random action is executed instead of the given one. The trembling draws from its own generator, so nothing
    else that is random moves it.

    Attributes: t (steps since the start state), horizon (steps), p_tremble, observation (the latest, float32), state_size (length of `get_state`).
    """

    def __init__(self, env, horizon, p_tremble=0.0, seed=0):
        super().__init__(env)
        if not isinstance(horizon, numbers.Integral) or horizon < 1:
            raise ValueError(f"horizon must be a whole number of at least 1 step, not {horizon!r}")
        if not 0 <= p_tremble <= 1:
            raise ValueError(f"p_tremble is a probability, between 0 and 1, not {p_tremble!r}")
        self.horizon, self.p_tremble = int(horizon), p_tremble
        self.t = 0
        self.observation = None

        space, action_space = env.observation_space, env.action_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"observations must be flat arrays of numbers (a one-dimensional Box), not {space}")
        if not isinstance(action_space, gym.spaces.Discrete) and not (isinstance(action_space, gym.spaces.Box) and action_space.is_bounded()):
            raise ValueError(f"actions must be a bounded Box or Discrete, not {action_space}")
        self.observation_space = gym.spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32))

        # Two streams from one seed: the start states and the trembling.
        start_seed, tremble_seed = np.random.SeedSequence(seed).spawn(2)
        self._start_rng = np.random.default_rng(start_seed)
        self._tremble_rng = np.random.default_rng(tremble_seed)

        # Bullet's first reset loads the bodies and differs in the last digits from all later ones: spend it here. It also makes a new environment
        # ready for set_state().
        env.reset(seed=0)
        self.state_size = get_state(self).size

    def reset(self, *, seed=None, options=None):
        """A start state of the environment's own: observation (float32) and info, whose "seed" reproduces this start state.

        Without a seed it is the next one of this environment's stream; with one, the stream does not move.
        """
        if seed is None:
            seed = int(self._start_rng.integers(2**31))
        observation, info = self.env.reset(seed=seed, options=options)
        self.t = 0
        self.observation = np.array(observation, dtype=np.float32)
        return self.observation, {**info, "seed": seed}

    def step(self, action):
        """Returns observation (float32), reward (float), terminated, truncated (bool) and info, whose "executed_action" is what the task was given.

        Raises ValueError for an action of the wrong shape or with NaN or infinity. This is the one place where actions are cast to the action space's
        type and clipped to its bounds: the task's physics, its action costs and info all see the same action.
        """
        if self.observation is None:
            raise gym.error.ResetNeeded("call reset() or set_state() before step()")
        executed_action = self._check_action(action)
        if self.p_tremble > 0 and self._tremble_rng.random() < self.p_tremble:
            executed_action = self.random_action(self._tremble_rng)
        observation, reward, terminated, truncated, info = self.env.step(executed_action)
        self.t += 1
        self.observation = np.array(observation, dtype=np.float32)
        truncated = bool(truncated) or self.t >= self.horizon
        return self.observation, float(reward), bool(terminated), truncated, {**info, "executed_action": executed_action}

    def _check_action(self, action):
        space, array = self.action_space, np.asarray(action)
        if isinstance(space, gym.spaces.Discrete):
            if array.size != 1 or array.dtype.kind not in "iu" or not space.contains(int(array.item())):
                raise ValueError(f"the action must be one whole number from {space.start} to {space.start + space.n - 1}, not {action!r}")
            return int(array.item())
        if array.shape != space.shape or array.dtype.kind not in "fiu":
            raise ValueError(f"the action must be an array of {space.shape[0]} numbers, not one of shape {array.shape} and type {array.dtype}")
        if not np.isfinite(array).all():
            raise ValueError(f"the action must be finite, but entry {np.flatnonzero(~np.isfinite(array))[0]} is {array[~np.isfinite(array)][0]}")
        return np.clip(array.astype(space.dtype), space.low, space.high)

    def random_action(self, rng):
        """A uniformly random action from the generator `rng`: an array of the action space's shape and type, or an int."""
        if isinstance(self.action_space, gym.spaces.Discrete):
            return int(self.action_space.start + rng.integers(self.action_space.n))
        return rng.uniform(self.action_space.low, self.action_space.high).astype(self.action_space.dtype)

    def state_dict(self):
        """For checkpoints: the state (a list of floats) and the generators, as plain Python values."""
        return {"state": get_state(self).tolist(), "start": self._start_rng.bit_generator.state, "tremble": self._tremble_rng.bit_generator.state}

    def load_state_dict(self, saved):
        """Puts back what `state_dict` gave; `observation` is then the one that the task gave there."""
        set_state(self, saved["state"])
        self._start_rng.bit_generator.state = saved["start"]
        self._tremble_rng.bit_generator.state = saved["tremble"]


class Remember(gym.Wrapper):
    """Keeps the latest observation, which is part of the state: some tasks can't recompute it."""

    def reset(self, **kwargs):
        self.observation, info = self.env.reset(**kwargs)
        return self.observation, info

    def step(self, action):
        self.observation, *rest = self.env.step(action)
        return self.observation, *rest


class BulletState(Remember):
    """Makes a PyBullet locomotion task a function of its state, and gives access to that state.

    Bullet keeps the contact points of earlier steps to warm-start the solver, and no call reads or writes them: two simulations in the same
    positions and velocities can then differ (1.5 % of Hopper's steps, by up to 0.08 in an observation). So every step here starts from the
    written-back state, with that cache dropped. The physics is otherwise the stock environment's, and a restore is exact by construction: a step
    can't tell it from no restore.
    """

    def __init__(self, env):
        super().__init__(env)
        from pybullet_envs_gymnasium.robot_locomotors import Humanoid

        self.collides_with_itself = isinstance(env.unwrapped.robot, Humanoid)  # the other robots' limbs pass through each other
        if env.unwrapped.render_mode == "rgb_array":
            env.unwrapped.camera_adjust = lambda: None  # moves a window's camera, and fails without one once the first environment is closed

    def reset(self, **kwargs):
        self.restored = None
        return super().reset(**kwargs)

    def step(self, action):
        if self.restored is None:
            self.set_state(self.get_state())
        self.restored = None
        return super().step(action)

    def get_state(self):
        if self.restored is not None:
            return self.restored.copy()  # Bullet normalises orientations, so that reading them back may differ in the last digit
        env = self.unwrapped
        bullet, robot = env._p, env.robot
        state = []
        for body in robot.objects:
            position, orientation = bullet.getBasePositionAndOrientation(body)
            linear, angular = bullet.getBaseVelocity(body)
            state += [*position, *orientation, *linear, *angular]
            for joint in bullet.getJointStates(body, range(bullet.getNumJoints(body))):
                state += joint[:2]
        # What the environment itself remembers: contacts of the previous step, two reference points of the reward, and the observation, which
        # PyBullet cannot recompute (its link velocities lag a step).
        state += [*robot.feet_contact, robot.initial_z, env.potential, *self.observation]
        return np.array(state, dtype=np.float64)

    def set_state(self, state):
        env = self.unwrapped
        bullet, robot = env._p, env.robot
        if not self.collides_with_itself:
            # Lift the robot out of everybody's reach for one collision check (no simulation step), which drops all its contacts: 15 microseconds.
            for body in robot.objects:
                bullet.resetBasePositionAndOrientation(body, (0.0, 0.0, 50.0), (0.0, 0.0, 0.0, 1.0))
            bullet.performCollisionDetection()
        values, i = state.tolist(), 0
        for body in robot.objects:
            n_joints = bullet.getNumJoints(body)
            bullet.resetBasePositionAndOrientation(body, values[i : i + 3], values[i + 3 : i + 7])
            bullet.resetBaseVelocity(body, values[i + 7 : i + 10], values[i + 10 : i + 13])
            i += 13
            joints = values[i : i + 2 * n_joints]
            bullet.resetJointStatesMultiDof(body, range(n_joints), [[q] for q in joints[::2]], [[v] for v in joints[1::2]])
            i += 2 * n_joints
            if self.collides_with_itself:
                # Limbs that touch each other do so in mid-air too. Setting a link's collision filter takes the link out of the collision world and
                # puts it in again, without its contacts; group 1 and mask -1 (everything) let the same pairs collide as before.
                for link in range(-1, n_joints):
                    bullet.setCollisionFilterGroupMask(body, link, 1, -1)
        n_feet = len(robot.feet_contact)
        robot.feet_contact[:] = values[i : i + n_feet]
        robot.initial_z, env.potential = values[i + n_feet], values[i + n_feet + 1]
        self.observation = np.array(values[i + n_feet + 2 :], dtype=np.float32)
        self.restored = state.copy()
        return self.observation


class MujocoState(Remember):
    """Access to the full state of a gymnasium MuJoCo task: physics (time, warm start, controls and applied forces included) and observation.

    After a step MuJoCo's derived quantities lag the positions by one substep, and some tasks compute their next reward from them (Ant from `xpos`,
    Humanoid from `xipos`): recomputing them would change that reward. So those are part of the state; the others are recomputed, for rendering.
    """

    LAGGING = ("xpos", "xipos", "site_xpos")

    def __init__(self, env):
        super().__init__(env)
        import mujoco

        self.mujoco, self.physics = mujoco, int(mujoco.mjtState.mjSTATE_INTEGRATION)

    def get_state(self):
        model, data = self.unwrapped.model, self.unwrapped.data
        physics = np.empty(self.mujoco.mj_stateSize(model, self.physics))
        self.mujoco.mj_getState(model, data, physics, self.physics)
        return np.concatenate([physics, *(getattr(data, name).ravel() for name in self.LAGGING), self.observation])

    def set_state(self, state):
        model, data = self.unwrapped.model, self.unwrapped.data
        i = self.mujoco.mj_stateSize(model, self.physics)
        self.mujoco.mj_setState(model, data, state[:i], self.physics)
        self.mujoco.mj_forward(model, data)
        self.mujoco.mj_setState(model, data, state[:i], self.physics)  # up to some version mj_forward changes the warm start
        for name in self.LAGGING:
            field = getattr(data, name)
            field[:] = state[i : i + field.size].reshape(field.shape)
            i += field.size
        self.observation = state[i:].copy()
        return self.observation


class ClassicState(Remember):
    """Access to the state of a classic control task: its `state` vector and the type of it, CartPole's memory of a fall, and the observation."""

    def get_state(self):
        task = self.unwrapped
        # Some of these tasks compute in single precision after a step and in double precision after a reset, or the other way round.
        single = np.asarray(task.state).dtype == np.float32
        fallen = getattr(task, "steps_beyond_terminated", None)
        return np.array([single, -1 if fallen is None else fallen, *task.state, *self.observation], dtype=np.float64)

    def set_state(self, state):
        task = self.unwrapped
        n = len(task.state)
        task.state = state[2 : 2 + n].astype(np.float32 if state[0] else np.float64)
        task.steps_beyond_terminated = None if state[1] < 0 else int(state[1])
        self.observation = state[2 + n :].astype(np.float32)
        return self.observation


class SmallMDP(gym.Env):
    """An example of the paper: discrete, deterministic, T decisions t = 1..T, then truncated; r(s, a) in [-1, 1] but where a class says otherwise.

    The state, a float32 vector, is the observation. `move` and `reward` take a batch: states (n, d), actions (n,) -> states (n, d), rewards (n,). The
    expert's actions `expert_actions` (T,) depend on time alone. With eps > 0, `given_policy` is the theorem's, which errs with probability eps T.
    Raises ValueError for T < 1, n_actions < 2 or an eps T that is no probability.
    """

    def __init__(self, T, n_actions, start, low, high, expert_actions, eps=0.0):
        if not 0 <= eps * T <= 1:
            raise ValueError(f"eps T is {eps:g} * {T} = {eps * T:g}: it is a probability, give an eps from 0 to 1/T")
        self.T, self.eps, self.start = T, eps, np.array(start, dtype=np.float32)
        self.observation_space, self.action_space = gym.spaces.Box(low, high, self.start.shape), gym.spaces.Discrete(n_actions)
        self.expert_actions = np.array(expert_actions)

    def given_policy(self, t):
        """The action probabilities (A,), in every state, that the theorem prescribes for decision t; None where it leaves the policy open."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.state = 0, self.start.copy()
        return self.state.copy(), {}

    def step(self, action):
        states, actions = self.state[None], np.array([action])
        reward, self.state, self.t = self.reward(states, actions)[0], self.move(states, actions)[0], self.t + 1
        return self.state.copy(), float(reward), False, self.t >= self.T, {}

    def get_state(self):
        return np.array([self.t, *self.state])

    def set_state(self, state):
        self.t, self.state = int(state[0]), state[1:].astype(np.float32)
        return self.state.copy()


class Tree(SmallMDP):
    """Theorem "Inverse RL Sample Complexity": each action leads to a child of its own; r = 1 for the step into the expert's leaf, one of n_actions^T, else 0.

    State: the T actions of the path, -1 where not yet taken. expert_seed draws the expert's path.
    """

    def __init__(self, T=8, n_actions=2, expert_seed=0, render_mode=None):
        _check_sizes(T, n_actions)
        super().__init__(T, n_actions, [-1] * T, -1, n_actions - 1, np.random.default_rng(expert_seed).integers(n_actions, size=T))

    def move(self, states, actions):
        states, depth = states.copy(), (states >= 0).sum(1)
        inner = depth < self.T  # a leaf stays what it is
        states[inner, depth[inner]] = actions[inner]
        return states

    def reward(self, states, actions):
        return ((states[:, -1] < 0) & (self.move(states, actions) == self.expert_actions).all(1)).astype(float)


class Cliff(SmallMDP):
    """Theorem "MMDP Lower Bound": action 0 goes on, action 1 falls to s_x for good; r = -1[s_x] - 1[action 1], so in s_x down to -2, as in the paper.

    State: the index of s_0..s_{T-1}, or T for s_x. The expert always plays 0. The given policy plays 1 with probability eps T at t = 1, else 0.
    """

    def __init__(self, T=10, eps=0.0, render_mode=None):
        _check_sizes(T)
        super().__init__(T, 2, [0], 0, T, [0] * T, eps)

    def move(self, states, actions):
        return np.where(actions[:, None] == 1, np.float32(self.T), np.minimum(states + 1, np.float32(self.T)))

    def reward(self, states, actions):
        return -1.0 * (states[:, 0] == self.T) - (actions == 1)

    def given_policy(self, t):
        p = self.eps * self.T * (t == 1)
        return np.array([1 - p, p]) if self.eps > 0 else None


class Dante(SmallMDP):
    """Figure "Dante": actions up, stay, down in the rows 0 (top), 1 (centre), 2; rows clip; r = 1 if the row after the action is 0 or 1, else 0.

    State: the row, at first the centre. The expert always stays. The given policy, from t = 2, goes down with probability eps T at t = 2 and stays otherwise.
    """

    def __init__(self, T=10, eps=0.0, render_mode=None):
        _check_sizes(T)
        super().__init__(T, 3, [1], 0, 2, [1] * T, eps)

    def move(self, states, actions):
        return np.clip(states + np.float32(actions - 1)[:, None], 0, 2)

    def reward(self, states, actions):
        return (self.move(states, actions)[:, 0] < 2).astype(float)

    def given_policy(self, t):
        p = self.eps * self.T * (t == 2)
        return np.array([0, 1 - p, p]) if t > 1 and self.eps > 0 else None


for _env_id, _task in zip(SMALL_MDPS, (Tree, Cliff, Dante)):
    gym.register(_env_id, entry_point=_task, kwargs={"T": 8 if _task is Tree else 10})


def make_env(env_id, p_tremble=0.0, seed=0, horizon=None, render_mode=None, **kwargs):
    """The task `env_id` as a `ResettableEnv`; MODULE:ID, as in `gymnasium.make`, is task ID after MODULE, which registers it, was imported.

    p_tremble: probability of a random action in each step. seed: decides the start states and the trembling. horizon: steps (None: the task's
    registered limit); it is the T of a small MDP. render_mode: "rgb_array" makes render() return a (height, width, 3) uint8 array; PyBullet needs no
    display for it. kwargs: the task's own, such as n_actions of Tree-v0 and eps of Cliff-v0 and Dante-v0.
    Raises ValueError, in one sentence, for an unknown id or keyword, a missing package, or a task whose state this module can't save.
    """
    full_id, (module, _, env_id) = env_id, env_id.rpartition(":")
    if "Bullet" in env_id:
        _require("pybullet_envs_gymnasium", env_id, "pip install pybullet-envs-gymnasium")
        import pybullet_envs_gymnasium  # noqa: F401  (registers the tasks)
    if env_id in MAZE_ENVS:
        if module:  # the scripts know the mazes, whose defaults are others, by their ids alone
            raise ValueError(f"{full_id} is a task of this repository: give {env_id}, without a module")
        _require("mujoco", env_id, MUJOCO_INSTALL)
        import utils.mazes  # noqa: F401  (registers the tasks)
    try:
        if module:
            importlib.import_module(module)
        spec = gym.spec(env_id)
    except (gym.error.Error, ImportError) as error:
        known = ", ".join(BULLET_ENVS + MUJOCO_ENVS + CLASSIC_ENVS + MAZE_ENVS + SMALL_MDPS)
        reason = f" ({error})" if isinstance(error, ImportError) else ""
        own = "MODULE:ID of a task with get_state and set_state, which the module MODULE on PYTHONPATH registers"
        raise ValueError(f"unknown environment {full_id!r}{reason}: known ids are {known}, and {own}") from error
    if str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        _require("mujoco", env_id, MUJOCO_INSTALL)
    if env_id in SMALL_MDPS:
        if "T" in kwargs:
            raise ValueError(f"T of {env_id} is its horizon: give horizon={kwargs['T']} instead")
        kwargs["T"] = horizon = spec.kwargs["T"] if horizon is None else horizon
    if horizon is None and spec.max_episode_steps is None:
        raise ValueError(f"{env_id} has no registered time limit: register it with max_episode_steps, or give make_env a horizon")

    with _quiet() if "Bullet" in env_id else contextlib.nullcontext():
        try:
            env = gym.make(env_id, render_mode=render_mode, disable_env_checker=True, **kwargs)
        except (gym.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"{env_id} could not be made: {error}") from error
        return ResettableEnv(_with_state(env), spec.max_episode_steps if horizon is None else horizon, p_tremble, seed)


def get_state(env):
    """Everything that decides the future of `env` but its generators: float64 of shape (env.state_size,), the time step first."""
    return np.concatenate([[env.t], np.ravel(env.env.get_state())]).astype(np.float64)


def set_state(env, state):
    """Put `env` into `state`, a result of `get_state` for any instance of this task. Returns the observation (float32) that the task gave there.

    Raises ValueError for a state of the wrong size, with NaN or infinity, or with a time step that is none. The generators keep their state.
    """
    state = np.asarray(state, dtype=np.float64)
    if state.shape != (env.state_size,):
        raise ValueError(f"a state of this environment has shape ({env.state_size},), not {state.shape}: was it recorded in another one?")
    if not np.isfinite(state).all():
        raise ValueError(f"the state must be finite, but entry {np.flatnonzero(~np.isfinite(state))[0]} is not")
    if state[0] < 0 or state[0] % 1 != 0:
        raise ValueError(f"a state begins with its time step, a whole number of at least 0, not {state[0]}")
    env.t = int(state[0])
    env.observation = np.array(env.env.set_state(state[1:]), dtype=np.float32)
    return env.observation


def roll_out(env, act, n_episodes):
    """Whole episodes of `act` (observation -> action) from the environment's own start states.

    Returns lists of their state-action pairs, float32 arrays of shape (T_i, obs_dim + action_dim), and of their true returns, floats.
    """
    episodes, returns = [], []
    for _ in range(n_episodes):
        observation, _ = env.reset()
        pairs, total, done = [], 0.0, False
        while not done:
            action = act(observation)
            pairs.append(np.append(observation, action))
            observation, reward, terminated, truncated, _ = env.step(action)
            total, done = total + reward, terminated or truncated
        episodes.append(np.array(pairs, dtype=np.float32))
        returns.append(total)
    return episodes, returns


def evaluate(env, act, n_episodes, validation_error=None):
    """Score `act` (observation -> action) over whole episodes in `env`, which is then closed: give it one of its own, lest training's streams move.

    Returns means as floats, by name: return (the true one), return_std (its standard deviation), length (steps), validation_error (where a
    utils.demos.ValidationError is given) and, in the mazes, success_percent.
    """
    episodes, returns = roll_out(env, act, n_episodes)
    env.close()
    lengths = [len(episode) for episode in episodes]
    score = {"return": float(np.mean(returns)), "return_std": float(np.std(returns)), "length": float(np.mean(lengths))}
    if validation_error:
        score["validation_error"] = validation_error(episodes)
    if env.unwrapped.spec.id in MAZE_ENVS:
        score["success_percent"] = float(np.mean(100 * (np.array(returns) > 0)))
    return score


def _with_state(env):
    """`env` without gymnasium's own wrappers, with get_state() and set_state(state): its own, or those of one of the classes above."""
    while not (hasattr(type(env), "get_state") and hasattr(type(env), "set_state")):
        task, module = type(env).__name__, type(env).__module__
        if module == "pybullet_envs_gymnasium.gym_locomotion_envs" and f"{task}-v0" in BULLET_ENVS:
            return BulletState(env)
        if module.startswith("gymnasium.envs.mujoco."):
            return MujocoState(env)
        if module.startswith("gymnasium.envs.classic_control."):
            return ClassicState(env)
        # The time limit is ResettableEnv's: TimeLimit counts steps of its own and knows nothing of a restore.
        if not isinstance(env, (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)):
            raise ValueError(
                f"{task} can't be put back into a recorded state: give it get_state(), returning a flat array of everything that decides its future, "
                "and set_state(state), returning the observation there (see utils/envs.py)"
            )
        env = env.env
    return env


def _check_sizes(T, n_actions=2):
    for name, value, least in (("T", T, 1), ("n_actions", n_actions, 2)):
        if not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")


def _require(module, env_id, command):
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{env_id} needs a package that is not installed: {command}")


@contextlib.contextmanager
def _quiet():
    """Bullet prints "argv[0]=" from C at each connection: send the process's standard output nowhere for that moment."""
    libc = ctypes.CDLL(None if os.name == "posix" else "msvcrt")
    sys.stdout.flush()
    libc.fflush(None)
    stdout = os.dup(1)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
