"""`labkit bench train`: what the training loop costs beside a plain loop written by hand, in one process.

Both train the same network on the same batches in the same process, turn about.
"""

from collections.abc import Iterator
from statistics import median

import torch
import torch.nn.functional as F

from labkit.bench.side_by_side import STEPS, WARM_UPS, Comparison, take_turns
from labkit.data import GlobalBatches
from labkit.train.config import TrainConfig
from labkit.train.loop import Loop
from labkit.train.running import make_strategy
from labkit.train.workloads import make_workload

TARGET = 1.05  # times as long as the plain loop, at most
IMAGE = TrainConfig(norm="group", limit=4000, epochs=1000, progress="none", eval_every=10**9)
TEXT = TrainConfig(workload="text", limit=4000, epochs=1000, progress="none", eval_every=10**9)


def plain_loop(config: TrainConfig) -> Iterator[float]:
    """What one writes by hand: the losses of the steps."""
    workload = make_workload(config)
    model, data = workload.model, workload.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    hits = 0
    sampler = GlobalBatches(len(data), batch_size=config.batch_size, num_replicas=1, rank=0, seed=config.seed)
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        for indices in sampler:
            inputs, targets = data.batch(indices)
            optimizer.zero_grad()
            output = model(inputs)
            loss = F.cross_entropy(output, targets)
            loss.backward()
            optimizer.step()
            hits += int((output.argmax(1) == targets).sum())  # for the accuracy that every loop prints
            yield loss.item()


def our_loop(config: TrainConfig) -> Iterator[float]:
    """The same by `labkit.train`'s loop."""
    for step in Loop(config, make_strategy(config)).steps():
        yield step.loss


def bench_train(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each workload; returns the median ratios by name. About a minute on 2 cores."""
    print("train: one process; a step reads its batch, trains on it, and counts loss and hits")
    results: dict[str, float] = {}
    for name, config in (("image", IMAGE), ("text", TEXT)):
        loops = [our_loop(config), plain_loop(config), plain_loop(config)]
        found = Comparison.of([take_turns([loop.__next__ for loop in loops], steps=steps, warm_ups=warm_ups)])
        speeds = [config.batch_size / median(seconds) for seconds in (found.ours, found.theirs)]
        line = found.line(f"train {name}", target=TARGET, of_whom="a plain loop")
        print(f"{line}; {speeds[0]:.0f} samples/s, {speeds[1]:.0f} by the plain loop")
        results[name], results[f"{name} control"] = found.ratio.median, found.noise.median
    return results
