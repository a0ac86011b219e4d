"""Processes that end together: a process without JAX stands for one of them, the test for the others."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.devices

PREPARE = """
import socket, sys, time
from meshwright.runtime.processes.peers import Peers
peers = Peers(0, {1: socket.socket(fileno=int(sys.argv[1])), 2: socket.socket(fileno=int(sys.argv[2]))}, heartbeat_s=2)
peers.start()
def call(name="step", **types):
    peers.enter()
    peers.announce(name, types)
print("ready", flush=True)
"""
HANG_S = 60


class First:
    """Process 0 of three, in a process of its own that goes on with some code."""

    def __init__(self, code, prepare=PREPARE):
        pairs = [socket.socketpair() for _ in range(2)]
        self.others = [ours for ours, _ in pairs]
        theirs = [their.fileno() for _, their in pairs]
        command = [sys.executable, "-c", prepare + code, *map(str, theirs)]
        self.child = subprocess.Popen(
            command, pass_fds=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _, their in pairs:
            their.close()
        assert self.child.stdout.readline() == "ready\n"

    def tell(self, process, message):
        self.others[process - 1].sendall(json.dumps(message).encode() + b"\n")

    def end(self):
        """Its exit code, what it printed at last, and what it told the others."""
        try:
            said = self.child.communicate(timeout=HANG_S)[1].strip().splitlines()
        finally:
            self.child.kill()
            self.child.wait()
        told = []
        for other in self.others:
            text = b""
            other.settimeout(HANG_S)
            while received := _receive(other):
                text += received
            told.append([json.loads(line) for line in text.splitlines()])
            other.close()
        return self.child.returncode, said, told


def _receive(connection):
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_a_process_that_is_gone_ends_those_who_wait_for_it_at_once():
    first = First("time.sleep(600)")
    first.others[1].close()
    del first.others[1]
    code, said, told = first.end()
    sentence = "process 2 was killed or crashed, or its host was lost; its own output may say why"
    assert (code, said) == (1, [f"meshwright: {sentence}. So process 0 ends, too."])
    assert told == [[{"failed": [sentence, True]}]], "and the third hears of it"


def test_the_last_words_of_one_are_passed_on_and_end_those_who_wait():
    first = First("time.sleep(600)")
    first.tell(1, {"failed": ["process 1 ended with ValueError: bad record", False]})
    code, said, told = first.end()
    assert (code, said) == (1, ["meshwright: process 1 ended with ValueError: bad record. So process 0 ends, too."])
    assert told[1] == [{"failed": ["process 1 ended with ValueError: bad record", False]}]


def test_the_next_step_raises_what_ended_another():
    first = First(
        "import meshwright as mw\n"
        "while peers.failure is None: time.sleep(0.01)\n"
        "try: call()\n"
        "except mw.ProcessError as error: print('caught', error, file=sys.stderr)\n"
    )
    first.tell(2, {"failed": ["process 2 was interrupted", False]})
    code, said, _ = first.end()
    assert (code, said) == (1, ["caught process 2 was interrupted"]), "it left by itself, and waits for nobody"


@pytest.mark.parametrize(
    ("code", "words"),
    [("raise ValueError('bad\\nrecord')", "process 0 ended with ValueError: bad"), (None, "process 0 was interrupted")],
)
def test_an_error_that_ends_a_process_is_told_to_all(code, words):
    first = First(code or "time.sleep(600)")
    if code is None:
        first.child.send_signal(signal.SIGINT)
    status, said, told = first.end()
    assert status == 1 and any("Traceback" in line for line in said) and "meshwright:" not in said[-1]
    assert told == [[{"failed": [words, False]}]] * 2


def test_an_exit_code_is_told_to_all_and_kept():
    """Python calls no hook for `sys.exit`: the others had learnt that the process made no more calls."""
    status, said, told = First("call(); sys.exit(7)").end()
    assert (status, said) == (7, [])
    assert [words[1:] for words in told] == [[{"failed": ["process 0 ended with exit code 7", False]}]] * 2


def test_an_exit_that_was_called_off_is_none():
    status, said, told = First("try: sys.exit(7)\nexcept SystemExit: call()").end()
    assert (status, said) == (0, []) and all(words[1:] == [{"end": [0, 1]}] for words in told)


def test_a_process_that_comes_to_its_end_says_how_far_it_came_and_waits_for_none():
    first = First("call(x='float32[4]'); call(x='float32[4]')")
    code, said, told = first.end()
    assert (code, said) == (0, [])
    assert told == [[{"turn": [1, "step", {"x": "float32[4]"}]}, {"end": [0, 2]}]] * 2


def test_a_process_that_ended_well_is_not_missed():
    first = First("time.sleep(1.5)")
    for process in (1, 2):
        first.tell(process, {"end": [process, 0]})
        first.others[process - 1].shutdown(socket.SHUT_RDWR)
    assert first.end()[:2] == (0, [])


IN_THE_MIDDLE = """
import socket, sys, time
from meshwright.runtime.processes.peers import Peers
above, below = (socket.socket(fileno=int(text)) for text in sys.argv[1:])
peers = Peers(1, {0: above, 5: below}, heartbeat_s=2)
peers.start()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_between_others_passes_on_what_it_hears():
    """Process 1 of more than five: above it is process 0, below it process 5, and below that process 21."""
    middle = First("", prepare=IN_THE_MIDDLE)
    above, below = (connection.makefile("r") for connection in middle.others)
    hear = lambda source: json.loads(source.readline())  # noqa: E731
    assert hear(above) == {"at": {"1": [0, 0]}}
    middle.tell(2, {"at": {"5": [3, 2], "21": [2, 2]}, "paces": {"21": [0.1, 0.2]}})
    assert hear(above) == {"at": {"5": [3, 2], "21": [2, 2]}, "paces": {"21": [0.1, 0.2]}}
    middle.tell(1, {"ask": [21, None]})
    assert hear(below) == {"ask": [21, None]}
    middle.tell(2, {"doing": [21, ["its loader"]]})
    assert hear(above) == {"doing": [21, ["its loader"]]}
    middle.tell(1, {"ask": [1, None]})
    process, doing = hear(above)["doing"]
    assert process == 1 and "MainThread" in doing[0]
    middle.tell(1, {"stalled": "process 21 has kept the others waiting"})
    assert hear(below) == {"stalled": "process 21 has kept the others waiting"}
    middle.tell(2, {"end": [21, 4]})
    assert hear(above) == {"end": [21, 4]}, "and nobody takes it for an end of process 5"
    above.close()
    middle.others[1].shutdown(socket.SHUT_RDWR)
    code, said, told = middle.end()
    lost = "process 5 was killed or crashed, or its host was lost; its own output may say why"
    assert code == 1 and said[-1] == f"meshwright: {lost}. So process 1 ends, too."
    assert told[0] == [{"failed": [lost, True]}]


def test_one_that_is_stuck_in_a_call_that_others_do_not_make_is_ended():
    first = First("call(x='float32[4]'); call(x='float32[4]'); time.sleep(600)")
    first.tell(1, {"turn": [1, "step", {"x": "float32[4]"}]})
    first.tell(1, {"turn": [2, "step", {"x": "float32[8]"}]})
    code, said, told = first.end()
    sentence = "process 1 calls step with x as float32[8] (call 2), and process 0 with x as float32[4]"
    assert code == 1 and said[0].startswith(f"meshwright: {sentence}; all processes must call the same functions")
    assert told[0][-1]["failed"][0] == told[1][-1]["failed"][0]


def test_a_child_does_not_keep_its_parents_connections_open():
    first = First(
        "import os\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(600)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    child = int(first.child.stdout.readline())
    try:
        first.others[0].settimeout(HANG_S)
        assert first.others[0].recv(10) == b"", "the kernel closed it with the parent"
    finally:
        os.kill(child, signal.SIGKILL)
    assert first.end()[0] == -9
