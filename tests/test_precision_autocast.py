"""`autocast`: dtypes and results are PyTorch's, operation by operation and on both workloads, forward and backward."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autocast_samples import LISTED, MADE_OF_LISTED, SAMPLES, UNCALLED
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from labkit.models import resnet, transformer
from labkit.parallel import DistributedDataParallel
from labkit.precision import autocast, autocast_state, custom_bwd, custom_fwd
from labkit.precision.cast_lists import CPU, CUDA
from labkit.precision.regions import cached_weights
from labkit.ranks import Ranks

Region = Callable[[], AbstractContextManager[Any]]
LOW, FULL = torch.bfloat16, torch.float32


def theirs() -> AbstractContextManager[Any]:
    return torch.autocast("cpu")


def ours() -> AbstractContextManager[Any]:
    return autocast("cpu")


# --- the lists ---


def test_the_lists_are_those_that_pytorchs_dispatcher_has_for_the_cpu() -> None:
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and any(line.startswith("AutocastCPU") for line in torch._C._dispatch_dump(name).splitlines())
    }
    assert registered == LISTED


def test_an_operation_is_on_one_list_only() -> None:
    for lists in (CPU, CUDA):
        every = [lists.lower, lists.full, lists.full_output, lists.widest]
        every += [lists.lower_inside, lists.full_inside, lists.widest_inside]
        assert sum(map(len, every)) == len(frozenset().union(*every))


def test_every_listed_operation_that_can_be_called_has_a_sample() -> None:
    assert set(SAMPLES) | UNCALLED == LISTED


@pytest.mark.filterwarnings("ignore")  # some of the operations are deprecated, and listed all the same
@pytest.mark.parametrize("dtype", [FULL, LOW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*SAMPLES, *MADE_OF_LISTED])
def test_an_operation_gives_pytorchs_dtype_and_values(name: str, dtype: torch.dtype) -> None:
    call = (SAMPLES | MADE_OF_LISTED)[name]
    found = []
    for region in (theirs, ours):
        with region():
            found.append([one for one in tree_leaves(call(lambda tensor: tensor.to(dtype))) if isinstance(one, Tensor)])
    for their, our in zip(*found, strict=True):
        assert our.dtype is their.dtype
        assert torch.equal(our.nan_to_num(), their.nan_to_num())


def test_the_samples_reach_the_casts() -> None:
    """Without autocast most of them give other dtypes: the comparison above is not one of two idle regions."""
    outside = {name: SAMPLES[name](lambda tensor: tensor) for name in CPU.lower - UNCALLED}
    assert all(tensor.dtype is FULL for tensor in outside.values())
    with ours():
        inside = {name: SAMPLES[name](lambda tensor: tensor) for name in CPU.lower - UNCALLED}
        loss = F.mse_loss(torch.ones(2).bfloat16(), torch.zeros(2).bfloat16())
    assert all(tensor.dtype is LOW for tensor in inside.values())
    assert loss.dtype is FULL


# --- both workloads ---


def images() -> tuple[nn.Module, Tensor, Tensor]:
    return resnet(8, num_classes=10, in_channels=1), torch.randn(6, 1, 20, 20), torch.randint(0, 10, (6,))


def texts() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(0, 50, (4, 12))
    return transformer(vocab_size=50, d_model=32, num_classes=7, dropout=0.1), tokens, torch.randint(0, 7, (4,))


def tokens() -> tuple[nn.Module, Tensor, Tensor]:
    model = transformer(vocab_size=50, d_model=32, causal=True, head="token")
    return model, torch.randint(0, 50, (4, 12)), torch.randint(0, 50, (4 * 12,))


workloads = pytest.mark.parametrize("workload", [images, texts, tokens])


def trained(workload: Callable[[], tuple[nn.Module, Tensor, Tensor]], region: Region) -> dict[str, Tensor]:
    """Output, loss and gradients, by name."""
    torch.manual_seed(0)
    model, inputs, targets = workload()
    with region():
        output = model(inputs)
        loss = F.cross_entropy(output.flatten(0, -2), targets)
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"output": output, "loss": loss, **gradients}


def equal(our: dict[str, Tensor], their: dict[str, Tensor]) -> bool:
    assert our.keys() == their.keys()
    return all(our[name].dtype is their[name].dtype and torch.equal(our[name], their[name]) for name in their)


@workloads
def test_forward_and_gradients_are_pytorchs_to_the_bit(workload: Any) -> None:
    our = trained(workload, ours)
    assert equal(our, trained(workload, theirs))
    assert not equal(our, trained(workload, nullcontext))
    assert our["output"].dtype is LOW and our["loss"].dtype is FULL


@workloads
def test_without_the_cache_of_weights_too(workload: Any) -> None:
    their = trained(workload, lambda: torch.autocast("cpu", cache_enabled=False))
    assert equal(trained(workload, lambda: autocast("cpu", cache_enabled=False)), their)


def recorded(region: Region) -> list[torch.dtype]:
    """The dtype of every module's output."""
    torch.manual_seed(0)
    model, inputs, _ = texts()
    dtypes: list[torch.dtype] = []
    for module in model.modules():
        module.register_forward_hook(lambda _m, _i, out: dtypes.append(tree_leaves(out)[0].dtype))
    with region():
        model(inputs)
    return dtypes


