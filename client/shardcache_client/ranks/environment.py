"""The rank of this process and the name of its job, from its environment variables.

A launcher sets these for each process: torchrun, Slurm or Ray. This module does not need torch.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.protocol import MAX_JOB_CHARS
from shardcache_client.order.topology import Topology

# Run ids that torchrun sets if the user chose none: "none", or a random UUID.
_NO_RUN_ID = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NOTEBOOKS = ("ipykernel_launcher", "colab_kernel_launcher")  # programs that run notebooks


def ranks_of_environment(
    env: Mapping[str, str] = os.environ,
    argv: Sequence[str] = sys.argv,
) -> Topology:
    """Return the rank and the number of ranks that torchrun or Slurm has set; else a single rank.

    Raises ConfigError for invalid values.
    """
    launchers = [("RANK", "WORLD_SIZE")]
    # Ray's workers inherit Slurm's variables from the `ray start` that started them, whose rank is
    # not theirs.
    if not _is_ray_worker(env, argv):
        # `srun` starts all ranks, and sets SLURM_STEP_NUM_TASKS to their number. SLURM_NTASKS would
        # be wrong in a batch script or a shell under `salloc`, which are not started by `srun`:
        # they run as one process, but SLURM_NTASKS is the number of tasks that they may start.
        launchers.append(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    for rank_variable, size_variable in launchers:
        if rank_variable in env and size_variable in env:
            return Topology(_number(env, rank_variable), _number(env, size_variable))
    return Topology()


def ranks_of_ray_train() -> Topology | None:
    """Return the rank of this process in its Ray Train run; None outside of such a run."""
    context = _ray_train_context()
    if context is None:
        return None
    return Topology(context.get_world_rank(), context.get_world_size())


def _ray_train_context() -> Any:
    """Return Ray's TrainContext of this process; None outside of a Ray Train run."""
    # Ray's worker has imported this module already. Elsewhere, an import would take seconds.
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        return train.get_context()
    except RuntimeError:  # This process is not a worker of a Ray Train run.
        return None


def _is_ray_worker(env: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Return True if Ray has started this process as a worker, by the name of Ray's script."""
    if not argv or not env.get("RAY_JOB_ID"):
        return False
    return Path(argv[0]).name == "default_worker.py"


def _number(env: Mapping[str, str], name: str) -> int:
    """Return the number in an environment variable. Raises ConfigError for any other text."""
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"${name} is {env[name]!r}, not a number",
            remedy="correct or unset it, or pass rank and world_size",
        ) from None


def job_name(
    env: Mapping[str, str] = os.environ,
    argv: Sequence[str] = sys.argv,
    module: str | None = None,
) -> str:
    """Return the name under which the daemon lists this job, cut to the length that it shows.

    It is the first of these that exists:

    1. $SHARDCACHE_JOB.
    2. In Ray workers, whose scripts all have the same name: the Ray Train run or the Ray job.
    3. Slurm's job name, with the id that `squeue` shows.
    4. The name of the script, or of the module that `python -m` runs, with torchrun's run id if the
       user chose one.

    Args:
        env: the environment variables.
        argv: the arguments of the process.
        module: name of the module that `python -m` runs; "" for a script; None to find it.
    """
    name = _full_name(env, argv, module)
    # The name of a script need not be valid Unicode, but a message to the daemon must be. A line
    # break in the name would break the table of jobs.
    printable = (char if char.isprintable() else "?" for char in name)
    return "".join(printable)[:MAX_JOB_CHARS]


def _full_name(env: Mapping[str, str], argv: Sequence[str], module: str | None) -> str:
    """Return the name of the job before it is cut to length; see `job_name`."""
    if env.get("SHARDCACHE_JOB"):
        return env["SHARDCACHE_JOB"]
    if _is_ray_worker(env, argv):
        context = _ray_train_context()
        experiment = None if context is None else context.get_experiment_name()
        return experiment or f"ray-{env['RAY_JOB_ID']}"
    if env.get("SLURM_JOB_ID"):
        return _slurm_name(env)

    if module is None:
        module = _main_module()
    script = _script(env, argv, module)
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if _NO_RUN_ID.fullmatch(run_id):
        return script
    return f"{script}-{run_id}"


def _slurm_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name and id of the job; for a job array, with the number of the task."""
    job_id = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    name = env.get("SLURM_JOB_NAME", "slurm")
    return f"{name}-{job_id}"


def _script(env: Mapping[str, str], argv: Sequence[str], module: str) -> str:
    """Return the name of the script, notebook or module; "python" at a prompt or with `-c`.

    For the arguments, see `job_name`.
    """
    script = module.removesuffix(".__main__")
    if not script and argv:
        script = Path(argv[0]).name
    if script.removesuffix(".py") in _NOTEBOOKS:
        return Path(env.get("JPY_SESSION_NAME", "notebook")).name
    # "-m" is the name while `python -m` still imports the package of its module.
    if script in ("", "-c", "-m"):
        return "python"
    return script


def _main_module() -> str:
    """Return the name of the module that `python -m` runs; empty for a script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # Python gives the name `__main__` to the script in a folder or zip file that it runs.
    if spec is None or spec.name == "__main__":
        return ""
    return str(spec.name)
