"""Targets by name: next tokens and completions of language models; outputs and inputs as Hugging Face has them."""

import pytest
import torch
from torch.nn import functional as F

import documents
from dualform.errors import QuestionError
from dualform.query.targets import CompletionTokens, logits_of, predicts_next_token

transformers = pytest.importorskip("transformers")
PROMPTS = list(documents.FACTS)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return documents.train(tmp_path_factory.mktemp("gpt2") / "run", epochs=4)


@pytest.fixture(scope="module")
def prompts(gpt2):
    """Prompts of several lengths, padded."""
    return gpt2.tokenizer(PROMPTS[:3], return_tensors="pt", padding=True)


def values(answers):
    """The target of each query, which every layer knows."""
    return torch.tensor(answers[list(answers)[-1]].parts()["target"].to_list(), dtype=torch.float32)


def last_logits(trained, texts):
    """(texts, vocabulary): each text by itself, without padding."""
    with torch.no_grad():
        each = [trained.model(trained.tokenizer(text, return_tensors="pt")["input_ids"]).logits for text in texts]
    return torch.cat([logits[:, -1] for logits in each])


def test_logits_are_found_in_whatever_a_model_gives():
    logits = torch.randn(2, 3)
    output = transformers.modeling_outputs.SequenceClassifierOutput(loss=torch.tensor(1.0), logits=logits)
    for given in (logits, output, {"logits": logits}, (torch.tensor(1.0), logits, None)):
        assert logits_of(given) is logits
    assert logits_of({"hidden": logits}) == {"hidden": logits}


def test_the_next_token_is_the_likeliest_after_the_last_token(gpt2, prompts):
    found = values(gpt2.dual.contributions(prompts, target="next token"))
    torch.testing.assert_close(found, last_logits(gpt2, PROMPTS[:3]).amax(1), rtol=1e-4, atol=1e-4)


def test_padding_on_the_left(gpt2):
    gpt2.tokenizer.padding_side = "left"
    try:
        inputs = gpt2.tokenizer(PROMPTS[:3], return_tensors="pt", padding=True)
    finally:
        gpt2.tokenizer.padding_side = "right"
    assert not inputs["attention_mask"][:, 0].all()
    with torch.no_grad():
        expected = gpt2.model(**inputs).logits[:, -1].amax(1)
    found = values(gpt2.dual.contributions(inputs, target="next token"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_token_as_text(gpt2, prompts):
    token = gpt2.tokenizer.decode([gpt2.tokenizer(" the")["input_ids"][0]])
    number = gpt2.tokenizer(token)["input_ids"][0]
    found = values(gpt2.dual.contributions(prompts, target=token, tokenizer=gpt2.tokenizer))
    torch.testing.assert_close(found, last_logits(gpt2, PROMPTS[:3])[:, number], rtol=1e-4, atol=1e-4)


def test_the_log_probability_of_a_completion(gpt2):
    text = PROMPTS[0] + documents.FACTS[PROMPTS[0]]
    inputs = documents.encoded(gpt2.tokenizer, [text])
    inputs["labels"][:, : len(gpt2.tokenizer(PROMPTS[0])["input_ids"])] = -100
    with torch.no_grad():
        output = gpt2.model(**inputs)
    asked = int((inputs["labels"] >= 0).sum())
    found = values(gpt2.dual.contributions(inputs, target="completion"))
    assert found.item() == pytest.approx(-asked * output.loss.item(), rel=1e-4)


@pytest.mark.parametrize("target", ["next token", "completion"])
def test_influence_takes_them_too(gpt2, target):
    inputs = documents.encoded(gpt2.tokenizer, PROMPTS[:1])
    found = gpt2.dual.influence(inputs, target=target, segments=2)

    def by_hand(output):
        if target == "completion":
            loss = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
            return -loss.sum(1)
        return output.logits[:, -1].softmax(-1)[:, answer].logit()

    answer = int(last_logits(gpt2, PROMPTS[:1]).argmax())
    expected = gpt2.dual.influence(inputs, target=by_hand, segments=2)
    torch.testing.assert_close(found.sums("sample_id").totals, expected.sums("sample_id").totals, rtol=1e-3, atol=1e-6)


def test_the_tokens_of_a_completion_are_queries_of_their_own(gpt2):
    """One forward pass; scores of tokens add up to those of the completion."""
    inputs = documents.encoded(gpt2.tokenizer, PROMPTS[:2])  # equally long
    inputs["labels"][:, :3] = -100
    each = CompletionTokens(inputs["labels"], True)
    tokens = int((inputs["labels"][0] >= 0).sum())
    by_token = gpt2.dual.contributions(inputs, target=each)
    whole = gpt2.dual.contributions(inputs, target="completion")
    for name in ("lm_head", "transformer.wpe", "transformer.h.0.mlp.c_fc", "transformer.h.1.ln_1"):
        found = by_token[name].sums("sample_id").totals
        assert found.shape[0] == 2 * tokens
        expected = whole[name].sums("sample_id").totals
        torch.testing.assert_close(found.reshape(2, tokens, -1).sum(1), expected, rtol=1e-3, atol=1e-5)


def test_models_that_do_not_predict_the_next_token():
    kinds = {kind: predicts_next_token(documents.make_model(kind, 300)) for kind in documents.TINY}
    assert kinds == {"gpt2": True, "llama": True, "bert": False, "t5": False}


def test_the_completion_of_an_encoder_decoder(tmp_path):
    t5 = documents.train(tmp_path / "run", "t5", epochs=2)
    inputs = t5.tokenizer(PROMPTS[:1], return_tensors="pt")
    inputs["labels"] = t5.tokenizer(" Zumiro", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = t5.model(**inputs).loss.item()
    found = values(t5.dual.contributions(inputs, target="completion"))
    assert found.item() == pytest.approx(-loss * inputs["labels"].numel(), rel=1e-4)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"target": "completion"}, 'give inputs as a dictionary with "labels"'),
        ({"target": " Zumiro"}, "a token as text needs the tokenizer"),
        ({"target": 3}, r'output is \(3, \d+, \d+\), not \(3, units\).*"next token"'),
        ({}, "Say what the target is"),
    ],
)
def test_targets_that_say_what_is_missing(gpt2, prompts, question, words):
    with pytest.raises(QuestionError, match=words):
        gpt2.dual.contributions(prompts, **question)


