"""`clip_grad_norm_` gives one process's norm for every mix of sharded, replicated and tied parameters."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_groups import new_group
from torch import nn

from labkit.collectives.groups import name_of
from labkit.mesh import Gradient, Placement, axes_to_sum, clip_grad_norm_, init_device_mesh, place
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder

NORMS = (1.0, 2.0, 3.0, math.inf)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=30) as ranks:
        yield ranks


SHAPES = {"a": (7, 5), "b": (6, 3), "c": (5, 5, 2), "d": (4, 90), "e": (3,), "f": (33, 257), "g": (2, 2)}


def whole_gradients(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def one_process(gradients: dict[str, torch.Tensor], max_norm: float, power: float) -> tuple[float, dict[str, Any]]:
    """The truth: PyTorch's own function on whole gradients, in float64."""
    parameters = {name: nn.Parameter(torch.zeros_like(value).double()) for name, value in gradients.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].double()
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm, power)
    return norm.item(), {name: parameter.grad for name, parameter in parameters.items()}


def placed(gradient: torch.Tensor, placement: Placement) -> nn.Parameter:
    """A parameter that holds this piece, with its part of the gradient."""
    parameter = nn.Parameter(torch.zeros(placement.local_shape, dtype=gradient.dtype))
    parameter.grad = placement.take(gradient)
    place(parameter, placement)
    return parameter


def clipped(pieces: dict[str, nn.Parameter], placements: dict[str, Placement], max_norm: float, power: float) -> Any:
    with Recorder() as record:
        norm = clip_grad_norm_(pieces.values(), max_norm, power)
    grads = {name: (placements[name], parameter.grad) for name, parameter in pieces.items()}
    return norm, grads, record.ranks[0].bytes_by("group")


def holds(answers: list[Any], gradients: dict[str, torch.Tensor], max_norm: float, power: float) -> None:
    """Every rank returned one process's norm, and the pieces put together are one process's gradients."""
    norm, truth = one_process(gradients, max_norm, power)
    for found, pieces, _ in answers:
        assert found.item() == pytest.approx(norm, rel=1e-6)
        assert found.item() == answers[0][0].item()  # to the last bit
        for name, (placement, grad) in pieces.items():
            torch.testing.assert_close(grad.double(), placement.take(truth[name]), rtol=2e-6, atol=1e-7)


def data_and_tensor(max_norm: float, power: float) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp, gradients = mesh["dp"], mesh["tp"], whole_gradients()
    whole = {name: Placement.of(value) for name, value in gradients.items()}
    placements = {
        "a": whole["a"],  # plain
        "b": whole["b"].sharded(0, tp).replicated(dp),  # tensor parallel
        "c": whole["c"].sharded(1, tp),  # uneven: 3 and 2
        "d": whole["d"].replicated(tp).sharded_flat(*((0, 123) if dp.get_local_rank() == 0 else (123, 360)), dp),
        "e": whole["e"].sharded_flat(*((0, 3) if dp.get_local_rank() == 0 else (3, 3)), dp),  # one rank holds nothing
    }
    block = whole["f"].sharded(0, tp)
    half = block.numel // 2
    placements["f"] = block.sharded_flat(*((0, half) if dp.get_local_rank() == 0 else (half, block.numel)), dp)
    placements["g"] = whole["g"].replicated(dp).replicated(tp)
    return clipped({n: placed(gradients[n], p) for n, p in placements.items()}, placements, max_norm, power)


@pytest.mark.parametrize("power", NORMS)
def test_data_and_tensor_axes_give_one_process_norm(four: Ranks, power: float) -> None:
    answers = four.run(data_and_tensor, 0.5, power)
    holds(answers, whole_gradients(), 0.5, power)
    # one number along each axis: the first rank of a pair sends it back
    assert [answer[2] for answer in answers] == [{"dp": 8, "tp": 8}] * 4


