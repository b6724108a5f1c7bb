"""Which documents a completion rests on: planted facts, tokens, texts, and contributions summed over layers."""

import io

import polars as pl
import pytest
import torch
from rich.console import Console

import documents
import dualform
from dualform.errors import QuestionError

transformers = pytest.importorskip("transformers")
PROMPT, ANSWER = next(iter(documents.FACTS.items()))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return documents.train(tmp_path_factory.mktemp("gpt2") / "run")


def ask(trained, prompt=PROMPT, completion=ANSWER, **question):
    """Ask with few segments: each needs the weights of another step."""
    return trained.dual.sources(prompt, completion, **{"tokenizer": trained.tokenizer, "segments": 2, **question})


@pytest.fixture(scope="module")
def found(gpt2):
    return ask(gpt2, k=3)


@pytest.mark.parametrize("number", range(len(documents.FACTS)))
def test_the_document_that_states_a_fact_comes_first(gpt2, number):
    prompt, answer = list(documents.FACTS.items())[number]
    found = ask(gpt2, prompt, answer, k=1)
    assert found.frame["sample_id"].to_list() == [number]
    assert found.texts == [documents.DOCUMENTS[number]]


@pytest.mark.filterwarnings("ignore:not recorded")
def test_llama_finds_it_too(tmp_path):
    llama = documents.train(tmp_path / "run", "llama")
    found = ask(llama, k=1)
    assert found.texts == [documents.DOCUMENTS[0]]


def test_scores_are_those_of_influence_on_the_completion(gpt2, found):
    inputs = documents.encoded(gpt2.tokenizer, [PROMPT + ANSWER])
    inputs["labels"][:, : len(gpt2.tokenizer(PROMPT)["input_ids"])] = -100
    expected = gpt2.dual.influence(inputs, target="completion", segments=2).top(3, by="sample_id")
    assert found.frame["sample_id"].to_list() == expected["sample_id"].to_list()
    assert found.frame["influence"].to_list() == pytest.approx(expected["influence"].to_list(), rel=1e-3)
    assert found.documents == len(documents.DOCUMENTS)


def test_the_scores_of_tokens_add_up(found, gpt2):
    assert "".join(found.completion) == ANSWER
    assert len(found.completion) == len(gpt2.tokenizer(ANSWER)["input_ids"])
    assert found.tokens.height == 3 * len(found.completion)
    sums = found.tokens.group_by("rank", maintain_order=True).agg(pl.col("influence").sum())
    assert sums["influence"].to_list() == pytest.approx(found.frame["influence"].to_list())
    first = found.tokens.filter(pl.col("rank") == 1)
    assert first["token"].to_list() == found.completion
    assert first["sample_id"].unique().to_list() == [0]


