"""The python tool: what code may do, and each way in which it may not; the host must be as it was."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
from tool_doubles import run

from agentr1_jax.contrib.python_sandbox import PythonTool, SandboxLimits, bubblewrap, process, tool
from agentr1_jax.contrib.python_sandbox.bubblewrap import Command
from agentr1_jax.errors import UserError
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.validation import from_section

SECONDS = 20.0
LIMITS = SandboxLimits(seconds=SECONDS, memory_mib=512, processes=24, folder_mib=16, file_mib=8)
SHORT = dataclasses.replace(LIMITS, seconds=1.0)
"""For what would never end."""
ROOM = 10.0
"""Seconds beyond the limit in which a busy machine has to end a call."""
SOON = 10.0
MIB = 1 << 20
AT_WORK = 3 if os.geteuid() == 0 else 2
"""Processes that can be seen once code has copied itself: the two, and for root the program that watches them."""


@pytest.fixture(scope="module")
def python():
    """The tool; tests that ask for it are skipped where bubblewrap does not work: no attack runs without isolation."""
    try:
        return PythonTool(LIMITS)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def mark(monkeypatch):
    """Stands in the environment of whatever a sandbox starts during the test; nothing that has it may be left."""
    text = f"mark-{uuid.uuid4().hex}"
    monkeypatch.setitem(bubblewrap.ENVIRONMENT, "MARK", text)
    yield text
    assert none_is_left(text)


def find_processes(text):
    """The processes of this machine that have the mark."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def none_is_left(text):
    """The kernel takes a moment to end the processes of a namespace."""
    end = time.monotonic() + SOON
    while find_processes(text) and time.monotonic() < end:
        time.sleep(0.02)
    return not find_processes(text)


def does(python, code):
    return run(python, {"code": code})


