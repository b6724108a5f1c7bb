"""From data to page, on tiny datasets made up here: what is written, what is not done again, and the command."""

import json
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pooch
import pytest
from idx import contents, source, write
from typer.testing import CliRunner

from dualform.cli import app
from dualform_paper import analysis, data, pictures, run, settings, training
from dualform_paper.tasks import load

TINY = {"train_images": 200, "test_images": 40, "width": 8, "batch": 8, "top": 6}
WIDTH = {"COLUMNS": "200", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module", autouse=True)
def datasets(tmp_path_factory, patch):
    """Made-up datasets in a folder; nothing else is found."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("mnist", "fashion-mnist")):
        files = contents(seed)
        write(folder / name, files)
        patch.setitem(data.SOURCES, name, source(name, files, package=None))
    patch.setattr(pooch, "os_cache", lambda project: folder / "cache")
    patch.setattr(pooch, "retrieve", no_network)
    patch.setenv("DUALFORM_DATA", str(folder))
    return folder


def no_network(*_, **__):
    raise OSError("there is no network here")


def refuse(*_, **__):
    raise AssertionError("done again")


def tiny(experiment="single-task", **options):
    return settings.settings_for(experiment, **{"steps": 12, **TINY, **options})


class StoppedError(Exception):
    """Stands for whatever ends a process."""


@dataclass
class Ran:
    """A run of two seeds that was interrupted while the second was measured, and then went on."""

    out: Path
    page: Path
    left: set = field(default_factory=set)
    """What the interruption left."""
    analysed: list = field(default_factory=list)
    """The seeds that were measured, in their order."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, datasets):
    out, analysed, interrupted = tmp_path_factory.mktemp("run") / "out", [], []

    def counted(of, tasks, folder, progress, *, thorough):
        analysed.append(of.seed)
        if of.seed == 1 and not interrupted:
            interrupted.append(True)
            training.train(of, tasks, folder, progress)
            raise StoppedError
        assert thorough == (of.seed == 0)
        return analysis.analyse(of, tasks, folder, progress, thorough=thorough)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "analyse", counted)
        with pytest.raises(StoppedError):
            run.run(tiny(), out, seeds=2, command="the command")
        left = {str(path.relative_to(out)) for path in out.glob("*")} | {p.name for p in out.glob("recordings/*")}
        patch.setattr(training, "_batches", refuse)  # the second seed's training was over
        page = run.run(tiny(), out, seeds=2, command="the command")
    return Ran(out, page, left, analysed)


def test_an_interrupted_run_goes_on_where_it_was(ran):
    assert ran.analysed == [0, 1, 1]
    assert "seed-0.json" in ran.left
    assert not {"seed-1.json", "results.json", "index.md", "seed-0"} & ran.left
    assert "seed-1" in ran.left  # its recording


def test_what_is_written(ran):
    assert ran.page == ran.out / "index.md"
    names = {path.name for path in ran.out.iterdir()}
    assert names == {"index.md", "results.json", "seed-0.json", "seed-1.json", "figures"}
    results = json.loads((ran.out / "results.json").read_text())
    assert results["command"] == "the command"
    assert [one["settings"]["seed"] for one in results["seeds"]] == [0, 1]
    assert all(one["verified"] for one in results["seeds"])
    for seed, one in enumerate(results["seeds"]):
        stored = json.loads((ran.out / f"seed-{seed}.json").read_text())
        assert json.dumps(stored) == json.dumps(one)
        assert stored["settings"] == json.loads(json.dumps(replace(tiny(), seed=seed).to_dict()))


def test_every_picture_of_the_page_is_there(ran):
    page = ran.page.read_text()
    links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page)
    assert len(links) == len(set(links)) == 11  # inputs, table 1, recency, and four for each of two examples
    for link in links:
        drawn = ran.out / link
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in drawn.with_suffix(".svg").read_text()
    drawn = {path.stem for path in (ran.out / "figures").glob("*.png")}
    assert drawn == {Path(link).stem for link in links}


def test_the_page_says_what_was_measured(ran):
    page, seeds = ran.page.read_text(), json.loads((ran.out / "results.json").read_text())["seeds"]
    assert "Made by `the command`." in page
    assert "2 seeds" in page
    right = [one["datasets"]["mnist"]["table"]["4"]["right"] for one in seeds]
    middle = sum(right) / 2
    deviation = abs(right[0] - right[1]) / 2**0.5
    (line,) = (line for line in page.splitlines() if line.startswith("| layer-2, ours |"))
    assert line.endswith(f"{middle:.1f} ± {deviation:.1f} |")
    assert "nan" not in page


def test_seeds_differ(ran):
    first, second = json.loads((ran.out / "results.json").read_text())["seeds"]
    assert first["datasets"] != second["datasets"]
    assert [one["gap"] for one in first["certificate"]] != [one["gap"] for one in second["certificate"]]


