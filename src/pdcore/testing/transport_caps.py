"""What the transports that come with pdcore must declare: none may pass the suite by declaring
less."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pdcore.transports.base import Revocation

#: What each transport must at least declare; ``revocation`` lists what is allowed.
MINIMUM_CAPS: Final[dict[str, dict[str, Collection[object]]]] = {
    "loopback": {
        "native_notify": (True,),
        "revocation": tuple(Revocation),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
    },
    "shm": {
        "one_sided": (True,),
        "native_notify": (True,),
        "revocation": (Revocation.SENDER_ACK,),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
        "death_fences": (True,),
    },
    "socket": {
        "one_sided": (True,),
        "native_notify": (True,),
        "revocation": (Revocation.RECEIVER_ENFORCED,),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
        "death_fences": (True,),
    },
    "nixl": {
        "one_sided": (True,),
        "native_notify": (True,),
        "revocation": (Revocation.QUARANTINE,),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
    },
    "torchdist": {
        "native_notify": (True,),
        "revocation": (Revocation.RECEIVER_ENFORCED,),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
        "death_fences": (True,),
    },
    # Over a vendor's engine of one-sided writes whose late bytes nobody can call back.
    "mooncake": {
        "one_sided": (True,),
        "native_notify": (True,),
        "revocation": (Revocation.QUARANTINE,),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
        "cross_host": (True,),
    },
    "memfabric": {
        "one_sided": (True,),
        "native_notify": (True,),
        "revocation": (Revocation.SENDER_ACK, Revocation.QUARANTINE),
        "submit_blocks": (False,),
        "detects_peer_death": (True,),
        "cross_host": (True,),
    },
}
