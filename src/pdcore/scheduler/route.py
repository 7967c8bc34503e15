"""What a rank tells others about itself, made from what its core was told.

A worker process sends its registration to a bootstrap server over HTTP. A program that
holds its prefill ranks itself needs no server: :func:`route_of` answers ``FetchTopology``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdcore.control.messages import RankRegistration, Route
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.errors import ConfigError
from pdcore.scheduler.setup import CoreSetup


def registration_of(setup: CoreSetup) -> RankRegistration:
    """What this rank tells a bootstrap server (R24; D35: layout and model are in it).

    Raises ConfigError when ``setup.me.address`` is not ``tcp://host:port``.
    """
    profile = setup.profile()
    at = setup.layout.coordinates(setup.me.rank)
    scheme, _, rest = setup.me.address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(
            f"address: {setup.me.address!r} cannot be put in a route; use tcp://host:port"
        )
    return RankRegistration(
        attn_tp_size=profile.tp_size,
        attn_tp_rank=at.tp,
        attn_cp_size=profile.cp_size,
        attn_cp_rank=at.cp,
        attn_dp_size=profile.dp_size,
        attn_dp_rank=at.dp,
        pp_size=profile.pp_size,
        pp_rank=at.pp,
        rank_ip=host,
        rank_port=int(port),
        block_sizes=dict(profile.block_sizes),
        kv_cache_dtype=profile.kv_cache_dtype,
        max_prefill_tokens=profile.max_prefill_tokens,
        incarnation=setup.me.incarnation.hex(),
        layout_digest=profile.layout_digest,
        fingerprint=profile.fingerprint,
        transport=profile.transport,
        protocol_min=profile.protocol_min,
        protocol_max=profile.protocol_max,
        all_cp_ranks=setup.layout.all_cp_ranks,
    )


def route_of(setups: Sequence[CoreSetup]) -> Route:
    """The route to one prefill instance, of which these are all the ranks: what its
    bootstrap server would answer (R25).

    Raises ConfigError when a rank is missing, RegistrationConflict when two disagree.
    """
    if not setups:
        raise ConfigError("setups: a route needs at least one prefill rank")
    first = setups[0]
    table = RankTable(RankTableConfig(first.me.instance, first.layout))
    for setup in setups:
        table.register(registration_of(setup), 0.0)
    encoded = table.route(0.0)
    if encoded is None:
        raise ConfigError(f"setups: {table.why_not_ready(0.0)}")
    return msgspec.json.decode(encoded.body, type=Route)
