"""Dequantisation is bit-identical to the ``gguf`` package, where that is installed."""

from __future__ import annotations

import numpy as np
import pytest

from pdcore.engine.gguf import GGUFFile, dequantise
from pdcore.engine.load import find_embedded_model

pytestmark = pytest.mark.oracle


def test_every_tensor_is_bit_identical() -> None:
    gguf = pytest.importorskip("gguf", reason="optional: `pip install gguf` to compare with it")
    file = GGUFFile(find_embedded_model())
    mapped = np.memmap(file.path, np.uint8, "r")
    kinds = {kind.name: kind for kind in gguf.GGMLQuantizationType}
    for info in file.tensors.values():
        raw = np.array(mapped[info.offset : info.offset + info.size_bytes])
        expected = gguf.dequantize(raw, kinds[info.type.name]).reshape(-1)
        assert np.array_equal(dequantise(raw, info.type), expected), info.name
