"""What a person does, in a real browser."""

import re
import time

import pytest
import runs
from browsing import browser, expect, fits, nameless, needs_browser, page, settled

import dualform
from dualform.explorer import edits
from dualform.explorer.server import Server
from dualform.explorer.session import Session
from dualform.explorer.subject import subject

pytestmark = needs_browser
VIEWS = ["run", "prediction", "prediction?kind=contribution", "edit", "suspects", "api"]


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def digits(session):
    with Server(session) as server:
        yield server.url


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    dual, language = runs.letters(tmp_path_factory.mktemp("letters") / "run")
    with Server(Session(subject(dual, language=language))) as server:
        yield server.url


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    dual, train, test, options = runs.hostile(tmp_path_factory.mktemp("hostile") / "run")
    with Server(Session(subject(dual, train, test, **options))) as server:
        yield server.url


def field(look, name):
    """A choice by its label."""
    return look.locator("label.field", has_text=re.compile(f"^{name}")).locator("select")


def test_the_run(chromium, digits):
    with page(chromium, f"{digits}#/run") as look:
        look.get_by_text("Verified after step 16").wait_for()
        assert "one part in" in look.locator("section", has_text="Certificate").inner_text()
        look.locator(".chart .main-svg").first.wait_for()
        assert look.locator(".tile b").first.inner_text() == "16"
        field(look, "Column").select_option("sample_id")
        look.get_by_text("largest of 200 groups").wait_for()


def test_choosing_a_test_example(chromium, digits, session):
    with page(chromium, f"{digits}#/prediction") as look:
        settled(look)
        assert "input=test%3A0" in look.url
        field(look, "Answer").select_option("false")
        field(look, "Class").select_option("3")
        look.wait_for_url(re.compile("of=3"))
        settled(look)
        found = session.predictions.examples(label="3", right=False)
        look.get_by_text(f"{found.found} fit", exact=True).wait_for()
        look.locator(".grid a").first.click()
        look.get_by_role("heading", name=f"test example {found.examples[0].input[5:]}", exact=True).wait_for()
        assert look.locator("main .wrong", has_text="wrong").count() >= 1
        look.get_by_role("button", name="Reset").click()
        look.get_by_label("Number").fill("7")
        look.get_by_label("Number").press("Enter")
        look.get_by_text("1 fit", exact=True).wait_for()
        look.get_by_role("button", name="Reset").click()
        settled(look)
        look.get_by_role("button", name="Random one").click()
        settled(look)
        look.get_by_role("button", name="Shuffle").click()
        look.wait_for_url(re.compile("shuffle="))


def test_looking_at_a_prediction(chromium, digits, session):
    with page(chromium, f"{digits}#/prediction?input=test:3") as look:
        settled(look)
        cards = look.get_by_role("region", name=re.compile("^Layer "))
        expect(cards).to_have_count(3)
        expect(look.locator(".sources a")).to_have_count(24)
        expect(cards.first.locator(".bars tr")).to_have_count(10)
        cards.first.locator(".chart").last.scroll_into_view_if_needed()
        cards.first.locator(".chart .main-svg").first.wait_for()
        look.get_by_label("sizes, as in the paper's figures").check()
        look.wait_for_url(re.compile("absolute=true"))
        look.get_by_role("radio", name="Contribution").click()
        look.get_by_text("Exact: initial part + classes = the output.").wait_for()
        settled(look)
        look.get_by_label("Towards which output").select_option("7")
        look.wait_for_url(re.compile("target=7"))
        settled(look)
        assert "output 7" in cards.last.inner_text()
        address = look.url
        look.reload()  # the whole state is in the address
        settled(look)
        assert look.url == address
        assert look.get_by_role("radio", name="Contribution").get_attribute("aria-checked") == "true"


def test_influence_is_estimated_with_progress(chromium, digits):
    with page(chromium, f"{digits}#/prediction?input=test:4") as look:
        look.get_by_role("radio", name="Influence").click()
        look.get_by_text("Pushes it up most").first.wait_for()
        assert "An estimate" in look.locator(".note").inner_text()


