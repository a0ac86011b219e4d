"""`meshwright launch`: scripts without JAX stand for training, so that only the launcher is tested."""

import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.cli.console import CommandError
from meshwright.cli.launching.settings import device_settings

pytestmark = pytest.mark.slow

HANG_S = 60


def start(folder, code, *options):
    """The launcher with a script that knows its process's number."""
    (folder / "script.py").write_text(f"import os, sys, time\nme = int(os.environ['JAX_PROCESS_ID'])\n{code}\n")
    command = [sys.executable, "-m", "meshwright", "launch", "--processes", "2", *options, str(folder / "script.py")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
    )


def end(launcher):
    """Its exit code, and the lines on stdout and stderr."""
    try:
        out, errors = launcher.communicate(timeout=HANG_S)
    finally:
        launcher.kill()
    return launcher.returncode, out.splitlines(), errors.splitlines()


def test_each_process_has_its_number_its_devices_and_the_arguments(tmp_path):
    names = ("JAX_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    code = f"print([os.environ[n] for n in {names}], sys.argv[1:], '--processes' in sys.argv, file=sys.stderr)"
    launcher = start(tmp_path, code, "--devices-per-process", "4")
    status, out, errors = end(launcher)
    assert (status, out) == (0, [])
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    assert sorted(errors) == [f"[{i}] ['2', '4', {flags!r}] [] False" for i in range(2)]


def test_options_after_the_script_are_the_scripts(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    command = ["launch", "--processes", "1", str(tmp_path / "script.py"), "--processes", "9", "-x"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *command], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (0, "[0] ['--processes', '9', '-x']\n"), done.stderr


def test_a_module_is_run_as_python_runs_it(tmp_path):
    command = [sys.executable, "-m", "meshwright", "launch", "--processes", "1", "-m", "json.tool", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert done.returncode == 0 and "[0] usage: " in done.stdout, done.stderr


def test_a_process_that_fails_is_named_with_its_last_lines_and_the_others_are_ended(tmp_path):
    code = (
        "print('well', flush=True)\nif me == 0:\n open('said', 'w').close()\n time.sleep(600)\n"
        "while not os.path.exists('said'): time.sleep(0.01)\nsys.exit('no data')"
    )
    status, out, errors = end(start(tmp_path, code, "--grace", "0.5"))
    assert status == 1 and sorted(out) == ["[0] well", "[1] well"]
    assert errors[:-2] == [
        "[1] no data",
        "meshwright launch: killed process 0, still running 0.5 s after another one failed",
        "meshwright launch: process 1 of 2 failed with exit code 1; its last lines:",
    ]
    assert sorted(errors[-2:]) == ["    no data", "    well"]  # from two streams


def test_a_process_that_is_killed_is_named_with_the_signal(tmp_path):
    status, _, errors = end(start(tmp_path, "if me == 0: os.kill(os.getpid(), 9)"))
    assert status == 128 + 9
    assert errors == [
        "meshwright launch: process 0 of 2 was killed by SIGKILL; its last lines:",
        "    (it printed nothing)",
    ]


CONNECTED = " is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def test_the_cause_is_named_and_not_the_process_that_ends_first_because_of_it(tmp_path):
    code = (
        f"print('[Gloo] Rank ' + str(me) + '{CONNECTED}')\n"
        f"print('[Gloo] Rank [Gloo] Rank 0{CONNECTED}')\nprint('1{CONNECTED}')\n"  # torn by its threads
        "if me == 0:\n print(f'meshwright: process 1 has no data. So process 0 {ENDS_TOO}')\n sys.exit(1)\n"
        "print('[Gloo] closed')\ntime.sleep(1.5)\nsys.exit(7)"
    )
    status, out, errors = end(start(tmp_path, f"from meshwright.runtime.processes.peers import ENDS_TOO\n{code}"))
    assert status == 7
    assert sorted(out) == ["[0] meshwright: process 1 has no data. So process 0 ends, too.", "[1] [Gloo] closed"]
    assert errors == ["meshwright launch: process 1 of 2 failed with exit code 7; its last lines:", "    [Gloo] closed"]


@pytest.mark.skipif(sys.platform != "linux", reason="the script looks at /proc")
def test_a_process_that_was_stopped_is_named_and_not_the_one_that_lost_it(tmp_path):
    code = (
        "import signal\nif me == 1:\n print('here', flush=True)\n open('at', 'w').write(str(os.getpid()))\n"
        " os.rename('at', 'pid')\n os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not os.path.exists('pid'): time.sleep(0.01)\n"
        "while open(f'/proc/{open(\"pid\").read()}/stat').read().split()[2] != 'T': time.sleep(0.01)\nos.abort()"
    )
    status, _, errors = end(start(tmp_path, code))
    assert status == 128 + signal.SIGSTOP
    assert errors[0] == (
        "meshwright launch: process 1 of 2 was stopped (SIGSTOP), and the others waited for it in vain; its last lines:"
    )
    assert errors[1:] == ["    here"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_process_once(tmp_path, number):
    code = f"import signal\nsignal.signal({int(number)}, lambda *_: print('asked', flush=True) or sys.exit(0))\n"
    # A signal that comes just before a sleep is heeded after it, so sleeps are short.
    launcher = start(tmp_path, code + "print('ready', flush=True)\nwhile True:\n    time.sleep(0.05)")
    assert {launcher.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    launcher.send_signal(number)
    status, out, errors = end(launcher)
    assert (status, sorted(out), errors) == (0, ["[0] asked", "[1] asked"], [])


def test_processes_that_do_not_heed_a_signal_are_killed(tmp_path):
    code = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)"
    launcher = start(tmp_path, code, "--grace", "0.1")
    assert {launcher.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    launcher.terminate()
    status, _, errors = end(launcher)
    assert status == 128 + 9 and errors[0].startswith("meshwright launch: killed processes 0, 1, still running 0.1 s")
    assert "mw.preempted()" in errors[0] and len(errors) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end children with their parent")
def test_processes_do_not_outlive_the_launcher(tmp_path):
    with start(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)") as launcher:
        children = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.kill()
    deadline = time.monotonic() + HANG_S
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().split()[2] != "Z"  # a zombie waits for somebody to read its exit code
    except OSError:
        return False


def test_all_are_started_again_as_often_as_asked(tmp_path):
    code = "if me == 1:\n open('tries', 'a').write('x')\n if len(open('tries').read()) < 3: sys.exit(4)\nprint('done')"
    status, out, errors = end(start(tmp_path, code, "--restarts", "2", "--grace", "5"))
    assert status == 0 and sorted(out[-2:]) == ["[0] done", "[1] done"]
    again = [line for line in errors if "again" in line]
    assert again == [f"meshwright launch: starting all 2 processes again (restart {i} of 2)" for i in (1, 2)]


def test_gpus_are_divided(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    shares = device_settings(2, None, "cuda")
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1", "2,5"]
    with pytest.raises(CommandError, match="4 processes with 2 GPUs each need 8, and there are 4 here; give fewer"):
        device_settings(4, 2, "cuda")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--processes", "0", "script.py"], "--processes is 0; give 1 or more"),
        (["--devices-per-process", "0", "script.py"], "--devices-per-process is 0; give 1 or more"),
        (["--platform", "abacus", "script.py"], "the platform is 'abacus'; give --platform cpu or cuda"),
        (["absent.py"], "there is no script absent.py"),
        (["-m", "absent.one"], "there is no module absent.one"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, said):
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-m", "meshwright", "launch", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=HANG_S)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("ending", "is_started_again"),
    [
        ("raise mw.errors.DoesNotFit('no plan fits', needed_bytes=2, limit_bytes=1)", False),
        ("raise mw.errors.CheckpointError('the disk is full')", True),
        ("sys.exit(2)", False),
    ],
)
def test_errors_that_would_come_again_are_not_tried_again(ending, is_started_again, tmp_path):
    code = f"import meshwright as mw, meshwright.errors\nif me == 0:\n time.sleep(0.5)\nelse: {ending}"
    _, _, errors = end(start(tmp_path, code, "--restarts", "1"))
    assert any("starting all 2 processes again" in line for line in errors) == is_started_again
    assert ("meshwright launch: not started again, since the same error would end it again" in errors) != (
        is_started_again
    )
