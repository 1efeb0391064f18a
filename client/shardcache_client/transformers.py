"""Hugging Face's Trainer over ShardDatasets, resumed exactly, even by another number of processes.

    from shardcache_client.transformers import ShardTrainer

    trainer = ShardTrainer(...)  # with the arguments of transformers.Trainer

Needs the package transformers, which shardcache itself does not depend on.
"""

import math
from collections.abc import Iterator
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.dataset import ShardDataset
from shardcache_client.loading.loader import ShardLoader

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as exn:
    raise ImportError(
        "shardcache_client.transformers needs transformers: pip install transformers", name=exn.name
    ) from exn


class ShardTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with the loaders of its ShardDatasets and Mixtures.

    For other datasets, ShardTrainer does the same as Trainer.

    Trainer by itself would divide a ShardDataset's samples among the processes, although the
    dataset has done so already. To resume, Trainer drops as many batches as it has trained on; if
    the number of processes has changed, these are other samples. ShardTrainer saves the loader's
    position in each checkpoint, as part of `trainer_state.json`, and
    `train(resume_from_checkpoint=…)` continues from there: the rest of the epoch comes exactly
    once, on any number of processes.

    Trainer computes epoch and learning rate from the number of steps, so the steps of a resumed run
    must have as many samples as before: with half the processes, set twice the
    `gradient_accumulation_steps`. With `ignore_data_skip=True`, the epoch begins again; checkpoints
    of such a run have no position.

    Of the arguments for loaders, these apply: `dataloader_num_workers`, `dataloader_pin_memory`,
    `dataloader_prefetch_factor`, `dataloader_drop_last` and `auto_find_batch_size`. Training
    workers persist.

    To combine it with another subclass of Trainer, name that class second: `class
    MyTrainer(ShardTrainer, Seq2SeqTrainer)`.

    `train` raises ConfigError if it resumes from a checkpoint without a loader's position, or from
    a run with steps of another size.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(LoaderPosition)

    def get_train_dataloader(self) -> Any:
        """Return the loader for `train`."""
        # Trainer calls this again to try smaller batches. Dropping the last attempt's batches ends
        # their workers.
        self._batches: Iterator[Any] = iter(())
        self._loader = self._loader_of(self.train_dataset, self._train_batch_size)
        self._epoch: int | None = None  # the epoch that is being read
        # Trainer's own iterator of that epoch, by which the next epoch is recognised.
        self._epoch_iterator: Iterator[Any] | None = None
        if self._loader is None:
            return super().get_train_dataloader()
        return self._loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader for `evaluate`.

        Args:
            eval_dataset: the dataset, or its name among the trainer's; None for the trainer's only
                dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        loader = self._loader_of(dataset, self.args.eval_batch_size, persistent_workers=False)
        if loader is None:
            return super().get_eval_dataloader(eval_dataset)
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader for `predict`."""
        loader = self._loader_of(test_dataset, self.args.eval_batch_size, persistent_workers=False)
        if loader is None:
            return super().get_test_dataloader(test_dataset)
        return loader

    def _loader_of(
        self,
        dataset: object,
        batch_size: int,
        **options: Any,
    ) -> ShardLoader[Any] | None:
        """Return the loader of a ShardDataset with Trainer's arguments; None for other datasets."""
        if not isinstance(dataset, ShardDataset):
            return None
        return dataset.loader(
            batch_size=batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            # None means that memory is pinned if there is a CUDA device.
            pin_memory=None if self.args.dataloader_pin_memory else False,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            drop_last=self.args.dataloader_drop_last,
            **options,
        )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any) -> Any:
        """Return the loader's next batches, for one step.

        Args:
            epoch_iterator: Trainer's own iterator of the epoch. It is not read: in a resumed epoch,
                it would drop the first batches of the rest.
        """
        if self._loader is None:
            return super().get_batch_samples(epoch_iterator, *args)
        if epoch_iterator is not self._epoch_iterator:  # Trainer has begun the next epoch
            self._epoch_iterator = epoch_iterator
            self._epoch = self._loader.epoch if self._epoch is None else self._epoch + 1
            # If the loader's length is unknown, a resumed Trainer counts epochs from 0 again. So
            # epochs are counted here.
            if self._loader.epoch != self._epoch:
                self._loader.set_epoch(self._epoch)
            self._batches = iter(self._loader)
        return super().get_batch_samples(self._batches, *args)


class LoaderPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves the position of the training loader in each of Trainer's checkpoints, and loads it.

    ShardTrainer adds this callback.
    """

    def __init__(self) -> None:
        self._loader: ShardLoader[Any] | None = None
        self._steps: dict[str, int] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Load the position from the checkpoint, if the run resumes from one.

        Raises ConfigError if the checkpoint does not fit.
        """
        self._loader = train_dataloader if isinstance(train_dataloader, ShardLoader) else None
        if self._loader is None:
            return
        self._steps = _step_counts(train_dataloader, args.gradient_accumulation_steps)
        # Trainer saves the states of the callbacks that have an entry here.
        entry = state.stateful_callbacks.setdefault(type(self).__name__, {})
        saved = entry.get("attributes", {})
        if not state.global_step:
            return
        if args.ignore_data_skip:
            # The epoch begins again, while Trainer goes on counting steps. So the number of steps
            # no longer tells where an epoch ends, and no position is saved any more.
            self._loader = None
            return
        if "position" not in saved:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} has no loader position",
                remedy="resume from one that a ShardTrainer saved; or read its epoch again, with "
                "ignore_data_skip=True",
            )
        _check_same_steps(saved["steps"], self._steps)
        self._loader.load_state_dict(saved["position"])

    def state(self) -> dict[str, Any]:
        """Return the position after the last step."""
        attributes: dict[str, Any] = {}
        if self._loader is not None:
            attributes = {"position": self._loader.state_dict(), "steps": self._steps}
        return {"args": {}, "attributes": attributes}


def _step_counts(loader: Any, accumulated: int) -> dict[str, int]:
    """Return the number of samples in a step of all processes, and of steps in an epoch.

    The number of steps is left out if it is unknown.

    Args:
        loader: the loader of the training dataset.
        accumulated: number of batches whose gradients are accumulated in a step.
    """
    processes = loader.dataset.topology().world_size
    counts = {"samples per step": loader.batch_size * accumulated * processes}
    if has_length(loader):
        counts["steps per epoch"] = math.ceil(len(loader) / accumulated)
    return counts


def _check_same_steps(saved: dict[str, int], now: dict[str, int]) -> None:
    """Raise ConfigError if steps are of another size or number than in the checkpoint's run.

    Args:
        saved: `_step_counts` of the run that saved the checkpoint.
        now: `_step_counts` of this run.
    """
    for name in sorted(saved.keys() & now.keys()):
        if saved[name] != now[name]:
            raise ConfigError(
                f"the checkpoint is from a run of {saved[name]} {name}, and this one has "
                f"{now[name]}: Trainer would resume in another epoch and end at another step",
                remedy="set gradient_accumulation_steps or per_device_train_batch_size so that "
                "number of processes × batch size × accumulation is "
                f"{saved['samples per step']} as before; or read its epoch again, with "
                "ignore_data_skip=True",
            )
