"""DFLASH_LOG=json: every line of flows, tasks and training processes is one JSON object that says whose it is."""

import json
import os
import subprocess
import sys

import pytest

from flows import logs, server

SCRIPT = """
import logging, sys
TRAINING = "import sys; print('WARNING dflash.training.loop step 7 is skipped', file=sys.stderr); sys.exit(1)"
from prefect import flow, task
from prefect.logging import get_run_logger
from dflash.training import launch
from flows.watch import begin, end

@task
def train():
    logging.getLogger("dflash.training").info("a line\\nand [another] %s", "of ours")
    launch._run([sys.executable, "-c", TRAINING], 1, lambda *_: None)

@flow(name="small", flow_run_name="small · 1", on_running=[begin], on_failure=[end])
def small():
    get_run_logger().info("Prefect's")
    train()

small()
"""


def test_every_line_is_one_json_object_that_names_its_run(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "json")
    environment = {**os.environ, **server.settings(), "PREFECT_API_URL": prefect_server}
    environment |= {"PREFECT_LOGGING_LEVEL": "INFO", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    said, _, last = done.stderr.partition('Traceback (most recent call last):\n  File "<string>"')
    assert "RuntimeError: training crashed" in last  # what Python says at the end
    lines = [json.loads(line) for line in said.splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    (ours,) = (line for line in lines if line["message"] == "a line\nand [another] of ours")
    assert (ours["logger"], ours["level"], ours["flow_run"]) == ("dflash.training", "INFO", "small · 1")
    assert ours["task_run"].startswith("train")
    (prefects,) = (line for line in lines if line["message"] == "Prefect's")
    assert prefects["flow_run_id"] == ours["flow_run_id"]
    (child,) = (line for line in lines if line["logger"] == "dflash.training.loop")
    assert (child["level"], child["message"]) == ("WARNING", "step 7 is skipped")
    assert child["task_run_id"] == ours["task_run_id"]
    assert any("RuntimeError: training crashed" in line.get("exception", "") for line in lines)


def test_text_is_the_default_and_another_style_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    assert logs.settings() == {}
    monkeypatch.setenv(logs.VARIABLE, "xml")
    with pytest.raises(ValueError, match="DFLASH_LOG=xml: no such style; choose from text, json"):
        server.settings()
