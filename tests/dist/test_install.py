"""Real installs into throwaway environments: sdist, wheel and editable activate the engine, uninstalling removes every trace.

Each environment borrows the packages of the running one through a .pth file, so nothing is downloaded.
"""

import os
import resource
import shutil
import site
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from support.processes import run

REPOSITORY = Path(__file__).parents[2]
PTH = "deepspeed_cdp_autoload.pth"
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "constraints.txt", PTH, "deepspeed_cdp_autoload.py")

# What an ordinary script sees: it names deepspeed only. Prints one line.
PROBE = """
import sys
early = "deepspeed_cdp" in sys.modules
from deepspeed import initialize
import deepspeed
registered = hasattr(deepspeed.DeepSpeedConfig({"train_batch_size": 1, "cyclic": {"enabled": False}}), "cyclic_config")
print("PROBE", early, initialize is deepspeed.initialize, hasattr(initialize, "__deepspeed_cdp_stock__"), registered)
"""
ACTIVE, INACTIVE = "PROBE False True True True", "PROBE False True False False"


class Environment:
    """A virtual environment with the packages of the running one, and a pip that reaches no index."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(with_pip=False).create(folder)
        self.python = str(folder / "bin" / "python")
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        ours = [
            path
            for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
            if Path(path).is_dir()
        ]
        (self.site / "borrowed.pth").write_text("\n".join(ours) + "\n")

    def run(self, *arguments: str, **variables: str) -> str:
        names = ("PYTHONPATH", "DEEPSPEED_CDP_AUTOLOAD", "PIP_USER", "PIP_TARGET")
        environment = {key: value for key, value in os.environ.items() if key not in names} | variables
        done = run([self.python, *arguments], 120, environment, cwd=self.site)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def pip(self, *arguments: str) -> str:
        return self.run("-m", "pip", "--no-input", "--disable-pip-version-check", *arguments)

    def install(self, *arguments: str) -> str:
        # --ignore-installed: the running environment, whose packages are borrowed, may have the package as well.
        return self.pip("install", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", *arguments)

    def probe(self, **variables: str) -> str:
        return next(line for line in self.run("-c", PROBE, **variables).splitlines() if line.startswith("PROBE"))

    def traces(self) -> set[str]:
        return {path.name for path in self.site.iterdir() if "deepspeed_cdp" in path.name}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what the packages are built from, so that a build leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("source") / "deepspeed_cdp"
    shutil.copytree(REPOSITORY / "deepspeed_cdp", folder / "deepspeed_cdp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture
def environment(tmp_path) -> Environment:
    borrowed = [path for path in sys.path if Path(path, PTH).exists()]
    made = Environment(tmp_path / "venv")
    if not borrowed:
        assert made.probe() == INACTIVE
    return made


def build(environment: Environment, source: Path, kind: str, folder: Path) -> Path:
    """Calls the PEP 517 hook of `kind`, "wheel" or "sdist", as a build front end does."""
    code = f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    done = run([environment.python, "-c", code], 120, cwd=source)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["folder", "sdist", "wheel", "editable"])
def test_install_activates_and_uninstall_removes(environment, source, tmp_path, way):
    if way == "folder":
        environment.install(str(source))
    elif way == "editable":
        environment.install("-e", str(source))
    else:
        built = build(environment, source, way, tmp_path)
        if way == "sdist":
            with tarfile.open(built) as archive:
                assert any(name.endswith("/" + PTH) for name in archive.getnames())
        environment.install(str(built))
    assert PTH in environment.traces()
    assert (environment.site / PTH).read_text() == (source / PTH).read_text()
    assert environment.probe() == ACTIVE
    beside = "import deepspeed_cdp, pathlib; at = pathlib.Path(deepspeed_cdp.__file__).parent; "
    beside += "print((at / 'py.typed').exists(), len([*(at / 'native').glob('*.h'), *(at / 'native').glob('*.cpp')]))"
    sources = [p for p in (source / "deepspeed_cdp" / "native").iterdir() if p.suffix in (".h", ".cpp")]
    assert environment.run("-c", beside).splitlines()[-1] == f"True {len(sources)}" and len(sources) > 3
    command = Path(environment.python).with_name("deepspeed-cdp")
    assert environment.run(str(command), "costs", "--json").startswith('{"ok": true')
    if way == "editable":
        assert not (environment.site / "deepspeed_cdp").exists()
        where = environment.run("-c", "import deepspeed_cdp; print(deepspeed_cdp.__file__)")
        assert str(source) in where
        assert environment.probe(DEEPSPEED_CDP_AUTOLOAD="0") == INACTIVE
    environment.pip("uninstall", "--yes", "deepspeed-cdp")
    assert environment.traces() == set() and not command.exists()


def hand_installed(environment: Environment) -> None:
    """The files a wheel would put there, without the seconds that pip takes."""
    for name in (PTH, "deepspeed_cdp_autoload.py"):
        shutil.copy(REPOSITORY / name, environment.site / name)


def stub_deepspeed(environment: Environment) -> None:
    """A `deepspeed` that imports at once, in front of the borrowed one."""
    (environment.site / "deepspeed.py").write_text("def initialize(): pass\n")


def test_half_an_uninstall_is_silent(tmp_path):
    environment = Environment(tmp_path / "venv")
    stub_deepspeed(environment)
    shutil.copy(REPOSITORY / PTH, environment.site / PTH)
    assert environment.run("-c", "pass") == "", "the .pth file alone"
    hand_installed(environment)
    (environment.site / "deepspeed_cdp").mkdir()  # as after an uninstall that left a __pycache__ behind
    assert environment.run("-c", "import deepspeed") == "", "no package behind the finder"


def stub_plugin(folder: Path, plugin: str) -> Environment:
    """An environment with a stub DeepSpeed, the .pth file, and this text for the package's plugin."""
    environment = Environment(folder / "venv")
    stub_deepspeed(environment)
    hand_installed(environment)
    stub_package(environment.site, plugin)
    return environment


