"""Saved tensors on disk: the same gradients, nothing held in memory meanwhile, nothing left on the disk behind."""

import pytest
import torch
from torch import nn

from labkit.memory import MemoryLedger, checkpoint, save_on_cpu, save_on_disk


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def gradients(context=None, call=lambda part, x: part(x)):
    model = net()
    x = torch.randn(16, 32)
    with MemoryLedger(model) as ledger:
        if context is None:
            output = call(model, x)
        else:
            with context:
                output = call(model, x)
        held, on_disk = ledger.now().of("activations"), getattr(context, "written_bytes", 0)
        output.sum().backward()
    return [p.grad for p in model.parameters()], held, on_disk


def same(one, other):
    return all(map(torch.equal, one, other))


def test_what_is_saved_goes_to_the_disk_and_comes_back(tmp_path):
    disk = save_on_disk(tmp_path, min_bytes=0)
    found, held, written = gradients(disk)
    assert same(found, gradients()[0])
    assert held == 0 and written == 4 * 16 * (32 + 64 + 64)
    assert disk.written_bytes == 0 and not [file for folder in tmp_path.iterdir() for file in folder.iterdir()]


def test_a_storage_that_is_saved_several_times_is_one_file(tmp_path):
    with save_on_disk(tmp_path, min_bytes=0) as disk:
        x = torch.randn(64, requires_grad=True).exp()
        y = (x * x).sum() + x.view(8, 8).t().sin().sum()
        assert disk.written_bytes == x.nbytes
    assert y.requires_grad


def test_views_keep_their_strides(tmp_path):
    def slope(context):
        x = torch.arange(24.0).reshape(4, 6).requires_grad_()
        with context:
            y = (x.exp()[1:, ::2].t() ** 2).sum()
        y.backward()
        return x.grad

    assert torch.equal(slope(save_on_disk(tmp_path, min_bytes=0)), slope(torch.enable_grad()))


def test_a_conjugated_or_negated_view_comes_back_as_it_was(tmp_path):
    def slope(context):
        x = torch.polar(torch.ones(8), torch.arange(8.0)).requires_grad_()
        with context:
            y = (x * x.conj() * x.conj().imag).abs().sum()
        y.backward()
        return x.grad

    assert torch.equal(slope(save_on_disk(tmp_path, min_bytes=0)), slope(torch.enable_grad()))


def test_small_tensors_and_parameters_stay(tmp_path):
    assert gradients(save_on_disk(tmp_path))[2] == 4 * 16 * (64 + 64)  # x is of 2,048 bytes


def test_around_a_checkpoint_it_takes_the_arguments(tmp_path):
    disk = save_on_disk(tmp_path, min_bytes=0)
    found, held, written = gradients(disk, checkpoint)
    assert same(found, gradients()[0])
    assert (held, written) == (0, 4 * 16 * 32)


def test_a_disk_without_room_is_named(monkeypatch, tmp_path):
    def full(*_):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", full)
    with save_on_disk(tmp_path), pytest.raises(OSError, match=r"could not write 0\.008192 MB to .*No space left"):
        torch.ones(2048, requires_grad=True).exp()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/nowhere: make it first"):
        save_on_disk(tmp_path / "nowhere")


def test_the_hosts_memory_is_where_cpu_tensors_are_already():
    assert same(gradients(save_on_cpu())[0], gradients()[0])
