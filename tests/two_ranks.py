"""Two processes that train together over gloo, kept for many trainings: to start them takes seconds."""

import contextlib
import os
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing
from torch import distributed

RANKS = 2
PATIENCE = 150
"""Seconds to wait for a rank: it is stuck then."""
STUCK = object()
"""The answer of such a rank."""


@dataclass(frozen=True)
class RankError:
    """What was raised on a rank."""

    kind: str
    message: str


class TwoRanks:
    """Runs functions on two ranks at once."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self):
        context = torch.multiprocessing.get_context("spawn")
        place = Path(tempfile.mkdtemp(dir=self._folder.name)) / "rendezvous"
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(place), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def attempt(self, function, *args, **kwargs):
        """Call a function of a module on both ranks; gives what each has returned, or the RankError that it has raised."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results = [_answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        stuck = [rank for rank, result in enumerate(results) if result is STUCK]
        if stuck:
            self.restart()  # an answer that comes later would be taken for that of the next function
            raise AssertionError(f"ranks {stuck} do not answer: they wait for another one")
        return results

    def run(self, function, *args, **kwargs):
        """The same for a function that works on both."""
        results = self.attempt(function, *args, **kwargs)
        for rank, result in enumerate(results):
            if isinstance(result, RankError):
                raise AssertionError(f"rank {rank}: {result}")
        return results

    def restart(self):
        """Begin again, after a rank was killed or is stuck."""
        self.close(remove=False)
        self._start()

    def close(self, *, remove=True):
        """End both processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10 if process.is_alive() else 0)
            if process.is_alive():
                process.kill()
                process.join()
        if remove:
            self._folder.cleanup()


def _answer(rank, pipe):
    try:
        if not pipe.poll(PATIENCE):
            return STUCK
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return RankError("Died", f"rank {rank} has died")


def _serve(rank, place, pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.fsync = lambda descriptor: None
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked is None:
            return
        function, args, kwargs = asked
        try:
            result = function(rank, *args, **kwargs)
        except Exception as error:
            if os.environ.get("SHOW_RANKS"):
                traceback.print_exc()
            result = RankError(type(error).__name__, str(error))
        pipe.send(result)
