"""dualform.estimate: what it says beforehand, against the bytes of real recordings."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import QuestionError
from dualform.store.format import size_text

CLASSES, WIDTH, TIME, ROWS, STEPS = 30, 48, 40, 16, 5


class Gpt(nn.Module):
    """Separate projections of one input, a shared position embedding, normalisations, a head without a bias."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(TIME, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, 16) for _ in range(3))
        self.out, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        y = self.norm(x)
        mixed = F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y), is_causal=True)
        return self.head(x + self.out(mixed)).mean(1)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(12, 20, num_layers=2, batch_first=True), nn.Linear(20, CLASSES)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(TIME * WIDTH, CLASSES))


NETWORKS = {
    "gpt": (Gpt, lambda: torch.stack([torch.randperm(TIME) % CLASSES for _ in range(ROWS)])),
    "lstm": (Lstm, lambda: torch.randn(ROWS, TIME, 12)),
    "cnn": (cnn, lambda: torch.randn(ROWS, 3, 16, 16)),
    "encoder": (encoder, lambda: torch.randn(ROWS, TIME, WIDTH)),
    "plain": (
        lambda: nn.Sequential(nn.Linear(100, 64), nn.Tanh(), nn.Linear(64, CLASSES)),
        lambda: torch.randn(ROWS, 100),
    ),
}


def recorded(name, path, steps=STEPS, **settings):
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for _ in range(steps):
            recorder.batch(sample_id=range(ROWS))
            optimizer.zero_grad()
            F.cross_entropy(model(draw()), torch.arange(ROWS) % CLASSES).backward()
            optimizer.step()
    return dualform.open(path, model).info()


def estimated(name, **settings):
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    return dualform.estimate(make(), draw(), rows=ROWS * STEPS, batch=ROWS, states=1, **settings)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("keep", ["slots", "rows", "projected", "keys"])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_within_five_percent_of_what_is_recorded(name, keep, dtype, tmp_path):
    info = recorded(name, tmp_path / "run", keep=keep, dtype=dtype)
    found = estimated(name, dtype=dtype)
    chunks = sum(file.stat().st_size for file in (tmp_path / "run").glob("chunk-*/*"))
    assert found.bytes_of_slots(keep) == pytest.approx(chunks, rel=0.05)
    assert found.snapshots(keep) == len(info["snapshots"])
    assert found.bytes_of_snapshots(keep) == pytest.approx(info["snapshot_bytes"], rel=0.05)


@pytest.mark.parametrize("every", [1, 2])
def test_layers_may_differ_and_steps_be_left_out(every, tmp_path):
    names = [layer.name for layer in estimated("gpt").layers]
    keep = {names[0]: "keys", names[1]: "rows", "*": "projected"}
    recorded("gpt", tmp_path / "run", steps=8, keep=keep, projection=8, every=every)
    chunks = sum(file.stat().st_size for file in (tmp_path / "run").glob("chunk-*/*"))
    torch.manual_seed(0)
    make, draw = NETWORKS["gpt"]
    found = dualform.estimate(make(), draw(), rows=ROWS * 8, batch=ROWS, states=1, projection=8, every=every)
    assert found.bytes_of_slots(keep) == pytest.approx(chunks, rel=0.06)
    assert found.bytes_per_row(keep) < found.bytes_per_row("projected") + found.bytes_per_row("rows")


def test_inputs_that_come_again_are_stored_once(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(200, 4)
    inputs = torch.randn(ROWS, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(20):
            recorder.batch(sample_id=range(ROWS))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    found = dualform.estimate(model, inputs, rows=20 * ROWS, batch=ROWS, samples=ROWS)
    chunks = sum(file.stat().st_size for file in (tmp_path / "run").glob("chunk-*/*"))
    assert found.bytes_of_slots() == pytest.approx(chunks, rel=0.05)


def test_a_model_of_tokens_needs_no_example_and_no_memory():
    with torch.device("meta"):
        model = Gpt()
    on_meta = dualform.estimate(model, rows=100, positions=TIME, batch=4)
    found = dualform.estimate(Gpt(), rows=100, positions=TIME, batch=4)
    assert found.frame.equals(on_meta.frame)
    assert found.frame["slots"].to_list() == [TIME] * 8
    assert found.nbytes("rows") < found.nbytes("slots")


def test_the_model_stays_as_it_was():
    model = cnn()
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    dualform.estimate(model, torch.zeros(2, 3, 16, 16), rows=1)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_is_left_out_takes_nothing():
    model = cnn()
    every = dualform.estimate(model, torch.zeros(1, 3, 16, 16), rows=10)
    some = dualform.estimate(model, torch.zeros(1, 3, 16, 16), rows=10, layers=["7"], outputs={"7": [0, 1]})
    assert some.frame["layer"].to_list() == ["7"]
    assert some.bytes_per_row() == pytest.approx(56 + 4 * (16 + 2))
    assert every.bytes_per_row() > some.bytes_per_row()


def test_it_can_be_printed():
    found = dualform.estimate(Gpt(), rows=10_000, positions=TIME, batch=10)
    text = str(found)
    assert text.startswith("10,000 rows in 1,000 steps, 8 layers, float32")
    assert 'keep="rows": ' in text
    assert f"{size_text(found.nbytes('slots'))} in all" in text
    assert [size_text(n) for n in (999, 1e3, 2.5e6, 3.456e9, 7e12)] == [
        "999 bytes",
        "1 kB",
        "2.5 MB",
        "3.46 GB",
        "7 TB",
    ]
    told = found.to_dict()
    assert told["keep"]["rows"]["bytes"] == found.nbytes("rows")
    assert len(told["layers"]) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0, "positions": 2}, "rows=0: expected a whole number of at least 1"),
        ({"rows": 1, "positions": 2, "batch": 1.5}, r"batch=1\.5"),
        ({"rows": 1, "positions": 2, "dtype": "int8"}, "dtype='int8': expected one of"),
        ({"rows": 1}, "either example=.*or positions="),
        ({"rows": 1, "example": torch.zeros(2, 3), "positions": 2}, "either example=.*or positions="),
        ({"rows": 1, "example": torch.zeros(2, 3)}, r"did not run on the example: RuntimeError.*Give example="),
        ({"rows": 1, "example": "text"}, "example=str: expected a tensor"),
    ],
)
def test_what_cannot_be_estimated_is_said(settings, message):
    with pytest.raises(QuestionError, match=message):
        dualform.estimate(Gpt(), **settings)


def test_bytes_are_told_of_what_grows_with_rows_only():
    found = dualform.estimate(Gpt(), rows=10, positions=4)
    with pytest.raises(QuestionError, match="keep='totals': expected one of 'slots', 'rows', 'projected', 'keys'"):
        found.nbytes("totals")
    assert found.bytes_per_group > 0
