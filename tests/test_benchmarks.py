"""The numbers of docs/benchmarks.md and of the README's headlines are those of bench/results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "bench" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def largest_gap(dtype):
    return max(cell["gap"] for cell in result("exactness")["cells"] if cell["dtype"] == dtype)


def certificate_gap(dtype, kind=""):
    parameters = result("certificate")[dtype]["certificate"]
    return max(row["gap"] for name, row in parameters.items() if name.endswith(kind))


def planted_gap(precision):
    return max(run["gap"] for way, run in result("planted-facts").items() if way.endswith(precision))


def recording_ratio(network, dtype):
    return result("recording-networks")["ratios"][network][dtype]


def score(view):
    return result("quality")["lds"]["digits-sgd"]["views"][view]["lds"]


def ratio(work, peer):
    return json.loads((ROOT / "bench" / "results.json").read_text())[work]["ratios"][peer]


def milliseconds(work):
    seconds = json.loads((ROOT / "bench" / "results.json").read_text())[work]["seconds"]["ours"]
    return f"{1000 * seconds:.2g} ms"


def faster(work, peer, digits="#.2g"):
    """Ours as a fraction of the peer's time, 1/29."""
    return f"1/{1 / ratio(work, peer):{digits}}".removesuffix(".")


def found(claim, page=PAGE):
    """The result that a row states."""
    rows = [line for line in page.splitlines() if line.startswith(f"| {claim}")]
    assert len(rows) == 1, f"{len(rows)} rows begin with {claim!r}"
    return rows[0].split(" | ")[1]


GPT = "GPT, 4 layers of 192, AdamW"
CNN = "CNN with BatchNorm, AdamW"
TABLE_1 = "Table 1, layers {}: 10,000 queries (the authors' way: 256, multiplied)"
AUTHORS = "the authors' way"
MANY = "top-10 of 128 queries, 384,000 × 800 keys"

ROWS = {
    "Largest gap of a weight": lambda: f"{certificate_gap('float32', 'weight'):.1e}",
    "The same, of a bias": lambda: f"{certificate_gap('float32', 'bias'):.1e}",
    "Largest gap, stored in float16": lambda: f"{certificate_gap('float16'):.1e}",
    "Largest gap, trained and stored in float64": lambda: f"{certificate_gap('float64'):.1e}",
    "Largest gap of six networks": lambda: f"{largest_gap('float32'):.1e}",
    "The same in float64": lambda: f"{largest_gap('float64'):.1e}",
    "Largest gap of language models under bfloat16": lambda: f"{planted_gap('bf16'):.1e}",
    "The same in float32": lambda: f"{planted_gap('fp32'):.1e}",
    "A GPT of 4 layers of 192, AdamW, float16": lambda: f"{recording_ratio(GPT, 'float16'):.2f}",
    "A GPT of 4 layers of 192, AdamW, float32": lambda: f"{recording_ratio(GPT, 'float32'):.2f}",
    "A CNN with BatchNorm, AdamW, float16": lambda: f"{recording_ratio(CNN, 'float16'):.2f}",
    "A CNN with BatchNorm, AdamW, float32": lambda: f"{recording_ratio(CNN, 'float32'):.2f}",
    "The paper's network, 6000 steps, float16": lambda: (
        f"{ratio('training with recording, float16, 6000 steps', 'bare training'):.2f}"
    ),
    "The paper's network, 6000 steps, float32": lambda: (
        f"{ratio('training with recording, float32, 6000 steps', 'bare training'):.2f}"
    ),
    "The same, 1000 steps, by the processor's time, float16": lambda: (
        f"{ratio('training with recording, float16, 1000 steps', 'bare training'):.2f}"
    ),
    "The same, 1000 steps, by the processor's time, float32": lambda: (
        f"{ratio('training with recording, float32, 1000 steps', 'bare training'):.2f}"
    ),
    "Table 1 of 10,000 queries": lambda: faster(TABLE_1.format("0, 2, 4"), AUTHORS, ".0f"),
    "The same: layers 1 and 2": lambda: faster(TABLE_1.format("2, 4"), AUTHORS, ".0f"),
    "Layer 0 beside the sgemm": lambda: f"{ratio(TABLE_1.format('0'), 'sgemm of the distinct keys'):.2f}",
    "Best 10 for 128 queries beside FAISS": lambda: faster(MANY, "FAISS IndexFlatIP"),
    "Best 10 for 128 queries beside the sgemm": lambda: faster(MANY, "sgemm"),
    "Best 10 for one query beside a streaming read": lambda: faster("top-10 of one query, float32", "streaming read"),
    "The same, float16 | 1/": lambda: faster("top-10 of one query, float16", "streaming read"),
    "Totals of one query by label": lambda: milliseconds("totals by label, one query"),
    "Totals of one query by each": lambda: milliseconds("totals by sample, one query, 60,000 samples"),
    "The same beside reading the sums": lambda: (
        f"{ratio('totals by sample, one query, 60,000 samples', 'reading the totals'):.2f}"
    ),
    "`masked` under AdamW": lambda: f"{ratio('masked under AdamW, 600 steps', 'the gradients once'):.1f}",
    "Contributions of 100 test images": lambda: faster(
        "100 test images against all training data, last layer, top-10 by sample",
        "Captum TracInCPFast, 15 checkpoints",
        ".0f",
    ),
    'Influence, `method="kernel"`': lambda: f"{score('kernel'):.2f}",
    "Influence, the default": lambda: f"{score('whitened'):.2f}",
    "kronfluence with its default damping": lambda: f"{score('kronfluence'):.2f}",
    "kronfluence with its other damping": lambda: f"{score('kronfluence-damped'):.2f}",
    "Exact contribution": lambda: f"{score('contribution'):.2f}",
    "Attention of the last layer": lambda: f"{score('attention'):.2f}",
}


@pytest.mark.parametrize("claim", ROWS)
def test_a_row_states_what_was_measured(claim):
    assert found(claim) == ROWS[claim]()


def test_the_headlines_of_the_readme():
    assert found("Largest gap between trained", README) == f"{largest_gap('float32'):.1e}"
    ratios = [recording_ratio(network, "float32") for network in (GPT, CNN)]
    assert found("Training time", README) == "; ".join(f"{value:.2f}" for value in ratios)
    scores = [score(view) for view in ("kernel", "whitened", "kronfluence")]
    assert found("How well influence predicts", README) == "; ".join(f"{value:.2f}" for value in scores)


@pytest.mark.parametrize("page", [PAGE, README], ids=["benchmarks", "README"])
def test_the_scripts_that_it_names_exist(page):
    scripts = [word for word in page.replace("`", " ").split() if word.startswith("bench/") and word.endswith(".py")]
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []
