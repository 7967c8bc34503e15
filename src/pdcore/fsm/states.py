"""The states of every lifecycle. Plain enums: transitions 0.9.3 confuses StrEnum with str.

The theory of each lifecycle stands at the top of its own module.
"""

from __future__ import annotations

import enum


class SenderState(enum.Enum):
    """Prefill half of one (room, attempt) on one rank."""

    BOOTSTRAPPING = "Bootstrapping"
    WAITING_FOR_INPUT = "WaitingForInput"
    TRANSFERRING = "Transferring"
    DRAINING = "Draining"
    DONE = "Done"
    FAILED = "Failed"


class ReceiverState(enum.Enum):
    """Decode half of one (room, attempt) on one rank."""

    BOOTSTRAPPING = "Bootstrapping"
    WAITING_FOR_INPUT = "WaitingForInput"
    TRANSFERRING = "Transferring"
    DRAINING = "Draining"
    DONE = "Done"
    FAILED = "Failed"


class PeerState(enum.Enum):
    """One pair of ranks, one incarnation."""

    UNKNOWN = "Unknown"
    HEALTHY = "Healthy"
    SUSPECT = "Suspect"
    DEAD = "Dead"


class RankState(enum.Enum):
    """Registration of one prefill rank at its bootstrap server."""

    ABSENT = "Absent"
    REGISTERED = "Registered"
    STALE = "Stale"


class InstanceState(enum.Enum):
    """One service instance as its leader sees it."""

    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    STOPPED = "Stopped"
    UNHEALTHY = "Unhealthy"


class RoutedState(enum.Enum):
    """One client request at the router."""

    RECEIVED = "Received"
    DISPATCHED = "Dispatched"
    RETRYING = "Retrying"
    STREAMING = "Streaming"
    DONE = "Done"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
