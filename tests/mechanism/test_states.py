"""Pieces of a loop's state: torch's generator, of which nobody may know a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equidp.mechanism import states
from equidp.mechanism.states import seed_unforeseen


def test_every_word_of_torchs_generator_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows some of a Mersenne Twister's 624 words foretells a part of what it draws; NumPy's is the same."""
    words = np.random.default_rng(0).integers(2**32, size=624, dtype=np.uint32)
    monkeypatch.setattr(states.secrets, "token_bytes", lambda size: words.tobytes()[:size])
    before = torch.get_rng_state()
    try:
        seed_unforeseen(torch.device("cpu"))
        drawn = torch.empty(1000, dtype=torch.int32).random_()
    finally:
        torch.set_rng_state(before)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": len(words)}}
    assert drawn.tolist() == (twister.random_raw(1000) % 2**31).tolist()