def stub_package(site: Path, plugin: str) -> None:
    """A package that holds nothing but this plugin."""
    folder = site / "deepspeed_cdp" / "integration"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").write_text("")
    (folder / "plugin.py").write_text(plugin)


def test_a_real_registration_error_is_told(tmp_path):
    environment = stub_plugin(tmp_path, "def register(): raise RuntimeError('not this DeepSpeed')")
    told = environment.run("-c", "import deepspeed; print('went on')")
    assert "could not register its engine" in told and "RuntimeError: not this DeepSpeed" in told and "went on" in told


def test_reload_registers_again(tmp_path):
    environment = stub_plugin(tmp_path, "import deepspeed\ndef register(): deepspeed.initialize = 'registered'")
    code = (
        "import deepspeed, importlib; first = deepspeed.initialize; deepspeed.initialize = None; "
        "importlib.reload(deepspeed); print(first, deepspeed.initialize)"
    )
    assert environment.run("-c", code).strip() == "registered registered"
    assert "registered" not in environment.run("-c", code, DEEPSPEED_CDP_AUTOLOAD="0")


def test_start_up_is_not_slowed(tmp_path, capsys):
    """CPU time of the interpreter's start-up with and without the .pth file, in turns; best case and median of 20."""
    environment = Environment(tmp_path / "venv")
    (environment.site / "borrowed.pth").unlink()
    variables = {key: value for key, value in os.environ.items() if key != "DEEPSPEED_CDP_AUTOLOAD"}
    hand_installed(environment)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    here, aside = environment.site / PTH, tmp_path / PTH
    for turn in range(42):
        installed = turn % 2 == 0
        if installed != here.exists():
            (aside if installed else here).rename(here if installed else aside)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)  # other tests beside it change the time by the clock
        subprocess.run([environment.python, "-c", "pass"], env=variables, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if turn >= 2:  # the first of each writes bytecode
            seconds[installed].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    median = {installed: 1e3 * statistics.median(times) for installed, times in seconds.items()}
    least = {installed: 1e3 * min(times) for installed, times in seconds.items()}
    with capsys.disabled():
        print(
            f"\nstart-up: median {median[False]:.2f} ms without, {median[True]:.2f} ms with the .pth file; "
            f"least {least[False]:.2f} and {least[True]:.2f} ms"
        )
    # The noise of a busy machine is larger than the cost, which the next test bounds by what is imported.
    assert min(median[True] - median[False], least[True] - least[False]) < 2


def test_start_up_imports_nothing_and_adds_one_finder(tmp_path):
    environment = Environment(tmp_path / "venv")
    code = "import sys; print(sorted(sys.modules))"
    before = environment.run("-c", code)
    hand_installed(environment)
    after = environment.run("-c", code)
    assert after == before
    finders = "import sys; print([getattr(finder, '__name__', '') for finder in sys.meta_path].count('DeepSpeedCDPFinder'))"
    assert environment.run("-c", finders).strip() == "1"  # Python runs a virtual environment's .pth files twice
    assert environment.run("-c", finders, DEEPSPEED_CDP_AUTOLOAD="0").strip() == "0"


def test_deepspeed_imported_before_the_pth_file_runs(tmp_path):
    environment = Environment(tmp_path / "venv")
    stub_deepspeed(environment)
    late = tmp_path / "late"
    late.mkdir()
    for name in (PTH, "deepspeed_cdp_autoload.py"):
        shutil.copy(REPOSITORY / name, late / name)
    stub_package(late, "import deepspeed\ndef register(): deepspeed.initialize = 'registered'")
    code = f"import deepspeed, site; site.addsitedir({str(late)!r}); print(deepspeed.initialize)"
    assert environment.run("-c", code).strip() == "registered"
