"""The residual networks: equal to torchvision's, easy to cut, and refusing what they are not."""

import pytest
import torch
import torchvision
from torch import nn

from labkit.models import resnet


def torchvision_twin(depth: int) -> nn.Module:
    build = {18: torchvision.models.resnet18, 50: torchvision.models.resnet50}[depth]
    torch.manual_seed(depth)
    twin: nn.Module = build(num_classes=10)
    for name, tensor in twin.state_dict().items():  # or the norms' statistics and scales would all be 0 and 1
        if name.endswith(("running_var", "bn1.weight", "bn2.weight", "bn3.weight", "downsample.1.weight")):
            nn.init.uniform_(tensor, 0.5, 1.5)
        elif name.endswith(("running_mean", "bias")):
            nn.init.normal_(tensor)
    return twin


@pytest.mark.parametrize("depth", [18, 50])
def test_parameters_and_buffers_have_the_names_and_shapes_of_torchvisions(depth: int) -> None:
    ours = {name: tensor.shape for name, tensor in resnet(depth, num_classes=10, stem="imagenet").state_dict().items()}
    theirs = {name: tensor.shape for name, tensor in torchvision_twin(depth).state_dict().items()}
    assert ours == theirs


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("depth", [18, 50])
def test_with_the_weights_of_torchvisions_network_outputs_and_gradients_are_equal(depth: int, training: bool) -> None:
    theirs = torchvision_twin(depth).double().train(training)
    ours = resnet(depth, num_classes=10, stem="imagenet").double().train(training)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, actual = theirs(images), ours(images)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for (name, parameter), twin in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-7, atol=1e-7, msg=name)


def test_the_initial_weights_are_spread_as_torchvisions_are() -> None:
    ours = dict(resnet(18, num_classes=10, stem="imagenet").named_parameters())
    for name, theirs in torchvision.models.resnet18(num_classes=10).named_parameters():
        if theirs.dim() == 4:
            assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=0.05), name
        else:
            assert ours[name].mean().item() == pytest.approx(theirs.mean().item(), abs=0.02), name


def test_depth_8_has_three_stages_of_one_basic_block_of_widths_16_32_64() -> None:
    model = resnet(8, num_classes=10, in_channels=1)
    widths = [model.get_submodule(f"layer{stage}.0.conv2").out_channels for stage in (1, 2, 3)]
    assert widths == [16, 32, 64]
    assert sum(isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) for module in model.modules()) == 7
    convolutions = 9 * (16 + 16 * 16 * 2 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
    norms = 2 * (16 * 3 + 32 * 3 + 64 * 3)
    assert sum(parameter.numel() for parameter in model.parameters()) == convolutions + norms + 64 * 10 + 10


def test_the_small_stem_keeps_the_size_of_the_image_and_the_imagenet_stem_divides_it_by_four() -> None:
    for stem, side in (("small", 32), ("imagenet", 8)):
        steps = resnet(18, num_classes=10, stem=stem).as_sequential()
        assert steps[:4](torch.zeros(1, 3, 32, 32)).shape == (1, 64, side, side)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("stem", ["small", "imagenet"])
@pytest.mark.parametrize("depth", [8, 18, 50])
def test_the_sequence_of_its_modules_composes_to_the_model_and_holds_all_its_parameters(
    depth: int, stem: str, norm: str
) -> None:
    model = resnet(depth, num_classes=7, stem=stem, norm=norm).double().eval()
    steps = model.as_sequential()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(steps[3:](steps[:3](images)), model(images))
    assert {id(p) for p in steps.parameters()} == {id(p) for p in model.parameters()}
    assert {id(b) for b in steps.buffers()} == {id(b) for b in model.buffers()}


def test_with_group_norm_a_sample_does_not_depend_on_the_rest_of_its_batch() -> None:
    images = torch.randn(5, 1, 16, 16, dtype=torch.float64)
    for norm, independent in (("group", True), ("batch", False)):
        model = resnet(8, num_classes=10, in_channels=1, norm=norm).double().train()
        alone = torch.cat([model(images[:3]), model(images[3:])])
        assert torch.allclose(model(images), alone, rtol=1e-9, atol=1e-9) == independent


def test_group_norm_has_at_most_32_groups_of_at_least_4_channels() -> None:
    for depth in (8, 18, 50):
        for module in resnet(depth, num_classes=2, norm="group").modules():
            assert not isinstance(module, nn.BatchNorm2d)
            if isinstance(module, nn.GroupNorm):
                assert module.num_groups <= 32
                assert module.num_channels // module.num_groups >= 4


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"depth": 34}, r"depth 34: choose 8, 18 or 50\.$"),
        ({"norm": "layer"}, r"norm must be one of 'batch', 'group', 'sync', not 'layer'\.$"),
        ({"stem": "large"}, r"stem must be 'small' or 'imagenet', not 'large'\.$"),
        ({"num_classes": 0}, r"must be at least 1, not 0 and 3\.$"),
        ({"in_channels": 0}, r"must be at least 1, not 10 and 0\.$"),
    ],
)
def test_what_it_is_not_is_refused_in_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        resnet(**{"depth": 8, "num_classes": 10} | settings)  # type: ignore[arg-type]
