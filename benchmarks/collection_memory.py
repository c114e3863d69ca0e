"""Rows per second and peak memory of collection on a synthetic input, as one JSON line.

    python benchmarks/collection_memory.py --rows 1000000

The input is written to a temporary folder first, by a process of its own so that its memory does not count. A twentieth
of the rows repeats an earlier one, and every row is checked against the bundled evaluation prompts.
"""

import argparse
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash.config import GenerationConfig, SourceConfig
from dflash.corpus.collection import collect


def write(path: Path, *, rows: int) -> None:
    generator = random.Random(0)
    vocabulary = [
        "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(8192)
    ]
    with path.open("w") as file:
        lines: list[str] = []
        for _ in range(rows):
            if lines and generator.random() < 0.05:
                file.write(generator.choice(lines))
                continue
            question, answer = (" ".join(generator.choices(vocabulary, k=generator.randint(20, 80))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            line = json.dumps({"messages": messages}) + "\n"
            file.write(line)
            if len(lines) < 1_000:
                lines.append(line)


def measure(path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start, start_of_work = time.monotonic(), time.process_time()
    config = GenerationConfig(prompts=[SourceConfig(path=str(path))])
    summary = collect(config, [SourceConfig(path="bundled:evaluation")]).summary
    seconds, work = time.monotonic() - start, time.process_time() - start_of_work
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record = {
        "rows": summary["rows_in"],
        "kept": summary["rows"],
        "dropped": summary["dropped"],
        "rows_per_second": round(summary["rows_in"] / seconds),
        "rows_per_cpu_second": round(summary["rows_in"] / work),
        "input_mb": round(path.stat().st_size / 1e6),
        "peak_mb": round(peak / 1e6),
        "imports_mb": round(before / 1e6),
        "peak_of_input": round(peak / path.stat().st_size, 2),
    }
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, rows=arguments.rows)
    elif arguments.measure:
        logging.basicConfig(level=logging.WARNING)
        measure(arguments.measure)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "input.jsonl"
            again = [sys.executable, __file__, "--rows", str(arguments.rows)]
            subprocess.run([*again, "--write", path], check=True)
            environment = os.environ | {"DFLASH_HOME": str(Path(folder) / "home")}
            subprocess.run([*again, "--measure", path], check=True, env=environment)


if __name__ == "__main__":
    main()
