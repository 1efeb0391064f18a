"""environment.py: who this reader is, from what a launcher leaves in the environment."""

import pytest

from shardcache.errors import ConfigError
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.environment import job_name, ranks_of_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, Topology(0, 1)),
        (TORCHRUN, Topology(3, 8)),
        (SRUN, Topology(1, 4)),
        (TORCHRUN | SRUN, Topology(3, 8)),
        (BATCH_SCRIPT, Topology(0, 1)),
        ({"WORLD_SIZE": "8"}, Topology(0, 1)),
    ],
    ids=[
        "nothing",
        "torchrun",
        "srun",
        "torchrun under srun",
        "batch script without srun",
        "half of torchrun's",
    ],
)
def test_ranks_come_from_the_launcher(env: dict[str, str], ranks: Topology) -> None:
    """Each launcher is understood, the inner one wins, and an allocation alone makes no ranks."""
    assert ranks_of_environment(env) == ranks


def test_rays_workers_are_not_the_tasks_of_the_step_that_started_ray() -> None:
    """`srun ray start` leaves its rank in each worker; torchrun's may be the worker's own."""
    worker = {"RAY_JOB_ID": "02000000"}
    assert ranks_of_environment(SRUN | worker, ["/ray/default_worker.py"]) == Topology(0, 1)
    assert ranks_of_environment(SRUN | worker | TORCHRUN, ["/ray/default_worker.py"]) == Topology(
        3, 8
    )
    assert ranks_of_environment(SRUN | worker, ["driver.py"]) == Topology(1, 4)


@pytest.mark.parametrize(
    "env", [{"RANK": "one", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_nonsense_in_the_environment_is_an_error(env: dict[str, str]) -> None:
    """A rank that is no number, or not below the world size, is not guessed around."""
    with pytest.raises(ConfigError):
        ranks_of_environment(env)


@pytest.mark.parametrize(
    ("env", "argv", "name"),
    [
        ({"SHARDCACHE_JOB": "mine", "SLURM_JOB_ID": "7"}, ["train.py"], "mine"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "vit"}, ["train.py"], "vit-7"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"},
            ["train.py"],
            "slurm-5_2",
        ),
        ({"TORCHELASTIC_RUN_ID": "run-5"}, ["train.py"], "train.py-run-5"),
        ({"TORCHELASTIC_RUN_ID": "0b9c3d1e-5a6b-4c7d-8e9f-001122334455"}, ["train.py"], "train.py"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ["/home/me/train.py"], "train.py"),
        ({"RAY_JOB_ID": "02000000"}, ["/ray/default_worker.py"], "ray-02000000"),
        (
            {"RAY_JOB_ID": "02000000", "SLURM_JOB_ID": "7"},
            ["/ray/default_worker.py"],
            "ray-02000000",
        ),
        ({"RAY_JOB_ID": "02000000"}, ["train.py"], "train.py"),
        ({}, ["default_worker.py"], "default_worker.py"),
        ({}, ["-c"], "python"),
        ({}, [], "python"),
        ({}, ["ipykernel_launcher.py"], "notebook"),
        ({"JPY_SESSION_NAME": "/home/me/look.ipynb"}, ["ipykernel_launcher.py"], "look.ipynb"),
        ({"SHARDCACHE_JOB": "two\nlines"}, ["train.py"], "two?lines"),
        ({}, ["train\x1b[1m.py"], "train?[1m.py"),
        ({}, ["caf\udce9.py"], "caf?.py"),
    ],
)
def test_a_job_has_a_name(env: dict[str, str], argv: list[str], name: str) -> None:
    """The name is the most telling one at hand."""
    assert job_name(env, argv, module="") == name


@pytest.mark.parametrize(
    ("module", "name"),
    [("pkg.train", "pkg.train"), ("pkg.__main__", "pkg"), ("ipykernel_launcher", "notebook")],
)
def test_a_module_names_its_job(module: str, name: str) -> None:
    """`python -m` names it, whose file says less; a chosen run id tells runs apart."""
    assert job_name({}, ["/src/pkg/train.py"], module) == name
    assert job_name({"TORCHELASTIC_RUN_ID": "7"}, ["/src/pkg/train.py"], module) == f"{name}-7"