def stages_and_a_tie(max_norm: float, power: float, staged: bool) -> Any:
    """Four stages; "a" lives on 1 and 3, which tie it; stage 2 holds no parameter at all."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    tie, rank, gradients = new_group([1, 3], "tie"), dist.get_rank(), whole_gradients()
    whole = {name: Placement.of(value).staged(mesh["pp"]) for name, value in gradients.items()}
    tied = {"a": (whole["a"] if staged else Placement.of(gradients["a"])).tied(tie)} if rank in (1, 3) else {}
    mine = {name: whole[name] for name in {0: "bc", 1: "de", 2: "", 3: "fg"}[rank]} | tied
    pieces = {name: placed(gradients[name], placement) for name, placement in mine.items()}
    axes = axes_to_sum([whole["a"]])
    with Recorder() as record:
        norm = clip_grad_norm_(pieces.values(), max_norm, power, axes=axes)
    grads = {name: (mine[name], parameter.grad) for name, parameter in pieces.items()}
    return norm, grads, record.ranks[0].bytes_by("group")


@pytest.mark.parametrize("power", NORMS)
def test_stages_and_a_parameter_tied_between_two_of_them(four: Ranks, power: float) -> None:
    for staged in (True, False):
        holds(four.run(stages_and_a_tie, 1.5, power, staged), whole_gradients(), 1.5, power)


def tied_over_all_stages(max_norm: float) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    gradients = {name: whole_gradients()[name] for name in "ab"}
    placements = {name: Placement.of(value).tied(mesh["pp"]) for name, value in gradients.items()}
    return clipped({n: placed(gradients[n], p) for n, p in placements.items()}, placements, max_norm, 2.0)


def test_a_parameter_tied_over_all_stages_counts_once(two: Ranks) -> None:
    gradients = {name: whole_gradients()[name] for name in "ab"}
    holds(two.run(tied_over_all_stages, 0.1), gradients, 0.1, 2.0)


def only_a_tie_on_the_last_stage() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    gradients = {name: whole_gradients()[name] for name in "ab"}
    placements = {"a": Placement.of(gradients["a"]).tied(mesh["pp"])}
    if dist.get_rank() == 0:
        placements["b"] = Placement.of(gradients["b"]).staged(mesh["pp"])
    return clipped({n: placed(gradients[n], p) for n, p in placements.items()}, placements, 0.1, 2.0)


def test_a_stage_that_holds_nothing_but_a_tied_parameter_takes_part(two: Ranks) -> None:
    holds(two.run(only_a_tie_on_the_last_stage), {name: whole_gradients()[name] for name in "ab"}, 0.1, 2.0)


def data_parallel(max_norm: float, given: str) -> Any:
    gradients = whole_gradients()
    pieces = {name: nn.Parameter(torch.zeros_like(value)) for name, value in gradients.items()}
    placements = {name: Placement.of(value) for name, value in gradients.items()}
    for name, parameter in pieces.items():
        parameter.grad = gradients[name].clone()
        if given == "world":
            placements[name] = placements[name].replicated(None)
            place(parameter, placements[name])
    return clipped(pieces, placements, max_norm, 2.0)


@pytest.mark.parametrize("given", ["nothing", "world"])
def test_replicated_parameters_count_once_and_nothing_is_sent(two: Ranks, given: str) -> None:
    answers = two.run(data_parallel, 0.7, given)
    holds(answers, whole_gradients(), 0.7, 2.0)
    assert [answer[2] for answer in answers] == [{}, {}]


def flat_shards_over_borders(max_norm: float) -> Any:
    """ZeRO: parameters whole, reduced gradients in one padded flat shard a rank, which ends amid parameters."""
    gradients = whole_gradients()
    flat = torch.cat([value.flatten() for value in gradients.values()])
    world, rank = dist.get_world_size(), dist.get_rank()
    each = -(-flat.numel() // world)
    shard = torch.zeros(each)
    start, stop = rank * each, min(flat.numel(), (rank + 1) * each)
    shard[: stop - start] = flat[start:stop]
    parameters, begin, pieces = {}, 0, {}
    for name, value in gradients.items():
        low, high = max(start, begin), min(stop, begin + value.numel())
        low, high = (low, high) if low < high else (begin, begin)
        piece = shard[low - start : high - start] if low < high else shard[:0]
        held = Placement.of(value).sharded_flat(low - begin, high - begin, None)
        parameter = nn.Parameter(torch.zeros_like(value))
        place(parameter, Placement.of(value), gradient=Gradient(partial(torch.Tensor.detach, piece), held))
        parameters[name], pieces[name] = parameter, (held, piece)
        begin += value.numel()
    norm = clip_grad_norm_(parameters.values(), max_norm)
    return norm, pieces, shard


def test_flat_shards_across_parameter_borders_are_counted_and_scaled_where_they_lie(four: Ranks) -> None:
    answers = four.run(flat_shards_over_borders, 2.0)
    holds(answers, whole_gradients(), 2.0, 2.0)
    _, truth = one_process(whole_gradients(), 2.0, 2.0)
    flat = torch.cat([shard for _, _, shard in answers])
    expected = torch.cat([value.flatten() for value in truth.values()])
    torch.testing.assert_close(flat[: expected.numel()].double(), expected, rtol=2e-6, atol=1e-7)


def given_as_argument() -> float:
    gradient = whole_gradients()["d"]
    placement = Placement.of(gradient).sharded(1, None)
    parameter = nn.Parameter(torch.zeros(placement.local_shape))
    parameter.grad = placement.take(gradient)
    return clip_grad_norm_([parameter], 1.0, placements={parameter: placement}).item()


def test_placements_may_be_given_instead_of_attached(four: Ranks) -> None:
    norm, _ = one_process({"d": whole_gradients()["d"]}, 1.0, 2.0)
    assert four.run(given_as_argument) == [pytest.approx(norm, rel=1e-6)] * 4


def one_bad_value(value: float) -> Any:
    gradient = whole_gradients()["b"]
    placement = Placement.of(gradient).sharded(0, None)
    parameter = placed(gradient, placement)
    assert parameter.grad is not None
    if dist.get_rank() == 1:
        parameter.grad[0, 0] = value
    before = parameter.grad.clone()
    try:
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        assert torch.equal(parameter.grad, before) or math.isnan(value)
        return str(error), clip_grad_norm_([parameter], 1.0).item()
    return None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_is_not_finite_is_known_to_all_ranks(two: Ranks, value: float) -> None:
    told = f"clip_grad_norm_: the norm of the gradients is {value}; nothing was scaled"
    for sentence, norm in two.run(one_bad_value, value):
        assert sentence == told and str(norm) == str(value)


def crossing_twice() -> None:
    whole = Placement((4,), torch.float32)
    pair = new_group([0, 1], "pair") if dist.get_rank() < 2 else new_group([2, 3])
    axes_to_sum([whole.sharded(0, None), whole.sharded(0, pair)])


def test_axes_that_do_not_cross_like_a_mesh_are_refused(four: Ranks) -> None:
    with pytest.raises(RankError, match="have more than one rank in common: shard over the axes of one mesh"):
        four.run(crossing_twice)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> list[tuple[str, list[int]]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    groups = [mesh.get_group(name) for name in names]
    return [(name_of(group), dist.get_process_group_ranks(group)) for group in groups]


def test_a_mesh_has_a_group_for_every_line_named_after_its_axis(four: Ranks) -> None:
    names = ("dp", "pp", "tp")
    lines = four.run(mesh_of, (2, 1, 2), names)
    assert lines[0] == [("dp", [0, 2]), ("pp", [0]), ("tp", [0, 1])]
    assert lines[3] == [("dp", [1, 3]), ("pp", [3]), ("tp", [2, 3])]


@pytest.mark.parametrize(
    ("shape", "names", "sentence"),
    [
        ((2, 3), ("dp", "tp"), "dp 2 x tp 3 makes 6 ranks, but there are 4"),
        ((4,), ("dp", "tp"), "give every axis one name of its own"),
        ((2, 2), ("dp", "dp"), "give every axis one name of its own"),
        ((-2, -2), ("dp", "tp"), "give whole numbers of ranks, 1 or more"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_in_one_sentence(
    four: Ranks, shape: tuple[int, ...], names: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(RankError, match=sentence):
        four.run(mesh_of, shape, names)


# --- one process, beside PyTorch ---


def both(gradients: list[torch.Tensor | None], max_norm: float, power: float = 2.0) -> None:
    """Ours and PyTorch's on equal gradients: the same norm, the same gradients after."""
    ours, theirs = (
        [
            nn.Parameter(torch.zeros(1 if g is None else g.shape, dtype=None if g is None else g.dtype))
            for g in gradients
        ]
        for _ in range(2)
    )
    for a, b, gradient in zip(ours, theirs, gradients, strict=True):
        a.grad, b.grad = (None, None) if gradient is None else (gradient.clone(), gradient.clone())
    norm, truth = clip_grad_norm_(ours, max_norm, power), torch.nn.utils.clip_grad_norm_(theirs, max_norm, power)
    # PyTorch sums in float32
    torch.testing.assert_close(norm.double(), truth.double(), rtol=3e-6, atol=0, equal_nan=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-6, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("power", [0.5, 1, 2, 2.5, math.inf])
def test_one_process_agrees_with_pytorch(power: float) -> None:
    gradients = list(whole_gradients().values())
    for max_norm in (0.0, 1e-3, 1.0, 1e9, math.inf):
        both([*gradients, None], max_norm, power)


def test_mixed_dtypes_and_gradients_that_are_not_finite_agree_with_pytorch() -> None:
    torch.manual_seed(0)
    both([torch.randn(4, 5), torch.randn(3, dtype=torch.float64), torch.randn(4).double()], 1.0)
    both([torch.tensor([1.0, math.inf]), torch.ones(2)], 1.0)
    both([torch.tensor([1.0, math.nan]), torch.ones(2)], 1.0)
    both([torch.full((3,), 1e-6)], 1e-6)  # small beside the 1e-6 that PyTorch adds to the norm
    both([], 1.0)
    both([None, None], 1.0)


def test_the_norm_of_16_bit_gradients_does_not_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    parameter.grad = torch.full((64,), 60000.0, dtype=torch.float16)
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(480000, rel=1e-3)
    assert parameter.grad.tolist() == [pytest.approx(0.125, rel=1e-3)] * 64


def test_long_sums_in_float32_keep_their_digits() -> None:
    gradient = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(torch.zeros(1_000_000))
    parameter.grad = gradient.clone()
    truth = gradient.double().norm().item()
    assert clip_grad_norm_(parameter, math.inf).item() == pytest.approx(truth, rel=1e-7)


@pytest.mark.parametrize("power", [1, 2, math.inf])
def test_an_empty_gradient_adds_nothing(power: float) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (0, 2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    assert clip_grad_norm_(parameters, 1.0, power).item() == pytest.approx(2 * 2 ** (1 / power))
    assert clip_grad_norm_(parameters[:1], 1.0, power).item() == 0


def test_a_parameter_that_is_given_twice_counts_once() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter, parameter], 1.0).item() == 5
    assert parameter.grad.norm().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_norm": -1}, "max_norm is -1; give 0 or more"),
        ({"max_norm": math.nan}, "max_norm is nan; give 0 or more"),
        ({"max_norm": 1, "norm_type": 0}, "norm_type is 0; give a power above 0, or math.inf"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        clip_grad_norm_(nn.Parameter(torch.zeros(2)), **arguments)


def test_a_gradient_that_is_not_the_piece_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))
    parameter.grad = torch.zeros(4, 2)
    sentence = r"a gradient of shape \[4, 2\] for a piece of shape \[2, 2\], of a parameter of shape \[4, 2\]"
    placement = Placement((4, 2), torch.float32, ((0, 2), (0, 2)))
    with pytest.raises(ValueError, match=sentence):
        clip_grad_norm_(parameter, 1.0, placements={parameter: placement})


def test_a_sparse_gradient_is_refused_in_one_sentence() -> None:
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="a gradient is sparse; build its layer with sparse=False"):
        clip_grad_norm_(layer.parameters(), 1.0)