def test_drawing_a_digit(chromium, digits):
    with page(chromium, f"{digits}#/prediction") as look:
        settled(look)
        box = look.locator("canvas.draw")
        box.scroll_into_view_if_needed()
        at = box.bounding_box()
        look.mouse.move(at["x"] + 128, at["y"] + 40)
        look.mouse.down()
        look.mouse.move(at["x"] + 126, at["y"] + 220, steps=8)
        look.mouse.up()
        look.get_by_role("heading", name="your drawing").wait_for()
        settled(look)
        assert "input=draw%3A" in look.url
        expect(look.locator(".sources a")).to_have_count(24)


def test_drawing_with_the_keyboard(chromium, digits):
    with page(chromium, f"{digits}#/prediction") as look:
        settled(look)
        look.locator("canvas.draw").focus()
        look.keyboard.press("Space")
        for _ in range(6):
            look.keyboard.press("ArrowDown")
        look.keyboard.press("Enter")
        look.get_by_role("heading", name="your drawing").wait_for()


def test_editing_memory(chromium, digits, session):
    with page(chromium, f"{digits}#/edit?input=test:3") as look:
        settled(look)
        look.get_by_role("button", name="Switch off label 3").click()
        look.get_by_text("rows dropped").wait_for()
        expected = session.edits.change("test:3", "label = 3")
        assert f"{expected.dropped_rows} of 400 rows dropped" in look.inner_text("main")
        after = expected.after.units[0]
        assert f"{after.name}" in look.get_by_role("region", name="Before and after").inner_text()
        assert "does not predict what retraining" in look.inner_text("main")
        look.get_by_text("The whole test set").wait_for()
        look.get_by_role("button", name="Switch off label 5").click()
        look.get_by_text('"label" IN (3, 5)').wait_for()
        look.get_by_role("button", name="Switch on label 3").click()
        look.get_by_role("button", name="Switch on label 5").click()
        look.get_by_text("Switch something off to see").wait_for()
        look.get_by_label("From step").fill("8")
        look.get_by_label("to step", exact=True).fill("15")
        look.get_by_role("button", name="Switch steps off").click()
        look.get_by_text("200 of 400 rows dropped").wait_for()
        link = look.url
        sample = session.book.key(0)[0]
        look.get_by_label("Training example").fill(str(sample))
        look.get_by_role("button", name="Switch it off").click()
        look.get_by_role("button", name=f"Switch on training example {sample}").wait_for()
        look.get_by_role("button", name="Everything back on").click()
        look.get_by_text("Switch something off to see").wait_for()
        look.goto(link)  # a link that somebody sent
        look.get_by_text("200 of 400 rows dropped").wait_for()


@pytest.fixture
def endless(monkeypatch):
    """Edits that go on, after their first parameter, until they are cancelled; gives what came to an end all the same."""
    masked, ended = dualform.Dual.masked, []

    def slowly(self, *, progress, **asked):
        def hesitant(what, done, total):
            for _ in range(6000 if done == 1 else 1):  # a minute
                progress(what, done, total)
                time.sleep(0.01 if done == 1 else 0)

        ended.append(masked(self, progress=hesitant, **asked))
        return ended[-1]

    monkeypatch.setattr(edits, "SMALL", 0)
    monkeypatch.setattr(dualform.Dual, "masked", slowly)
    return ended


def begun(look, act):
    """Do something that begins a job, and wait until it works; gives the job's address."""
    with look.expect_response(lambda answer: answer.status == 202) as answer:
        act()
    address = f"{look.url.partition('#')[0]}api/jobs/{answer.value.json()['id']}"
    while look.request.get(address).json()["done"] < 1:
        look.wait_for_timeout(10)
    return address