def test_a_second_run_trains_nothing(ran, monkeypatch):
    before = (ran.out / "results.json").read_text(), ran.page.read_text()
    for name in ("train", "network"):
        monkeypatch.setattr(analysis, name, refuse)
    monkeypatch.setattr(run, "analyse", refuse)
    run.run(tiny(), ran.out, seeds=2, command="the command")
    assert ((ran.out / "results.json").read_text(), ran.page.read_text()) == before


@pytest.fixture
def quick(monkeypatch):
    """Nothing is drawn: the figures have tests of their own, and take most of the time."""
    for kind in ("bars", "curves", "inputs", "lines", "matches", "totals"):
        monkeypatch.setattr(getattr(pictures, kind), "save", lambda *_, **__: None)


def older(path):
    """As a version wrote it that did not have all of the settings."""
    content = json.loads(path.read_text())
    for one in content.get("seeds", [content]):
        del one["settings"]["every"], one["settings"]["raw_pixels"]
    path.write_text(json.dumps(content))


@pytest.mark.usefixtures("quick")
def test_what_an_older_version_has_measured_is_not_done_again(ran, tmp_path, monkeypatch):
    shutil.copytree(ran.out, tmp_path / "out")
    for name in ("seed-0.json", "seed-1.json", "results.json", "figures/pictures.json"):
        older(tmp_path / "out" / name)
    assert run.write_page(tmp_path / "out", "the command").read_text() == ran.page.read_text()
    monkeypatch.setattr(run, "analyse", refuse)
    assert run.run(tiny(), tmp_path / "out", seeds=2, command="the command").read_text() == ran.page.read_text()
    results = [json.loads((out / "results.json").read_text()) for out in (tmp_path / "out", ran.out)]
    assert results[0] == results[1]


@pytest.mark.usefixtures("quick")
def test_what_an_older_version_has_trained_is_not_trained_again(tmp_path, monkeypatch):
    chosen = tiny(steps=4)
    tasks, told = load(chosen, None), lambda *_: None
    first = training.train(chosen, tasks, tmp_path / "run", told)
    older(tmp_path / "run" / training.FINISHED)
    monkeypatch.setattr(training, "_batches", refuse)
    assert training.train(chosen, tasks, tmp_path / "run", told) == first


COMMITTED = [
    path
    for path in sorted((Path(__file__).parents[2] / "docs" / "paper").glob("*/results.json"))
    if "seeds" in json.loads(path.read_text())
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("results", COMMITTED, ids=lambda path: path.parent.name)
def test_committed_pages_can_be_written_again(results, tmp_path):
    shutil.copy(results, tmp_path)
    found = json.loads(results.read_text())
    picture = {"stem": "any", "caption": "any"}
    drawn = {"inputs": picture, "examples": [[picture] * 4 for _ in found["seeds"][0]["examples"]]}
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "pictures.json").write_text(json.dumps(drawn))
    written = run.write_page(tmp_path, found["command"]).read_text()
    tables = [line for line in results.with_name("index.md").read_text().splitlines() if line.startswith("| layer-")]
    assert tables
    assert tables == [line for line in written.splitlines() if line.startswith("| layer-")]
    assert "on one in 10 test images of MNIST" in written


@pytest.mark.usefixtures("quick")
def test_other_settings_are_other_runs(tmp_path):
    for steps in (4, 5):
        run.run(tiny(steps=steps), tmp_path, seeds=1)
        (seed,) = json.loads((tmp_path / "results.json").read_text())["seeds"]
        assert seed["settings"]["phases"][0]["steps"] == steps


@pytest.mark.usefixtures("quick")
def test_recordings_are_kept_if_wanted(tmp_path):
    run.run(tiny(steps=4), tmp_path, seeds=2, keep=True)
    assert {path.name for path in (tmp_path / "recordings").iterdir()} == {"seed-0", "seed-1"}
    assert (tmp_path / "recordings" / "seed-1" / "manifest.json").exists()


@pytest.mark.usefixtures("quick")
def test_other_recordings_are_left_alone(tmp_path):
    (tmp_path / "recordings" / "mine").mkdir(parents=True)
    run.run(tiny(steps=4), tmp_path, seeds=1)
    assert [path.name for path in (tmp_path / "recordings").iterdir()] == ["mine"]


@pytest.mark.usefixtures("quick")
def test_pictures_are_of_the_first_seed_of_the_page(tmp_path, monkeypatch):
    """The second seed was measured already, but the pictures in the folder are of the first."""
    drawn = []
    monkeypatch.setattr(pictures.inputs, "save", lambda inputs, *_: drawn.append([one.caption for one in inputs]))
    for first, seeds in ((0, 2), (1, 1), (1, 1)):
        run.run(tiny(seed=first), tmp_path, seeds=seeds)
        told = json.loads((tmp_path / "results.json").read_text())["seeds"][0]
        assert told["settings"]["seed"] == first
        assert drawn[-1] == [f"test image {one['test image']}" for one in told["examples"]]
    assert len(drawn) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("experiment", ["joint", "continual"])
