"""What a store remembers while it is open."""

from dualform.store import catalog
from dualform.store.files import files_at
from dualform.store.reader import Store
from training import train


def test_results_about_the_steps_asked_last_are_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "CACHED_STEPS", 2)
    store = Store(files_at(train(tmp_path / "run", steps=4).path))
    computed = []

    def ask(step, name):
        return store.cached(name, lambda: computed.append((step, name)) or (step, name), step)

    for step in (1, 2, 1, 3, None, 1, 3, 2, None):
        for name in ("a", "b"):
            assert ask(step, name) == (step, name)
    assert [step for step, name in computed if name == "a"] == [1, 2, 3, None, 2]
    assert [step for step, name in computed if name == "b"] == [1, 2, 3, None, 2]