def until(look, address, state):
    """Wait until the server says this of a job."""
    for _ in range(3000):
        if look.request.get(address).json()["state"] == state:
            return
        look.wait_for_timeout(10)
    raise AssertionError(look.request.get(address).json())


def test_cancelling_long_work(chromium, digits, endless, monkeypatch):
    with page(chromium, f"{digits}#/edit?input=test:3", refusals=True) as look:
        settled(look)
        job = begun(look, lambda: look.get_by_role("button", name="Switch off label 9").click())
        look.get_by_text("putting the network together without it").wait_for()
        assert float(look.get_by_role("progressbar").get_attribute("value")) == 1
        look.get_by_role("button", name="Cancel").click()
        look.get_by_text("Cancelled: the work has stopped.").wait_for()
        assert look.get_by_role("progressbar").count() == 0
        until(look, job, "cancelled")
        assert endless == []  # the work did not come to its end
        monkeypatch.undo()
        look.get_by_role("button", name="Begin again").click()
        look.get_by_text("rows dropped").wait_for()


def test_who_leaves_cancels(chromium, digits, endless):
    with page(chromium, f"{digits}#/edit?input=test:3", refusals=True) as look:
        settled(look)
        job = begun(look, lambda: look.get_by_role("button", name="Switch off label 8").click())
        look.get_by_role("link", name="Run").click()
        until(look, job, "cancelled")
        assert endless == []


def test_a_condition_that_is_none_is_told_in_words(chromium, digits):
    with page(chromium, f"{digits}#/edit?input=test:3", refusals=True) as look:
        look.get_by_text("As a condition").click()
        look.get_by_label("Also without rows where").fill("wheather = 1")
        look.get_by_label("Also without rows where").press("Enter")
        look.get_by_role("alert").get_by_text("there is no column 'wheather'").wait_for()


def test_a_training_example(chromium, digits):
    with page(chromium, f"{digits}#/prediction?input=test:3") as look:
        settled(look)
        look.locator(".layers section").last.locator(".sources a").first.click()
        look.get_by_role("heading", name="What it wrote over time").wait_for()
        expect(look.locator(".heat tbody tr")).to_have_count(2)
        look.get_by_role("radio", name="0", exact=True).click()
        look.get_by_text("Length of value").wait_for()
        readers = look.locator("section", has_text="Test examples that attend to it most").locator(".grid a")
        expect(readers).to_have_count(12)
        readers.first.click()
        look.wait_for_url(re.compile("#/prediction"))


def test_suspects(chromium, digits, session):
    with page(chromium, f"{digits}#/suspects") as look:
        look.locator(".grid a").first.wait_for()
        first = session.suspicion.suspects(offset=0, limit=1).suspects[0]
        assert (
            look.locator(".grid a")
            .first.get_attribute("aria-label")
            .startswith(f"Rank 1: training example {first.title}")
        )
        look.get_by_role("button", name="After →").click()
        look.get_by_text("41 to 80 of 200").wait_for()
        look.locator(".grid a").first.click()
        look.get_by_text(re.compile("rank 41 of 200")).wait_for()


def test_text(chromium, letters):
    with page(chromium, f"{letters}#/text") as look:
        settled(look)
        expect(look.locator(".tokens button")).to_have_count(len("the wolf and"))
        expect(look.locator("ol.passages mark")).to_have_count(8)
        look.locator(".tokens button").nth(4).click()
        look.wait_for_url(re.compile("position=4"))
        settled(look)
        look.get_by_role("radio", name="Contribution").click()
        look.get_by_role("radio", name="f", exact=True).click()
        look.wait_for_url(re.compile("gate=f"))
        settled(look)
        look.get_by_text(re.compile("down most")).wait_for()
        look.get_by_role("textbox", name="Prompt").fill("the lamb")
        look.get_by_role("button", name="Ask").click()
        look.wait_for_url(re.compile("prompt=the\\+lamb"))
        settled(look)
        look.get_by_role("button", name="One token").click()
        look.wait_for_url(re.compile("made=1"))
        settled(look)
        expect(look.locator(".tokens button")).to_have_count(len("the lamb") + 1)
        expect(look.locator(".tokens .made")).to_have_count(1)


