import builtins
import inspect
import re
import subprocess
import sys

import pytest

import dualform
from dualform import errors


def test_the_public_names():
    assert {"Dual", "Recorder", "__version__", "errors", "open", "record"} <= set(dualform.__all__)
    assert all(hasattr(dualform, name) for name in dualform.__all__)
    public = {name for name in vars(dualform) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(dualform, name))}
    assert public - modules <= set(dualform.__all__)


def test_the_users_lines():
    """The names of the design, which users write."""
    for name in ("verify", "info", "attend", "contributions", "masked", "compact", "at", "model", "layer"):
        assert callable(getattr(dualform.Dual, name))
    for name in ("batch", "log", "close", "__enter__", "__exit__"):
        assert callable(getattr(dualform.Recorder, name))


def test_the_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", dualform.__version__)


IMPORT = (
    "import time, torch; before = time.process_time(); import dualform; [getattr(dualform, n) for n in dualform.__all__]; "
    "print(time.process_time() - before)"
)


def test_importing_everything_takes_less_than_a_second_beyond_torch():
    """The one timing in this suite: of the processor, and the best of five, because machines are busy."""
    seconds = []
    for _ in range(5):
        found = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        seconds.append(float(found.stdout))
        if seconds[-1] < 1:
            return
    pytest.fail(f"import dualform took {seconds} s beyond torch")


def test_importing_is_light():
    """What belongs to the demo, the figures and the page is imported where it is used."""
    code = "import dualform; [getattr(dualform, name) for name in dualform.__all__]"
    assert not imported(code) & {"sklearn", "matplotlib", "fastapi", "plotly"}


def imported(code):
    """The packages that a fresh interpreter has imported after running some code."""
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("code", ["import dualform", "from dualform.cli import app"])
def test_a_room_is_entered_when_it_is_used(code):
    assert not imported(code) & {"torch", "polars", "numpy"}


@pytest.mark.parametrize("first", ["record", "record.columns", "evaluate", "evaluate.bm25"])
def test_a_name_that_is_also_a_room_is_the_function_whoever_enters_the_room_first(first):
    code = f"import dualform.{first}, dualform; assert callable(dualform.record) and callable(dualform.evaluate)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'dualform' has no attribute 'recrod'"):
        dualform.recrod  # noqa: B018
    assert set(dualform.__all__) <= set(dir(dualform))


TREE = [line for line in errors.__doc__.splitlines() if "Error" in line and "──" in line]


def test_the_tree_on_top_of_the_file_is_the_tree():
    assert len(TREE) >= 16
    parents = {}
    for line in TREE:
        name = re.search(r"── (\w+)", line).group(1)
        depth = line.index("──") // 4
        parents[depth] = name
        above = getattr(errors, parents[depth - 1]) if depth else errors.DualformError
        kind = getattr(errors, name)
        assert above in kind.__bases__, name
        builtin = re.search(r"\((\w+)\)", line.split(name, 1)[1][:30])
        if builtin:
            assert issubclass(kind, getattr(builtins, builtin.group(1))), name


def test_every_error_is_in_the_tree():
    drawn = {re.search(r"── (\w+)", line).group(1) for line in TREE} | {"DualformError"}
    defined = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.DualformError)
    }
    assert defined == drawn


BUILTINS = {
    errors.RecordingError: RuntimeError,
    errors.BatchError: ValueError,
    errors.AxisError: ValueError,
    errors.OptimizerError: TypeError,
    errors.UnexplainedError: RuntimeError,
    errors.StoreError: OSError,
    errors.StoreExistsError: FileExistsError,
    errors.StoreMissingError: FileNotFoundError,
    errors.StoreDamagedError: OSError,
    errors.StoreVersionError: OSError,
    errors.WriterError: OSError,
    errors.WorkersLostError: RuntimeError,
    errors.QuestionError: ValueError,
    errors.MaskError: ValueError,
    errors.UnknownLayerError: LookupError,
    errors.ModelMismatchError: ValueError,
    errors.NotRecordedError: LookupError,
}


@pytest.mark.parametrize(("kind", "builtin"), BUILTINS.items())
def test_each_error_is_also_the_fitting_builtin(kind, builtin):
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.DualformError)
    assert str(kind("what happened")) == "what happened"
