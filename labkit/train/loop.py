"""The training loop, one for every strategy: it reads the batches, weighs the loss, steps, evaluates and saves."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from labkit.record import span
from labkit.train import resuming
from labkit.train.batches import EpochBatches
from labkit.train.config import TrainConfig
from labkit.train.metrics import Metrics
from labkit.train.optimizers import set_learning_rate
from labkit.train.progress import Progress
from labkit.train.results import Evaluation, TrainResult
from labkit.train.schedules import learning_rate_factor
from labkit.train.settings import ConfigError
from labkit.train.stopping import StopRequest
from labkit.train.strategies import Strategy
from labkit.train.sums import Sums


@dataclass(frozen=True)
class Step:
    """One step that was done: the numbers of the whole global batch."""

    step: int
    loss: float
    accuracy: float
    learning_rate: float
    gradient_norm: float | None
    samples: int
    loss_scale: float | None = None
    stepped: bool = True
    seconds: float = 0.0


class Loop:
    """A run on this rank. `run()` does all of it; `steps()` yields after each step.

    The rule for losses: a share's loss sum is divided by the step's global weight (samples or valid tokens, one small
    counted all-reduce, which also tells whether any rank was asked to stop) and multiplied by the number of shares, by
    which strategies divide.
    """

    def __init__(
        self, config: TrainConfig, strategy: Strategy, *, rank: int = 0, request: StopRequest | None = None
    ) -> None:
        self.config, self.strategy, self.rank = config, strategy, rank
        self.request = request or StopRequest()
        self.result = TrainResult(world_size=config.world_size)
        self.train = self._batches(strategy.workload.train, shuffle=True, workers=config.workers)
        self.test = self._batches(strategy.workload.test, shuffle=False, workers=config.workers)
        self.epoch = self.position = self.step = 0
        resuming.seed_rank(config.seed, 0 if strategy.same_random_numbers else rank)
        self._resume()
        per_epoch = self.train.steps_from(0)
        self.total = config.steps or config.epochs * per_epoch
        if config.warmup > self.total:
            raise ConfigError(f"warmup={config.warmup} is longer than the run of {self.total} steps: shorten it")
        first, writes = rank == 0, rank == 0 and bool(config.folder)
        self.metrics = Metrics(Path(config.folder) if writes else None, self.step)
        self.progress = Progress(config.progress if first else "none", self.total, self.step)

    def _batches(self, data: Any, *, shuffle: bool, workers: int) -> EpochBatches:
        return EpochBatches(
            data,
            batch_size=self.config.batch_size,
            shares=self.strategy.shares,
            share=self.strategy.share,
            shuffle=shuffle,
            seed=self.config.seed,
            workers=workers,
        )

    def _resume(self) -> None:
        snapshot = resuming.find(self.config)
        if snapshot is None:
            return
        data = resuming.restore(snapshot, self.strategy, self.config.seed)
        self.epoch, self.position = data["epoch"], data["position"]
        self.step = self.result.first_step = snapshot.step
        self.result.refused = snapshot.refused

    # --- running ---

    def run(self) -> TrainResult:
        """Train to the end, or until a stop is asked for; evaluate and save on the way."""
        try:
            for words in self.result.refused:
                self.progress.say(words)
            for _ in self.steps():
                if self.config.snapshot_every and self.step % self.config.snapshot_every == 0:
                    self._save()
                if self._evaluates():
                    self._evaluate()
            if not self.result.stopped and not self.result.evaluations:
                self._evaluate()  # a run that was complete before
            if self.step > self.result.first_step:
                self._save_last()
        finally:
            self.metrics.close()
            self.progress.close()
        self.result.step, self.result.epoch = self.step, self.epoch
        self.strategy.synchronise_buffers()
        state = self.strategy.full_state()  # all ranks together, where it has to be gathered
        if self.rank == 0:
            self.result.state_dict = state
        return self.result

    def steps(self) -> Iterator[Step]:
        """Do the steps that are left, one at each turn; ends early where any rank was asked to stop."""
        since = time.perf_counter()
        while self.step < self.total:
            for inputs, targets, counts in self.train.epoch(self.epoch, self.position):
                weight = self.strategy.workload.weight(targets) if counts else 0
                global_weight, stop = self.strategy.sum_over_ranks([weight, float(self.request.asked)])
                if stop:
                    self.result.stopped = self.request.signal_name or "SIGTERM"
                    return
                done = self._step(inputs, targets, counts, global_weight)
                done = replace(done, seconds=time.perf_counter() - since)
                self._keep(done)
                yield done
                since = time.perf_counter()  # what happened meanwhile is no training
                if self.step == self.total:
                    return
            self.epoch, self.position = self.epoch + 1, 0

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor, counts: bool, global_weight: float) -> Step:
        config, strategy = self.config, self.strategy
        inputs, targets = inputs.to(strategy.device), targets.to(strategy.device)
        factor = learning_rate_factor(self.step, total=self.total, schedule=config.schedule, warmup=config.warmup)
        set_learning_rate(strategy.optimizer, config.learning_rate * factor)
        scale = strategy.shares / global_weight if counts and global_weight else 0.0
        sums = strategy.forward_backward(inputs, targets, scale)
        norm = strategy.clip(config.clip) if config.clip else None
        loss_scale = strategy.scaler.get_scale() if strategy.scaler is not None else None
        stepped = strategy.step()
        loss, correct, _, samples = self._total(sums if counts else Sums())
        self.step += 1
        self.position = min(self.position + config.batch_size, len(self.train.data))
        per = max(global_weight, 1)
        rate = config.learning_rate * factor
        return Step(self.step, loss / per, correct / per, rate, norm, int(samples), loss_scale, stepped)

    def _total(self, sums: Sums) -> list[float]:
        return self.strategy.sum_over_ranks([sums.loss, sums.correct, sums.weight, sums.samples])

    def _keep(self, done: Step) -> None:
        result = self.result
        result.losses.append(done.loss)
        result.accuracies.append(done.accuracy)
        result.learning_rates.append(done.learning_rate)
        result.samples, result.seconds = result.samples + done.samples, result.seconds + done.seconds
        values = {"loss": done.loss, "accuracy": done.accuracy, "learning_rate": done.learning_rate}
        if done.gradient_norm is not None:
            result.gradient_norms.append(done.gradient_norm)
            if math.isfinite(done.gradient_norm):  # not so where the step was skipped; and JSON has no such numbers
                values["gradient_norm"] = done.gradient_norm
        if done.loss_scale is not None:
            result.loss_scales.append(done.loss_scale)
            result.skipped += not done.stepped
            values["loss_scale"] = done.loss_scale
        values["samples_per_second"] = done.samples / done.seconds
        self.metrics.write("train", done.step, epoch=self.epoch, **values)
        self.progress.step(done.step, done.samples, done.loss, done.accuracy)

    # --- evaluating and saving ---

    def _evaluates(self) -> bool:
        every = self.config.eval_every
        at_end_of_epoch = self.position == len(self.train.data)
        return self.step == self.total or (self.step % every == 0 if every else at_end_of_epoch)

    def _evaluate(self) -> None:
        one = self.evaluate()
        self.result.evaluations.append(one)
        self.metrics.write("test", self.step, loss=one.loss, accuracy=one.accuracy)
        self.metrics.flush()
        self.progress.evaluated(one)

    def evaluate(self) -> Evaluation:
        """Mean loss and accuracy over the test split: every sample counts once, whatever the number of ranks."""
        strategy, total = self.strategy, [0.0] * 4
        with span("evaluation", "other"):
            strategy.synchronise_buffers()
            strategy.model.eval()
            for inputs, targets, counts in self.test.epoch(0):
                if counts or strategy.in_step:
                    sums = strategy.evaluate(inputs.to(strategy.device), targets.to(strategy.device))
                if counts:
                    mine = [sums.loss, sums.correct, sums.weight, sums.samples]
                    total = [a + b for a, b in zip(total, mine, strict=True)]
            strategy.model.train()
            loss, correct, weight, samples = strategy.sum_over_ranks(total)
        return Evaluation(self.step, loss / max(weight, 1), correct / max(weight, 1), int(samples))

    def _save(self) -> None:
        if self.config.folder:
            with span("snapshot", "other"):
                resuming.save(self.config, self.strategy, self.step, self.train.state(self.epoch, self.position))
            self.metrics.flush()

    def _save_last(self) -> None:
        every = self.config.snapshot_every
        if not every or self.step % every:
            self._save()
