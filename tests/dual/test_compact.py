import pytest
import torch
from torch import nn

import dualform
from dualform.errors import NotRecordedError, QuestionError, UnknownLayerError
from training import samples, train

INPUTS, _ = samples()
TIGHT = {"rtol": 0, "atol": 1e-13}


def learned(trained, name):
    """What a layer learned, the long way."""
    layer = trained.dual.layer(name)
    return trained.model[int(name)].weight.detach() - layer.initial_weight


@pytest.mark.parametrize("name", ["0", "2"])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_is_the_truncated_svd(trained, name, rank):
    U, S, Vh = torch.linalg.svd(learned(trained, name))
    expected = sum(S[i] * torch.outer(U[:, i], Vh[i]) for i in range(rank))
    layer = trained.dual.compact(rank)[name]
    assert layer.rank == rank
    assert layer.keys.shape == (rank, len(Vh))
    assert layer.values.shape == (rank, len(U))
    assert layer.slots == 30
    found = sum(torch.outer(value, key) for value, key in zip(layer.values, layer.keys, strict=True))
    torch.testing.assert_close(found, expected, **TIGHT)
    torch.testing.assert_close(layer.weight, trained.dual.layer(name).initial_weight + expected, **TIGHT)
    lost = torch.linalg.norm(learned(trained, name) - found) / torch.linalg.norm(learned(trained, name))
    assert layer.error == pytest.approx(float(lost), abs=1e-12)


def test_no_other_system_of_this_rank_is_closer(trained):
    """Eckart and Young: neither moved a little, nor drawn at random and fitted by least squares."""
    whole, best = learned(trained, "0"), trained.dual.compact(2)["0"]
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e-1, 1.0, 10.0):
        drawn = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        keys = best.keys + scale * drawn
        fitted = torch.linalg.lstsq(keys.T, whole.T).solution  # the best values for these keys
        error = torch.linalg.norm(whole - fitted.T @ keys) / torch.linalg.norm(whole)
        assert error > best.error


def test_with_all_directions_it_is_the_layer(trained):
    found = trained.dual.compact(4, layers="2")
    queries = trained.model[:2](INPUTS).detach()
    torch.testing.assert_close(found["2"](queries), trained.model[2](queries).detach(), **TIGHT)
    assert found["2"].error < 1e-13
    torch.testing.assert_close(found.model()(INPUTS), trained.model(INPUTS), **TIGHT)


def test_the_model_has_the_compacted_weights_and_the_rest_as_trained(trained):
    found = trained.dual.compact(1, layers=["0"])
    model = found.model()
    assert list(found) == ["0"]
    torch.testing.assert_close(model[0].weight.detach(), found["0"].weight, **TIGHT)
    torch.testing.assert_close(model[0](INPUTS).detach(), found["0"](INPUTS), **TIGHT)
    for name in ("0.bias", "2.weight", "2.bias"):
        assert torch.equal(model.state_dict()[name], trained.model.state_dict()[name])
    assert not torch.allclose(trained.model[0].weight, model[0].weight)


def test_before_training_there_is_nothing_to_lose(trained):
    layer = trained.dual.at(0).compact(1)["0"]
    assert layer.error == 0
    assert torch.equal(layer.weight, trained.checkpoints[0]["0.weight"])


@pytest.mark.parametrize("rank", [0, -1, 5, 1.5, True, "2"])
def test_a_rank_that_cannot_be(dual, rank):
    with pytest.raises(QuestionError, match=r"layer '2' has 7 inputs and 4 outputs, .* from 1 to 4.*layers="):
        dual.compact(rank, layers="2")


def test_an_unknown_layer(dual):
    with pytest.raises(UnknownLayerError, match="'4' was not recorded"):
        dual.compact(1, layers="4")


def test_it_says_how_much_is_saved(dual):
    assert "2 of 30 slots, error " in repr(dual.compact(2))


def test_with_the_adam_family_too(tmp_path):
    run = train(tmp_path / "run", optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    layer = run.dual.compact(4)["2"]
    torch.testing.assert_close(layer.weight, run.model[2].weight.detach(), rtol=0, atol=1e-12)


def test_a_convolution_and_an_embedding(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(12, 4)).double()
    run = train(tmp_path / "run", model=model)
    found = run.dual.compact(2, layers="1")
    torch.testing.assert_close(found.model()[1].weight.detach().reshape(3, 2), found["1"].weight, **TIGHT)
    torch.testing.assert_close(found.model()(INPUTS), run.model(INPUTS), rtol=0, atol=1e-12)

    words = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 4)).double()
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    numbers = torch.tensor([[0, 1], [2, 3], [4, 5]])
    with dualform.record(words, optimizer, tmp_path / "words", dtype="float64") as recorder:
        for _ in range(3):
            recorder.batch(sample_id=torch.arange(3))
            optimizer.zero_grad()
            nn.functional.cross_entropy(words(numbers), torch.arange(3)).backward()
            optimizer.step()
    found = dualform.open(tmp_path / "words", words).compact(3)
    torch.testing.assert_close(found.model()(numbers), words(numbers), rtol=0, atol=1e-12)


def test_layers_that_are_several_matrices_stay_slots(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (5, 1)), nn.RNN(1, 4, batch_first=True)).double()

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x)[0][:, -1]

    run = train(tmp_path / "run", model=Last())
    found = run.dual.compact(1)
    assert next(iter(found.values())).rank == 1
    with pytest.raises(QuestionError, match=r"several matrices at once.*layers="):
        found.model()


def test_without_a_model_and_with_keys_only(trained, tmp_path):
    found = dualform.open(trained.path).compact(1)
    assert found["0"].rank == 1
    with pytest.raises(QuestionError, match="needs the model"):
        found.model()
    run = train(tmp_path / "run", keep="keys")
    with pytest.raises(NotRecordedError, match=r"compact\(\) needs error signals"):
        run.dual.compact(1)
