"""Plans for the networks of `labkit.models`: which modules are cut, and how."""

from torch import nn

from labkit.models.encoder import TokenHead, Transformer
from labkit.models.residual import BasicBlock, ResidualNetwork
from labkit.parallel.tensor.attention_style import AttentionParallel
from labkit.parallel.tensor.layouts import Layout, Replicate, Shard
from labkit.parallel.tensor.linear_styles import ColwiseParallel, RowwiseParallel, VocabParallelEmbedding
from labkit.parallel.tensor.sequence_styles import (
    ChannelParallel,
    DropoutParallel,
    GatherInput,
    ScatterOutput,
    SequenceParallel,
    VocabParallelHead,
)
from labkit.parallel.tensor.styles import ParallelStyle, checked_keep


def plan_for(
    model: nn.Module, *, sequence: str = "none", sharded_logits: bool = True, pieces: int = 1
) -> dict[str, ParallelStyle]:
    """A plan for a network of `labkit.models`.

    A transformer: attention by heads, feed-forward by columns and then rows, the embedding by its vocabulary, a token
    head with it; norms, positions and a class head stay replicated. A residual network: the convolutions of each block
    by channels, two by two; stem, shortcuts and the last layer stay replicated.

    Args:
        model: what `resnet` or `transformer` returned.
        sequence: "none"; or shards of the sequence between the shared layers, which keep the "gathered" input for
            backward, or only the "shards". For the transformer.
        sharded_logits: whether a token head puts out this rank's logits, for `loss_parallel`, or gathers them.
        pieces: as for `RowwiseParallel`, of all linear layers by rows.

    Raises ValueError for another model, or one that has no sequence.
    """
    if isinstance(model, Transformer):
        return _transformer(model, sequence, sharded_logits, pieces)
    if not isinstance(model, ResidualNetwork):
        raise ValueError(f"plan_for knows labkit's models, not {type(model).__name__}: write a plan for it")
    if sequence != "none":
        raise ValueError(f"plan_for: sequence is {sequence!r}, but images have no sequence; leave it out")
    return _residual(model)


def _transformer(model: Transformer, sequence: str, sharded_logits: bool, pieces: int) -> dict[str, ParallelStyle]:
    shards = sequence != "none"
    keep = checked_keep(sequence) if shards else "gathered"
    between: Layout = Shard(1) if shards else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding.token": VocabParallelEmbedding(output_layouts=between),
        "blocks.*.attention": AttentionParallel(
            input_layouts=between, output_layouts=between, keep=keep, pieces=pieces
        ),
        "blocks.*.feed_forward.up": ColwiseParallel(input_layouts=between, keep=keep),
        "blocks.*.feed_forward.dropout": DropoutParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between, pieces=pieces),
    }
    if isinstance(model.head, TokenHead):
        logits: Layout = Shard(-1) if sharded_logits else Replicate()
        plan["head"] = VocabParallelHead(input_layouts=between, output_layouts=logits)
    if shards:
        plan |= {
            "embedding.position": ScatterOutput(0),
            "embedding.dropout": SequenceParallel(),
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.norm2": SequenceParallel(),
            "blocks.*.dropout": SequenceParallel(),
        }
        plan |= {"head.norm": SequenceParallel()} if isinstance(model.head, TokenHead) else {"head": GatherInput(1)}
    return plan


def _residual(model: ResidualNetwork) -> dict[str, ParallelStyle]:
    """Two convolutions: columns, rows. Three: columns, rows whose sum is scattered over the channels, rows."""
    columns, between, rows = ColwiseParallel(), ChannelParallel(), RowwiseParallel()
    plan: dict[str, ParallelStyle] = {}
    for stage in model._stage_names:
        for number, block in model.get_submodule(stage).named_children():
            name = f"{stage}.{number}"
            plan |= {f"{name}.conv1": columns, f"{name}.bn1": between}
            if isinstance(block, BasicBlock):
                plan[f"{name}.conv2"] = rows
            else:
                scattered = RowwiseParallel(output_layouts=Shard(1))
                plan |= {f"{name}.conv2": scattered, f"{name}.bn2": between, f"{name}.conv3": rows}
    return plan
