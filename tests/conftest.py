"""What holds for every test: no network, fixed seeds, one thread."""

from __future__ import annotations

import ipaddress
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub, which reads them at import: a look-up that would go out fails
# at once and by name. Subprocesses of tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings

SEED = 20240607

# The same examples on every run and machine; a slow or busy machine is no failure.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def is_local(address: object) -> bool:
    """Whether a socket address stays on this machine: a Unix path, loopback, or an unspecified address."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in ("", "localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Connections to other machines raise, and so do look-ups of their names."""
    real = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    real_getaddrinfo = socket.getaddrinfo

    def guarded(name: str) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            if not is_local(address):
                raise RuntimeError(f"tests: no network; a test tried to reach {address!r}")
            return real[name](self, address)

        return call

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if text is not None and not is_local((text,)):
            raise RuntimeError(f"tests: no network; a test tried to look up {text!r}")
        return real_getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(socket.socket, name, guarded(name))
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread for torch: sums come out the same on every machine, and small tests run faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers in every test, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)  # third parties use the global generator
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def exported_scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its trained heads as a folder of graphs in fp32; not to be changed."""
    from engine.encoders.registry import load_encoder
    from engine.export.folder import ExportSettings, export_model
    from engine.heads.tflocal import TFLocal, TFLocalConfig

    place = tmp_path_factory.mktemp("export")
    config = TFLocalConfig(layers=2, width=64, reach=1, image_layers=(4,), text_layers=(7, 8))
    local = TFLocal.build(load_encoder("scenes", device="cpu").spec, config, seed=1).save(place / "tflocal.safetensors")
    settings = ExportSettings(heads=("max_sim_head", "peakpatch", str(local)))
    return export_model("scenes", place / "scenes", settings)


@pytest.fixture
def exported_copy(exported_scenes: Path, tmp_path: Path) -> Path:
    """A copy of `exported_scenes` that may be changed."""
    return Path(shutil.copytree(exported_scenes, tmp_path / "copy"))
