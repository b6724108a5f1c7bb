import pytest
import torch
from torch.nn import functional as F

from dualform.errors import NotRecordedError
from dualform.query.influence.softmax import misfit


def signals(sharpness, dtype=torch.float32):
    """∂ cross-entropy / ∂ logits, as autograd rounds it, of rows whose label's logit leads by so much."""
    labels = torch.arange(40) % 10
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = (logits + sharpness * F.one_hot(labels, 10)).requires_grad_()
    F.cross_entropy(logits, labels, reduction="sum").backward()
    return logits.grad, F.softmax(logits.detach(), 1)[torch.arange(40), labels]


@pytest.mark.parametrize("sharpness", [0, 5, 10, 15, 20, 50])
def test_one_minus_p_is_read_from_rows_learnt_ever_so_well(sharpness):
    errors, p = signals(sharpness)
    torch.testing.assert_close(misfit(errors, "4"), 1 - p, rtol=0, atol=1e-6)


def test_other_losses_are_refused():
    with pytest.raises(NotRecordedError, match="not those of a softmax cross-entropy"):
        misfit(torch.randn(40, 10), "4")
    with pytest.raises(NotRecordedError, match="larger than those"):
        misfit(50 * signals(0)[0], "4")