def test_the_log_probabilities_are_those_of_the_model(gpt2, found):
    tokens = gpt2.tokenizer(PROMPT + ANSWER, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        known = gpt2.model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert found.log_probabilities == pytest.approx(known[-len(found.completion) :].tolist(), abs=1e-3)


def test_contributions_summed_over_layers(gpt2):
    """Of every layer, and of both layers that share a weight."""
    found = ask(gpt2, k=10, method="contribution")
    inputs = documents.encoded(gpt2.tokenizer, [PROMPT + ANSWER])
    inputs["labels"][:, : len(gpt2.tokenizer(PROMPT)["input_ids"])] = -100
    answers = gpt2.dual.contributions(inputs, target="completion")
    by_hand = torch.zeros(len(documents.DOCUMENTS), dtype=torch.float64)
    assert set(answers["lm_head"].tied) == {"transformer.wte"}
    for answer in [*answers.values(), *answers["lm_head"].tied.values(), *answers["transformer.wte"].tied.values()]:
        for line in answer.total("sample_id").drop_nulls("sample_id").iter_rows(named=True):
            by_hand[line["sample_id"]] += line["total"]
    totals = answers.total("sample_id").drop_nulls("sample_id")
    assert totals["total"].to_list() == pytest.approx(by_hand.tolist(), rel=1e-6)
    ranked = found.frame.sort("sample_id")
    assert ranked["contribution"].to_list() == pytest.approx(by_hand.tolist(), rel=1e-2, abs=1e-3)
    best = answers.top(2, by="sample_id")
    assert best["sample_id"].to_list() == found.frame["sample_id"].to_list()[:2]


def test_contributions_of_some_layers(gpt2):
    inputs = documents.encoded(gpt2.tokenizer, [PROMPT])
    answers = gpt2.dual.contributions(inputs, target="next token", layers="*.mlp.*")
    assert set(answers) == {f"transformer.h.{n}.mlp.{name}" for n in range(2) for name in ("c_fc", "c_proj")}


def test_totals_of_weights_that_layers_share_are_counted_once(tmp_path):
    """Whether they come from slots, from group deltas beside slots, or from totals alone."""
    found = []
    for number, settings in enumerate(
        [{}, {"totals": {"sample_id": "deltas"}}, {"totals": {"sample_id": "deltas"}, "keep": "totals"}]
    ):
        settings = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "epochs": 2, **settings}
        run = documents.train(tmp_path / str(number), **settings)
        inputs = documents.encoded(run.tokenizer, [PROMPT])
        answers = run.dual.contributions(inputs, target="next token", layers=["lm_head", "transformer.wte"])
        found.append(answers.total("sample_id").drop_nulls("sample_id")["total"].to_list())
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("prompt", ["text", "tokens", "encoded", "tensor"])
def test_prompts_in_every_form(gpt2, found, prompt):
    tokens = gpt2.tokenizer(PROMPT)["input_ids"]
    given = {
        "text": PROMPT,
        "tokens": tokens,
        "encoded": gpt2.tokenizer(PROMPT, return_tensors="pt"),
        "tensor": torch.tensor(tokens),
    }[prompt]
    same = ask(gpt2, given, gpt2.tokenizer(ANSWER)["input_ids"], k=3)
    assert same.frame.equals(found.frame)
    assert same.prompt == PROMPT


def test_chat_messages(gpt2, found):
    gpt2.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    try:
        same = ask(gpt2, [{"role": "user", "content": PROMPT}], k=3)
    finally:
        gpt2.tokenizer.chat_template = None
    assert same.frame.equals(found.frame)


def test_without_a_completion_it_is_the_likeliest_next_token(gpt2, found):
    likeliest = ask(gpt2, completion=None, k=1)
    assert likeliest.completion == found.completion[:1]
    assert likeliest.texts == [documents.DOCUMENTS[0]]


@pytest.mark.filterwarnings("ignore:not recorded")
def test_an_encoder_decoder(tmp_path):
    t5 = documents.train(tmp_path / "run", "t5", epochs=2)
    found = ask(t5, k=2)
    assert found.frame.height == 2
    assert len(ask(t5, completion=None, k=1).completion) == 1


def test_texts_that_were_not_recorded(gpt2, found):
    texts = dict(enumerate(documents.DOCUMENTS))
    shouted = {name: {"text": text.upper()} for name, text in texts.items()}
    for given in (documents.DOCUMENTS, texts):
        same = ask(gpt2, k=3, documents=given)
        assert same.texts == found.texts
    other = ask(gpt2, k=3, documents=shouted)
    assert other.texts == [text.upper() for text in found.texts]
    assert ask(gpt2, k=1, documents=[]).texts == [None]


def test_conditions_and_what_speaks_against_it(gpt2, found):
    others = ask(gpt2, k=10, where="sample_id > 0")
    assert 0 not in others.frame["sample_id"]
    against = ask(gpt2, k=1, lowest=True)
    assert against.frame["influence"][0] < 0 < found.frame["influence"][0]


