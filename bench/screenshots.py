"""The documents' pictures of the explorer, taken in Chromium.

dualform demo && python bench/screenshots.py runs/demo
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from dualform.explorer.runs import find
from dualform.explorer.server import Server
from dualform.explorer.session import Session

WIDTH, HEIGHT = 1280, 860


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", type=Path)
    options.add_argument("--out", type=Path, default=Path("docs"))
    options.add_argument("--test", type=int, help="default: the first test example with a wrong answer")
    told = options.parse_args()
    session = Session(find(told.run))
    wrong = session.predictions.examples(right=False, limit=1).examples
    test = f"test:{told.test}" if told.test is not None else wrong[0].input if wrong else "test:0"
    answer = session.predictions.prediction(test)
    views = {
        "explorer-prediction": (f"prediction?input={test}&kind=contribution", "light"),
        "explorer-edit": (f"edit?input={test}&off=%5B%22label%22%2C{answer.answer}%5D", "dark"),
    }
    with Server(session) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (view, theme) in views.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)  # type: ignore[arg-type]
            page.goto(f"{server.url}#/{view}")
            taken(page, told.out / f"{name}.png")
        browser.close()


def taken(page: Page, path: Path) -> None:
    page.set_default_timeout(120_000)
    page.locator(".bars").first.wait_for()
    page.locator(".skeleton").first.wait_for(state="detached")
    page.wait_for_timeout(1000)
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
