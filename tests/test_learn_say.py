"""`say` puts computed numbers into prose, `result` puts them where the runner finds them."""

import gettext
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from labkit.learn import result, say
from labkit.learn.results import plain_value


def test_numbers_stand_formatted_in_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    say("Each rank sent {x:.2f} tensors in {n} messages.", x=torch.tensor(1.5), n=np.int64(3))
    assert capsys.readouterr().out == "Each rank sent 1.50 tensors in 3 messages.\n"


@pytest.mark.parametrize(
    ("template", "values", "sentence"),
    [
        ("{x} and {y}", {"x": 1}, "no such value"),
        ("{x}", {"x": 1, "y": 2}, "'y' is not used"),
        ("{}", {}, "has no name"),
        ("a { brace", {}, "braces"),
        ("{x:.2f}", {"x": "much"}, "does not fit"),
        ("{x:{width}}", {"x": 1}, "{width}"),
    ],
)
def test_a_value_that_is_missing_unused_or_misfit_is_named(
    template: str, values: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=r"^say: ") as refusal:
        say(template, **values)
    assert sentence in str(refusal.value)


class _Translations(gettext.NullTranslations):
    texts: dict[str, str]

    def gettext(self, message: str) -> str:
        return self.texts.get(message, message)


def test_the_translation_is_filled_and_a_broken_one_falls_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue = _Translations()
    catalogue.texts = {"{x:.1f} bytes": "{x:.1f} Byte", "{n} ranks": "{m} Prozesse"}
    monkeypatch.setattr(gettext, "translation", lambda *_, **__: catalogue)
    say("{x:.1f} bytes", x=2)
    say("{n} ranks", n=4)
    assert capsys.readouterr().out == "2.0 Byte\n4 ranks\n"


def test_a_result_outside_of_a_notebook_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    result("ring-bytes", torch.tensor(1.5), "x tensor")
    result("claim/ring-even", "holds when the ranks are alike", "")
    assert capsys.readouterr().out.splitlines() == [
        "ring-bytes = 1.5 x tensor",
        "claim/ring-even = holds when the ranks are alike",
    ]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(3), 3),
        (torch.tensor([2.5]), 2.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (float("nan"), "nan"),
        (torch.tensor(float("-inf")), "-inf"),
        ("text", "text"),
    ],
)
def test_every_scalar_becomes_what_json_can_carry(value: object, plain: object) -> None:
    found = plain_value("x", value)
    assert (found, type(found)) == (plain, type(plain))
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("value", [torch.ones(2), [1], {"a": 1}, None, 1j, object()])
def test_more_than_one_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^result 'x': "):
        result("x", value, "")


@pytest.mark.parametrize("name", ["Ring", "ring bytes", "ring_bytes", "-ring", "claim/", "a/b", "", 3])
def test_a_name_that_is_no_slug_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="is no name for a result"):
        result(name, 1, "")  # type: ignore[arg-type]


@pytest.mark.parametrize("verdict", ["holds", "holds when n is large", "does not hold here", "not testable here"])
def test_the_verdicts_on_a_claim_are_four(verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    result("claim/when-data", verdict, "")
    assert verdict in capsys.readouterr().out


@pytest.mark.parametrize("verdict", ["true", "holds when ", "holds when ...", "maybe", 1, True])
def test_any_other_verdict_is_refused(verdict: object) -> None:
    with pytest.raises(ValueError, match="the verdict is one of"):
        result("claim/when-data", verdict, "")


def test_a_verdict_has_no_unit_and_a_unit_is_text() -> None:
    with pytest.raises(ValueError, match="a verdict has no unit"):
        result("claim/when-data", "holds", "bytes")
    with pytest.raises(TypeError, match="the unit is text"):
        result("x", 1, None)  # type: ignore[arg-type]


def test_importing_the_room_imports_neither_torch_nor_widgets() -> None:
    code = "import sys, labkit.learn as learn; learn.say; print({'torch', 'ipywidgets', 'IPython'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_is_there() -> None:
    import labkit.learn

    assert {"say", "predict", "reveal", "check", "hint", "solution", "result"} <= set(labkit.learn.__all__)
    assert all(callable(getattr(labkit.learn, name)) for name in labkit.learn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sey'"):
        _ = labkit.learn.sey
