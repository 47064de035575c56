"""`labkit bench NAME`: the benchmarks, each a module that is imported when it is asked for."""

import argparse
from importlib import import_module

#: name: (module, function, what it measures)
BENCHMARKS = {
    "ranks": ("labkit.bench.ranks_bench", "bench_ranks", "how long ranks take to start, to answer and to end"),
    "all_reduce": ("labkit.bench.all_reduce_bench", "bench_all_reduce", "our ring beside gloo's all-reduce"),
    "ddp": ("labkit.bench.ddp_bench", "bench_ddp", "our DistributedDataParallel beside PyTorch's"),
    "accumulate": ("labkit.bench.accumulate_bench", "bench_accumulate", "accumulation beside PyTorch's no_sync"),
    "checkpoint": ("labkit.bench.checkpoint_bench", "bench_checkpoint", "our gradient checkpointing beside PyTorch's"),
    "zero": ("labkit.bench.zero_bench", "bench_zero", "our stages of ZeRO beside PyTorch's, and its FSDP2"),
    "pipeline": ("labkit.bench.pipeline_bench", "bench_pipeline", "our pipeline schedules beside PyTorch's"),
    "precision": ("labkit.bench.precision_bench", "bench_precision", "our autocast beside PyTorch's, and float32"),
    "tensor": ("labkit.bench.tensor_bench", "bench_tensor", "a shared transformer block beside PyTorch's"),
    "train": ("labkit.bench.train_bench", "bench_train", "the training loop beside a plain one written by hand"),
}


def bench_command(argv: list[str]) -> int:
    """Run the named benchmarks, all of them without a name; each prints a line for what it has measured."""
    listed = "\n".join(f"  {name:<12}{about}" for name, (_, _, about) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="labkit bench",
        description="Measure, turn about in one launch. Close other programs first: what else runs is measured too.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is given")
    names = parser.parse_args(argv).names
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        module, function, _ = BENCHMARKS[name]
        getattr(import_module(module), function)()
    return 0
