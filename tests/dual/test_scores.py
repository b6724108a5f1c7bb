import pytest
import torch

from dualform.dual import scores as module
from dualform.dual.scores import scores
from dualform.layers.keys import Vectors
from dualform.layers.layer import Use


@pytest.mark.parametrize("role", ["weight", "table"])
@pytest.mark.parametrize(("d_in", "d_out"), [(20, 1), (20, 2), (5, 4), (4, 5), (2, 20)])
@pytest.mark.parametrize("at_once", [1, 50, 1 << 20])
@pytest.mark.parametrize("slots", [0, 7])
def test_a_score_is_error_times_matrix_times_key(role, d_in, d_out, at_once, slots, monkeypatch):
    """However many examples are multiplied at once, and whichever side is the longer."""
    monkeypatch.setattr(module, "BLOCK_NUMBERS", at_once)
    torch.manual_seed(0)
    product = torch.randn(6, d_out, d_in, dtype=torch.float64)
    keys, errors = (torch.randn(slots, d, dtype=torch.float64) for d in (d_in, d_out))
    found = scores(
        Use("p", role), product if role == "weight" else product.transpose(1, 2), Vectors(keys), errors, None
    )
    for example in range(6):
        for slot in range(slots):
            expected = sum(
                float(errors[slot, o] * product[example, o, i] * keys[slot, i])
                for o in range(d_out)
                for i in range(d_in)
            )
            assert float(found[example, slot]) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.shape == (6, slots)
