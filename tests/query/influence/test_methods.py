"""Each method beside its dense reference in float64."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import NotRecordedError
from full_scan import top_by_scan
from reference import influence as reference
from training import samples

SEGMENTS = [(0, 2), (2, 4), (4, 6)]
UNITS = [0, 1, 2]


@pytest.fixture(scope="module")
def asked():
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def everything(answer):
    """(queries, rows)."""
    return torch.cat([scores for _, scores in answer.scores()], 1).numpy()


def test_whitened_is_the_dense_one_in_each_layer_and_in_sum(trained, asked):
    found = trained.dual.influence(asked, target=UNITS, segments=SEGMENTS)
    expected = np.concatenate(
        [
            reference.whitened(trained, *samples(), segment, moment, asked, UNITS, ["0", "2"])
            for segment, moment in zip(SEGMENTS, found.moments, strict=True)
        ],
        axis=2,
    )
    for place, layer in enumerate(("0", "2")):
        np.testing.assert_allclose(everything(found[layer]), expected[place], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(everything(found), expected.sum(0), rtol=1e-8, atol=1e-10)


def test_the_kernel_is_the_dense_one(trained, asked):
    found = trained.dual.influence(asked, target=UNITS, segments=SEGMENTS, method="kernel")
    expected = np.concatenate(
        [
            reference.kernel(trained, *samples(), segment, moment, asked, UNITS)
            for segment, moment in zip(SEGMENTS, found.moments, strict=True)
        ],
        axis=1,
    )
    np.testing.assert_allclose(everything(found), expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(everything(found["0"]) + everything(found["2"]), expected, rtol=1e-8, atol=1e-10)


def test_a_sketch_as_large_as_the_gradients_is_the_kernel(trained, asked):
    kernel = trained.dual.influence(asked, target=UNITS, segments=SEGMENTS, method="kernel")
    sketch = trained.dual.influence(asked, target=UNITS, segments=SEGMENTS, method="sketch", size=8)
    np.testing.assert_allclose(everything(sketch), everything(kernel), rtol=1e-7, atol=1e-10)
    for layer in ("0", "2"):
        np.testing.assert_allclose(everything(sketch[layer]), everything(kernel[layer]), rtol=1e-7, atol=1e-10)


def test_a_smaller_sketch_comes_near(trained, asked):
    kernel, sketch = (
        everything(trained.dual.influence(asked, target=UNITS, segments=SEGMENTS, method=method, size=4))
        for method in ("kernel", "sketch")
    )
    assert np.corrcoef(kernel.ravel(), sketch.ravel())[0, 1] > 0.5
    assert not np.allclose(kernel, sketch, rtol=1e-3)


def twice(path, second):
    """A network whose rows go backward twice in each step; second: the loss of the other pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = samples()
    labels = labels % 3
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(6):
            ids = torch.arange(step, step + 4)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            second(model, inputs[ids], labels[ids]).backward()
            optimizer.step()
    return dualform.open(path, model)


def test_a_row_that_goes_backward_twice_has_two_slots(tmp_path, asked):
    dual = twice(tmp_path / "run", lambda model, x, y: model[0](x.flip(1) / 100).square().mean())
    kernel = dual.influence(asked, target=UNITS, segments=SEGMENTS, method="kernel")
    sketch = dual.influence(asked, target=UNITS, segments=SEGMENTS, method="sketch", size=8)
    np.testing.assert_allclose(everything(sketch), everything(kernel), rtol=1e-7, atol=1e-10)


def test_norms_of_two_keys_are_no_bound_of_one_row(tmp_path):
    dual = twice(tmp_path / "run", lambda model, x, y: 1e-3 * model[0](0 * x).square().mean())
    for query in torch.randn(20, 1, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64):
        whitened = dual.influence(query, segments=[(0, 3), (3, 6)], layers="0")
        assert whitened.best(1).slots.equal(top_by_scan(whitened, 1).slots)


def test_two_losses_of_a_row_are_two_labels(tmp_path, asked):
    dual = twice(tmp_path / "run", lambda model, x, y: F.cross_entropy(model(x.flip(1)), (y + 1) % 3))
    for method in ("kernel", "sketch"):
        with pytest.raises(NotRecordedError, match="several slots for each row"):
            dual.influence(asked, method=method, segments=SEGMENTS)
