"""A longer run, recorded and asked: the cost of a slot. Takes the recording as far as it came, if it was stopped.

DUALFORM_DATA=… python bench/recordings.py long; python bench/scale.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import dualform
import mnist
import recordings
from measure import Peak, machine

OUT = Path(__file__).parent / "results" / "scale.json"

if __name__ == "__main__":
    image = recordings.queries(128)
    found: dict[str, dict[str, float]] = {}

    def ask(name: str, question: Callable[[], object]) -> None:
        began, used = time.perf_counter(), time.process_time()
        with Peak() as peak:
            question()
        found[name] = {
            "seconds": time.process_time() - used, "by the clock": time.perf_counter() - began, "bytes": peak.bytes,
        }  # fmt: skip
        print(f"{name}: {found[name]['seconds']:.3f} s of the processor, {peak.bytes / 1e6:.0f} MB", flush=True)

    ask("opening", lambda: dualform.open(recordings.FOLDER / "long", mnist.network()))
    dual = recordings.recorded("long", unfinished=True)
    slots = dual.store.slots("2")
    print(f"{dual.end_step:,} steps, {slots:,} slots in each layer, {dual.store.nbytes / 1e9:.2f} GB")
    ask("top-10 of one query, the first", lambda: dual.attend(image[:1])["2"].top(10))
    ask("top-10 of one query", lambda: dual.attend(image[:1])["2"].top(10))
    ask("top-10 of 128 queries", lambda: dual.attend(image)["2"].best(10))
    ask("contributions to a logit, top-10 of 128, the first", lambda: dual.contributions(image)["4"].best(10))
    ask("contributions to a logit, top-10 of 128", lambda: dual.contributions(image)["4"].best(10))
    ask("top-500 of every class, the first", lambda: dual.attend(image[:1])["2"].top(500, per="label"))
    ask("top-500 of every class", lambda: dual.attend(image[:1])["2"].top(500, per="label"))
    ask("masked without one sample", lambda: dual.masked(drop="sample_id = 7"))
    size = {
        "steps": dual.end_step,
        "slots": slots,
        "bytes": dual.store.nbytes,
        "bytes a row": dual.store.nbytes / slots,
    }
    OUT.write_text(json.dumps({"machine": machine(), **size, "questions": found}, indent=1) + "\n")
