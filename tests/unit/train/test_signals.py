"""A wish to stop, in a process of its own: signals go to all of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from shardwise.errors import EXIT_STOPPED

BEFORE = """
import hashlib, os, sys, time
from shardwise.train import signals
from shardwise.train.signals import LeaveSetup, StopRequest
signals.SAME_WISH_SECONDS, signals.LEAVE_SECONDS = 0.5, 1.0
stop = StopRequest(started_at=time.time())
stop.listen(0)
"""
SLEEP = """
print("there", flush=True)
try:
    time.sleep(20)
except LeaveSetup:
    print(stop.before_training())
    raise SystemExit(0)
print(stop.wanted())
"""
# Inside one call that lets other threads run but no handler, as a collective does.
BLOCKED = """
print("there", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
"""


def run(code: str, *signals: tuple[float, int], timeout: float = 30) -> tuple[int, str]:
    """Exit code and output of a program that was sent signals, each so many seconds after the last."""
    process = subprocess.Popen([sys.executable, "-c", BEFORE + code], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    for seconds, number in signals:
        time.sleep(seconds)
        process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_set_up_is_left_at_once(number: signal.Signals) -> None:
    assert run(SLEEP, (0, number)) == (0, f"stopped before the first step ({number.name}): nothing was begun and there "
                                          "is no checkpoint yet. Start again to go on\n")


def test_a_set_up_is_left_at_the_time_limit() -> None:
    code, output = run("stop.time_limit_seconds = 1\n" + SLEEP)
    assert code == 0 and "(run.time_limit)" in output


def test_a_set_up_is_left_from_within_a_call_that_does_not_return() -> None:
    assert run(BLOCKED, (0, signal.SIGTERM)) == (EXIT_STOPPED, "")


def test_training_is_not_interrupted() -> None:
    code, output = run("stop.training()\n" + SLEEP.replace("20", "1.5"), (0, signal.SIGTERM), (0.1, signal.SIGTERM))
    assert (code, output) == (0, "True\n")  # the same wish twice


@pytest.mark.parametrize("code", [SLEEP, BLOCKED], ids=["sleeping", "blocked"])
def test_a_second_signal_ends_at_once(code: str) -> None:
    assert run("stop.training()\n" + code, (0, signal.SIGUSR1), (1.0, signal.SIGTERM)) == (128 + signal.SIGTERM, "")


def test_an_error_in_a_set_up_that_was_to_end_anyway_is_a_stop() -> None:
    """A tokenising process that the same signal ended, say."""
    code, output = run("""
print("there", flush=True)
try:
    while stop.reason is None:
        try:
            time.sleep(20)
        except LeaveSetup:
            pass
    raise ValueError("a consequence")
except ValueError as error:
    print(stop.left_setup(error), stop.left_setup(error))
""", (0, signal.SIGTERM))
    assert (code, output) == (0, "True False\n")
