"""Builds the distributions and tries them in empty environments: `python bench/wheel_check.py`.

1. sdist, and from it the wheel, as a user's pip would build them;
2. the wheel in an empty environment (`--no-index --no-deps`): the package is imported from there, the
   command runs, a pair is scored;
3. mypy on the installed wheel;
4. the sdist in another empty environment with a compiler that always fails: it installs, and says that the
   CPU kernels are missing.

Third parties (torch, transformers, ...) are lent to the empty environments by a path file that names the
running interpreter's site-packages. Path files in there are not followed, so an editable installation of
this package stays out of sight.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAILING_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false", "PEAKSIM_NATIVE": "optional"}

SMOKE = """
import importlib.util, json, sys
import engine, transformers
import engine.kernels
from PIL import Image
kernels = importlib.util.find_spec("kernels")
scores = engine.score([Image.new("RGB", (64, 64), "red")], ["a red square", "two blue circles"])
print(json.dumps({
    "engine": engine.__file__,
    "kernels": engine.kernels.__file__,
    "native": importlib.util.find_spec("engine._C") is not None,
    "top_level_kernels": kernels.origin if kernels else None,
    "shape": list(scores.shape),
}))
"""


def run(*command: str | Path, cwd: Path, merged: bool = False, **environment: str) -> str:
    """The output of a command, `merged` with its errors; shows both and raises where the command fails."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print(done.stdout, done.stderr or "", sep="\n", file=sys.stderr)
    done.check_returncode()
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel, built from the sdist, and the sdist."""
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder,
        ROOT,
        cwd=folder,
        PEAKSIM_NATIVE="required",
    )
    (wheel,), (sdist,) = folder.glob("peaksim-*.whl"), folder.glob("peaksim-*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Everything is in, in its place, and nothing else."""
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"engine", next(t for t in tops if t.endswith(".dist-info"))}, tops
    for needed in ("engine/py.typed", "engine/kernels/__init__.py"):
        assert needed in files, f"{needed} is not in the wheel"
    assets = {p.relative_to(ROOT).as_posix() for p in (ROOT / "engine/assets").rglob("*") if p.is_file()}
    assert assets and assets <= set(files), f"not in the wheel: {assets - set(files)}"
    assert any(name.startswith("engine/_C.") for name in files), "the wheel lacks engine._C"
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.?pp")}
    assert sources and sources <= packed, f"not in the sdist: {sources - packed}"


def empty_environment(folder: Path) -> Path:
    """The interpreter of a new environment that sees this one's third parties and nothing of this package."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    interpreter = folder / "bin/python"
    site = Path(
        run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    (site / "third_parties.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    seen = run(
        interpreter, "-c", "import importlib.util as u; print(u.find_spec('engine'))", cwd=folder
    ).strip()
    assert seen == "None", f"the empty environment already has {seen}"
    return interpreter


def install(interpreter: Path, distribution: Path, **environment: str) -> str:
    """Installs one file and nothing else, without an index; what pip and the build said."""
    return run(
        *(sys.executable, "-m", "pip", "--python", interpreter, "install", "-v", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--ignore-installed", distribution),
        cwd=distribution.parent,
        merged=True,
        **environment,
    )


def check_installed(interpreter: Path, *, native: bool) -> None:
    """Imports, scores and the doctor's report from another folder."""
    home = interpreter.parent.parent
    said = json.loads(run(interpreter, "-c", SMOKE, cwd=home).splitlines()[-1])
    assert Path(said["engine"]).is_relative_to(home), said
    assert Path(said["kernels"]).is_relative_to(home), said
    assert said["top_level_kernels"] is None and said["native"] is native and said["shape"] == [1, 2], said
    report = run(home / "bin/peaksim", "doctor", "--json", cwd=home)
    missing = [row["what"] for row in json.loads(report)["missing"]]
    assert ("C++ CPU kernels" in missing) is not native, report


def main() -> None:
    """Runs the four steps and says how long each took."""
    start = time.perf_counter()

    def done(step: str) -> None:
        print(f"wheel check: {step} ({time.perf_counter() - start:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        check_contents(wheel, sdist)
        done(f"{sdist.name} and {wheel.name} built, {wheel.stat().st_size / 2**20:.1f} MiB")
        first = empty_environment(folder / "with_wheel")
        install(first, wheel)
        check_installed(first, native=True)
        done("the wheel works in an empty environment")
        mypy = ("-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache")
        run(sys.executable, *mypy, "--python-executable", first, "-p", "engine", cwd=folder)
        done("types hold")
        second = empty_environment(folder / "without_compiler")
        assert "engine._C was not built" in install(second, sdist, **FAILING_COMPILER)
        check_installed(second, native=False)
        done("the sdist installs without a compiler and says what is missing")


if __name__ == "__main__":
    main()
