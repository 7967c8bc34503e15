"""The wheel ``nixl-cu12``: the one file that imports it, and what it raises in our words."""

from __future__ import annotations

import importlib.util
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pdcore.errors import TransportError
from pdcore.transports.engines import WriteFailed

_MODULE: Final = "nixl_cu12"
_BACKEND: Final = "UCX"
#: The longest sleep of an agent's progress thread, which otherwise wakes up for what comes.
PROGRESS_US: Final = 1000
_UCX_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "_.:-")

Uint64Array = npt.NDArray[np.uint64]
#: Address, bytes, device, and a word for other kinds of memory.
Row = tuple[int, int, int, str]


def why_unavailable() -> str | None:
    """One sentence for ``pdcore doctor``, or None. Finds the wheel without importing it."""
    if sys.platform != "linux":
        return f"nixl needs Linux; this is {sys.platform}"
    if importlib.util.find_spec(_MODULE) is None:
        return f"{_MODULE} is not installed"
    return None


class Handle(Protocol):
    def release(self) -> None: ...


class Agent(Protocol):
    """What is used of ``nixl_agent``. Descriptor lists are opaque."""

    agent: object

    def create_backend(self, backend: str, parameters: dict[str, str], /) -> None: ...
    def register_memory(self, rows: list[Row], mem_type: str, /) -> object: ...
    def deregister_memory(self, known: object, /) -> None: ...
    def get_xfer_descs(self, rows: Uint64Array, mem_type: str, /) -> object: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes, /) -> bytes: ...
    def remove_remote_agent(self, name: str, /) -> None: ...
    def initialize_xfer(
        self, operation: str, local: object, remote: object, name: str, /
    ) -> Handle: ...
    def transfer(self, handle: Handle, /) -> str: ...
    def check_xfer_state(self, handle: Handle, /) -> str: ...


class Vendor:
    """The wheel, and what it raises in our words. Raises TransportError where it cannot be
    imported."""

    def __init__(self) -> None:
        try:
            import nixl_cu12 as vendor
        except (ImportError, OSError, RuntimeError) as error:
            raise TransportError(f"nixl: {_MODULE} cannot be imported: {error}") from error
        self._module: ModuleType = vendor
        try:
            _tame_logging(self._module)
            bindings = self._module._api.nixlBind
            self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        except AttributeError as error:
            raise TransportError(
                f"nixl: {_MODULE} is not the package that pdcore knows ({error}); install "
                "nixl-cu12 1.5.1"
            ) from error
        own = [kind for kind in vars(bindings).values() if isinstance(kind, type)]
        #: Its exceptions have no base of their own; pybind raises the other three.
        self._errors: tuple[type[Exception], ...] = (
            *(kind for kind in own if issubclass(kind, Exception)),
            RuntimeError,
            TypeError,
            ValueError,
        )

    def agent(self, name: str, options: dict[str, str]) -> Agent:
        """With its progress thread, safe for any number of ours, and UCX started."""
        vendor, bindings = self._module, self._module._api.nixlBind
        with self.spoken(f"start an agent with {options or 'no options'}"):
            agent: Agent = vendor.nixl_agent(name, vendor.nixl_agent_config(backends=[]))
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.syncMode = bindings.NIXL_THREAD_SYNC_RW
            config.pthrDelay = PROGRESS_US
            # Theirs has a delay of 0, by which the progress thread never sleeps.
            agent.agent = bindings.nixlAgent(name, config)
            agent.create_backend(_BACKEND, options)
        return agent

    @contextmanager
    def spoken(self, doing: str) -> Iterator[None]:
        """Raises TransportError for whatever the vendor raises."""
        try:
            yield
        except self._errors as error:
            raise TransportError(f"nixl could not {doing}: {error}") from _bare(error)

    @contextmanager
    def writing(self, *, may_land: bool) -> Iterator[None]:
        """Raises WriteFailed for whatever the vendor raises."""
        try:
            yield
        except self._errors as error:
            is_gone = isinstance(error, self._disconnected)
            raise WriteFailed(f"nixl: {error}", is_peer_gone=is_gone, may_land=may_land) from _bare(
                error
            )

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """For what is over anyway."""
        with suppress(*self._errors):
            yield


def _bare(error: Exception) -> Exception:
    """Whoever keeps an error does not keep the agent, which the vendor's frames hold."""
    return error.with_traceback(None)


def _tame_logging(module: ModuleType) -> None:
    """The wheel's loggers are the program's again: as they come they write about every agent
    to standard output, and the process is silent about any logging that fails."""
    logging = module.logging.logging
    logger = logging.getLogger("nixl")
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
    for handler in list(logger.handlers):
        if handler.name in module.logging.LOGGING_CONFIG["handlers"]:
            logger.removeHandler(handler)
    logger.propagate = True
    logging.raiseExceptions = True


def ucx_options(tls: str | None, device: str | None) -> dict[str, str]:
    """For ``create_backend``. Raises TransportError for several values in one option."""
    words = []
    for option, key, value in (("ucx_tls", "TLS", tls), ("ucx_device", "NET_DEVICES", device)):
        if value is None:
            continue
        # NIXL takes these apart at commas itself.
        if not value or not set(value) <= _UCX_CHARACTERS:
            raise TransportError(
                f"{option}: {value!r} must be one name, such as tcp or eth0; for several set "
                f"UCX_{key} in the environment of the process"
            )
        words.append(f"{key}={value}")
    return {"engine_config": ",".join(words)} if words else {}
