"""Collections of other networks than an MLP: their slots make the gradients that autograd gives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualform
from dualform.query.influence.segments import segments

LINEAR = [["weight"], ["weight", "bias"], ["table", "bias"]]
"""The uses of nn.Linear, and of GPT-2's layers, whose weights are turned."""


def summed_gradients(model, loss_fn, batches):
    """Σ over batches of ∂loss/∂parameter, by autograd alone."""
    model = copy.deepcopy(model).eval()
    model.zero_grad()
    for batch in batches:
        loss_fn(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_slots_make_gradients(path, model, expected):
    """Of each layer that is a plain linear map: Σ error ⊗ key is the gradient."""
    store = dualform.open(path).store
    compared = 0
    for layer in store.manifest.layers:
        is_shared = len(store.users(layer.uses[0].parameter)) > 1
        if is_shared or layer.form != "vectors" or [use.role for use in layer.uses] not in LINEAR:
            continue
        found = 0
        for chunk in store.chunks(layer.name):
            keys = chunk.keys(torch.float64, 0, chunk.slots).vectors()
            found = found + chunk.errors(torch.float64, 0, chunk.slots).T @ keys
        name = layer.uses[0].parameter
        weight = expected[name]
        found = found.T if layer.uses[0].role == "table" else found
        torch.testing.assert_close(found, weight, rtol=1e-9, atol=1e-12, msg=name)
        compared += 1
    assert compared


def test_a_convolutional_network(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    inputs, labels = torch.randn(10, 1, 6, 6).double(), torch.arange(10) % 4
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    path = dualform.collect(model, loader, loss_fn, tmp_path / "run", columns={"label": 1})
    dual = dualform.open(path, model)
    assert dual.layers == ["0", "1", "4"]
    assert dual.verify().passed
    assert_slots_make_gradients(path, model, summed_gradients(model, loss_fn, list(loader)))
    found = dual.influence(inputs[:2])
    assert found.top(3, by="sample_id").height == 6
    assert set(found.total("label")["label"]) == {0, 1, 2, 3}


@pytest.fixture
def language():
    pytest.importorskip("transformers")
    tokens = torch.arange(24).reshape(6, 4) % 11 + 2
    return [{"input_ids": tokens[low : low + 2], "labels": tokens[low : low + 2]} for low in (0, 2, 4)]


def of_hugging_face(model, batch):
    return model(**batch).loss


def gpt2(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config).double()


def test_gpt2(tmp_path, language):
    """Dropout is off in evaluation mode; the tied weight is in a checkpoint under one of its names."""
    model, trained = gpt2(), gpt2(seed=1)
    trained.save_pretrained(tmp_path / "checkpoint-7")
    path = dualform.collect(
        model, language, of_hugging_face, tmp_path / "run", checkpoints=[gpt2().state_dict(), tmp_path / "checkpoint-7"]
    )
    dual = dualform.open(path, model)
    assert dual.checkpoints["name"].to_list() == ["checkpoint 0", f"{tmp_path.name}/checkpoint-7"]
    assert dual.verify().passed
    for name, value in dual.model().state_dict().items():
        torch.testing.assert_close(value, trained.state_dict()[name], rtol=0, atol=0)
    expected = [summed_gradients(one, of_hugging_face, language) for one in (gpt2(), trained)]
    both = {name: sum(one[name] for one in expected) for name in expected[0]}
    assert_slots_make_gradients(path, model, both)
    found = dual.influence({"input_ids": language[0]["input_ids"]}, target="next token")
    assert found.segments == [(0, 3), (3, 6)]
    assert found.top(2, by="sample_id").height == 4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters(tmp_path, language):
    """The base is frozen, and not stored; a checkpoint holds the adapter alone."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True
    )
    model = peft.get_peft_model(gpt2(), config)
    adapter = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    other = {name: value + 0.1 for name, value in adapter.items()}
    path = dualform.collect(
        model, language, of_hugging_face, tmp_path / "run", checkpoints={"half": other, "end": adapter}
    )
    dual = dualform.open(path, model)
    assert all("lora_" in name for name in dual.layers)
    assert dual.verify().passed
    assert dual.store.manifest.base
    expected = summed_gradients(model, of_hugging_face, language)
    assert_slots_make_gradients_of(dual, expected, begin=3)
    assert dual.influence({"input_ids": language[0]["input_ids"]}, target="next token").top(1).height == 2
    assert dual.store.nbytes < 400_000


def assert_slots_make_gradients_of(dual, expected, begin):
    for layer in dual.store.manifest.layers:
        found = 0
        for chunk in dual.store.chunks(layer.name, begin_step=begin):
            inside = torch.from_numpy(chunk.per_slot(chunk.blocks[:, 0]) >= begin)
            keys = chunk.keys(torch.float64, 0, chunk.slots).vectors()[inside]
            found = found + chunk.errors(torch.float64, 0, chunk.slots)[inside].T @ keys
        [use] = layer.uses
        torch.testing.assert_close(found, expected[use.parameter], rtol=1e-9, atol=1e-12, msg=use.parameter)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch about itself
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`")
def test_a_compiled_model(tmp_path):
    from training import network, samples

    model = network()
    compiled = torch.compile(model, backend="eager")
    loader = DataLoader(TensorDataset(*samples()), batch_size=4)

    def loss_fn(model, batch):
        assert model is compiled
        return F.cross_entropy(model(batch[0]), batch[1])

    path = dualform.collect(compiled, loader, loss_fn, tmp_path / "run", checkpoints=[model.state_dict()])
    dual = dualform.open(path, model)
    assert dual.verify().passed
    assert len(segments(dual.store, dual.end_step)) == 1


def test_batch_encodings_of_a_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    encodings = [
        transformers.BatchEncoding(
            {"input_ids": torch.arange(8).reshape(2, 4) + low, "doc": torch.tensor([low, low + 1])}
        )
        for low in (0, 2)
    ]

    def loss_fn(model, batch):
        return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    path = dualform.collect(gpt2(), encodings, loss_fn, tmp_path / "run", columns=["doc"])
    assert dualform.open(path).rows["doc"].to_list() == [0, 1, 2, 3]