def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_it_shows_what_is_printed_and_the_value_of_a_last_expression(python, mark):
    assert isinstance(python, Tool) and python.name == "python" and "20 seconds" in python.description
    for code, shown in [
        ("print('a')\n1 + 1", "a\n2"),
        ("x = 1", "No output."),
        ("print('é')\nimport sys\nprint('err', file=sys.stderr)\nprint(3)", "é\nerr\n3"),
        ("print('\\ud800')", "\\ud800"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nsys.exit()", "\ufffd"),
        ("print(__name__)\nif __name__ == '__main__': print('main')", "__main__\nmain"),
        ("import json, math, re, random, datetime, decimal, subprocess\nmath.comb(5, 2)", "10"),
        ("import os\nopen('a', 'w').write('x')\nprint(open(os.environ['HOME'] + '/a').read())", "x"),
        ("import sys\nsys.stdin.read()", "''"),
        ("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))", "[1, 2]"),
        ("import os\nsorted({*os.environ} - {'PWD'})", str(sorted(bubblewrap.ENVIRONMENT))),
        ("import os\nsorted(os.listdir('/proc/self/fd'))[:-1]", "['0', '1', '2']"),  # The last is its own.
        (f"x = '{'y' * 90_000}'\nlen(x)", "90000"),
    ]:
        result = does(python, code)
        assert result.ok, result.content
        assert result.content == shown


def test_nothing_outlasts_a_call(python, mark):
    assert does(python, "open('a', 'w').write('x')\nx = 3").ok
    assert does(python, "import os\nos.listdir(), 'x' in globals()").content == "([], False)"


@pytest.mark.parametrize(
    ("code", "kind", "last"),
    [
        ("def f():\n    return 1 / 0\nprint('so far')\nf()", "exception", "ZeroDivisionError: division by zero"),
        ("1 +", "exception", "SyntaxError: invalid syntax"),
        ("x = '\0'", "exception", "source code string cannot contain null bytes"),
        ("'\ud800'", "exception", "surrogates not allowed"),
        ("(" * 5000, "exception", "too many nested parentheses"),
        ("def f(): f()\nf()", "exception", "RecursionError: maximum recursion depth exceeded"),
        ("import sys\nsys.exit(3)", "exit", "Error: exit status 3."),
        ("import os\nos.abort()", "killed", "Error: killed by SIGABRT."),
        ("import threading\nthreading.Thread(target=input).start()\n[][1]", "exception", "list index out of range"),
    ],
)
def test_what_is_wrong_with_the_code_comes_back_to_the_policy(python, mark, code, kind, last):
    result = does(python, code)
    assert result.error == ToolError(kind, "model")
    assert last in result.content.splitlines()[-1]
    assert "site-packages" not in result.content and "first_process" not in result.content  # Only frames of the code.
    if "so far" in code:
        assert result.content.startswith("so far\nTraceback") and "return 1 / 0" in result.content


KILLED_FIRST = "hiding from the kernel's choice of what to kill"
# Attacks: the kinds that they may end as, None for an attack that fails without ending the code.
ATTACKS = {
    "fork bomb": ("import os\nwhile True: os.fork()", {"processes"}),
    "persistent fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout", "processes", "memory"},
    ),
    "threads": (
        "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()",
        {"processes"},
    ),
    "slow allocation": ("x = []\nwhile True: x.append(bytes(2**20))", {"memory"}),
    "allocation by children": (
        "import os, time\nfor _ in range(8):\n    if not os.fork(): x = b'x' * (300 * 2**20); time.sleep(99)\n"
        "time.sleep(99)",
        {"memory"},
    ),
    "pages behind an ended first thread": (
        "import ctypes, os, threading, time\n"
        "def fill():\n    time.sleep(.2)\n    x = b'x' * (300 * 2**20)\n    time.sleep(9)\n"
        "for _ in range(2):\n    if not os.fork():\n        threading.Thread(target=fill).start()\n"
        "        ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)\n"
        "time.sleep(9)",
        {"memory"},
    ),
    "buffers of sockets": (
        "import os, socket, time\nkept = []\n"
        "for _ in range(16):\n    if not os.fork():\n        for _ in range(60):\n"
        "            kept.append(socket.socketpair())\n            for one in kept[-1]:\n"
        "                one.setblocking(False)\n"
        "                try:\n                    while True: one.send(bytes(2**16))\n"
        "                except BlockingIOError: pass\n"
        "        time.sleep(9)\ntime.sleep(9)",
        {"memory"},
    ),
    "file locks": (
        "import fcntl, time\nfile = open('x', 'w')\n"
        "for n in range(3 * 10**6, 0, -2): fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, n)\ntime.sleep(9)",
        {"memory"},
    ),
    "memory files": ("import os\nos.memfd_create('x')", {"exception"}),
    "shared memory without a file": ("import mmap\nmmap.mmap(-1, 2**20)", {"exception"}),
    "shared memory of a device": ("open('/dev/zero', 'r+b')", {"exception"}),
    "larger buffers": (
        "import socket\nfor one in socket.socketpair(): one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)",
        {"exception"},
    ),
    "network sockets": ("import socket\nsocket.socket()", {"exception"}),
    "System V": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "got = libc.semget(0, 9, 0o1600), libc.shmget(0, 9, 0o1600), libc.msgget(0, 0o1600)\n"
        "print('done' if got == (-1, -1, -1) else got)",
        {None},
    ),
    "sockets that reach the host": (
        "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "vsock, tipc, pair = 40, 30, (ctypes.c_int * 2)()\n"
        "calls = [lambda f: libc.socket(f, socket.SOCK_STREAM, 0), lambda f: libc.socketpair(f, 1, 0, pair)]\n"
        "refused = []\nfor call in calls:\n    for family in (vsock, tipc, socket.AF_INET, socket.AF_NETLINK):\n"
        "        ctypes.set_errno(0)\n        refused.append(call(family) == -1 and ctypes.get_errno() == 1)\n"
        "print('done' if all(refused) else refused)",
        {None},
    ),
    KILLED_FIRST: (
        "path = '/proc/self/oom_score_adj'\nfor score in ('0', '-1000', '999'):\n"
        "    try:\n        with open(path, 'w') as file: file.write(score)\n    except OSError: pass\n"
        "print('done' if open(path).read() == '1000\\n' else open(path).read())",
        {None},
    ),
    "watches of files": ("import ctypes\nprint('done' if ctypes.CDLL(None).inotify_init1(0) == -1 else '')", {None}),
    "endless loop that will not go": (
        "import signal\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        {"timeout"},
    ),
    "sleep": ("import time\ntime.sleep(99)", {"timeout"}),
    "endless output": ("while True: print('x' * 99)", {"output_limit"}),
    "endless line": ("import os\nwhile True: os.write(2, bytes(10**6))", {"output_limit"}),
    "large file": ("with open('x', 'wb') as file:\n    for _ in range(1000): file.write(bytes(10**6))", {"files"}),
    "large folder": (
        "for n in range(1000):\n    with open(f'{n}', 'wb') as file: file.write(bytes(2**20))",
        {"files"},
    ),
    "shared memory": (
        "for n in range(1000):\n    with open(f'/dev/shm/{n}', 'wb') as file: file.write(bytes(2**20))",
        {"files"},
    ),
    "many files": ("for n in range(10**7): open(f'{n}', 'w').close()", {"files"}),
    "zombies": (
        "import os\nfor _ in range(16):\n    if not os.fork(): os._exit(0)\nprint('done')",
        {None},
    ),
    "children that stay": (
        "import subprocess\nfor _ in range(4): subprocess.Popen(['sleep', '9'], start_new_session=True)\nprint('done')",
        {None},
    ),
    "daemon": (
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(1000)\n    os._exit(0)\n"
        "print('done')",
        {None},
    ),
    "killing": (
        "import os\nfor kill, *numbers in [(os.kill, 1, 2), (os.kill, 1, 9), (os.kill, -1, 9), (os.killpg, 0, 0)]:\n"
        "    try: kill(*numbers)\n    except OSError: pass\nprint('done')",
        {None},
    ),
    "becoming root": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert libc.setuid(0) and libc.unshare(0x10000000) and libc.mount(b'x', b'.', b'tmpfs', 0, None)\n"
        "assert libc.chroot(b'.')\nprint('done')",
        {None},
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_contained(python, mark, attack):
    code, kinds = ATTACKS[attack]
    limits = SHORT if "timeout" in kinds else LIMITS
    before, start = resident(), time.monotonic()
    result = does(PythonTool(limits), code)
    assert time.monotonic() - start < limits.seconds + ROOM
    assert (result.error.kind if result.error else None) in kinds, result.content[-500:]
    assert result.ok or result.error.fault == "model"
    assert not result.ok or result.content == "done"
    assert len(result.content) <= LIMITS.output_bytes + 200
    assert resident() < before + 100 * MIB
    assert does(python, "6 * 7").content == "42"  # The tool is unharmed, too.


