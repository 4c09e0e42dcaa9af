"""Mazes with D4RL's interface: AntMaze exactly as in D4RL v2, and PointMaze, the same mazes for a ball, which is far quicker to simulate and to learn.

    env = make_env("antmaze-large-play-v2", horizon=700)      # from utils/envs.py; D4RL's own horizon, 1000, where none is given
    env = make_env("PointMaze_Large-v0", render_mode="rgb_array")

An episode starts in the cell marked R and ends with reward 1 when the robot is within 0.5 m of the goal, which is drawn anew for each episode near the
cell marked G. There is no other reward and no other ending, even for an ant on its back. An observation is the robot's generalised positions and
velocities and the goal's x and y, in metres, radians and seconds: 15 + 14 + 2 numbers for the ant (D4RL's 29 and the goal), 2 + 2 + 2 for the ball.

Sources: the maze, start, goal, reward and model of the `d4rl` package (Fu et al. 2020, "D4RL: Datasets for Deep Data-Driven Reinforcement Learning"), which
itself no longer runs on current versions of Python. tests/test_mazes.py compares the two simulations. `play` and `diverse` differ in their data only.

This is a module of its own because it needs MuJoCo, which PyBullet's tasks do without: utils/envs.py imports it when a maze is asked for.
"""

import xml.etree.ElementTree as ET

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.envs.mujoco.ant_v5 import AntEnv

from utils.d4rl import GOAL_RADIUS
from utils.envs import MAZE_ENVS

# D4RL's evaluation mazes. Row i and column j are the square of CELL metres around x = CELL (j - 1), y = CELL (i - 1): the start is at the origin.
CELL, WALL_HEIGHT = 4.0, 2.0
LAYOUTS = {
    "umaze": """
        #####
        #R..#
        ###.#
        #G..#
        #####""",
    "medium": """
        ########
        #R.##..#
        #..#...#
        ##...###
        #..#...#
        #.#..#.#
        #...#.G#
        ########""",
    "large": """
        ############
        #R...#.....#
        #.##.#.#.#.#
        #......#...#
        #.####.###.#
        #..#.#.....#
        ##.#.#.#.###
        #..#...#.G.#
        ############""",
    "open": "R",  # no walls: where the walker of utils/make_maze_demos.py is trained
}
LAYOUTS = {name: text.split() for name, text in LAYOUTS.items()}


def cell_centre(cell):
    """(2,) float64: x and y in metres of the centre of `cell`, a row and a column."""
    return CELL * (np.array([cell[1], cell[0]], dtype=np.float64) - 1)


def cell_of(xy):
    """(row, column) of the cell in which the point x, y (metres) lies."""
    return int(np.floor(xy[1] / CELL + 1.5)), int(np.floor(xy[0] / CELL + 1.5))


def find(layout, mark):
    """(row, column) of the first cell with this mark."""
    return next((i, row.index(mark)) for i, row in enumerate(layout) if mark in row)


class Maze(MujocoEnv):
    """A robot in a maze: what AntMaze and PointMaze share. `layout` is a name in LAYOUTS.

    The state is the observation and the warm start of the contact solver: nothing else decides what a step does.
    """

    metadata = AntEnv.metadata | {"render_fps": 10}
    FRAME_SKIP = 5  # simulation steps of 0.02 s in a step of 0.1 s

    def __init__(self, layout, **kwargs):
        self.layout, self.goal = LAYOUTS[layout], np.zeros(2)
        rows, columns = len(self.layout), len(self.layout[0])
        camera = {"lookat": cell_centre(((rows - 1) / 2, (columns - 1) / 2)).tolist() + [0.0], "distance": 1.25 * CELL * max(rows, columns)}
        camera |= {"elevation": -90.0, "azimuth": 90.0}
        # The file's name matters to AntMaze only, but MujocoEnv insists on one that exists.
        super().__init__("ant.xml", self.FRAME_SKIP, None, default_camera_config=camera, **kwargs)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.model.nq + self.model.nv + 2,), dtype=np.float64)

    def robot_xml(self):
        """The robot and a floor, as the root of a tree that the walls are added to."""
        raise NotImplementedError

    def _initialize_simulation(self):
        root = self.robot_xml()
        add_walls(root, self.layout)
        ET.SubElement(root.find("worldbody"), "site", name="goal", type="cylinder", size=f"{GOAL_RADIUS} 0.02", rgba="0.1 0.7 0.2 1")
        model = mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))
        if tuple(map(int, mujoco.__version__.split(".")[:2])) >= (3, 5):
            model.geom_margin /= 2  # D4RL's physics takes the greater margin of two geoms, and from this version on MuJoCo adds them
        model.vis.global_.offwidth, model.vis.global_.offheight = self.width, self.height
        return model, mujoco.MjData(model)

    def is_free(self, xy):
        """(n,) bool: whether these points (n, 2), in metres, lie outside all walls and inside the maze."""
        padded = np.pad([[mark != "#" for mark in row] for row in self.layout], 1)
        row, column = (np.floor(xy[:, ::-1].T / CELL + 2.5)).astype(int)
        return padded[row.clip(0, padded.shape[0] - 1), column.clip(0, padded.shape[1] - 1)]

    def observe(self):
        return np.concatenate([self.data.qpos, self.data.qvel, self.goal])

    def reset_model(self):
        rng, goal_cell = self.np_random, cell_centre(find(self.layout, "G" if any("G" in row for row in self.layout) else "R"))
        self.goal = np.maximum(goal_cell + rng.uniform(0, 1, 2) + rng.uniform(0, 0.5, 2), 0)
        qpos = self.init_qpos + rng.uniform(-0.1, 0.1, self.model.nq)
        qvel = self.init_qvel + 0.1 * rng.standard_normal(self.model.nv)
        if self.model.nq > self.model.nv:  # the ant's orientation is a quaternion; newer versions of MuJoCo leave its normalisation to us
            qpos[3:7] /= np.linalg.norm(qpos[3:7])
        return self.set_state(np.concatenate([np.zeros(self.model.nv), qpos, qvel, self.goal]))

    def step(self, action):
        """`action`: float (k,) in [-1, 1]. The reward is 1.0 within 0.5 m of the goal, which ends the episode, and else 0.0; info has "success"."""
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, nstep=self.frame_skip)
        success = bool(np.linalg.norm(self.data.qpos[:2] - self.goal) <= GOAL_RADIUS)
        if self.render_mode == "human":
            self.render()
        return self.observe(), float(success), success, False, {"success": success}

    def get_state(self):
        """Warm start, positions, velocities, goal: float64 of shape (nv + nq + nv + 2,)."""
        return np.concatenate([self.data.qacc_warmstart, self.observe()])

    def set_state(self, state):
        """Put the maze into `state`, a result of get_state(), and return its observation. A warm start of zeros is a fresh one."""
        nq, nv = self.model.nq, self.model.nv
        warm_start, qpos, qvel, self.goal = np.split(np.array(state, dtype=np.float64), [nv, nv + nq, nv + nq + nv])
        self.data.qpos[:], self.data.qvel[:] = qpos, qvel
        mujoco.mj_forward(self.model, self.data)  # for what is drawn; older versions normalise quaternions here, and some move the warm start
        self.data.qpos[:], self.data.qacc_warmstart[:] = qpos, warm_start
        return self.observe()

    def render(self):
        self.data.site("goal").xpos[:2] = self.goal
        try:
            return super().render()
        except Exception as error:  # whatever the OpenGL platform raises
            raise RuntimeError(
                f"the maze cannot be drawn here ({error}): install an OpenGL library that needs no display and say which before starting, as in "
                "MUJOCO_GL=egl (libegl1) or MUJOCO_GL=osmesa (libosmesa6)"
            ) from error


