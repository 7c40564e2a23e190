"""Structured logs: one line a fact, key=value for people or JSON for machines."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from streams.settings import Settings

_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; whatever is passed as `extra` becomes a field."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in _PLAIN},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(fields, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:
            # Text that is no UTF-8, or a number beyond 64 bits: a log line must not fail for what it is about.
            return json.dumps({key: str(value) for key, value in fields.items()})


def dict_config(settings: Settings) -> dict[str, Any]:
    """The logging of a process, in the form that `logging.config` and Faust take."""
    level = settings.log_level.upper()
    # Kafka's Python clients tell every rebalance and fetch in several lines; ours say what matters of it.
    quiet = max(logging.WARNING, logging.getLevelNamesMapping()[level])
    formatter = (
        {"()": JsonFormatter} if settings.log_json else {"format": "%(asctime)s %(levelname)-7s %(name)s  %(message)s"}
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"chosen": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "chosen", "stream": sys.stderr}},
        "loggers": {name: {"level": quiet} for name in ("aiokafka", "faust", "mode")},
        "root": {"level": level, "handlers": ["stderr"]},
    }


def configure(settings: Settings) -> None:
    """Send the logs of this process to standard error in the form that the settings ask for."""
    logging.config.dictConfig(dict_config(settings))
