"""Logs of a process: one line per record, as text for people or as JSON for machines."""

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
    """One JSON object per line; every entry of `extra` becomes a field."""

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
            # Text that is not UTF-8, or a number beyond 64 bits. Logging must not fail because of a value.
            return json.dumps({key: str(value) for key, value in fields.items()})


def dict_config(settings: Settings) -> dict[str, Any]:
    """Configuration for `logging.config.dictConfig`, which Faust takes as well."""
    level = settings.log_level.upper()
    # Faust and aiokafka log several lines for every rebalance and fetch; our own lines contain what matters.
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
    """Send the logs of this process to standard error, in the format that the settings choose."""
    logging.config.dictConfig(dict_config(settings))