def test_influence_on_a_word(chromium, letters):
    with page(chromium, f"{letters}#/text?position=4&layer=lstm") as look:
        settled(look)
        look.get_by_role("radio", name="Influence").click()
        look.get_by_text(re.compile("^Pushes .* down most$")).wait_for()
        assert "An estimate" in look.locator(".note").inner_text()
        expect(look.locator("ol.passages mark")).to_have_count(16)
        assert look.get_by_role("radiogroup", name="Gate").count() == 0
        look.get_by_role("radio", name="decoder").click()
        look.wait_for_url(re.compile("layer=decoder"))
        look.get_by_text(re.compile("^Pushes .* up most$")).wait_for()


def test_a_text_without_slots_says_why_there_is_no_influence(chromium, tmp_path):
    dual, language = runs.letters(tmp_path / "run", keep="totals", totals=["place"])
    with (
        Server(Session(subject(dual, language=language))) as server,
        page(chromium, f"{server.url}#/text?kind=influence") as look,
    ):
        settled(look)
        look.get_by_text("Influence cannot be shown here: ").wait_for()
        assert "this run keeps totals only" in look.inner_text("main")
        look.get_by_role("radio", name="Attention").click()
        look.locator("ol.passages mark").first.wait_for()


def test_generation_goes_on_and_stops(chromium, letters):
    with page(chromium, f"{letters}#/text?prompt=the") as look:
        settled(look)
        look.get_by_role("button", name="Go on for 40 tokens").click()
        look.wait_for_url(re.compile("made=3"))
        look.get_by_role("button", name="Stop").click()


def test_nothing_in_the_data_is_believed(chromium, hostile):
    with page(chromium, f"{hostile}#/run") as look:
        for view in ("run", "prediction", "prediction?kind=contribution", 'edit?off=["label","plain"]', "suspects"):
            look.goto(f"{hostile}#/{view}")
            settled(look)
            assert look.evaluate("window.owned") is None
            assert look.locator("main img[src=x]").count() == 0
            assert runs.HOSTILE in look.locator(".brand .title").inner_text()
            assert look.locator("main script").count() == 0


def test_hostile_titles_of_passages(chromium, letters):
    with page(chromium, f"{letters}#/text") as look:
        settled(look)
        assert look.evaluate("window.owned") is None
        assert runs.HOSTILE in look.locator("ol.passages").inner_text()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_view_fits_and_has_names(chromium, digits, letters, width, theme):
    with page(chromium, f"{digits}#/run", width=width, theme=theme) as look:
        for view in VIEWS:
            look.goto(f"{digits}#/{view}")
            settled(look)
            assert fits(look), view
            assert nameless(look) == [], view
        assert look.evaluate("document.documentElement.dataset.theme") == theme
    with page(chromium, f"{letters}#/text", width=width, theme=theme) as look:
        settled(look)
        assert fits(look)
        assert nameless(look) == []


def test_the_keyboard_is_enough(chromium, digits):
    with page(chromium, f"{digits}#/run") as look:
        settled(look)
        look.keyboard.press("Tab")
        assert look.evaluate("document.activeElement.className") == "skip"
        for _ in range(3):
            look.keyboard.press("Tab")
        assert look.evaluate("document.activeElement.textContent") == "Prediction"
        look.keyboard.press("Enter")
        settled(look)
        look.get_by_role("radio", name="Attention").focus()
        look.keyboard.press("ArrowRight")
        look.wait_for_url(re.compile("kind=contribution"))


def test_the_theme_is_remembered(chromium, digits):
    with page(chromium, f"{digits}#/run") as look:
        look.get_by_role("button", name="Dark colours").click()
        look.reload()
        look.get_by_role("button", name="Light colours").wait_for()
