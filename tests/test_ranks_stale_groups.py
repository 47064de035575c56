"""What was built on a group that is gone says so, in one sentence."""

from collections.abc import Iterator

import pytest

from labkit.ranks import RankError, Ranks
from labkit.ranks.reports import STALE


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


@pytest.fixture(autouse=True)
def remembering(ranks: Ranks) -> None:
    """Every test begins with ranks that remember something."""
    ranks.push(memory="kept")


@pytest.mark.parametrize(
    ("build", "use"),
    [
        ("old = dist.group.WORLD", "from labkit import collectives; collectives.all_reduce(torch.ones(1), group=old)"),
        ("old = dist.group.WORLD", "dist.all_reduce(torch.ones(1), group=old)"),
        (
            "old = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
            "old(torch.ones(1, 2)).sum().backward()",
        ),
        (
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "old = init_device_mesh('cpu', (world_size // 2, 2), mesh_dim_names=('a', 'b'))['b']",
            # the new one must not be taken for the old
            "new = init_device_mesh('cpu', (2, world_size // 2), mesh_dim_names=('a', 'b'))\nold.get_group()",
        ),
        (
            "from torch.distributed.fsdp import fully_shard\nold = fully_shard(torch.nn.Linear(4, 4))",
            "old(torch.ones(1, 4))",
        ),
    ],
    ids=["labkit", "torch", "DDP", "mesh", "FSDP"],
)
def test_a_wrapper_or_mesh_that_outlives_its_group_says_so(ranks: Ranks, build: str, use: str) -> None:
    ranks.run_cell(build)
    with pytest.raises(RankError, match="rank 0 raised"):
        ranks.run_cell("if rank == 0: raise ValueError('the group is gone after this')")
    with pytest.raises(RankError) as caught:
        ranks.run_cell(use)
    assert STALE in str(caught.value)
    assert "\n" not in str(caught.value)
