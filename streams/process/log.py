"""Logs of a process: one line per record, as text for people or as JSON for machines.

What lives here: formats, levels, and where lines go. What must not: which lines an outage of Kafka adds or hides
(kafka.outage_log).
"""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from streams.settings import LogSettings

#: Attributes of a line that are not fields of its JSON object: those of every line, and a mark of kafka.outage_log.
_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "kafka_checked",
}


class JsonFormatter(logging.Formatter):
    """One JSON object per line; every entry of `extra` becomes a field."""

    def __init__(self, number: int | None = None) -> None:
        """number: that of the process, if it is one of several; the field `process`."""
        super().__init__()
        self._of_process = {} if number is None else {"process": number}

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            **self._of_process,
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


def dict_config(settings: LogSettings, number: int | None = None) -> dict[str, Any]:
    """Configuration for `logging.config.dictConfig`, which Faust takes as well. number: as for `configure`."""
    level = settings.log_level.upper()
    # Faust and aiokafka log several lines for every rebalance and fetch; our own lines contain what matters.
    quiet = max(logging.WARNING, logging.getLevelNamesMapping()[level])
    of_process = "" if number is None else f"process {number}  "
    formatter = (
        {"()": JsonFormatter, "number": number}
        if settings.log_json
        else {"format": f"%(asctime)s %(levelname)-7s {of_process}%(name)s  %(message)s"}
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"chosen": formatter},
        "handlers": {"stderr": {"()": _handler, "formatter": "chosen"}},
        "loggers": {name: {"level": quiet} for name in ("aiokafka", "faust", "mode")},
        "root": {"level": level, "handlers": ["stderr"]},
    }


def _handler() -> logging.Handler:
    """The handler of all lines, which writes to standard error."""
    # Imported late: every command imports this module, and few use Kafka.
    from streams.kafka.outage_log import KafkaAwayFilter

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(KafkaAwayFilter(lambda: handler.handle))
    return handler


def configure(settings: LogSettings, number: int | None = None) -> None:
    """Send the logs of this process to standard error, in the format that the settings choose.

    number: that of the process, if several write to the same place.
    """
    logging.config.dictConfig(dict_config(settings, number))