class AntMaze(Maze):
    """D4RL's ant: gymnasium's, with D4RL's time step, contact solver and torques. Actions (8,) are torques in units of 30 Nm."""

    def robot_xml(self):
        root = ET.parse(self.fullpath).getroot()
        root.find("option").set("timestep", "0.02")
        geom = root.find("default/geom")
        geom.set("solref", ".02 1")
        geom.set("solimp", ".8 .8 .01")
        for motor in root.findall("actuator/motor"):
            motor.set("gear", "30")
        del root.find("worldbody/geom").attrib["material"]  # the floor's chequers hide an ant seen from above
        return root


class PointMaze(Maze):
    """A ball of 1 kg and 0.5 m radius that slides without friction. Actions (2,) push it in x and y, in units of 3 N, against a drag of 1 N s/m."""

    XML = """
        <mujoco>
          <option timestep="0.02"/>
          <default><geom condim="1" margin="0.01" rgba="0.8 0.6 0.4 1"/></default>
          <worldbody>
            <light directional="true" pos="0 0 10" dir="0 0 -1"/>
            <geom name="floor" type="plane" size="40 40 40" contype="0" conaffinity="0" rgba="0.8 0.9 0.8 1"/>
            <body name="torso" pos="0 0 0.5">
              <geom name="ball" type="sphere" size="0.5" mass="1" conaffinity="0" rgba="0.2 0.4 0.8 1"/>
              <joint name="x" type="slide" axis="1 0 0" damping="1"/>
              <joint name="y" type="slide" axis="0 1 0" damping="1"/>
            </body>
          </worldbody>
          <actuator>
            <motor joint="x" gear="3" ctrlrange="-1 1" ctrllimited="true"/>
            <motor joint="y" gear="3" ctrlrange="-1 1" ctrllimited="true"/>
          </actuator>
        </mujoco>"""

    def robot_xml(self):
        return ET.fromstring(self.XML)


def add_walls(root, layout):
    """Add a box for each # of `layout` to the model with this root."""
    for i, row in enumerate(layout):
        for j, mark in enumerate(row):
            if mark == "#":
                x, y = cell_centre((i, j))
                wall = {"name": f"block_{i}_{j}", "type": "box", "contype": "1", "conaffinity": "1", "rgba": "0.7 0.5 0.3 1"}
                wall |= {"pos": f"{x} {y} {WALL_HEIGHT / 2}", "size": f"{CELL / 2} {CELL / 2} {WALL_HEIGHT / 2}"}
                ET.SubElement(root.find("worldbody"), "geom", wall)


for env_id in MAZE_ENVS:
    robot, size = ("AntMaze", env_id.split("-")[1]) if env_id.startswith("antmaze") else ("PointMaze", env_id.split("_")[1].split("-")[0].lower())
    if env_id not in gym.registry:
        horizon = 700 if "antmaze-umaze" in env_id else 1000
        gym.register(env_id, entry_point=f"utils.mazes:{robot}", max_episode_steps=horizon, kwargs={"layout": size})
