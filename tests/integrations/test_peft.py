"""LoRA on embeddings, as PEFT has it: two linear maps for each adapter, in parameters that no module of their own uses."""

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("peft", reason="peft is not installed")

import peft

import dualform
from dualform.errors import RecordingError
from halves import require

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing")
TOKENS, WIDTH, RANK, ROWS, LENGTH, STEPS = 11, 6, 2, 4, 5, 8
A, B = ("base_model.model.tokens.lora_embedding_" + name for name in "AB")


class Scaled(nn.Embedding):
    """As some language models have it."""

    embed_scale = 3.0

    def forward(self, tokens):
        return super().forward(tokens) * self.embed_scale


class Network(nn.Module):
    def __init__(self, make=nn.Embedding, **settings):
        super().__init__()
        self.tokens = make(TOKENS, WIDTH, **settings)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.tokens(tokens))))


def adapted(network=None, dtype=torch.float64, targets=("tokens", "body"), **settings):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=3, target_modules=list(targets), **settings)
    return peft.get_peft_model((Network() if network is None else network).to(dtype), config).to(dtype)


def trained(path, model, steps=STEPS, before_step=lambda step: None, autocast=False, **settings):
    """Train what can be trained."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for step in range(steps):
            before_step(step)
            tokens = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)
            recorder.batch(sample_id=torch.arange(ROWS) + ROWS * (step % 3), half=torch.arange(ROWS) % 2)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(tokens)
            F.cross_entropy(output.flatten(0, 1).float(), tokens.roll(1, 1).flatten()).backward()
            optimizer.step()
    return dualform.open(path, model)


def assert_proved(dual, bound=1e-11):
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.frame["gap"].max() < bound, str(certificate)
    assert certificate.rows["assumed"].is_null().all(), str(certificate)


SETUPS = {
    "plain": lambda: adapted(),
    "padding": lambda: adapted(Network(padding_idx=0)),
    "by frequency": lambda: adapted(Network(scale_grad_by_freq=True)),
    "scaled": lambda: adapted(Network(Scaled)),
    "rsLoRA, dropout": lambda: adapted(use_rslora=True, lora_dropout=0.5),
    "base weights, too": lambda: adapted(modules_to_save=["head"]),
    "the embedding alone": lambda: adapted(targets=["tokens"]),
}


@pytest.mark.parametrize("name", SETUPS)
def test_an_adapter_of_an_embedding_is_recorded(tmp_path, name):
    model = SETUPS[name]()
    dual = trained(tmp_path / "run", model)
    assert {f"{A}.default", f"{B}.default"} <= set(dual.layers)
    assert dual.info()["left_out"] == {}
    assert_proved(dual)


def test_keys_and_error_signals_are_those_of_autograd(tmp_path):
    """Of one step: A's key is the token, its error signal the gradient of A's output; B's key is A's output."""
    model = adapted()
    with torch.no_grad():
        model.get_parameter(f"{A}.default").normal_()
    table, outward = (model.get_parameter(f"{name}.default").detach().clone() for name in (A, B))
    scaling = 3 / RANK
    tokens = torch.randint(0, TOKENS, (ROWS, LENGTH))
    inner = table.T[tokens].requires_grad_()
    added = (inner @ outward.T).detach().requires_grad_()
    plain = model.get_base_model()
    with model.disable_adapter():
        base = plain.tokens(tokens).detach()
    output = plain.head(torch.tanh(plain.body(base + scaling * added)))
    loss = F.cross_entropy(output.flatten(0, 1), tokens.flatten())
    [of_added] = torch.autograd.grad(loss, added)
    [of_inner] = torch.autograd.grad(inner @ outward.T, inner, of_added)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        recorder.batch(sample_id=range(ROWS))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    of_a, of_b = (dual.layer(f"{name}.default") for name in (A, B))
    torch.testing.assert_close(of_a.keys, F.one_hot(tokens.flatten(), TOKENS).double(), rtol=0, atol=0)
    torch.testing.assert_close(of_a.values, -0.1 * of_inner.flatten(0, 1), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(of_b.keys, inner.detach().flatten(0, 1), rtol=0, atol=0)
    torch.testing.assert_close(of_b.values, -0.1 * of_added.flatten(0, 1), rtol=1e-12, atol=1e-15)


def test_questions_are_answered(tmp_path):
    """Attention, contributions that are what a mask takes away, masks that add up, totals, influence."""
    model = adapted()
    dual = trained(tmp_path / "run", model, totals=["half"])
    tokens = torch.randint(0, TOKENS, (3, LENGTH))

    def target(output):
        return output[:, -1, 2]

    top = dual.attend(tokens)[f"{A}.default"].top(1)
    assert top["weight"].to_list() == [1.0] * (3 * LENGTH)  # each token was seen before
    kept, dropped, nothing = (
        dict(dual.masked(**asked, read="kept").named_parameters())
        for asked in ({"only": "half = 0"}, {"drop": "half = 0"}, {"only": pl.lit(False)})
    )
    for parameter in model.parameters():
        parameter.requires_grad_()
    gradients = torch.autograd.grad(target(model.eval()(tokens)).sum(), list(model.parameters()))
    slopes = {name: gradient for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True)}
    answers = dual.contributions(tokens, target=target)
    for name in (f"{A}.default", f"{B}.default"):
        trained_weight = model.get_parameter(name)
        torch.testing.assert_close(kept[name] + dropped[name] - nothing[name], trained_weight, rtol=0, atol=1e-12)
        expected = (slopes[name] * (kept[name] - nothing[name])).sum()
        total = answers[name].total("half").filter(pl.col("half") == 0)["total"].sum()
        assert total == pytest.approx(expected.item(), rel=1e-9)
    influence = dual.influence(tokens, target=target).top(3, by="sample_id")
    assert influence["influence"].is_finite().all()


def test_bfloat16_autocast(tmp_path):
    require(torch.bfloat16)
    assert_proved(trained(tmp_path / "run", adapted(dtype=torch.float32), autocast=True), bound=0.05)


def test_several_adapters_and_those_that_are_off(tmp_path):
    """Two adapters at once, one of them, and none; an adapter that is not in use has no slots."""
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["tokens", "body"]))
    model.double()

    def choose(step):
        model.base_model.set_adapter([["default"], ["default", "other"], ["other"]][step % 3])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)

    choose(1)
    dual = trained(tmp_path / "run", model, before_step=choose)
    assert dual.verify().passed, str(dual.verify())
    steps = {name: dual.slots(f"{A}.{name}")["step"].unique().sort().to_list() for name in ("default", "other")}
    assert steps == {"default": [0, 1, 3, 4, 6, 7], "other": [1, 2, 4, 5, 7]}


def test_an_adapter_that_is_turned_off_for_a_step_has_no_slots(tmp_path):
    model = adapted()
    embedding = model.get_submodule("base_model.model.tokens")

    def turn(step):
        embedding._disable_adapters = step == 3  # without freezing its parameters

    dual = trained(tmp_path / "run", model, before_step=turn)
    assert dual.verify().passed, str(dual.verify())
    assert dual.slots(f"{A}.default")["step"].unique().sort().to_list() == [0, 1, 2, 4, 5, 6, 7]


def test_dora_is_left_out_by_name(tmp_path):
    model = adapted(use_dora=True)
    with pytest.warns(UserWarning, match=r"tokens.*without variants \(use_dora=True"):
        dual = trained(tmp_path / "run", model)
    assert dual.verify().passed
    assert not any("tokens" in name for name in dual.layers)


@pytest.mark.parametrize(("settings", "words"), [({"max_norm": 1.0}, "max_norm"), ({"sparse": True}, "sparse")])
def test_embeddings_that_cannot_be_recorded_have_no_adapters_either(tmp_path, settings, words):
    model = adapted(Network(**settings), targets=["tokens"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(RecordingError, match=words):
        dualform.record(model, optimizer, tmp_path / "run")


def test_a_language_model_names_its_documents(tmp_path):
    """GPT-2 with adapters alone: the base embedding, which the output layer shares, is frozen."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": TOKENS}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    config = peft.LoraConfig(r=RANK, target_modules=["wte", "c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(1, TOKENS, (ROWS, LENGTH))
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(4):
            recorder.batch(sample_id=range(ROWS))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_proved(dual, bound=1e-5)
    sources = dual.sources(tokens[:1], tokens[0, -2:].tolist())
    assert sources.documents == ROWS
