"""The package as declared is the package as it lies here."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dllm

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TABLE = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = TABLE["package-dir"]
LARGEST_FILE = 13 * 2**20
LARGER = {
    "examples/smollm2-drafter/model.safetensors": 32_000_000,  # a trained drafter
}


def files_of_the_project() -> list[Path]:
    """Files that are, or could be, under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [file for file in files if file.is_file()]


def installed_path(file: Path) -> str | None:
    """Where a source file of the library goes below site-packages."""
    for package, folder in FOLDERS.items():
        if file.is_relative_to(ROOT / folder):
            return (Path(*package.split(".")) / file.relative_to(ROOT / folder)).as_posix()
    return None


def test_no_package_is_forgotten() -> None:
    result = {
        ".".join((package, *file.parent.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert set(TABLE["packages"]) == result


def test_no_data_file_is_forgotten() -> None:
    """Whatever else lies in a package is declared as its data."""
    declared = set()
    for package, patterns in TABLE["package-data"].items():
        (prefix, folder), *_ = sorted(
            (item for item in FOLDERS.items() if f"{package}.".startswith(f"{item[0]}.")),
            key=lambda item: -len(item[0]),
        )
        inside = ROOT / folder / Path(*package.removeprefix(prefix).split("."))
        for pattern in patterns:
            declared.update(inside.glob(pattern))
    result = {f for f in files_of_the_project() if installed_path(f) and f.suffix != ".py"}
    assert result <= declared, result - declared
    assert ROOT / "dllm" / "py.typed" in declared


def test_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    cited = re.search(r'^version: "?([^"\n]+)"?$', citation, re.MULTILINE)
    assert cited is not None
    assert PROJECT["version"] == dllm.__version__ == cited[1]
    assert f"## {dllm.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_entry_points_resolve() -> None:
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name)), target


def test_public_names_resolve() -> None:
    for name in dllm.__all__:
        assert getattr(dllm, name) is not None


def test_no_file_is_large() -> None:
    sizes = {file.relative_to(ROOT).as_posix(): file.stat().st_size
             for file in files_of_the_project()}  # fmt: skip
    assert not {n: size for n, size in sizes.items() if size > LARGER.get(n, LARGEST_FILE)}


def test_constraints_pin_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*+]+", str(pin.specifier)) for pin in pins)
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    assert len(versions) == len(pins)
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"]]  # flash-attn depends on the machine: it has no pin
    wanted += [line for name, group in extras.items() if name != "flash" for line in group]
    for line in wanted:
        requirement = Requirement(line)
        if requirement.name != "dllm":
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), line


def test_the_lowest_versions_are_those_that_are_accepted() -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"]]
    wanted += [line for name in ("train", "grammar", "serve", "test") for line in extras[name]]
    higher = set()
    for requirement in map(Requirement, wanted):
        if requirement.name in pins:
            (least,) = requirement.specifier
            if Version(least.version) != Version(pins.pop(requirement.name)):
                higher.add(requirement.name)
    assert not pins and higher == {"torch"}  # as the file says


@pytest.mark.slow
def test_the_wheel_holds_what_the_packages_hold(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "runs", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=left_out)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, tmp_path / "source"]
    subprocess.run(pip, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("dllm-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if n.startswith("dllm/")} == {
        path for file in files_of_the_project() if (path := installed_path(file))
    }
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert wheel.stat().st_size < 2 * LARGEST_FILE


def copy_of_the_checkout(folder: Path) -> Path:
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "runs", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "checkout", ignore=left_out))


def environment(folder: Path, *install: str | Path) -> Path:
    """The interpreter of a fresh virtual environment with the library installed in it.

    Its dependencies are those of the running one, whose own way of finding the library stays out.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    own = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", *install]
    subprocess.run(pip, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return python


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["installed", "editable"])
def test_an_installation_works_from_any_directory(tmp_path: Path, editable: bool) -> None:
    """Inside the checkout, whose folder `dllm` shadows an installed package, as elsewhere."""
    checkout = copy_of_the_checkout(tmp_path)
    python = environment(tmp_path / "venv", *(["-e"] if editable else []), checkout)
    program = (
        "import dllm\n"
        "print(dllm.__file__, dllm.samplers.__file__, dllm.cache.__file__, sep='\\n')\n"
        "print(dllm.generate('nano', 'Compute 1 + 1.', max_new_tokens=8).text or '(nothing)')"
    )
    places = {}
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    for place in (checkout, tmp_path):
        done = subprocess.run(
            [python, "-c", program], cwd=place, capture_output=True, text=True, env=plain
        )
        assert done.returncode == 0, done.stderr
        *files, answer = done.stdout.splitlines()
        assert answer
        places[place] = {Path(file).is_relative_to(checkout) for file in files}
        tests = [str(checkout / "tests" / name) for name in ("cache",)]
        collected = subprocess.run(
            [python, "-m", "pytest", "--collect-only", "-q", *tests],
            cwd=place, capture_output=True, text=True, env=plain,
        )  # fmt: skip
        assert collected.returncode == 0, collected.stdout + collected.stderr
    assert places[checkout] == {True}  # never half of one and half of the other
    assert places[tmp_path] == {editable}