def test_every_modules_output_has_pytorchs_dtype() -> None:
    assert recorded(ours) == recorded(theirs) != recorded(nullcontext)


def test_a_lstm_gives_pytorchs_dtypes_and_values() -> None:
    torch.manual_seed(0)
    model, inputs = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    found = []
    for region in (ours, theirs):
        with region():
            found.append(tree_leaves(model(inputs)))
    for our, their in zip(*found, strict=True):
        assert our.dtype is their.dtype
        torch.testing.assert_close(our, their)


# --- regions ---


def product_dtype() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_regions_nest_and_have_holes() -> None:
    assert product_dtype() is FULL
    with autocast("cpu"):
        assert product_dtype() is LOW
        with autocast("cpu", enabled=False):
            assert product_dtype() is FULL
            with autocast("cpu", torch.float16):
                assert product_dtype() is torch.float16
        assert product_dtype() is LOW
    assert product_dtype() is FULL
    with autocast("cpu", enabled=False), autocast("cpu"):
        assert product_dtype() is LOW


def test_an_error_inside_ends_the_region() -> None:
    with pytest.raises(ZeroDivisionError), autocast("cpu"):
        _ = 1 // 0
    assert product_dtype() is FULL and not autocast_state().enabled


def test_it_decorates_and_one_instance_may_be_entered_twice() -> None:
    region = autocast("cpu")
    assert region(product_dtype)() is LOW
    with region, region:
        assert product_dtype() is LOW
    assert product_dtype() is FULL
    assert region(product_dtype).__name__ == "product_dtype"


def test_another_thread_is_not_inside() -> None:
    found: list[torch.dtype] = []
    with autocast("cpu"):
        thread = threading.Thread(target=lambda: found.append(product_dtype()))
        thread.start()
        thread.join()
    assert found == [FULL]


def test_a_decorated_function_may_run_in_two_threads_at_once() -> None:
    inside, both = threading.Event(), threading.Event()
    found: list[Any] = []

    @autocast("cpu")
    def first() -> torch.dtype:
        if threading.current_thread() is thread:
            inside.set()
            both.wait(10)
        else:  # inside last, and left last
            both.set()
            thread.join(10)
        return product_dtype()

    thread = threading.Thread(target=lambda: found.append((first(), product_dtype())))
    thread.start()
    inside.wait(10)
    with autocast("cpu", torch.float16):
        found.append((first(), product_dtype()))
    assert found == [(LOW, FULL), (LOW, torch.float16)]


def test_float64_integers_and_outputs_given_by_the_caller_are_left_alone() -> None:
    with autocast("cpu"):
        assert torch.mm(torch.ones(2, 2).double(), torch.ones(2, 2).double()).dtype is torch.float64
        assert torch.mm(torch.ones(2, 2).long(), torch.ones(2, 2).long()).dtype is torch.int64
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2)).dtype is FULL


def test_a_join_with_a_third_dtype_is_refused_in_a_sentence() -> None:
    with autocast("cpu"), pytest.raises(RuntimeError, match="autocast to bfloat16 meets a float16 tensor: cast it to"):
        torch.cat([torch.ones(1), torch.ones(1).half()])


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="device_type is 'tpu'; give 'cpu' or 'cuda'"):
        autocast("tpu")
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; give torch\.bfloat16 or torch\.float16"):
        autocast("cpu", torch.float32)
    autocast("cpu", torch.float32, enabled=False)
    with pytest.raises(ValueError, match="only float16 on the CPU is emulated"):
        autocast("cpu", emulate=True)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="this machine has no CUDA GPU; give device_type='cpu'"):
            autocast("cuda")
        autocast("cuda", enabled=False)


# --- the cache of weights ---


def test_a_weight_is_cast_once_in_a_region_and_forgotten_after_it() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with autocast("cpu"):
        first = torch.ones(2, 2) @ weight
        with autocast("cpu"):
            second = torch.ones(2, 2) @ weight
        assert cached_weights() == 1
        casts = {one.grad_fn.next_functions[1][0] for one in (first, second)}  # type: ignore[union-attr]
    assert len(casts) == 1  # both products hang on one cast
    assert cached_weights() == 0


def test_an_activation_or_a_region_without_gradients_leaves_nothing_behind() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with autocast("cpu"):
        with torch.no_grad():
            _ = weight @ weight
        _ = (weight * 2) @ torch.ones(2, 2)
        assert cached_weights() == 0
        (weight @ torch.ones(2, 2)).sum().backward()
    assert weight.grad is not None  # PyTorch's own cache once kept the copy without a graph


def test_a_weight_that_was_changed_in_place_is_cast_anew() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with autocast("cpu"):
        assert (torch.eye(2) @ weight)[0, 0].item() == 1
        with torch.no_grad():
            weight.mul_(3)
        assert (torch.eye(2) @ weight)[0, 0].item() == 3


