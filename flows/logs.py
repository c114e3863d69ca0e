"""Log lines for machines: one JSON object per line, where DFLASH_LOG=json. Of flows, tasks, and what training says."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

VARIABLE = "DFLASH_LOG"
STYLES = ("text", "json")


class JsonLines(logging.Formatter):
    """Time, level, logger, message; names of flow run and task run inside of these; the traceback, if any."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()  # Prefect's configuration gives it a format, which is not one

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_runs(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _runs() -> dict[str, str]:
    context = sys.modules.get("prefect.context")  # not imported: Prefect asks for this formatter while it is
    flow = getattr(context, "FlowRunContext", None) and context.FlowRunContext.get()  # type: ignore[union-attr]
    task = getattr(context, "TaskRunContext", None) and context.TaskRunContext.get()  # type: ignore[union-attr]
    runs: dict[str, str] = {}
    if flow and flow.flow_run:
        runs |= {"flow_run": flow.flow_run.name, "flow_run_id": str(flow.flow_run.id)}
    if task:
        runs |= {"task_run": task.task_run.name, "task_run_id": str(task.task_run.id)}
    return runs


def as_json() -> bool:
    """Whether lines are to be JSON. Raises ValueError for a style that is not known."""
    style = os.environ.get(VARIABLE, STYLES[0])
    if style not in STYLES:
        raise ValueError(f"{VARIABLE}={style}: no such style; choose from {', '.join(STYLES)}")
    return style == "json"


def settings() -> dict[str, str]:
    """Environment that makes Prefect's own handler write such lines, in this process and those it starts."""
    if not as_json():
        return {}
    return {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
        "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": f"{__name__}.{JsonLines.__name__}",
        "PREFECT_LOGGING_COLORS": "false",
    }
