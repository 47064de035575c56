"""Which 16-bit dtypes this machine multiplies itself, by the flags of its processor; autocast follows."""

import pytest
import torch

from labkit.precision import autocast, native, processors


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The processor's flags, to be filled in."""
    chosen: set[str] = set()
    monkeypatch.setattr(processors, "processor_flags", lambda: frozenset(chosen))
    monkeypatch.setattr(processors.platform, "system", lambda: "Linux")
    return chosen


def test_a_processor_is_known_by_its_flags(flags: set[str]) -> None:
    assert native(torch.bfloat16) == native(torch.float16) == ""
    flags.update({"avx2", "avx512_bf16"})
    assert (native(torch.bfloat16), native(torch.float16)) == ("avx512_bf16", "")
    flags.update({"amx_bf16", "avx512_fp16"})
    assert (native(torch.bfloat16), native(torch.float16)) == ("amx_bf16", "avx512_fp16")
    assert native(torch.float32) == ""


def test_float16_is_emulated_where_the_processor_lacks_it(flags: set[str]) -> None:
    assert autocast("cpu", torch.float16).emulates
    assert not autocast("cpu", torch.float16, emulate=False).emulates
    assert not autocast("cpu").emulates
    flags.add("avx512_fp16")
    assert not autocast("cpu", torch.float16).emulates
    assert autocast("cpu", torch.float16, emulate=True).emulates


def test_flags_are_read_from_the_system_and_agree_with_pytorch() -> None:
    found = processors.processor_flags()
    if found:
        assert ("avx512_bf16" in found) == torch.cpu._is_avx512_bf16_supported()
        assert ("avx2" in found) == torch.cpu._is_avx2_supported()
