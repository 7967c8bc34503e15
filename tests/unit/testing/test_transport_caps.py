from __future__ import annotations

import attrs
import pytest

from pdcore.testing.transport_caps import MINIMUM_CAPS
from pdcore.transports import registry
from pdcore.transports.base import TransportCaps


@pytest.mark.parametrize("name", MINIMUM_CAPS)
def test_what_is_pinned_is_what_is_declared(name: str) -> None:
    """The declaration of each transport of pdcore, made or not, is within its pin."""
    assert name in registry.built_in()
    caps = registry.load(name).caps
    assert caps is not None
    declared = attrs.asdict(caps)
    for field, allowed in MINIMUM_CAPS[name].items():
        assert field in attrs.fields_dict(TransportCaps)
        assert declared[field] in allowed
