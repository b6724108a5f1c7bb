"""Key sums by position of a text, for an LSTM: what the slots say, without error signals and without growing."""

import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.layers import recurrent
from dualform.record import finished

TOKENS, ROWS, WINDOW, WIDTH = 24, 3, 4, 5
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def train(path, kind="LSTM", steps=7, *, layers=1, throw_away=False, in_place=False, set_to_none=True, **options):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"rnn": KINDS[kind](2, WIDTH, num_layers=layers, batch_first=True), "head": nn.Linear(WIDTH, 1)}
    )
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    text = torch.randn(TOKENS, 2, dtype=torch.float64)
    state = None
    with dualform.record(model, optimizer, path, layers=["rnn"], **options) as recorder:
        for step in range(steps):
            positions = (torch.arange(ROWS)[:, None] * 8 + step * WINDOW + torch.arange(WINDOW)) % TOKENS
            for throw in [True, False] if throw_away else [False]:
                recorder.batch(text_position=positions)
                output, after = model["rnn"](text[positions], state)
                output = output.mul_(0.5) if in_place else output
                model["head"](output).square().mean().backward()
                if throw:
                    optimizer.zero_grad(set_to_none=set_to_none)
            state = tuple(part.detach() for part in after) if kind == "LSTM" else after.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path), text


def sums(dual, layer="rnn"):
    """(positions, width) key sums, by asking for each unit vector."""
    width = dual.store.layer(layer)[1].d_in
    found = dual.attend({layer: torch.eye(width, dtype=torch.float64)})[layer].total("text_position")
    return found.pivot(on="query", index="text_position", values="total").sort("text_position")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"layers": 2}, {"throw_away": True}, {"throw_away": True, "set_to_none": False}]
)
def test_totals_are_the_sums_over_slots(tmp_path, kind, options, monkeypatch):
    monkeypatch.setattr(finished, "STRETCH_BYTES", 3000)
    assert_the_sums_over_slots(tmp_path, kind, options)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_an_output_that_is_changed_in_place_shows_no_states(tmp_path, kind):
    assert_the_sums_over_slots(tmp_path, kind, {"in_place": True})


def assert_the_sums_over_slots(folder, kind, options):
    kept, _ = train(folder / "totals", kind, keep="totals", totals={"text_position": "keys"}, **options)
    slots, _ = train(folder / "slots", kind, **options)
    for layer in kept.layers:
        ours, theirs = sums(kept, layer), sums(slots, layer)
        assert ours["text_position"].equals(theirs["text_position"])
        torch.testing.assert_close(
            ours.to_torch(dtype=pl.Float64), theirs.to_torch(dtype=pl.Float64), rtol=1e-12, atol=1e-12
        )
        query = torch.randn(1, slots.store.layer(layer)[1].d_in, dtype=torch.float64)
        ours, theirs = (dual.attend({layer: query})[layer].top(5, by="text_position") for dual in (kept, slots))
        assert ours.drop("weight").equals(theirs.drop("weight"))


def test_the_plain_sum(tmp_path):
    """Beside a loop over a cell that knows nothing of recorders; one step, so that the weights are the first ones."""
    kept, text = train(tmp_path / "run", steps=1, keep="totals", totals={"text_position": "keys"})
    torch.manual_seed(0)
    cell = nn.LSTM(2, WIDTH, batch_first=True).double()
    expected = {}
    for row in range(ROWS):
        h = c = torch.zeros(1, 1, WIDTH, dtype=torch.float64)
        for position in range(row * 8, row * 8 + WINDOW):
            x = text[position]
            expected[position] = torch.cat([x, h[0, 0]]).tolist()
            _, (h, c) = cell(x[None, None], (h.detach(), c.detach()))
            h = h.detach()
    found = sums(kept)
    assert found["text_position"].to_list() == sorted(expected)
    torch.testing.assert_close(
        found.drop("text_position").to_torch(dtype=pl.Float64),
        torch.tensor([expected[p] for p in sorted(expected)], dtype=torch.float64),
    )


def test_gates_are_not_computed_again_for_keys_alone(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("unrolled")

    monkeypatch.setattr(recurrent, "unroll", never)
    train(tmp_path / "run", keep="totals", totals={"text_position": "keys"})
    with pytest.raises(AssertionError, match="unrolled"):
        train(tmp_path / "deltas", keep="totals", totals={"text_position": "both"})


def test_disk_is_the_same_after_one_and_after_a_hundred_epochs(tmp_path):
    epoch = TOKENS // (ROWS * WINDOW)
    sizes = {}
    for epochs in (1, 100):
        dual, _ = train(tmp_path / str(epochs), steps=epochs * epoch, keep="totals", totals={"text_position": "keys"})
        (file,) = (tmp_path / str(epochs)).glob("totals-*/totals.safetensors")
        sizes[epochs] = dual.store.totals()["0.0.keys"].nbytes, file.stat().st_size
        assert dual.store.totals()["0.0.visits"].tolist() == [epochs] * TOKENS
    assert sizes[1][0] == sizes[100][0]
    assert abs(sizes[1][1] - sizes[100][1]) <= 64  # digits of the numbers in the header
    assert sizes[1][0] == TOKENS * (2 + WIDTH) * 8  # float64 here; 4 bytes in float32
