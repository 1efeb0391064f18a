"""The rank of this process and the name of its job, from its environment. Without torch.

The environment variables are those that a launcher sets for each process: torchrun, Slurm or Ray.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardcache.errors import ConfigError
from shardcache.shared.protocol import MAX_JOB_CHARS
from shardcache_client.order.topology import Topology

# Run ids that torchrun sets if the user chose none: "none", or a random UUID.
_NO_RUN_ID = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NOTEBOOKS = ("ipykernel_launcher", "colab_kernel_launcher")  # programs that run notebooks


def ranks_of_environment(
    env: Mapping[str, str] = os.environ,
    argv: Sequence[str] = sys.argv,
) -> Topology:
    """Return the ranks that the launcher set: torchrun's, a Slurm step's, or a single process.

    Only the variables of a Slurm step count. A batch script or a shell under `salloc` runs once,
    yet sees the SLURM_NTASKS of the whole allocation and a SLURM_PROCID of 0. Only `srun` sets
    SLURM_STEP_NUM_TASKS. In Ray's workers, Slurm's variables do not count, as they are those of the
    step that ran `ray start`.

    Raises ConfigError for invalid values.
    """
    launchers = [("RANK", "WORLD_SIZE")]
    if not _is_ray_worker(env, argv):
        launchers.append(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    for rank, world_size in launchers:
        if rank in env and world_size in env:
            return Topology(_number(env, rank), _number(env, world_size))
    return Topology()


def ranks_of_ray_train() -> Topology | None:
    """Return the rank of this worker of a Ray Train run; None in any other process."""
    context = _ray_train_context()
    if context is None:
        return None
    return Topology(context.get_world_rank(), context.get_world_size())


def _ray_train_context() -> Any:
    """Return the context of this worker's Ray Train run; None in any other process."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        return train.get_context()
    except RuntimeError:  # This process is not a worker of a Ray Train run.
        return None


def _is_ray_worker(env: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Return True if Ray has started this process: all such processes run the same script."""
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

    Characters that cannot be printed become question marks.

    In order of precedence: $SHARDCACHE_JOB; in Ray workers, whose scripts all have the same name,
    the Ray Train run or Ray job; Slurm's job name with the id that `squeue` shows; the name of the
    script, or of the module that `python -m` runs, with torchrun's run id if the user chose one.
    """
    name = _full_name(env, argv, module)
    # The name of a script need not be valid text, but a message to the daemon must be. A line break
    # would break the table of jobs.
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
    is_default = _NO_RUN_ID.fullmatch(run_id)
    if is_default:
        return script
    return f"{script}-{run_id}"


def _slurm_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name and id of the job, with the number of the task for a job array."""
    job_id = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    name = env.get("SLURM_JOB_NAME", "slurm")
    return f"{name}-{job_id}"


def _script(env: Mapping[str, str], argv: Sequence[str], module: str) -> str:
    """Return the name of the script, notebook or module; "python" at a prompt or with `-c`.

    Args:
        env: the environment variables.
        argv: the arguments of the process.
        module: name of the module that `python -m` runs; "" for a script.
    """
    script = module.removesuffix(".__main__")
    if not script and argv:
        script = Path(argv[0]).name
    if script.removesuffix(".py") in _NOTEBOOKS:
        return Path(env.get("JPY_SESSION_NAME", "notebook")).name
    if script in ("", "-c", "-m"):
        return "python"
    return script


def _main_module() -> str:
    """Return the name of the module that `python -m` runs; empty for a script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name == "__main__":
        return ""
    return str(spec.name)
