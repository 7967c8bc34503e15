"""Which memfabric package is here, and how its version wants to be spoken to.

Its interface changed under one name (every wheel on PyPI was looked at;
docs/transports.md has the table). Two things decide, and both can be told from the signature of
``initialize`` without calling anything:

- **shared store** (mf_adapter 1.0.0, memfabric_hybrid before 1.1.3): all engines meet in one
  config store at ``store_url``, which one process of the service must have started (R14), and
  an engine gives itself a session name beforehand. ``get_rpc_port`` then takes a free port
  for it: an int up to 1.0.3, the text "port_pid" from 1.0.4, and another one at each call;
- **own store** (1.1.3 and newer, ``store_server_role``): every receiver serves its own store,
  ``store_url`` says no more than its protocol, and ``get_rpc_port`` is 0 until ``initialize``
  returned. A session name made before that ends in ":0", and reaches nobody.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol

import attrs

from pdcore.errors import TransportError

#: Import name -> distribution; the first that is installed is taken.
PACKAGES: Final = {"memfabric_hybrid": "memfabric-hybrid", "mf_adapter": "mf-adapter"}
#: What a write answers that was refused for its arguments, before any byte: also while the
#: sender has not heard yet what the receiver registered (it asks the store every 3 s).
INVALID_ARGUMENT: Final = -2000
#: Of the library's own log, which goes to standard output: 3 is errors only.
LOG_ERRORS: Final = 3
_STORE_URL: Final = re.compile(r"tcp://((?:\d{1,3}\.){3}\d{1,3}):(\d{1,5})")
_SESSION: Final = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}:([1-9]\d{0,4})(?:_\d{1,10})?")
#: There on every machine with an Ascend driver.
_DRIVER: Final = Path("/dev/davinci_manager")
#: What a trial may take: the library needs half a second to find that it cannot work.
_TRIAL_TIMEOUT_S: Final = 30.0
#: "2026-11-30 07:04:31.66 ERROR [pid-tid][PART file:line function] text", in all versions.
_LOG_LINE: Final = re.compile(r"^.*\berror\b.*\] (.+)$", re.MULTILINE | re.IGNORECASE)
_SAID: Final = "pdcore says: "
#: Between two looks for a store that is not up, seconds.
_RETRY_S: Final = 0.2


class VendorEngine(Protocol):
    """``TransferEngine``. Every call returns 0, or a code; None of them raises for a failure."""

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: object,
        **optional: str,
    ) -> int: ...

    def get_rpc_port(self) -> int | str: ...

    def register_memory(self, buffer_addr: int, capacity: int) -> int: ...

    def unregister_memory(self, buffer_addr: int) -> int: ...

    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
    ) -> int: ...

    def destroy(self) -> None: ...


@attrs.frozen
class Vendor:
    """The package, imported. ``op_types``: name -> member of its ``TransDataOpType``."""

    name: str
    version: str
    make: Callable[[], VendorEngine]
    op_types: Mapping[str, object]
    has_own_stores: bool
    takes_nic: bool
    create_store: Callable[[str], int]
    #: ``unInitialize``: of the whole process, whichever engine it is called on.
    shut_down: Callable[[VendorEngine], None]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def find() -> str | None:
    """The import name of the package that is installed; looks without importing."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def why_unavailable(trial: str) -> str | None:
    """One sentence, or None. Where there is a driver, that is believed; to start an engine
    would take memory of an NPU. Where there is none, ``trial`` (a program that prints _SAID and
    what failed, or nothing) is run in a process of its own: only the library knows whether
    it can do without."""
    if sys.platform != "linux":
        return f"memfabric needs Linux; this is {sys.platform}"
    name = find()
    if name is None:
        return f"neither {' nor '.join(PACKAGES)} is installed"
    if _DRIVER.exists():
        return None
    spec = importlib.util.find_spec(name)
    return _tried(trial, spec.origin if spec is not None else None)


@functools.cache
def _tried(trial: str, _origin: str | None) -> str | None:
    program = f"import sys; sys.path[:] = {sys.path!r}; {trial}"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {_TRIAL_TIMEOUT_S:g} s, and there is no {_DRIVER}"
    return judge(ended.returncode, ended.stdout.decode(errors="replace"))