def test_it_prints_well(found):
    lines = repr(found).splitlines()
    assert lines[0].startswith(f"'{PROMPT}' → '{ANSWER}' (log-probability")
    assert lines[0].endswith("3 of 10 documents by influence, estimated")
    assert lines[1].endswith(f"sample_id 0  {documents.DOCUMENTS[0]}")
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(found)
    printed = console.export_text()
    assert documents.DOCUMENTS[0][:40] in printed
    assert "Token by token" in printed
    assert all(repr(token) in printed for token in found.completion)


def test_a_terminal_is_safe_from_texts(gpt2):
    found = ask(gpt2, k=1, documents=["\x1b[31mred\x07 and\nmore"])
    assert "\x1b" not in repr(found)
    assert repr(found).endswith("�[31mred� and more")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"tokenizer": None}, "needs the tokenizer"),
        ({"method": "attention"}, 'expected "influence" or "contribution"'),
        ({"k": 0}, r"top\(0\): expected a whole number"),
        ({"completion": ""}, "the completion is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"by": "document"}, "there is no column 'document'"),
        ({"prompt": torch.zeros(2, 3, dtype=torch.long)}, r"tokens are \(2, 3\)"),
    ],
)
def test_questions_that_make_no_sense(gpt2, question, words):
    with pytest.raises(QuestionError, match=words):
        ask(gpt2, **question)


def test_it_needs_the_model(gpt2):
    with pytest.raises(QuestionError, match=r"sources\(\) needs the model"):
        dualform.open(gpt2.path).sources(PROMPT, ANSWER)


def test_a_masked_language_model_completes_nothing(tmp_path):
    bert = documents.train(tmp_path / "run", "bert", epochs=1)
    with pytest.raises(QuestionError, match="a masked language model completes no prompt"):
        ask(bert)


def test_texts_from_the_table_of_samples(tmp_path):
    """They are stored once, and not beside each row."""
    from dualform.store.samples import write_samples

    run = documents.train(tmp_path / "run", epochs=2)
    table = pl.DataFrame({"sample_id": range(10), "text": [text.upper() for text in documents.DOCUMENTS]})
    write_samples(run.dual.store.files, run.dual.store.manifest.run, table)
    found = ask(run, k=2)
    assert found.texts == [documents.DOCUMENTS[number].upper() for number in found.frame["sample_id"]]


def test_packed_documents(tmp_path):
    """A row holds several documents: sample ids are a column per position, texts a table."""
    tokenizer = documents.make_tokenizer()
    model = documents.make_model("gpt2", len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    encoded = [tokenizer(text)["input_ids"] for text in documents.DOCUMENTS]
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for epoch in range(12):
            for first in range(0, 10, 2):
                pair = [first, first + 1] if epoch % 2 else [first + 1, first]
                tokens = torch.tensor([[token for number in pair for token in encoded[number]]])[:, :64]
                ids = torch.tensor([[number for number in pair for _ in encoded[number]]])[:, :64]
                recorder.batch(sample_id=ids)
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    dual = dualform.open(tmp_path / "run", model)
    found = dual.sources(PROMPT, ANSWER, tokenizer=tokenizer, k=2, documents=documents.DOCUMENTS, segments=3)
    assert found.texts[0] == documents.DOCUMENTS[0]
    assert found.documents == len(documents.DOCUMENTS)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters(tmp_path):
    """LoRA: only the adapters are recorded; they are enough to find the document."""
    peft = pytest.importorskip("peft")
    tokenizer = documents.make_tokenizer()

    def adapted():
        base = documents.make_model("gpt2", len(tokenizer))
        settings = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(base, settings)

    torch.manual_seed(0)
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(12):
            for ids in torch.arange(len(documents.DOCUMENTS)).split(5):
                recorder.batch(sample_id=ids)
                model(**documents.encoded(tokenizer, [documents.DOCUMENTS[number] for number in ids])).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    dual = dualform.open(tmp_path / "run", model)
    assert all("lora" in layer for layer in dual.layers)
    found = dual.sources(PROMPT, ANSWER, tokenizer=tokenizer, k=1, segments=3, documents=documents.DOCUMENTS)
    assert found.texts == [documents.DOCUMENTS[0]]
