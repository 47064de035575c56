"""`TrainConfig`: all settings of a training run, each with its default, its unit and what it means."""

from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, fields
from typing import Any, get_type_hints

from labkit.train.contradictions import refuse_contradictions
from labkit.train.settings import ConfigError, check_value, nearest, read_value, setting, words_for


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run. From Python: `TrainConfig(workload="text", batch_size=64)`; from `key=value` texts, as on
    the command line: `TrainConfig.from_arguments(["workload=text", "batch_size=64"])`; from a notebook's parameters:
    `TrainConfig(**parameters)`.

    Unknown, wrong and contradictory settings raise ConfigError in one sentence.
    """

    workload: str = setting("image", "what is learned", choices=("image", "text", "tokens"))
    data: str = setting("", "a known set or a path; empty: the embedded set of the workload")
    data_folder: str = setting("", "where a known set lies unpacked; empty: where it was fetched to")
    limit: int = setting(0, "train on so many only (texts for tokens); 0: all", "samples", least=0)
    test_limit: int = setting(0, "evaluate on so many only (texts for tokens); 0: all", "samples", least=0)
    augment: bool = setting(False, "crop and flip training images at random")
    image_size: int = setting(0, "side of images that come as files; 0: the set's own", "pixels", least=0)
    workers: int = setting(0, "processes of each rank that prepare data; 0: the rank itself", "processes", least=0)

    depth: int = setting(8, "depth of the ResNet", "layers", choices=(8, 18, 50))
    stem: str = setting("small", "first layers of the ResNet", choices=("small", "imagenet"))
    norm: str = setting("batch", "norm of the ResNet", choices=("batch", "group", "sync"))
    d_model: int = setting(128, "width of the transformer", "features", least=1)
    num_layers: int = setting(2, "blocks of the transformer", "blocks", least=1)
    num_heads: int = setting(4, "attention heads of a block", "heads", least=1)
    d_ff: int = setting(0, "inner width of the feed-forward layers; 0: four times d_model", "features", least=0)
    max_len: int = setting(64, "longest text, or length of a block of the stream", "tokens", least=2)
    dropout: float = setting(0.0, "share of features that dropout zeroes", least=0, below=1)

    dp: int = setting(1, "data-parallel ranks; under torchrun what remains of its ranks", "ranks", least=1)
    pp: int = setting(1, "pipeline stages", "ranks", least=1)
    pp_schedule: str = setting(
        "1f1b", "order in which pipeline stages work", choices=("naive", "gpipe", "1f1b", "zb-h1")
    )
    micro_batches: int = setting(
        0, "micro-batches that the pipeline cuts a batch into; 0: four for each stage", "micro-batches", least=0
    )
    tp: int = setting(1, "tensor-parallel ranks", "ranks", least=1)
    zero: int = setting(0, "ZeRO stage over the data-parallel ranks", choices=(0, 1, 2, 3))
    backend: str = setting("gloo", "gloo: compute on CPUs; nccl: one GPU for every rank", choices=("gloo", "nccl"))
    timeout: float = setting(60.0, "how long a rank may wait for another without progress", "seconds", above=0)
    precision: str = setting("float32", "numbers to compute in", choices=("float64", "float32", "bfloat16", "float16"))
    accumulate: int = setting(1, "micro-batches that each rank cuts its share into", "micro-batches", least=1)
    checkpoint: str = setting(
        "none", "which activations are computed again in backward: none, sqrt, selective, or every k blocks"
    )

    batch_size: int = setting(
        64, "the global batch: samples (blocks for tokens) of one step, all ranks together", "samples", least=1
    )
    steps: int = setting(0, "length of the run; 0: epochs decides", "steps", least=0)
    epochs: int = setting(1, "length of the run, where steps is 0", "epochs", least=1)
    optimizer: str = setting("adamw", "the optimizer", choices=("sgd", "adamw"))
    learning_rate: float = setting(1e-3, "the learning rate after warmup, at its largest", least=0)
    momentum: float = setting(0.9, "momentum of sgd", least=0, below=1)
    weight_decay: float = setting(0.0, "decay of the weights", least=0)
    schedule: str = setting("constant", "course of the learning rate", choices=("constant", "cosine", "linear"))
    warmup: int = setting(0, "steps in which the learning rate rises from 0", "steps", least=0)
    clip: float = setting(0.0, "largest norm of the gradients; 0: not clipped", least=0)
    seed: int = setting(0, "of weights, order of samples, augmentation and dropout", least=0)

    eval_every: int = setting(0, "evaluate after so many steps; 0: after each epoch", "steps", least=0)
    snapshot_every: int = setting(0, "save after so many steps; 0: at the end only", "steps", least=0)
    folder: str = setting("", "for snapshots, metrics.jsonl and TensorBoard; empty: nothing is written")
    resume: bool = setting(False, "go on from the newest snapshot in folder, if there is one")
    progress: str = setting("auto", "how progress is shown", choices=("auto", "bar", "lines", "none"))

    def __new__(cls, **settings: Any) -> "TrainConfig":
        """Refuse unknown names before dataclass's own __init__ does, which has no hint to give."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"there is no setting {name}{nearest(name, known) or '; labkit train --help lists all'}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for one, kind in _kinds():
            object.__setattr__(self, one.name, check_value(one, kind, getattr(self, one.name)))
        refuse_contradictions(self)

    @classmethod
    def from_arguments(cls, arguments: Iterable[str]) -> "TrainConfig":
        """From texts such as `workload=text`. A name given twice, or no `name=value` at all, is refused too."""
        kinds = {one.name: (one, kind) for one, kind in _kinds()}
        values: dict[str, Any] = {}
        for argument in arguments:
            name, equals, text = argument.partition("=")
            if not equals:
                raise ConfigError(f"{argument!r} must be name=value, as in batch_size=64{nearest(name, kinds)}")
            if name in values:
                raise ConfigError(f"{name} is given twice; give it once")
            values[name] = read_value(*kinds[name], text) if name in kinds else text
        return cls(**values)

    @property
    def set_name(self) -> str:
        """The data set: the one given, else the embedded one."""
        return self.data or ("fashion-mnist" if self.workload == "image" else "wordnet-topics")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.tp

    def as_dict(self) -> Mapping[str, Any]:
        """All settings by name."""
        return asdict(self)


def _kinds() -> list[tuple["Field[Any]", type]]:
    hints = get_type_hints(TrainConfig)
    return [(one, hints[one.name]) for one in fields(TrainConfig)]


def help_text() -> str:
    """All settings with default, unit, meaning and values, a line each."""
    rows = []
    for one, kind in _kinds():
        about = one.metadata
        default = (
            {"": '""', True: "true", False: "false"}.get(one.default, one.default)
            if kind in (str, bool)
            else one.default
        )
        values = f" ({words_for(one, kind)})" if about["choices"] else ""
        unit = f" [{about['unit']}]" if about["unit"] else ""
        rows.append((f"{one.name}={default}", f"{about['help']}{unit}{values}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {words}" for name, words in rows)
