"""Where a model is to run: a device that is none, or that is not there, is refused in words that name the argument."""

from __future__ import annotations

import pytest
import torch

import engine
from engine.encoders.placement import place
from tests.command_line import Shell

KNOWN = r"load: device must be 'auto', 'cpu', 'cuda' or 'cuda:<number>' \(or another device of torch\), got "


@pytest.mark.parametrize("name", ["foo", "cuda:x", "", "CPU"])
def test_what_is_no_device_is_refused_with_those_there_are(name: str):
    with pytest.raises(ValueError, match=f"^{KNOWN}{name!r}$"):
        engine.load("scenes", device=name)


def test_the_command_line_says_the_same_in_one_line(capsys: pytest.CaptureFixture[str]):
    shell = Shell(capsys)
    assert shell("eval", "scenes", "--limit", "1", "--device", "foo") == 2
    assert shell.err.startswith("peaksim: load: device must be 'auto', 'cpu', ") and shell.err.count("\n") == 1
    assert shell("eval", "scenes", "--limit", "1", "--dtype", "foo") == 2
    assert shell.err == "peaksim: load: 'scenes' runs in float32, got dtype='foo'\n"


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "mps", "xpu", "meta"])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    kind = name.split(":")[0].upper()
    with pytest.raises(ValueError, match=f"device '{name}' was wanted, but torch sees no {kind} device here"):
        place(name, "auto")


def test_a_number_beyond_those_there_are_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place("cuda:1", "auto") == (torch.device("cuda:1"), torch.float16)
    with pytest.raises(ValueError, match="device 'cuda:2' was wanted, but torch sees 2 of this kind here"):
        place("cuda:2", "auto")