# --- float16 by rounding ---


@workloads
def test_emulated_float16_has_the_dtypes_of_real_float16_and_nearly_its_values(workload: Any) -> None:
    our = trained(workload, lambda: autocast("cpu", torch.float16, emulate=True))
    their = trained(workload, lambda: torch.autocast("cpu", torch.float16))
    for name, value in their.items():
        assert our[name].dtype is value.dtype, name
    torch.testing.assert_close(our["output"], their["output"], rtol=5e-3, atol=5e-3)
    assert not equal(our, trained(workload, nullcontext))


def test_emulated_float16_overflows_and_underflows_forward_and_backward() -> None:
    with autocast("cpu", torch.float16, emulate=True):
        large = torch.tensor([[300.0]], requires_grad=True)
        assert torch.mm(large, large).item() == float("inf")
        tiny = torch.tensor([[1e-5]], requires_grad=True)
        assert torch.mm(tiny, tiny).item() == 0.0
        weight = torch.ones(1, 1, requires_grad=True)
        output = torch.mm(torch.ones(1, 1), weight)
    (output.float() * 2.0**-26).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 0.0


def test_emulated_products_are_rounded_once_from_a_float32_sum() -> None:
    ones = torch.ones(1, 4096)
    with autocast("cpu", torch.float16, emulate=True):
        total = torch.mm(ones, ones.t() * (1 + 2.0**-10))
    assert total.item() == torch.tensor(4096 * (1 + 2.0**-10)).half().item()


# --- recomputation and custom functions ---


def test_a_recomputation_outside_enters_the_state_of_forward_again() -> None:
    with autocast("cpu", cache_enabled=False), autocast("cpu", enabled=False), autocast("cpu"):
        state = autocast_state()
    assert product_dtype() is FULL
    with state.restore():
        assert product_dtype() is LOW and autocast_state() == state
    with autocast("cpu", torch.float16), autocast("cpu"):
        outside = autocast_state()
    assert outside != state  # one caches, the other doesn't
    plain = autocast_state()
    with autocast("cpu"), plain.restore():
        assert product_dtype() is FULL


def test_a_recomputation_in_a_backward_that_runs_inside_of_a_region_casts_too() -> None:
    found: list[torch.dtype] = []

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.state = autocast_state()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            with ctx.state.restore():
                found.append(product_dtype())
            return gradient

    with autocast("cpu"):
        Recomputes.apply(torch.ones(1, requires_grad=True)).sum().backward()
    Recomputes.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert found == [LOW, FULL]


def test_a_region_entered_where_pytorch_has_set_the_mode_aside_casts_too() -> None:
    found: list[torch.dtype] = []

    def called_from_within(value: float) -> float:
        with autocast("cpu"):
            found.append(product_dtype())
        return value

    with autocast("cpu"):
        torch.ones(1).apply_(called_from_within)
    assert found == [LOW]


def a_function(decorate: Any, decorate_backward: Any) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        @decorate
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @decorate_backward
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            x, w = ctx.saved_tensors
            return gradient @ w.t(), x.t() @ gradient

    return Product.apply


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [True, False])
def test_a_custom_function_behaves_as_under_pytorchs_decorators(cast_inputs: Any, inside: bool) -> None:
    options = {"device_type": "cpu", "cast_inputs": cast_inputs}
    our = a_function(custom_fwd(**options), custom_bwd(device_type="cpu"))
    their = a_function(torch.amp.custom_fwd(**options), torch.amp.custom_bwd(device_type="cpu"))
    found = []
    for function, region in ((our, ours), (their, theirs)):
        torch.manual_seed(0)
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
        with region() if inside else nullcontext():
            output = function(x, w)
        output.float().square().sum().backward()
        found.append({"output": output, "x": x.grad, "w": w.grad})
    assert equal(*found)
    assert (found[0]["output"].dtype is LOW) == (inside and cast_inputs is not FULL)


def test_a_backward_without_its_forward_decorated_is_refused() -> None:
    function = a_function(lambda function: function, custom_bwd(device_type="cpu"))
    output = function(torch.ones(1, 1, requires_grad=True), torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="custom_bwd: the function's forward is not decorated"):
        output.sum().backward()


# --- on ranks ---


def wrapped(which: str) -> dict[str, Tensor]:
    region = {"ours": ours, "theirs": theirs}[which]
    torch.manual_seed(0)
    model, inputs, targets = images()
    wrapper = DistributedDataParallel(model)
    for _ in range(2):  # buckets are rebuilt after the first step
        model.zero_grad()
        with region():
            loss = F.cross_entropy(wrapper(inputs), targets)
        loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_under_distributed_data_parallel_gradients_are_float32_and_equal_on_all_ranks(two: Ranks) -> None:
    our, their = two.run(wrapped, "ours"), two.run(wrapped, "theirs")
    assert equal(our[0], our[1]) and equal(our[0], their[0])
    assert all(gradient.dtype is FULL for gradient in our[0].values())
