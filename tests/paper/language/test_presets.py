"""The two presets of the language models: as the authors' code has them, and as the paper's text says."""

import math

import pytest
import torch

from dualform.errors import QuestionError
from dualform.language.model import build_model
from dualform.language.shape import Shape
from dualform_paper.language.corpora import load
from dualform_paper.language.queries import papers
from dualform_paper.language.settings import Order, settings_for
from dualform_paper.language.training import adam, batch_of, initial_model

CHARACTERS, WORDS = 74, 33_278


def sizes(model):
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def test_released_aesop_maps_embeddings_to_the_width_of_the_lstm():
    model = initial_model(settings_for("aesop"), CHARACTERS)
    assert sizes(model) == {
        "embedding.weight": (74, 64),
        "between.weight": (1024, 64),
        "between.bias": (1024,),
        "lstm.weight_ih_l0": (4096, 1024),
        "lstm.weight_hh_l0": (4096, 1024),
        "lstm.bias_ih_l0": (4096,),
        "lstm.bias_hh_l0": (4096,),
        "decoder.weight": (74, 1024),
        "decoder.bias": (74,),
    }
    assert settings_for("aesop", state=16).between == 16


def test_the_text_has_no_map_between_embedding_and_lstm():
    model = initial_model(settings_for("aesop", preset="text"), CHARACTERS)
    assert sizes(model)["lstm.weight_ih_l0"] == (4096, 64)
    assert not any(name.startswith("between") for name in sizes(model))


@pytest.mark.parametrize("preset", ["released", "text"])
def test_wikitext_has_no_map_in_either_preset(preset):
    shape = settings_for("wikitext-2", preset=preset).shape(WORDS)
    assert (shape.embedding, shape.between, shape.state, shape.key) == (200, 0, 200, 400)


@pytest.mark.parametrize("text", ["aesop", "wikitext-2"])
def test_released_embeddings_are_uniform(text):
    weight = initial_model(settings_for(text), CHARACTERS).embedding.weight.detach()
    assert weight.abs().max() <= 0.1
    assert weight.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.02)
    quarters = torch.histc(weight, 4, -0.1, 0.1) / weight.numel()
    assert quarters.tolist() == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize("text", ["aesop", "wikitext-2"])
def test_embeddings_of_the_text_preset_are_normal(text):
    weight = initial_model(settings_for(text, preset="text"), CHARACTERS).embedding.weight.detach()
    assert weight.std().item() == pytest.approx(1.0, rel=0.05)


def test_all_other_weights_have_pytorchs_initialisation():
    torch.manual_seed(3)
    lstm = torch.nn.LSTM(1024, 1024)
    model = initial_model(settings_for("aesop"), CHARACTERS)
    for name, expected in lstm.named_parameters():
        found = model.lstm.get_parameter(name)
        assert found.abs().max() <= 1 / math.sqrt(1024)
        assert found.std().item() == pytest.approx(expected.std().item(), rel=0.05)


def test_seeds_and_presets_give_other_weights():
    same = [initial_model(settings_for("aesop", "small", seed=1), 9).embedding.weight for _ in range(2)]
    assert torch.equal(*same)
    other = initial_model(settings_for("aesop", "small", seed=2), 9).embedding.weight
    assert not torch.equal(same[0], other)


def zeros_seen_by(module, model):
    """The share of zeros in a module's input during training."""
    shares = []
    handle = module.register_forward_pre_hook(lambda _, inputs: shares.append(float((inputs[0] == 0).float().mean())))
    model(torch.arange(200)[None] % 9)
    handle.remove()
    return shares[0]


def test_dropout_acts_on_the_embedding_before_the_map_and_nowhere_else():
    model = build_model(Shape(9, 64, 64, dropout=0.5, between=64), 0)
    assert zeros_seen_by(model.between, model) == pytest.approx(0.5, abs=0.05)
    assert zeros_seen_by(model.lstm, model) == 0
    assert zeros_seen_by(model.decoder, model) == 0
    model.eval()
    assert zeros_seen_by(model.between, model) == 0


@pytest.mark.parametrize(("preset", "at_output"), [("released", 0.0), ("text", 0.5)])
def test_dropout_of_wikitext(preset, at_output):
    model = initial_model(settings_for("wikitext-2", preset=preset), 9)
    assert zeros_seen_by(model.lstm, model) == pytest.approx(0.5, abs=0.05)
    assert zeros_seen_by(model.decoder, model) == pytest.approx(at_output, abs=0.05)


