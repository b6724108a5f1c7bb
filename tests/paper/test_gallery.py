"""docs/paper/README.md: its numbers are those of the pages that it sums up."""

import json
import re
import statistics
from pathlib import Path

GALLERY = Path(__file__).parents[2] / "docs" / "paper"
PAGE = (GALLERY / "README.md").read_text()
IN_WORDS = {3: "three", 5: "five", 7: "seven"}


def test_the_ranks_of_the_papers_passages():
    sections = json.loads((GALLERY / "aesop" / "results.json").read_text())["sections"]
    tables = [section["data"] for section in sections if re.match("Table [234]:", section["title"])]
    ranks = [passage["rank"] for table in tables for passage in table["theirs"]]
    assert len(ranks) == 9
    among_the_first = sum(rank <= 3 for rank in ranks)
    assert (
        f"Of the nine passages in the paper's Tables 2 to 4, {IN_WORDS[among_the_first]} are among the three that our LSTM attends "
        f"to most, of 120,623 positions; the median rank is {statistics.median(ranks):.0f}."
    ) in PAGE


def test_table_1_is_that_of_its_page():
    page = (GALLERY / "single-task-reference" / "index.md").read_text()
    for name, heading in (("ours", "| ours"), ("paper", "| paper")):
        (line,) = [line for line in PAGE.splitlines() if line.startswith(heading)]
        cells = [cell.strip() for cell in line.split("|")[2:5]]
        for number, cell in enumerate(cells):
            right, answer = cell.split(" / ")
            row = re.search(rf"^\| layer-{number}, {name} \|(.*)$", page, re.MULTILINE)[1]
            assert [part.strip() for part in row.split("|")[1:3]] == [answer, right]
