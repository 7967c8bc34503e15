"""One table of all constants, and nothing of the seed's forgotten (D44, D61)."""

from __future__ import annotations

import pytest

from pdcore.config import CONSTANTS, SEED_CONSTANTS, Constant, SeedConstant

KEYS = {constant.key for constant in CONSTANTS}


def check_resolved(constants: tuple[SeedConstant, ...], keys: set[str]) -> None:
    for constant in constants:
        assert constant.settings or constant.why, constant.name
        for key in constant.settings:
            assert key in keys, f"{constant.name}: {key} is not a setting"


def test_every_constant_of_section_1_2_became_a_setting_or_says_why_not() -> None:
    check_resolved(SEED_CONSTANTS, KEYS)


def test_a_dropped_setting_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_resolved(SEED_CONSTANTS, KEYS - {"disagg.bootstrap_port"})


def test_every_constant_has_a_reason_and_a_unique_key() -> None:
    assert len(KEYS) == len(CONSTANTS)
    for constant in CONSTANTS:
        assert constant.reason, constant.key


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("router.port", 8000),
        ("disagg.bootstrap_port", 18800),
        ("limits_config.num_reserved_decode_tokens", 64),
        ("server_config.request_timeout_s", 1800.0),
        ("scheduler_config.cp_mini_batch", -1),
        ("scheduler_config.batch_size", 32),
        ("scheduler_config.max_new_tokens", None),
        ("disagg.transport", "auto"),
    ],
)
def test_defaults(key: str, default: object) -> None:
    (found,) = (c for c in CONSTANTS if c.key == key)
    assert isinstance(found, Constant)
    assert found.default == default
