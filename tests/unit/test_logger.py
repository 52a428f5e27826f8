"""Lines of the log: one per event, no secrets, JSON where it was asked for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.logger import JsonFormatter, TextFormatter, make_formatter, redact


def record(message: str, *args: Any, **facts: Any) -> logging.LogRecord:
    made = logging.LogRecord("quire.x", logging.INFO, "file.py", 1, message, args, None)
    vars(made).update(facts)
    return made


def failed(message: str) -> logging.LogRecord:
    made = record("it failed")
    try:
        raise ValueError(message)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_a_line_of_text_holds_level_name_and_message() -> None:
    line = TextFormatter().format(record("%s of %d", "one", 2))
    assert line.startswith("INFO ")
    assert line.endswith("[quire.x] one of 2")


def test_json_has_facts_that_are_known() -> None:
    line = JsonFormatter().format(record("done %d", 7, request_id="r1", status=200, duration_ms=1.5, other="no"))
    found = json.loads(line)
    assert found["time"].endswith("+00:00")
    assert (found["level"], found["logger"], found["message"]) == ("INFO", "quire.x", "done 7")
    assert (found["request_id"], found["status"], found["duration_ms"]) == ("r1", 200, 1.5)
    assert found["pid"] == os.getpid()
    assert "other" not in found
    assert "exception" not in found


def test_an_exception_is_logged_without_secrets() -> None:
    text = TextFormatter().format(failed("password=hunter22"))
    assert "Traceback" in text
    assert "ValueError: password=***" in text
    line = JsonFormatter().format(failed("password=hunter22"))
    assert "\n" not in line
    assert "ValueError: password=***" in json.loads(line)["exception"]


@given(st.text(), st.sampled_from([TextFormatter(), JsonFormatter()]))
def test_nothing_a_client_sends_begins_another_line(text: str, formatter: logging.Formatter) -> None:
    line = formatter.format(record("path %s", text, path=text))
    assert len(line.splitlines()) == 1
    line.encode("utf-8", "strict" if text.isprintable() else "replace")
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("bearer abc.def-123==", "bearer ***"),
        ("'x-api-key': 'very secret'", "'x-api-key': '*** secret'"),
        ("api_key=abcdef, n=1", "api_key=***, n=1"),
        ("--api-key=abcdef", "--api-key=***"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "HF_TOKEN=***"),
        ("key sk-abcdefghijklmnop1234", "key sk-***"),
        ("https://me:pass@host/x", "https://***@host/x"),
        ("max_tokens=16, stop token: 5, tokens: 7", "max_tokens=16, stop token: 5, tokens: 7"),
        ("request chatcmpl-0a1b2c3d4e5f60718293", "request chatcmpl-0a1b2c3d4e5f60718293"),
        ("http://localhost:8000/v1/models", "http://localhost:8000/v1/models"),
    ],
)
def test_secrets_are_replaced(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_a_format_has_its_formatter() -> None:
    assert type(make_formatter("json")) is JsonFormatter
    assert type(make_formatter("text")) is TextFormatter


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)


def test_a_process_logs_in_the_form_it_is_told_to() -> None:
    log = "from quire.logger import init_logger, use_format; log = init_logger('quire.x'); log.warning('one')"
    done = run(f"{log}; use_format('text'); log.warning('two')", QUIRE_LOG_FORMAT="json")
    first, second = done.stderr.splitlines()
    assert json.loads(first)["message"] == "one"
    assert second.endswith("[quire.x] two")
    done = run(log, QUIRE_LOG_FORMAT="xml")
    assert "QUIRE_LOG_FORMAT='xml' is no form of the log" in done.stderr