def test_a_fork_bomb_is_contained_where_the_kernel_does_not_count_processes(python, mark, monkeypatch):
    """Root with no other id to give: its processes are only counted from outside."""
    monkeypatch.setattr(bubblewrap, "_unused_id", lambda: None)
    result = does(python, ATTACKS["fork bomb"][0])
    assert result.error.kind in ("processes", "memory") and result.error.fault == "model"


def test_there_is_no_network(python, mark):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind(f"\0{mark}")
        hidden.listen()
        goals = [(2, 1, ("127.0.0.1", server.getsockname()[1])), (1, 1, f"\0{mark}"), (2, 1, ("192.0.2.1", 80))]
        code = (
            f"import socket\nfor family, kind, goal in {goals!r}:\n"
            "    try:\n        socket.socket(family, kind).connect(goal)\n        print('reached', goal)\n"
            "    except OSError as error: print('refused')\n"
            "try: socket.getaddrinfo('example.com', 80)\nexcept OSError: print('refused')"
        )
        assert does(python, code).content.split() == ["refused"] * 4
        for family, kind, goal in goals[:2]:
            with socket.socket(family, kind) as control:
                control.connect(goal)


def test_no_file_of_the_host_can_be_read_or_written(python, mark, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(mark)
    tmp_path.chmod(0o777)
    secret.chmod(0o666)
    files = [secret, pathlib.Path(__file__), pathlib.Path("/etc/passwd"), pathlib.Path(base.__file__)]
    assert all(file.read_text() for file in files)
    code = f"""
import os
roots = ["", "..", "../../../..", "/proc/1/root", "/proc/self/root", "/proc/1/cwd/..", "/proc/self/cwd/.."]
roots += [f"/proc/1/fd/{{n}}" for n in range(20)] + [f"/proc/self/fd/{{n}}" for n in range(20)]
for file in {[str(file) for file in files]}:
    for root in roots:
        for way in ("r", "a"):
            try:
                with open(root + file, way) as opened: print("opened", root + file)
            except OSError: pass
for path in ["/", "/usr/lib", "/proc/sys/kernel/hostname", {os.path.dirname(sys.base_prefix)!r}, {sys.base_prefix!r}]:
    try:
        with open(path if path.startswith("/proc") else path + "/{mark}", "w") as opened: print("wrote", path)
    except OSError: pass
project = {str(pathlib.Path(__file__).parents[2])!r}
for path in [project, "/home", "/var", "/mnt", "/sys", "/run", "/root/.ssh", "/boot", "/opt"]:
    if os.path.exists(path) and path not in {sys.base_prefix!r}: print("seen", path)
open("{mark}", "w").close()
print(os.listdir() == ["{mark}"])
"""
    assert does(python, code).content == "True"
    assert secret.read_text() == mark and not pathlib.Path(bubblewrap.ENVIRONMENT["HOME"], mark).exists()


def test_what_is_made_visible_can_be_read_and_not_written(python, mark, tmp_path):
    (tmp_path / "data").write_text("some text")
    tmp_path.chmod(0o755)  # Where this process is root, the code is another user.
    shows = PythonTool(LIMITS, visible=[str(tmp_path)])
    assert does(shows, f"open({str(tmp_path / 'data')!r}).read()").content == "'some text'"
    result = does(shows, f"open({str(tmp_path / 'data')!r}, 'w')")
    assert result.error.kind == "exception" and (tmp_path / "data").read_text() == "some text"


def test_another_interpreter_brings_its_packages(python, mark):
    """That of this environment: the default is the one beneath it, which lacks them."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("no virtual environment")
    code = "import jsonschema\njsonschema.__name__"
    # A symbolic link within `bin` may lead by other folders, which are not visible.
    own = PythonTool(LIMITS, python=sys.executable)
    assert does(own, code).content == "'jsonschema'"
    assert does(python, "import sys\nsys.prefix").content == repr(sys.base_prefix)


def test_sixteen_calls_at_once_are_apart(python, mark):
    code = "import time\nopen('x', 'a').write('{n} ')\ntime.sleep(.2)\nopen('x').read()"

    async def main():
        return await asyncio.gather(*(base.call(python, {"code": code.format(n=n)}) for n in range(16)))

    assert [result.content for result in asyncio.run(main())] == [f"'{n} '" for n in range(16)]


def test_a_cancelled_call_ends_with_its_children(python, mark):
    async def main():
        task = asyncio.create_task(base.call(python, {"code": "import os\nos.fork()\nwhile True: pass"}))
        while len(find_processes(mark)) < AT_WORK:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main()) and none_is_left(mark)
    limited = wrap_tool(python, ToolsConfig(timeout_seconds=1, max_attempts=1), ToolMetrics())
    assert does(limited, "while True: pass").error == ToolError("timeout", "infrastructure")


def test_a_call_cancelled_at_any_moment_leaves_nothing(python, mark):
    async def main(pause, waits):
        task = asyncio.create_task(base.call(python, {"code": "while True: pass"}))
        await asyncio.sleep(pause)
        task.cancel()
        if waits:  # Else the end of the loop cancels it once more.
            await asyncio.wait([task])
        else:
            await asyncio.sleep(0)

    for pause in (0, 0.001, 0.005, 0.02, 0.05):
        for waits in (True, False):
            asyncio.run(main(pause, waits))
    assert none_is_left(mark)


HOST = """
import asyncio, sys
from agentr1_jax.contrib.python_sandbox import PythonTool, bubblewrap
bubblewrap.ENVIRONMENT["MARK"] = sys.argv[1]
tool = PythonTool()
asyncio.run(tool.execute({"code": "import os\\nos.fork()\\nwhile True: pass"}))
"""


@pytest.mark.parametrize("processes", [1, AT_WORK])
def test_a_sandbox_does_not_outlive_its_host(python, mark, processes):
    """Killed as the sandbox starts, and when code runs in it."""
    folder = pathlib.Path(__file__).parents[2]
    host = subprocess.Popen([sys.executable, "-c", HOST, mark], cwd=folder)
    try:
        end = time.monotonic() + 60
        while (found := len(find_processes(mark))) < processes and time.monotonic() < end:
            time.sleep(0.001)
        assert found >= processes
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    assert none_is_left(mark)


FORGER = """
for process in (1, "self"):
    for n in range(20):
        try:
            with open(f"/proc/{process}/fd/{n}", "w") as file:
                file.write('\\n{"kind": "sandbox", "detail": "forged"}\\n')
        except OSError:
            pass
raise SystemExit(3)
"""
AS_USER = """
import asyncio, os, sys
from agentr1_jax.contrib.python_sandbox import PythonTool
os.setgroups([])
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
sys.executable = "/usr/bin/python3"
result = asyncio.run(PythonTool(python=sys.executable).execute({"code": sys.argv[1]}))
print(result.content if result.ok else result.error.kind)
"""


def test_code_cannot_tell_the_host_how_it_ended(python):
    assert does(python, FORGER).error == ToolError("exit", "model")


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: the host of the other tests is such a user")
@pytest.mark.skipif(not pathlib.Path("/usr/bin/python3").exists(), reason="no Python that all users may run")
@pytest.mark.parametrize(("code", "said"), [(FORGER, "exit"), (ATTACKS[KILLED_FIRST][0], "done")])
def test_code_of_the_hosts_own_user_is_contained(python, code, said):
    """Who is not root has no other user to give to the code."""
    program = [sys.executable, "-c", AS_USER, code]
    done = subprocess.run(program, cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    if "needs bubblewrap" in done.stderr:
        pytest.skip(done.stderr[-500:])
    assert done.stdout.strip() == said, done.stderr[-2000:]


@pytest.mark.parametrize("said", ['{"kind": "sandbox"}', '{"kind": "anything"}', "{}"])
def test_a_report_that_makes_no_sense_is_no_fault_of_the_infrastructure(monkeypatch, python, said):
    code = f"import sys; sys.stdin.readline(); sys.stderr.write('started\\n' + {said!r} + '\\n')"
    monkeypatch.setattr(tool, "make_command", starts([sys.executable, "-c", code]))
    assert does(python, "1").error == ToolError("killed", "model")


def starts(argv):
    return lambda *given: Command(argv, None)


def test_without_bubblewrap_it_refuses_and_names_the_package(monkeypatch):
    says = [sys.executable, "-c", "import sys; sys.exit('no such namespace')"]
    for argv, why in [(["/no/such/bwrap"], "/no/such/bwrap: No such file or directory"), (says, "no such namespace")]:
        monkeypatch.setattr(tool, "make_command", starts(argv))
        tool._problem.cache_clear()
        with pytest.raises(ValueError, match=why) as e:
            PythonTool()
        assert "apt install bubblewrap" in str(e.value)
    tool._problem.cache_clear()


def test_a_sandbox_that_does_not_start_is_the_infrastructures_fault(monkeypatch, python):
    for argv, says in [
        (["/no/such/program"], "No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('out of order')"], "out of order"),
        ([sys.executable, "-c", ""], "it wrote nothing"),
    ]:
        monkeypatch.setattr(tool, "make_command", starts(argv))
        result = does(python, "1")
        assert result.error == ToolError("sandbox", "infrastructure") and says in result.content
    monkeypatch.setattr(process, "START_SECONDS", 0.2)
    monkeypatch.setattr(tool, "make_command", starts([sys.executable, "-c", "import time; time.sleep(99)"]))
    assert "not ready within 0.2 s" in does(python, "1").content


def test_settings_that_make_no_sense_are_refused():
    for field in dataclasses.fields(SandboxLimits):
        for value in (0, -1, True, None, float("inf") if field.name == "seconds" else 1.5):
            with pytest.raises(UserError, match=f"sandbox.{field.name} is "):
                from_section(SandboxLimits, "sandbox", {field.name: value})
    with pytest.raises(ValueError, match="interpreter /no/python does not run"):
        PythonTool(python="/no/python")
