import pytest

from dualform_paper.language.marking import marked


@pytest.mark.parametrize(
    ("passage", "line"),
    [
        (("in a\nsingle ", "d", "og, I faint"), "… in a single <b>d</b>og, I faint …"),
        (("nothing. At", " ", "most it"), "… nothing. At<b>␣</b>most it …"),
        (("the end", "\n", "\n\n    _By_"), r"… the end<b>⏎</b> \_By\_ …"),
        (("of <unk> ", "<unk>", " | 9 @.@ 4 *"), r"… of &lt;unk&gt; <b>&lt;unk&gt;</b> \| 9 @.@ 4 \* …"),
        (("Æsop’s ", "“", "[fox]"), r"… Æsop’s <b>“</b>\[fox\] …"),
    ],
)
def test_a_passage_is_one_line_that_markdown_leaves_alone(passage, line):
    assert marked(*passage) == line
