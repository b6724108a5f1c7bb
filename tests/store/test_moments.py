from dualform.store import moments
from dualform.store.moments import Moments


def test_the_moments_asked_about_last_are_known(monkeypatch):
    monkeypatch.setattr(moments, "MOST", 2)
    known, asked = Moments(), []

    def ask(moment, name):
        return known.get(moment, name, lambda: asked.append((moment, name)) or (moment, name))

    for moment in (1, 2, 1, 3, None, 1, 3, 2, None):
        for name in ("a", "b"):
            assert ask(moment, name) == (moment, name)
    assert [moment for moment, name in asked if name == "a"] == [1, 2, 3, None, 2]
    assert [moment for moment, name in asked if name == "b"] == [1, 2, 3, None, 2]
