"""The peers of dualform-paper, on a tiny recorded network."""

import pytest
import tiny

import dualform
from dualform.evaluate import views
from dualform_paper.peers import PEERS


def test_evaluate_finds_them_by_their_entry_point():
    assert views.peers() == PEERS


@pytest.mark.parametrize("name", PEERS)
def test_they_score_every_sample_for_every_test_example(recorded, name):
    peer = PEERS[name]
    if not peer.installed:
        pytest.skip("the peers extra is not installed")
    dual = dualform.open(recorded, tiny.network())
    scores = peer.view(dual, tiny.study(), None)
    assert scores.shape == (tiny.TESTS, tiny.SAMPLES)
    labels = tiny.data()[1]
    same = labels[tiny.SAMPLES :, None] == labels[None, : tiny.SAMPLES]
    assert scores[same].mean() > scores[~same].mean()  # positive is what supports
