"""Lion and Adafactor divide by no ε: by |u| of a sign u/|u|, and by the root of a product of means."""

import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.errors import OptimizerError
from lion import Lion
from recorded_networks import parameters

TOKENS, WIDTH, STEPS = 9, 6, 30


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def fairseq_adafactor(p):
    kind = pytest.importorskip("transformers.optimization").Adafactor
    return kind(p, lr=1e-2, scale_parameter=False, relative_step=False)


OPTIMIZERS = {
    "lion": lambda p: Lion(p, lr=1e-2, weight_decay=1e-2),
    "lion without averages": lambda p: Lion(p, lr=1e-2, betas=(0.0, 0.0)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "fairseq adafactor": fairseq_adafactor,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_where_there_is_no_gradient_nothing_is_divided_by_zero(tmp_path, optimizer, dtype):
    """Rows of padding and of words that never come, a word that comes once, two equal rows whose error signals cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH, padding_idx=0), Mean(), nn.Linear(WIDTH, 2)).to(dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    signs = torch.tensor([[1.0], [-1.0], [0.5], [2.0]]).to(dtype)
    first = model[0].weight.detach().clone()
    with dualform.record(model, made, tmp_path / "run") as recorder:
        for step in range(STEPS):
            words = torch.randint(1, 6, (4, 3))
            words[0, 2] = 0
            if step == 3:
                words[3, 0] = 7
            words[1] = words[0]
            recorder.batch(sample_id=range(4))
            made.zero_grad()
            output = model(words)
            loss = output.square().sum() if step % 2 else (output * signs).sum()
            loss.backward()
            made.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed, str(dual.verify())
    answers = dual.contributions(torch.tensor([[0, 1, 7], [8, 2, 3]]), target=0)
    for name in ("0", "2"):
        for scores in answers[name].scores():
            assert scores.scores.isfinite().all()
        assert all(answers[name].parts().select(pl.col(pl.Float64).is_finite().all()).row(0))
    one, other, nothing = (
        parameters(dual.masked(**asked, read="kept"))
        for asked in ({"only": "sample_id = 1"}, {"drop": "sample_id = 1"}, {"only": pl.lit(False)})
    )
    for name, value in parameters(model).items():
        assert one[name].isfinite().all()
        scale = 1 + one[name].abs() + other[name].abs()
        error = (one[name] + other[name] - nothing[name] - value).abs() / scale
        assert error.max() < (1e-11 if dtype == torch.float64 else 1e-4), name
    decay = (1 - 1e-4) ** STEPS if optimizer == "lion" else 1.0
    torch.testing.assert_close(one["0.weight"][8], first[8] * decay)


def test_rows_of_a_weight_cannot_be_kept_alone(tmp_path):
    """Adafactor's update of a row depends on all rows."""
    model = nn.Linear(3, 5)
    with pytest.raises(OptimizerError, match=r"outputs= keeps some rows.*Adafactor scales each by all of them"):
        dualform.record(model, torch.optim.Adafactor(model.parameters()), tmp_path / "run", outputs={"": [1]})
    assert not (tmp_path / "run").exists()
    dualform.record(model, Lion(model.parameters()), tmp_path / "run", outputs={"": [1]}).close()