def judge(code: int, output: str) -> str | None:
    """Why the trial failed, in the library's own words where it has some; None: it did not."""
    said = [line.removeprefix(_SAID) for line in output.splitlines() if line.startswith(_SAID)]
    if code == 0 and not said:
        return None
    told = said[0] if said else f"its process ended with {code}"
    lines = _LOG_LINE.findall(output)
    about_driver = [line for line in lines if "does not support" in line or "driver" in line]
    if not lines:
        return told
    return f"{told}; the library says: {(about_driver or lines)[-1].strip()}"


def report(failed: TransportError | None) -> None:
    """What a trial's process has to say before it ends: the fact; what helps is told apart."""
    if failed is not None:
        sys.stdout.write(f"\n{_SAID}{str(failed).partition(';')[0]}\n")
        sys.stdout.flush()


def load() -> Vendor:
    """Import it. Raises TransportError where it is not installed, does not load, or lacks what
    every wheel so far has."""
    name = find()
    if name is None:
        raise TransportError(f"neither {' nor '.join(PACKAGES)} is installed")
    try:
        module = vars(_import(name))
        kind: type[VendorEngine] = module["TransferEngine"]
        members: Mapping[str, object] = vars(kind)["TransDataOpType"].__members__
        signature = str(vars(kind)["initialize"].__doc__)
        shut_down: Callable[[VendorEngine], None] = vars(kind)["unInitialize"]
        set_tls: Callable[[bool, str], int] = module["set_conf_store_tls"]
        set_log_level: Callable[[int], int] = module["set_log_level"]
        create_store: Callable[[str], int] = module["create_config_store"]
    except (ImportError, OSError, RuntimeError) as error:
        raise TransportError(f"{name} is installed and cannot be imported: {error}") from error
    except (KeyError, AttributeError) as error:
        raise TransportError(
            f"{name} is not the package that pdcore knows, it has no {error}; install "
            "memfabric-hybrid 1.3.0"
        ) from error
    set_log_level(LOG_ERRORS)
    # Its store otherwise waits for certificates that nobody has configured.
    set_tls(False, "")
    return Vendor(
        name,
        _version(name),
        kind,
        dict(members),
        has_own_stores="store_server_role" in signature,
        takes_nic="nic: str" in signature,
        create_store=create_store,
        shut_down=shut_down,
    )


def _import(name: str) -> ModuleType:
    """Raises ImportError, OSError where a library that it loads is missing, and RuntimeError."""
    module: ModuleType
    if name == "mf_adapter":
        import mf_adapter

        module = mf_adapter
    else:
        import memfabric_hybrid

        module = memfabric_hybrid
    return module


def _version(name: str) -> str:
    try:
        return version(PACKAGES[name])
    except PackageNotFoundError:
        return ""


def check_session(name: str) -> str:
    """The session name of an engine, ours or a peer's: "address:port", or with "_pid" behind.
    Raises TransportError, for a port 0 too."""
    found = _SESSION.fullmatch(name)
    if found is None or int(found[1]) > 65535:
        raise TransportError(
            f"memfabric session {name[:80]!r}: must be an IPv4 address, a port of 1 to 65535, and "
            "perhaps _ and a process id"
        )
    return name


def start_store(vendor: Vendor, url: str) -> None:
    """R14: the config store of the whole service, in this process, until it ends. Raises
    TransportError."""
    _parse(url)
    code = vendor.create_store(url)
    if code != 0:
        raise TransportError(
            f"store_url: {vendor} cannot start a config store at {url} (code {code}); it must be "
            "an address of this machine, with a port that nobody has taken"
        )


def await_store(url: str, timeout_s: float, pause: Callable[[float], object]) -> None:
    """Until somebody answers where the config store must be: the workers of a service start in
    any order. Raises TransportError after ``timeout_s``."""
    where = _parse(url)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(where, timeout=max(0.1, min(1.0, timeout_s))).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise TransportError(
                    f"store_url: no config store answers at {url} within {timeout_s:g} s "
                    f"({error}); exactly one worker of the service must start it there "
                    "(creates_store), on a host and port that all of them reach"
                ) from error
        pause(_RETRY_S)


def _parse(url: str) -> tuple[str, int]:
    found = _STORE_URL.fullmatch(url)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise TransportError(
            f"store_url: must be tcp:// and a numeric IPv4 address and port, such as "
            f"tcp://10.0.0.5:10002, got {url!r}; memfabric-hybrid 1.1.3 and newer need none"
        )
    return found[1], int(found[2])
