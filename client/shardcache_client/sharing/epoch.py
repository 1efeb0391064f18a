"""Which epoch an iteration reads, agreed among the workers of the loader that began it."""

from __future__ import annotations

from typing import Any

from shardcache_client.sharing.board import Board

# Iterations whose workers have not all begun; loaders that were dropped leave some behind.
_REMEMBERED = 64


class Epochs:
    """Counts the iterations over a dataset, until `set` says which epoch it shall be from now on.

    Args:
        board: shared by all processes of the dataset.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def __repr__(self) -> str:
        return f"Epochs(next={self.next})"

    @property
    def next(self) -> int:
        """The epoch that an iteration would read which began now."""
        notes = self._board.read()
        epoch: int = notes["chosen"] if "chosen" in notes else notes.get("next", 0)
        return epoch

    def set(self, epoch: int) -> None:
        """Choose the epoch that every iteration reads from now on."""
        with self._board.edit() as notes:
            notes["chosen"] = epoch

    def go_on(self, epoch: int) -> None:
        """Count on from this epoch."""
        with self._board.edit() as notes:
            notes.pop("chosen", None)
            notes |= {"next": epoch, "begun": []}

    def passed(self, epoch: int) -> None:
        """Count on behind this epoch, which an iteration reads by itself."""
        with self._board.edit() as notes:
            notes["next"] = epoch + 1

    def begin(self) -> int:
        """Return the epoch for an iteration in a process without workers."""
        with self._board.edit() as notes:
            return self._count(notes)

    def join(self, loader: int, worker: int, workers: int) -> int:
        """Return the epoch for a worker's part of an iteration.

        Args:
            loader: a number that the workers of one iteration share. Persistent workers keep it; their iterations are
                told apart by each worker's taking part once in each.
        """
        with self._board.edit() as notes:
            if "chosen" in notes:
                return self._count(notes)
            begun: list[list[Any]] = notes.setdefault("begun", [])
            for each in reversed(begun):  # a dropped loader may have had the number of the present one
                if each[0] == loader and worker not in each[2]:
                    break
            else:
                each = [loader, self._count(notes), []]
                begun.append(each)
            each[2].append(worker)
            epoch: int = each[1]
            notes["begun"] = [each for each in begun if len(each[2]) < workers][-_REMEMBERED:]
            return epoch

    @staticmethod
    def _count(notes: dict[str, Any]) -> int:
        if "chosen" in notes:
            epoch: int = notes["chosen"]
            return epoch
        epoch = notes.get("next", 0)
        notes["next"] = epoch + 1
        return epoch