def test_a_text_of_several_tokens_is_no_token(gpt2, prompts):
    with pytest.raises(QuestionError, match=r"is \d tokens \(.*completion=' Zumiro'"):
        gpt2.dual.influence(prompts, target=" Zumiro", tokenizer=gpt2.tokenizer)


def test_a_tokenizer_without_tensors(gpt2):
    with pytest.raises(QuestionError, match=r'BatchEncoding; expected a tensor.*return_tensors="pt"'):
        gpt2.dual.attend(gpt2.tokenizer(PROMPTS))


def test_a_classifier_of_hugging_face(tmp_path):
    """BatchEncoding in, ModelOutput out: a class is a class."""
    import dualform

    tokenizer = documents.make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=3, **sizes)
    ).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = tokenizer(documents.FILLER, return_tensors="pt", padding=True)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(6))
        model(**inputs, labels=torch.arange(6) % 3).loss.backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    with torch.no_grad():
        logits = dual.model()(**inputs).logits
    torch.testing.assert_close(values(dual.contributions(inputs)), logits.amax(1))
    torch.testing.assert_close(
        values(dual.contributions(inputs, target=[0, 1, 2, 0, 1, 2])), logits[range(6), [0, 1, 2] * 2]
    )
    assert dual.influence(inputs, target=1).top(1).height == 6
    assert dual.attend(inputs)["classifier"].top(1).height == 6


def test_arguments_by_name_from_a_file(gpt2, prompts, tmp_path):
    from safetensors.torch import save_file

    from dualform.exports import read_inputs

    save_file(dict(prompts), tmp_path / "prompts.safetensors")
    found = read_inputs(tmp_path / "prompts.safetensors", gpt2.dual)
    assert set(found) == {"input_ids", "attention_mask"}
    assert torch.equal(found["input_ids"], prompts["input_ids"])
    (tmp_path / "broken.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(QuestionError, match="cannot be read as test inputs"):
        read_inputs(tmp_path / "broken.safetensors", gpt2.dual)
