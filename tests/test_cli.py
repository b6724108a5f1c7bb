"""The command line, as a hurried user or a script would use it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import dualform
import hostile
from dualform.cli import app
from dualform.dual.weights import rebuilt

WIDTH = {"COLUMNS": "200", "NO_COLOR": "1"}


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env=WIDTH)


def record(folder, *, steps=6, keep="slots", optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    stepper = optimizer(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, stepper, folder, keep=keep, **settings) as recorder:
        for step in range(steps):
            ids = torch.arange(4) + 4 * (step % 3)
            recorder.batch(sample_id=ids, label=ids % 3, token=ids[:, None])
            stepper.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(4, 5, generator=generator)), ids % 3)
            loss.backward()
            stepper.step()
            recorder.log(loss=loss.item())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record(tmp_path_factory.mktemp("cli") / "run")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return record(tmp_path_factory.mktemp("cli") / "totals", keep="totals", totals=["label"])


@pytest.fixture
def queries(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    np.save(tmp_path / "queries.npy", vectors)
    return tmp_path / "queries.npy"


def test_version_and_help():
    assert call("--version").stdout == f"dualform {dualform.__version__}\n"
    assert all(command in call("--help").stdout for command in ("demo", "info", "verify", "totals", "export"))


def test_info(run):
    shown = call("info", run)
    assert shown.exit_code == 0
    assert "sample_id (Int64 per row)" in shown.stdout
    assert json.loads(call("info", run, "--json").stdout) == dualform.open(run).info()


def test_info_shows_totals_marks_and_how_it_ended(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"totals": {"label": "keys", ("task", "label"): "both"}, "on_unexplained": "mark"}
    with pytest.raises(KeyboardInterrupt), dualform.record(model, stepper, tmp_path / "run", **settings) as recorder:
        for step in range(4):
            recorder.batch(label=[0, 1, 2, 0], task="digits")
            stepper.zero_grad()
            model(torch.ones(4, 5)).sum().backward()
            if step == 1:
                model.weight.grad[0] += 1  # noise
            if step == 3:
                model.weight.grad.fill_(float("nan"))
            stepper.step()
        raise KeyboardInterrupt
    shown = re.sub(r"\s+", " ", call("info", tmp_path / "run").stdout)
    assert "ended KeyboardInterrupt" in shown
    assert "totals by label: 3 groups, key sums" in shown
    assert "totals by task + label: 3 groups, key sums and group deltas" in shown
    assert "inexact '' from step 1 on: 'weight' has a gradient that its recorded slots do not explain" in shown
    assert "not finite the gradient of 'weight' from step 3 on" in shown
    assert "key sums" not in call("info", record(tmp_path / "plain")).stdout


def test_totals_are_built_and_kept(tmp_path):
    run = record(tmp_path / "run")
    shown = call("totals", run, "--by", "label")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Totals by label: 3 groups, key sums and group deltas. On disk: ")
    assert shown.stderr == ""
    answer = json.loads(call("totals", run, "--by", "label", "--by", "sample_id", "--kind", "keys", "--json").stdout)
    size = sum(file.stat().st_size for file in run.glob("totals-*/*"))
    assert answer == {"by": ["label", "sample_id"], "kind": "keys", "groups": 12, "groupings": 2, "bytes": size}
    again = call("totals", run, "--by", "label", "--kind", "deltas").stdout
    assert "3 groups, group deltas. On disk, with 1 other grouping: " in again
    built = dualform.open(run).info()["totals"]
    assert built == [
        {"by": ["label", "sample_id"], "kind": "keys", "groups": 12, "step": 6},
        {"by": ["label"], "kind": "deltas", "groups": 3, "step": 6},
    ]


def test_totals_of_a_recording_of_keys_are_key_sums(tmp_path):
    run = record(tmp_path / "keys", keep="keys", optimizer=torch.optim.Adam)
    assert json.loads(call("totals", run, "--by", "label", "--json").stdout)["kind"] == "keys"


def test_totals_wait_for_the_recorder(tmp_path):
    model = nn.Linear(5, 3)
    with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run"):
        answer = call("totals", tmp_path / "run", "--by", "label")
    assert answer.exit_code == 2
    assert "is being written by another recorder" in answer.stderr


def test_verify_passes(run):
    shown = call("verify", run)
    assert shown.exit_code == 0
    assert "All 4 parameters equal their dual" in shown.stdout
    answer = call("verify", run, "--json")
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["passed"] is True
    assert answer.stderr == ""
    assert call("verify", run, "--workers", 2, "--json").stdout == answer.stdout


def test_verify_fails_where_the_weights_are_not_what_the_slots_say(tmp_path, run, monkeypatch):
    monkeypatch.setattr("dualform.dual.masked.rebuilt", lambda *a, **k: rebuilt(*a, **k) + 0.01)
    failed = call("verify", run)
    assert failed.exit_code == 1
    assert "Not verified: 0.weight, 0.bias, 2.weight, 2.bias" in failed.stdout
    answer = call("verify", run, "--json")
    assert (answer.exit_code, json.loads(answer.stdout)["passed"]) == (1, False)


def test_verify_at_a_step_without_a_snapshot_compares_projections(run):
    answer = call("verify", run, "--step", 3, "--json")
    assert answer.exit_code == 0
    certificate = json.loads(answer.stdout)
    assert "projections of the weights" in certificate["compared_with"]
    assert {parameter["verdict"] for parameter in certificate["parameters"]} == {"pass"}


def test_verify_at_a_step_without_a_snapshot_fails_for_wrong_weights(run, monkeypatch):
    monkeypatch.setattr("dualform.dual.verify.rebuilt", lambda *a, **k: rebuilt(*a, **k) + 0.01)
    answer = call("verify", run, "--step", 3, "--json")
    assert answer.exit_code == 1
    assert {parameter["verdict"] for parameter in json.loads(answer.stdout)["parameters"]} == {"fail"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "{tmp}/nowhere"], "there is no such folder"),
        (["info", "{tmp}/file"], "expected a folder"),
        (["verify", "{run}", "--step", "99"], "expected a whole number from 0 to 6"),
        (["export", "{run}", "--to", "{tmp}/out", "--where", "label =="], "is not an SQL condition"),
        (["export", "{run}", "--to", "{tmp}/out", "--where", "lable = 1"], "there is no column 'lable'"),
        (["export", "{run}", "--to", "{tmp}/out", "--where", "label + 1"], "expected true or false"),
        (["export", "{run}", "--to", "{tmp}/out", "--queries", "{q}", "--layer", "7"], "Recorded layers: '0', '2'"),
        (["export", "{run}", "--to", "{tmp}/out", "--queries", "{q}", "--layer", "2"], "expected (queries, 4)"),
        (["export", "{run}", "--to", "{tmp}/out", "--queries", "{tmp}/no.npy", "--layer", "0"], "there is no file"),
        (["export", "{run}", "--to", "{tmp}/out", "--queries", "{tmp}/file", "--layer", "0"], ".npy, .safetensors"),
        (["totals", "{run}", "--by", "lable"], "there is no column 'lable'. Columns: sample_id, label, token"),
        (["totals", "{tmp}/nowhere", "--by", "label"], "there is no such folder"),
        (["totals", "{kept}", "--by", "label"], "keeps totals only"),
        (["demo", "--out", "{tmp}"], "holds no recording"),
        (["demo", "--out", "{run}"], "holds a recording already"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(run, kept, queries, tmp_path, arguments, message):
    (tmp_path / "file").write_text("hello")
    answer = call(*(a.format(run=run, kept=kept, tmp=tmp_path, q=queries) for a in arguments))
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: ")
    assert answer.stderr.count("\n") == 1
    assert message in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "{run}"], "--to"),
        (["export", "{run}", "--to", "{tmp}", "--queries", "{q}"], "--queries needs --layer"),
        (["export", "{run}", "--to", "{tmp}", "--layer", "0"], "--layer needs --queries"),
        (["export", "{run}", "--to", "{tmp}", "--top", "3"], "need --queries"),
        (["export", "{run}", "--to", "{tmp}", "--queries", "{q}", "--layer", "0", "--top", "3", "--all"], "give one"),
        (["export", "{run}", "--to", "{q}"], "is a file"),
        (["totals", "{run}"], "--by"),
        (["totals", "{run}", "--by", "label", "--by", "label"], "each column is given once"),
        (["totals", "{run}", "--by", "label", "--kind", "all"], "'keys', 'deltas', 'both'"),
    ],
)
def test_bad_usage_is_code_2(run, queries, tmp_path, arguments, message):
    answer = call(*(a.format(run=run, tmp=tmp_path, q=queries) for a in arguments))
    assert answer.exit_code == 2
    assert message in re.sub(r"\s+", " ", answer.stderr)


@pytest.mark.parametrize(("command", "option"), [("influence", "--model"), ("evaluate", "--study")])
def test_help_says_which_options_execute_code(command, option):
    told = re.sub(r"[\s│]+", " ", call(command, "--help").stdout)
    assert re.search(rf"{option} MODULE:NAME .*?executes their code", told)
    documents = Path(__file__).parent.parent
    page = {"influence": "docs/influence.md", "evaluate": "docs/evaluating.md"}[command]
    assert f"`{option} MODULE:NAME` executes code" in (documents / page).read_text()


@pytest.mark.parametrize("command", [["export", "{run}", "--to", "{tmp}/out"], ["mislabelled", "{run}"]])
def test_hostile_conditions_are_refused_and_read_nothing(run, tmp_path, command):
    secret = tmp_path / "secret.csv"
    secret.write_text("my-password,other\n1,2\n")
    arguments = [argument.format(run=run, tmp=tmp_path) for argument in command]
    with hostile.opened(secret) as was_opened:
        for text in hostile.conditions(secret):
            answer = call(*arguments, "--where", text)
            assert answer.exit_code == 2, text
            assert answer.stderr.startswith("error: where: ")
            assert answer.stderr.count("\n") == 1
            assert "my-password" not in answer.output
        assert not was_opened()


def test_export_rows(run, tmp_path):
    answer = call("export", run, "--to", tmp_path / "new" / "out")
    assert answer.exit_code == 0
    rows = pl.read_parquet(tmp_path / "new" / "out" / "rows.parquet")
    assert rows.drop("row").equals(dualform.open(run).rows)
    assert rows["row"].to_list() == list(range(24))


def test_export_some_rows(run, tmp_path):
    answer = json.loads(call("export", run, "--to", tmp_path, "--where", "label = 1 and step < 3", "--json").stdout)
    rows = pl.read_parquet(answer["rows"]["path"])
    assert rows.height == answer["rows"]["lines"] == 4
    assert rows["label"].unique().to_list() == [1]


def test_a_condition_on_positions_leaves_all_rows_in(run, tmp_path):
    answer = json.loads(call("export", run, "--to", tmp_path, "--where", "token < 2", "--json").stdout)
    assert answer["rows"]["lines"] == 24


def test_export_top(run, queries, tmp_path):
    arguments = ("export", run, "--to", tmp_path, "--queries", queries, "--layer", "0", "--top", 3)
    assert call(*arguments, "--where", "step >= 2").exit_code == 0
    attention = dualform.open(run).attend({"0": np.load(queries)})["0"]
    assert pl.read_parquet(tmp_path / "attention-0.parquet").equals(attention.top(3, where="step >= 2"))


def test_export_all(run, queries, tmp_path):
    answer = json.loads(
        call("export", run, "--to", tmp_path, "--queries", queries, "--layer", "0", "--all", "--json").stdout
    )
    found = pl.read_parquet(tmp_path / "attention-0" / "*.parquet").sort("query", "slot")
    assert found.height == answer["attention"]["lines"] == 2 * 24
    expected = dualform.open(run).layer("0").attention_weights(torch.from_numpy(np.load(queries)))
    np.testing.assert_allclose(found["weight"].to_numpy().reshape(2, 24), expected.numpy(), rtol=1e-6)
    assert found["row"].to_list() == [*range(24), *range(24)]


def test_all_kinds_of_query_files_give_the_same(run, queries, tmp_path):
    vectors = np.load(queries)
    save_file({"0": torch.from_numpy(vectors), "other": torch.zeros(1)}, tmp_path / "queries.safetensors")
    save_file({"only": torch.from_numpy(vectors)}, tmp_path / "one.safetensors")
    pl.DataFrame({"vector": vectors.tolist()}).write_parquet(tmp_path / "lists.parquet")
    pl.DataFrame(vectors).write_parquet(tmp_path / "wide.parquet")
    answers = []
    for file in ("queries.npy", "queries.safetensors", "one.safetensors", "lists.parquet", "wide.parquet"):
        out = tmp_path / file.replace(".", "-")
        assert call("export", run, "--to", out, "--queries", tmp_path / file, "--layer", "0").exit_code == 0
        answers.append(pl.read_parquet(out / "attention-0.parquet"))
    for answer in answers:
        assert_frame_equal(answer, answers[0])  # but for rounding: where a matrix begins decides how it is multiplied


def test_keys_alone_export_but_do_not_verify(tmp_path, queries):
    run = record(tmp_path / "keys", keep="keys", optimizer=torch.optim.Adam)
    assert call("export", run, "--to", tmp_path / "out", "--queries", queries, "--layer", "0").exit_code == 0
    answer = call("verify", run)
    assert answer.exit_code == 2
    assert "keeps keys only" in answer.stderr


def test_a_damaged_store_is_code_2(tmp_path):
    run = record(tmp_path / "run")
    (run / "manifest.json").write_text("{}")
    answer = call("verify", run, "--json")
    assert (answer.exit_code, answer.stdout) == (2, "")


def test_the_command_itself_is_installed(run):
    answer = subprocess.run(
        [sys.executable, "-c", "from dualform.cli import app; app()", "verify", str(run), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout)["passed"] is True
    assert answer.stderr == ""


def test_help_needs_neither_scikit_learn_nor_matplotlib():
    code = "import sys, dualform.cli; sys.exit(any(m in sys.modules for m in ('sklearn', 'matplotlib')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mislabelled(tmp_path):
    folder = tmp_path / "run"
    torch.manual_seed(0)
    inputs, labels, flipped = torch.randn(30, 5), torch.arange(30) % 3, torch.arange(30) % 10 == 0
    inputs[:, :3] += 6 * nn.functional.one_hot(labels, 3)
    told = torch.where(flipped, (labels + 1) % 3, labels)
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with dualform.record(model, optimizer, folder) as recorder:
        for _ in range(5):
            recorder.batch(sample_id=torch.arange(30), label=told, flipped=flipped)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), told).backward()
            optimizer.step()
    found = json.loads(call("mislabelled", folder, "--top", 3, "--planted", "flipped", "--json").stdout)
    assert sorted(row["sample_id"] for row in found["samples"]) == [0, 10, 20]
    assert found["auc"] == 1
    shown = call("mislabelled", folder, "--top", 3, "--planted", "flipped").stdout
    assert "probability 1.0000 (AUC)" in shown
    assert "the likeliest other" in shown
    refused = call("mislabelled", folder, "--planted", "label")
    assert refused.exit_code == 2
    assert "expected a Boolean column" in refused.stderr


def test_evaluate_a_demo(tmp_path):
    from dualform.demo import Settings, load, train

    settings = Settings(epochs=2, train_images=100, width=16)
    train(tmp_path / "demo", load(settings), settings)
    arguments = ["evaluate", tmp_path / "demo", "--subsets", 4, "--view", "attention", "--view", "whitened"]
    found = call(*arguments, "--json")
    assert found.exit_code == 0, found.output
    assert "6 trainings to do, about" in found.stderr
    told = json.loads(found.stdout)
    assert [view["view"] for view in told["views"]] == ["attention", "whitened"]
    assert (told["samples"], told["subsets"], told["repeats"]) == (100, 4, 2)
    shown = call(*arguments, "--leave-out", 5)
    first, then = map(int, re.findall(r"(\d+) trainings to do", shown.stderr))
    assert first == 0
    assert 40 < then <= 2 * (1 + 3 * 10) - 2  # all, and 10 examples of 3 views, some of which leave the same out
    assert "the 5 samples that support" in shown.stdout
    assert "what would change, estimated" in shown.stdout
    assert "retraining noise allows: about" in shown.stdout


def test_evaluate_needs_to_know_how_to_train(run):
    assert "--study my_module:my_study" in call("evaluate", run).stderr
    assert "expected MODULE:NAME" in call("evaluate", run, "--study", "nonsense").stderr


@pytest.mark.parametrize("study", ["os:system", "os:abort", "json:loads", "dualform:Study", "raises_on_import:study"])
def test_evaluate_says_what_is_wrong_with_the_study(run, architecture, study):
    found = call("evaluate", run, "--study", study)
    assert found.exit_code == 2
    assert re.search(r"expected a dualform\.Study|importing 'raises_on_import' failed", found.stderr)
    assert "Traceback" not in found.stderr


def test_influence_of_inputs_that_the_model_cannot_take(run, tmp_path, architecture):
    np.save(tmp_path / "wide.npy", np.zeros((2, 7), np.float32))
    found = call("influence", run, "--test", tmp_path / "wide.npy", "--model", architecture)
    assert found.exit_code == 2
    assert "the model's forward pass failed on these inputs: RuntimeError: mat1 and mat2 shapes" in found.stderr


@pytest.fixture
def architecture(tmp_path, monkeypatch):
    """A module in the current folder, as a user has it."""
    (tmp_path / "my_training.py").write_text(
        "from torch import nn\n\n"
        "def network():\n    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))\n\n"
        "def needs_more(width):\n    return network()\n\n"
        "def fails():\n    return 1 / 0\n\n"
        "def exits():\n    raise SystemExit(0)\n\n"
        "def gives_text():\n    return 'network'\n\n"
        "nothing = 3\n"
    )
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('no GPU')\n")
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "broken_syntax.py").write_text("def network(:\n")
    monkeypatch.chdir(tmp_path)
    yield "my_training:network"
    for name in ("my_training", "raises_on_import", "exits_on_import", "broken_syntax"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("method", ["whitened", "kernel", "sketch"])
def test_influence_is_what_the_library_says(run, queries, architecture, method):
    found = call("influence", run, "--test", queries, "--model", architecture, "--method", method, "--top", 2, "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    expected = dualform.open(run, model).influence(torch.from_numpy(np.load(queries)), method=method).top(2)
    assert [row["row"] for row in answer["top"]] == expected["row"].to_list()
    assert answer["segments"] == [[0, 3], [3, 6]]
    assert answer["estimated"] is True


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_influence_on_an_executor(run, queries, architecture, executor):
    asked = "influence", run, "--test", queries, "--model", architecture, "--top", 2, "--json"
    expected = json.loads(call(*asked).stdout)["top"]
    assert json.loads(call(*asked, "--executor", executor).stdout)["top"] == expected


def test_an_unknown_executor(run, queries, architecture):
    found = call("influence", run, "--test", queries, "--model", architecture, "--executor", "spark")
    assert found.exit_code == 2


@pytest.mark.parametrize("mean", ["tokens", "rows", "none"])
def test_influence_with_another_mean(run, queries, architecture, mean):
    asked = "influence", run, "--test", queries, "--model", architecture, "--loss-mean", mean, "--top", 2, "--json"
    found = json.loads(call(*asked).stdout)["top"]
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    inputs = torch.from_numpy(np.load(queries))
    expected = dualform.open(run, model).influence(inputs, loss_mean=mean).top(2)["influence"].to_list()
    assert [line["influence"] for line in found] == pytest.approx(expected)


def test_influence_by_sample_of_one_layer_for_people(run, queries, architecture):
    asked = ("influence", run, "--test", queries, "--model", architecture, "--target", 1, "--target", 2)
    found = call(*asked, "--by", "sample_id", "--layer", "2", "--where", "step >= 3", "--top", 1)
    assert found.exit_code == 0, found.output
    assert "Influence, estimated (whitened, 2 segments of training)" in found.stdout
    assert "Positive: supports the target" in found.stdout


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("network", "expected MODULE:NAME"),
        ("no_such_module:network", "cannot be found"),
        ("my_training:missing", "cannot be found"),
        ("my_training:nothing", "is an object of type int; expected an nn.Module"),
        ("my_training.py:network", "cannot be found: No module named 'my_training.py'"),
        (".my_training:network", "importing '.my_training' failed"),
        (
            "my_training:needs_more",
            "is the function needs_more(width); expected an nn.Module, or a function of no arguments",
        ),
        ("my_training:fails", "calling 'my_training:fails' failed: ZeroDivisionError"),
        ("my_training:exits", "calling 'my_training:exits' ended the program (sys.exit(0))"),
        ("my_training:gives_text", "gives an object of type str"),
        ("raises_on_import:network", "importing 'raises_on_import' failed: RuntimeError: no GPU"),
        ("exits_on_import:network", "importing 'exits_on_import' ended the program (sys.exit(3))"),
        ("broken_syntax:network", "importing 'broken_syntax' failed: SyntaxError"),
        ("os", "expected MODULE:NAME"),
        (":", "expected MODULE:NAME"),
        ("os:system", "is the function system(command); expected an nn.Module"),
        ("subprocess:run", "is the function run("),
        ("webbrowser:get", "is the function get("),
        ("os:abort", "is the function abort(); expected an nn.Module"),
        ("os:path", "is the module posixpath; expected an nn.Module"),
        ("sys:exit", "is the function exit("),
        ("json:loads", "is the function loads("),
        ("torch.nn:Linear", "is the class Linear(in_features: int"),
        ("threading:Thread", "is the class Thread("),
        ("torch.nn:Identity", "the model has none of that name"),
    ],
)
def test_influence_says_what_is_wrong_with_the_model(run, queries, architecture, model, says):
    found = call("influence", run, "--test", queries, "--model", model)
    assert found.exit_code == 2
    assert says in found.stderr
