import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dualform.errors import RecordingError
from dualform.record.choose import choose, summary


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)


def chosen(model, wanted=None, optimizers=None):
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)] if optimizers is None else optimizers
    choice = choose(model, optimizers, wanted)
    return [module.name for module in choice.recorded], choice.left_out


EVERY = ["blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "head", "norm"]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, EVERY),
        ("head", ["head"]),
        ("*.first", ["blocks.0.first", "blocks.1.first"]),
        (["head", "blocks.1.*"], ["blocks.1.first", "blocks.1.second", "head"]),
        (["head", "*"], EVERY),
    ],
)
def test_layers_by_name_or_glob_in_the_order_of_the_model(wanted, names):
    assert chosen(Model(), wanted) == (names, {})


def test_a_model_that_is_itself_a_layer():
    assert chosen(nn.Linear(2, 3)) == ([""], {})


@pytest.mark.parametrize("wanted", ["tail", ["head", "tail"], "blocks"])
def test_a_name_that_fits_nothing(wanted):
    with pytest.raises(RecordingError, match=r"names no layer that can be recorded.*'blocks\.0\.first'.*'head'"):
        chosen(Model(), wanted)


def test_not_in_the_optimizer():
    model = Model()
    names, left_out = chosen(model, None, [torch.optim.SGD(model.blocks.parameters(), lr=0.1)])
    assert names == EVERY[:-2]
    assert left_out == dict.fromkeys(["head", "norm"], "its weight is in no optimizer that was given")


def test_parametrised():
    model = Model()
    parametrizations.weight_norm(model.head)
    names, left_out = chosen(model)
    assert names == [*EVERY[:-2], "norm"]
    assert list(left_out) == ["head"]
    assert "parametrised" in left_out["head"]


def test_shared():
    model = Model()
    model.blocks[1].first.weight = model.blocks[0].first.weight
    assert chosen(model) == (EVERY, {})
    names, left_out = chosen(model, "blocks.0.*")
    assert names == ["blocks.0.second"]
    assert left_out == {"blocks.0.first": "its weight is shared by 'blocks.1.first', which is not recorded"}


def test_shared_with_several_modules():
    model = Model()
    for module in (model.blocks[1].first, model.blocks[1].second):
        module.weight = model.blocks[0].first.weight
    _, left_out = chosen(model, "blocks.0.*")
    reason = "its weight is shared by 'blocks.1.first' and 'blocks.1.second', which are not recorded"
    assert left_out == {"blocks.0.first": reason}


def test_an_excluded_layer_that_is_not_wanted():
    with pytest.raises(RecordingError, match=r"exclude=\['norm'\] names no layer.* There are: 'head'"):
        choose(Model(), [], "head", "norm")


def test_shared_with_an_embedding():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(5, 2))
    model[1].weight = model[0].weight
    assert chosen(model) == (["0", "1", "2"], {})


def test_shared_with_a_module_that_no_rule_covers():
    model = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 5), nn.Linear(5, 2))
    model[1].weight = model[0].weight
    names, left_out = chosen(model)
    assert names == ["2"]
    assert left_out["1"] == "its weight is shared by '0', which is not recorded"


def test_a_parameter_that_no_rule_covers_is_named():
    names, left_out = chosen(nn.Sequential(nn.Linear(3, 5), nn.PReLU(), nn.Bilinear(2, 2, 1)))
    assert names == ["0"]
    assert left_out == {
        "1.weight": "no rule covers a parameter of PReLU",
        "2.weight": "no rule covers a parameter of Bilinear",
        "2.bias": "no rule covers a parameter of Bilinear",
    }


def test_one_module_under_two_names_is_one_layer():
    layer = nn.Linear(3, 3)
    assert chosen(nn.Sequential(layer, nn.Tanh(), layer)) == (["0"], {})


def test_a_forward_of_its_own():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    names, left_out = chosen(nn.Sequential(Doubled(3, 3), nn.Linear(3, 3)))
    assert names == ["1"]
    assert left_out == {"0": "its type Doubled has a forward of its own"}


def test_a_lazy_layer_not_yet_run():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    names, left_out = chosen(model, None, [torch.optim.SGD(model[1].parameters(), lr=0.1)])
    assert names == ["1"]
    assert "lazy" in left_out["0"]


def test_nothing_to_record():
    with pytest.raises(RecordingError, match=r"no layer to record\. It has no layer of a known type"):
        chosen(nn.Sequential(nn.PReLU(3)))


def test_nothing_left_to_record_says_why():
    with pytest.raises(RecordingError, match=r"no layer to record.*'0': its weight is in no optimizer"):
        chosen(nn.Sequential(nn.Linear(3, 3)), None, [])


def test_what_several_blocks_leave_out_is_named_once():
    left_out = {"blocks.0.scale": "no rule", "blocks.1.scale": "no rule", "head": "in no optimizer"}
    assert summary(left_out) == "'blocks.*.scale' (2 of them): no rule; 'head': in no optimizer"
