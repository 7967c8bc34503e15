"""What a core is told about itself once, at construction."""

from __future__ import annotations

import attrs

from pdcore.config import CoreLimits
from pdcore.control.codec import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    decode_endpoint,
    encode_endpoint,
)
from pdcore.control.messages import Endpoint
from pdcore.errors import IncompatibleError
from pdcore.kv.layout import seen_from
from pdcore.kv.spec import KVCacheSpec, KVPlacement
from pdcore.topology import InstanceProfile, ParallelLayout
from pdcore.types import CRC32, NO_CHECKSUMS, PeerRef


@attrs.frozen
class CoreSetup:
    """Identity, limits and memory of one rank.

    ``group_size`` is the TP x CP group that moves in lockstep (1: alone).
    ``quarantine_s`` (0 but on QUARANTINE transports) comes from the transport's capabilities.
    """

    me: PeerRef
    limits: CoreLimits
    spec: KVCacheSpec
    placement: KVPlacement
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    transport: str
    transport_descriptor: bytes = b""
    layout: ParallelLayout = attrs.field(factory=lambda: ParallelLayout(1))
    group_size: int = 1
    #: Token ids are below it; a peer's first token is checked against it.
    vocab_size: int = 1 << 31
    quarantine_s: float = 0.0
    #: At decode: which checksums to ask for with the KV. At prefill: what decode must ask for.
    integrity: str = NO_CHECKSUMS
    #: The KV cache lies in memory that this process can read.
    is_host_memory: bool = True

    @property
    def drain_timeout_s(self) -> float:
        """After which a room that drains is stuck. On a QUARANTINE transport a writer may say only
        a period after its call failed that nothing of it lands, and the call may have stood still
        for its engine's limit before: as long as drain_timeout_s, with the defaults of both. The
        period counts twice so that some time is left beside the two."""
        return self.limits.drain_timeout_s + 2 * self.quarantine_s

    def profile(self) -> InstanceProfile:
        """What :func:`pdcore.topology.check_compatible` compares."""
        return InstanceProfile(
            tp_size=self.layout.tp_size,
            cp_size=self.layout.cp_size,
            dp_size=self.layout.dp_size,
            pp_size=self.layout.pp_size,
            block_sizes=self.spec.block_sizes,
            kv_cache_dtype=self.kv_cache_dtype,
            max_prefill_tokens=self.limits.max_prefill_tokens,
            layout_digest=self.spec.digest(),
            fingerprint=self.fingerprint,
            transport=self.transport,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
        )

    @property
    def kv_cache_dtype(self) -> str:
        """The dtypes of the cache entries, not of the model (D35)."""
        return ",".join(sorted({entry.dtype for entry in self.spec.entries}))

    def endpoint(self) -> bytes:
        """What a prefill rank must know to write into this rank; constant for a process."""
        place = self.placement
        return encode_endpoint(
            Endpoint(
                transport=self.transport,
                transport_descriptor=self.transport_descriptor,
                layout_digest=self.spec.digest(),
                fingerprint=self.fingerprint,
                tp_size=self.spec.tp_size,
                tp_rank=self.spec.tp_rank,
                num_blocks=place.num_blocks,
                entry_names=tuple(e.name for e in self.spec.entries),
                regions=place.regions,
                offsets=place.offsets,
                block_strides=place.block_strides,
                block_sizes=self.spec.block_sizes,
                integrity="" if self.integrity == NO_CHECKSUMS else self.integrity,
            )
        )


@attrs.frozen
class Destination:
    """A decoded and checked Endpoint: layout and placement of one decode rank."""

    spec: KVCacheSpec
    placement: KVPlacement
    transport_descriptor: bytes
    #: Decode wants checksums with its KV.
    is_summed: bool = False


def read_endpoint(setup: CoreSetup, data: bytes) -> Destination:
    """Raises CodecError for garbage, IncompatibleError for another model or layout; the
    peer's word is not trusted beyond what the transport bound-checks (D58)."""
    endpoint = decode_endpoint(data)
    for name, ours, theirs in (
        ("transport", setup.transport, endpoint.transport),
        ("layout_digest", setup.spec.digest(), endpoint.layout_digest),
        ("fingerprint", setup.fingerprint, endpoint.fingerprint),
    ):
        if ours != theirs:
            raise IncompatibleError(f"{name}: prefill has {ours}, decode has {theirs}")
    placement = KVPlacement(
        endpoint.num_blocks, endpoint.regions, endpoint.offsets, endpoint.block_strides
    )
    spec, placement = seen_from(
        setup.spec,
        endpoint.entry_names,
        placement,
        endpoint.tp_size,
        endpoint.tp_rank,
        endpoint.block_sizes,
    )
    _check_integrity(setup, endpoint.integrity or NO_CHECKSUMS)
    if spec == setup.spec:
        spec = setup.spec  # what is asked of it with every transfer is found by identity
    return Destination(spec, placement, endpoint.transport_descriptor, bool(endpoint.integrity))


def _check_integrity(setup: CoreSetup, wanted: str) -> None:
    """Prefill sends what decode asks for; where it is configured itself, it insists on it."""
    if wanted not in (NO_CHECKSUMS, CRC32):
        raise IncompatibleError(
            f"integrity: decode asks for {wanted}, prefill has only {CRC32}; upgrade prefill"
        )
    if setup.integrity not in (NO_CHECKSUMS, wanted):
        raise IncompatibleError(
            f"integrity: prefill has {setup.integrity}, decode has {wanted}; set both alike"
        )
    if wanted != NO_CHECKSUMS and not setup.is_host_memory:
        raise IncompatibleError(
            f"integrity: decode asks for {wanted}, but prefill's KV is in device memory, which "
            f"it cannot sum; set integrity to {NO_CHECKSUMS} at decode"
        )
