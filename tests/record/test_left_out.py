"""What is left out of a recording, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import dualform
from dualform.errors import RecordingError
from recorded_networks import CLASSES, WIDTH, assert_exact, train, vectors


def old_weight_norm(module, name="weight"):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module, name)


class Doubled(nn.LSTM):
    def forward(self, x, state=None):
        return super().forward(2 * x, state)


LEFT_OUT = {
    "old-style weight normalisation": (lambda: old_weight_norm(nn.Linear(3, 3)), "weight is no parameter"),
    "of a convolution": (lambda: old_weight_norm(nn.Conv1d(3, 3, 2)), "weight is no parameter"),
    "of an LSTM": (lambda: old_weight_norm(nn.LSTM(3, 3), "weight_hh_l0"), "one of its weights is no parameter"),
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(3, 3)), "its weight is parametrised"),
    "spectral": (lambda: parametrizations.spectral_norm(nn.Conv2d(3, 3, 2)), "its weight is parametrised"),
    "inside an attention": (lambda: attention_with(parametrizations.weight_norm), "parametrised"),
    "bag": (lambda: nn.EmbeddingBag(3, 3), "no rule covers a parameter of EmbeddingBag"),
    "sparse": (lambda: nn.Embedding(3, 3, sparse=True), r"sparse \(sparse=True\)"),
    "max_norm": (lambda: nn.Embedding(3, 3, max_norm=1.0), "max_norm changes its weight during the forward pass"),
    "proj_size": (lambda: nn.LSTM(3, 3, proj_size=2), r"\(proj_size\)"),
    "a forward of its own": (lambda: Doubled(3, 3), "its type Doubled has a forward of its own"),
    "complex": (lambda: nn.Linear(3, 3, dtype=torch.complex64), "its weight is complex64"),
    "lazy": (lambda: nn.LazyLinear(3), "lazy layer"),
    "transposed": (lambda: nn.ConvTranspose1d(3, 3, 2), "no rule covers a parameter of ConvTranspose1d"),
}


def attention_with(change):
    attention = nn.MultiheadAttention(3, 1)
    change(attention.out_proj)
    return attention


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("layer", LEFT_OUT)
def test_a_layer_that_is_left_out_is_named_once_with_the_reason(path, layer):
    make, reason = LEFT_OUT[layer]
    model = nn.ModuleDict({"fine": nn.Linear(3, 2), "odd": make()})
    trained = [p for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with pytest.warns(UserWarning, match=f"not recorded: 'odd.*{reason}") as said:
        recorder = dualform.record(model, optimizer, path)
    assert len(said) == 1
    with recorder:
        for _ in range(2):
            recorder.batch(sample_id=[1, 2])
            optimizer.zero_grad()
            model["fine"](torch.randn(2, 3)).square().sum().backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert dual.verify().passed
    assert any(name.startswith("odd") for name in dual.info()["left_out"])


def test_what_no_rule_covers_inside_an_attention_is_named(path):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True, add_zero_attn=True)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = x.transpose(0, 1)
            return self.head(self.attention(x, x, x)[0].mean(0))

    with pytest.warns(UserWarning, match="'attention.bias_k': no rule covers .*'attention.bias_v': no rule covers"):
        run = train((Biased, vectors), "adamw", path)
    assert_exact(run.dual)


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (nn.DataParallel, r"DataParallel runs copies of the model.*record\(model\.module, …\)"),
        (lambda model: nn.Sequential(nn.DataParallel(model)), "DataParallel runs copies"),
    ],
)
def test_models_that_run_as_something_else_are_refused(path, wrapped, words):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingError, match=words):
        dualform.record(wrapped(model), optimizer, path)
    assert not path.exists()