def test_the_pages_of_the_others(tmp_path, experiment):
    page = run.run(tiny(experiment, steps=6), tmp_path, seeds=1).read_text()
    assert "attention to the other dataset" in page
    assert ("## Nothing is forgotten" in page) == (experiment == "continual")
    assert "Table 1\n" not in page
    assert re.findall(r"figures/(recency|masks)\.png", page) == ["recency", "masks"][: 1 + (experiment == "continual")]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("reverse", [False, True])
def test_the_paper_s_accuracies_are_of_its_own_order(tmp_path, reverse):
    page = run.run(tiny("continual", steps=3, reverse=reverse), tmp_path, seeds=1).read_text()
    lines = [line.split("|")[1:-1] for line in page.splitlines() if re.match(r"\| after (Fashion-)?MNIST", line)]
    theirs = [line[-1].strip() for line in lines]
    assert theirs == ([""] * 4 if reverse else ["97", "", "45", "85"])


@pytest.mark.usefixtures("quick")
def test_no_image_is_called_a_misread_one_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "choose", lambda rule, candidates: (0, False))  # it is a 0
    page = run.run(tiny("continual", steps=3), tmp_path, seeds=1).read_text()
    assert "### MNIST: test image 0" in page
    assert "The misread 1" not in page


def test_estimates():
    one, kept = (run.estimate(settings.settings_for("joint"), 3, keep=keep) for keep in (False, True))
    assert kept.nbytes == 3 * one.nbytes == 3 * 5000 * 128 * run.SLOT_BYTES
    assert one.seconds == kept.seconds == 3 * run.estimate(settings.settings_for("joint"), 1, keep=False).seconds


# The command


@pytest.fixture
def call(quick, monkeypatch):
    """The command on slices of the datasets."""
    whole = settings.settings_for
    monkeypatch.setattr(settings, "settings_for", lambda one, **options: whole(one, **{**TINY, **options}))

    def invoke(*arguments):
        return CliRunner().invoke(app, ["paper", *map(str, arguments)], env=WIDTH)

    return invoke


def test_the_command(call, tmp_path):
    found = call("single-task", "--seeds", 1, "--steps", 20, "--out", tmp_path)
    assert found.exit_code == 0, found.output
    page = tmp_path / "single-task-reference" / "index.md"
    assert found.stdout.strip() == f"single-task-reference: {page}"
    assert re.search(r"1 × 20 steps, about \d+ min on two cores, \d+\.\d GB on the disk", found.stderr)
    assert str(tmp_path / "single-task-reference") in found.stderr
    assert "`dualform paper single-task --seeds 1 --steps 20 --optimizer reference`" in page.read_text()
    assert "on one in 10 test images of MNIST" in page.read_text()


def test_the_command_for_every_image(call, tmp_path):
    found = call("single-task", "--seeds", 1, "--steps", 20, "--every-image", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    page = (tmp_path / "single-task-reference" / "index.md").read_text()
    assert "--optimizer reference --every-image`" in page
    assert "on all test images of MNIST" in page


def test_the_command_as_json(call, tmp_path):
    options = ("--seeds", 1, "--seed", 4, "--steps", 3, "--optimizer", "vanilla", "--reverse", "--raw-pixels", "--keep")
    found = call("continual", *options, "--out", tmp_path, "--json")
    assert found.exit_code == 0, found.output
    name = "continual-vanilla-reverse-raw"
    assert json.loads(found.stdout) == {name: str(tmp_path / name / "index.md")}
    (seed,) = json.loads((tmp_path / name / "results.json").read_text())["seeds"]
    assert seed["settings"]["phases"][0] == {"datasets": ["fashion-mnist"], "steps": 3}
    assert (seed["settings"]["seed"], seed["settings"]["raw_pixels"]) == (4, True)
    assert (tmp_path / name / "recordings" / "seed-4").is_dir()
    page = (tmp_path / name / "index.md").read_text()
    command = "dualform paper continual --seeds 1 --seed 4 --steps 3 --optimizer vanilla --reverse --raw-pixels"
    assert f"`{command}`" in page
    assert "masking out MNIST" in page


@pytest.mark.parametrize("option", ["--reverse", "--long"])
@pytest.mark.parametrize("experiment", ["single-task", "joint"])
def test_variants_are_of_continual_learning(call, tmp_path, experiment, option):
    found = call(experiment, option, "--out", tmp_path)
    assert found.exit_code == 2
    assert "--reverse and --long are variants of continual" in found.stderr
    assert not list(tmp_path.iterdir())


def test_missing_data_is_one_line(call, tmp_path, monkeypatch):
    monkeypatch.delenv("DUALFORM_DATA")
    found = call("single-task", "--seeds", 1, "--data", tmp_path / "nowhere", "--out", tmp_path)
    assert found.exit_code == 2
    assert found.stdout == ""
    *_, last = found.stderr.strip().splitlines()
    assert re.match(r"error: mnist: no train-images.*nowhere.*there is no network here.*DUALFORM_DATA", last)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "options", [("cifar",), ("joint", "--seeds", 0), ("joint", "--steps", 0), ("joint", "--optimizer", "adam")]
)
def test_what_the_command_refuses(call, options, tmp_path):
    assert call(*options, "--out", tmp_path).exit_code == 2
