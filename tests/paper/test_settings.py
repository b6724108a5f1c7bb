from dataclasses import replace

import pytest

from dualform.errors import QuestionError
from dualform_paper.settings import Phase, Preset, settings_for
from dualform_paper.training import network

MNIST, FASHION = ("mnist",), ("fashion-mnist",)


def test_presets():
    assert settings_for("joint").preset == Preset(lr=3e-3, momentum=0.9, clip=1.0)
    assert settings_for("joint", optimizer="vanilla").preset == Preset(lr=3e-2, momentum=0.0, clip=None)


@pytest.mark.parametrize(
    ("experiment", "options", "phases"),
    [
        ("single-task", {}, [Phase(MNIST, 3000)]),
        ("joint", {}, [Phase(MNIST + FASHION, 5000)]),
        ("continual", {}, [Phase(MNIST, 3000), Phase(FASHION, 3000)]),
        ("continual", {"reverse": True}, [Phase(FASHION, 3000), Phase(MNIST, 3000)]),
        ("continual", {"long": True}, [Phase(MNIST, 3000), Phase(FASHION, 7000)]),
        ("continual", {"long": True, "reverse": True}, [Phase(FASHION, 3000), Phase(MNIST, 7000)]),
        ("continual", {"steps": 5}, [Phase(MNIST, 5), Phase(FASHION, 5)]),
        ("continual", {"steps": 5, "reverse": True}, [Phase(FASHION, 5), Phase(MNIST, 5)]),
        ("joint", {"steps": 1}, [Phase(MNIST + FASHION, 1)]),
    ],
)
def test_phases(experiment, options, phases):
    settings = settings_for(experiment, **options)
    assert list(settings.phases) == phases
    assert settings.steps == sum(phase.steps for phase in phases)
    assert settings.slots == 128 * settings.steps
    assert settings.experiment == experiment


def test_datasets_in_the_order_of_their_first_appearance():
    assert settings_for("single-task").datasets == MNIST
    assert settings_for("joint").datasets == MNIST + FASHION
    assert settings_for("continual", reverse=True).datasets == FASHION + MNIST
    thrice = replace(settings_for("continual"), phases=(Phase(FASHION, 1), Phase(MNIST + FASHION, 1), Phase(MNIST, 1)))
    assert thrice.datasets == FASHION + MNIST


def test_the_paper_s_network_and_others():
    shapes = [tuple(value.shape) for value in network(settings_for("joint")).parameters()]
    assert shapes == [(800, 784), (800,), (800, 800), (800,), (10, 800), (10,)]
    small = settings_for("joint", width=3, batch=2, seed=7, raw_pixels=True, train_images=10, test_images=5, top=4)
    assert (small.width, small.batch, small.seed, small.raw_pixels, small.top) == (3, 2, 7, True, 4)
    assert not network(small)[0].weight.equal(network(replace(small, seed=8))[0].weight)
    assert network(small)[0].weight.equal(network(small)[0].weight)


def test_plain_data_replays_it():
    told = settings_for("continual", steps=2).to_dict()
    assert told["phases"] == ({"datasets": MNIST, "steps": 2}, {"datasets": FASHION, "steps": 2})
    assert told["seed"] == 0
    assert told["optimizer"] == "reference"


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        ("cifar", {}, "experiment 'cifar': expected one of single-task, joint, continual"),
        ("joint", {"optimizer": "adam"}, "optimizer 'adam': expected one of reference, vanilla"),
        ("joint", {"reverse": True}, "variants of continual learning"),
        ("single-task", {"long": True}, "variants of continual learning"),
        ("continual", {"steps": 0}, "steps 0: expected at least 1"),
    ],
)
def test_what_makes_no_sense(experiment, options, message):
    with pytest.raises(QuestionError, match=message):
        settings_for(experiment, **options)