@pytest.mark.parametrize("preset", ["released", "text"])
def test_aesop_has_no_dropout(preset):
    model = initial_model(settings_for("aesop", preset=preset), 9)
    assert zeros_seen_by(model.lstm, model) == zeros_seen_by(model.decoder, model) == 0


@pytest.mark.parametrize(
    ("text", "preset", "lr", "weight_decay"),
    [
        ("aesop", "released", 1e-3, 1e-7),
        ("aesop", "text", 1e-3, 0.0),
        ("wikitext-2", "released", 3e-3, 1e-7),
        ("wikitext-2", "text", 3e-3, 1e-7),
    ],
)
def test_optimizer(text, preset, lr, weight_decay):
    settings = settings_for(text, preset=preset)
    optimizer = adam(initial_model(settings, 9), settings)
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (lr, weight_decay, (0.9, 0.999), 1e-8)
    assert not group["amsgrad"]


@pytest.mark.parametrize(
    ("text", "batch", "steps", "clip"), [("aesop", 64, 5000, 1.0), ("wikitext-2", 128, 10_000, 0.3)]
)
@pytest.mark.parametrize("preset", ["released", "text"])
def test_batches_steps_and_clipping(text, batch, steps, clip, preset):
    settings = settings_for(text, preset=preset)
    assert (settings.batch, settings.window, settings.steps, settings.clip) == (batch, 100, steps, clip)
    assert settings.forget == 0.01
    assert (settings.epochs, settings.forget_together) == ((True, True) if preset == "released" else (False, False))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "steps_of_an_epoch", "read"), [("aesop", 18, 115_200), ("wikitext-2", 163, 2_086_400)]
)
def test_positions_that_the_released_order_reads(name, steps_of_an_epoch, read):
    text = load(name)
    settings = settings_for(name)
    begins = [step for step in range(1, 400) if batch_of(text.train.ids, step, settings).starts_epoch]
    assert begins[0] == steps_of_an_epoch
    positions = torch.cat([batch_of(text.train.ids, step, settings).positions for step in range(steps_of_an_epoch)])
    assert torch.equal(positions.flatten().sort().values, torch.arange(read))
    # The paper's passages are all read. The query of Table 4, from the training text, stands in the part that never is.
    for query in papers(text):
        assert max(query.theirs) < read
        if query.part == "train":
            assert query.position >= read


def test_settings_are_recorded_with_their_preset():
    recorded = settings_for("wikitext-2", "small", steps=7, state=9, seed=3).to_dict()
    assert (recorded["preset"], recorded["state"], recorded["steps"], recorded["seed"]) == ("released", 9, 7, 3)
    assert recorded["embedding_range"] == 0.1


def test_unknown_settings_are_named():
    with pytest.raises(QuestionError, match="there are no settings for faust paper; expected one of aesop paper"):
        settings_for("faust")
    with pytest.raises(QuestionError, match="preset 'vanilla': expected one of released, text"):
        settings_for("aesop", preset="vanilla")
    for share in (0.0, 1.5):
        with pytest.raises(QuestionError, match=f"predicted {share:g}: expected a share of the tokens"):
            settings_for("aesop", predicted=share)
    for name in ("steps", "state"):
        with pytest.raises(QuestionError, match=f"{name} 0: expected at least 1"):
            settings_for("aesop", **{name: 0})


@pytest.mark.parametrize(
    ("order", "folder", "command"),
    [
        (Order(), "aesop-released", "dualform paper aesop --preset released"),
        (Order("text", seed=2), "aesop-text-seed-2", "dualform paper aesop --preset text --seed 2"),
        (
            Order(size="small", steps=3, state=8, minutes=2.0, predicted=0.25, all_slots=True),
            "aesop-released-small",
            "dualform paper aesop --preset released --size small --steps 3 --state-size 8 --minutes 2.0 --predicted 0.25 --slots",
        ),
    ],
)
def test_folder_and_command_of_an_order(order, folder, command):
    assert order.folder("aesop") == folder
    assert order.command("aesop") == command
    assert order.settings("aesop").preset == order.preset
