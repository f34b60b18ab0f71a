"""SIGBUS in a copy of the native mover, SIGBUS elsewhere, forks, and exits with running jobs.

Each is in a process of its own, which a failure may end.
"""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mover_helpers import need_library

pytestmark = pytest.mark.real_time

SCENE = """
    import ctypes, errno, faulthandler, mmap, os, signal, sys, tempfile, threading
    from itertools import product
    from mover_helpers import Endless, Memory, copies, is_readable, reaped, submitted, until
    from remote_server.errors import MoverClosed
    from remote_server.native import Job, Kind, make_mover

    class Truncated(Memory):
        '''Memory of a file that has lost all but its first 512 KiB.'''

        def __init__(self):
            self.file = tempfile.TemporaryFile()
            self.file.truncate(4 << 20)
            self.map = mmap.mmap(self.file.fileno(), 4 << 20)
            self._pin = (ctypes.c_char * (4 << 20)).from_buffer(self.map)
            self.address = ctypes.addressof(self._pin)
            self.map[:] = os.urandom(4 << 20)
            os.ftruncate(self.file.fileno(), 512 << 10)

    def fault():
        '''A SIGBUS that is not of a mover.'''
        lost = Truncated()
        ctypes.memmove(ctypes.create_string_buffer(9), lost.address + (1 << 20), 9)
"""


def run(scene: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCENE) + textwrap.dedent(scene)],
        capture_output=True, text=True, timeout=timeout_s, check=False,
        env={"PYTHONPATH": ":".join(str(Path(__file__).parents[level]) for level in (3, 1))},
    )  # fmt: skip


def lives(scene: str) -> None:
    done = run(scene)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["lives"]), done.stderr


@pytest.fixture
def native():
    need_library()


def test_a_copy_of_memory_whose_file_was_truncated_fails_with_efault(native):
    """The operations beside it are done, and the next job as well."""
    lives("""
        mover = make_mover(2)
        ways = mover.run, lambda job: submitted(mover, job)
        hows = {}, {"seeds": [1, 2, 3]}, {"stream": True}, {"stream": True, "seeds": [1] * 3}
        for lost, do, how in product((0, 1), ways, hows):
            target, source = [Truncated() if lost == side else Memory(4 << 20) for side in (0, 1)]
            for _ in range(2):
                job = copies(target, source, [300_000, 2 << 20, 100_000], **how)
                do(job)
                assert [*job.errors] == [0, errno.EFAULT, errno.EFAULT], job.errors
                assert job.done[0] == 300_000 and job.done[1] <= 1 << 20 and job.done[2] == 0
                whole = copies(Memory(9), Memory(9, b"123456789"), [9])
                do(whole)
                assert whole.keep[0].map[:] == b"123456789"
        print("lives")
    """)


def test_files_and_truncated_memory_end_with_efault(native):
    lives("""
        mover = make_mover(1)
        for do in (mover.run, lambda job: submitted(mover, job)):
            lost, file = Truncated(), tempfile.TemporaryFile()
            file.truncate(1 << 20)
            for job in (
                Job(Kind.READ, [lost.address], [0], [1 << 20], files=[file.fileno()], seeds=[1]),
                Job(Kind.WRITE, [0], [lost.address], [1 << 20], files=[file.fileno()]),
                Job(Kind.WRITE, [0], [lost.address], [1 << 20], files=[file.fileno()], seeds=[1]),
                Job(Kind.COPY, [0], [lost.address], [1 << 20], seeds=[1]),
            ):
                do(job)
                assert [*job.errors] == [errno.EFAULT] and job.done[0] == 512 << 10, [*job.done]
        print("lives")
    """)


def test_a_crash_in_a_move_of_the_server_fails_its_blocks_and_the_next_move_runs(native):
    lives("""
        from remote_server.native.moves import Moves
        moves, ended = Moves(1), []
        lost = copies(Memory(4 << 20), Truncated(), [512 << 10] * 8, seeds=[1] * 8)
        whole = copies(Memory(2 << 20), source := Memory(2 << 20, b"123"), [2 << 20])
        moves.submit("a", lost, ended.append)
        moves.submit("a", whole, ended.append)
        while moves.num_bytes:
            assert is_readable(moves, 60)
            moves.finish()
        assert ended == [lost, whole]
        assert [*lost.errors] == [0] + [errno.EFAULT] * 7
        assert lost.intact([*lost.digests]) == [True] + [False] * 7
        assert whole.keep[0].map[:] == source.map[:]
        print("lives")
    """)


def test_a_bus_error_elsewhere_ends_the_process_as_without_a_mover(native):
    done = run("make_mover(1).run(copies(Memory(9), Memory(9), [9])); fault()")
    assert done.returncode == -signal.SIGBUS
    assert done.stderr == ""


def test_a_bus_error_elsewhere_is_reported_by_faulthandler(native):
    done = run("faulthandler.enable(); make_mover(1); threading.Thread(target=fault).start()")
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr
    assert "in fault" in done.stderr


def test_a_bus_error_elsewhere_reaches_the_handler_before(native):
    """One in C that repairs the fault, with the arguments and the mask of the kernel."""
    lives("""
        libc = ctypes.CDLL(None, use_errno=True)
        lost, page = Truncated(), (1 << 20) // 4096
        seen, address = [], ctypes.c_uint64

        @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        def handler(number, info, context):
            seen.append((number, address.from_address(info + 16).value // 4096))
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            seen.append((signal.SIGBUS in blocked, signal.SIGUSR1 in blocked))
            os.ftruncate(lost.file.fileno(), 4 << 20)

        class Action(ctypes.Structure):
            _fields_ = [("handler", type(handler)), ("mask", ctypes.c_uint64 * 16),
                        ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]

        action = Action(handler, flags=4)  # SA_SIGINFO
        action.mask[0] = 1 << (signal.SIGUSR1 - 1)
        assert libc.sigaction(signal.SIGBUS, ctypes.byref(action), None) == 0
        mover = make_mover(1)
        assert ctypes.string_at(lost.address + (1 << 20), 9) == bytes(9)
        assert seen == [(signal.SIGBUS, lost.address // 4096 + page), (True, True)], seen
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        print("lives")
    """)


def test_a_bus_error_that_was_sent_is_never_taken_for_a_copys(native):
    """Sent to the process while its threads copy and the main thread runs jobs."""
    lives("""
        seen = []
        signal.signal(signal.SIGBUS, lambda *_: seen.append(1))
        mover = make_mover(1)
        source, target = Memory(16 << 20), Memory(16 << 20)
        for number in range(10):
            if number == 5:
                assert seen
                signal.signal(signal.SIGBUS, signal.SIG_IGN)
            job, own = (copies(target, source, [16 << 20]) for _ in range(2))
            mover.submit(job)
            os.kill(os.getpid(), signal.SIGBUS)
            mover.run(own)
            reaped(mover, 1)
            assert not job.failed and not own.failed
        print("lives")
    """)


def test_a_bus_error_that_was_sent_ends_the_process_without_a_handler(native):
    done = run("make_mover(1); os.kill(os.getpid(), signal.SIGBUS)")
    assert done.returncode == -signal.SIGBUS


def test_faulthandler_that_is_enabled_after_the_mover_reports_a_copy_which_fails(native):
    lives("""
        mover = make_mover(1)
        faulthandler.enable()
        job = copies(Memory(4 << 20), Truncated(), [4 << 20])
        submitted(mover, job)
        assert [*job.errors] == [errno.EFAULT]
        print("lives")
    """)


@pytest.mark.parametrize("kind", ["native", "python"])
def test_after_a_fork_the_parents_mover_is_refused_and_the_child_makes_its_own(kind):
    if kind == "native":
        need_library()
    lives(f"""
        os.environ.update({{"KVFERRY_MOVER": "python"}} if {kind == "python"} else {{}})
        mover, running = make_mover(2), Endless().job()
        done, queued = copies(Memory(9), Memory(9), [9]), copies(Memory(9), Memory(9), [9])
        mover.submit(running)
        mover.submit(done)
        until(lambda: is_readable(mover))
        for again in range(3):
            child = os.fork()
            if not child:
                for call in (lambda: mover.submit(queued), mover.fileno):
                    try:
                        call()
                    except MoverClosed:
                        continue
                    os._exit(1)
                if mover.reap() or mover.cancel(running):
                    os._exit(2)
                mover.close()
                if mover.run(queued):
                    os._exit(3)
                del mover
                own = make_mover(2)
                submitted(own, queued)
                grandchild = os.fork()
                if not grandchild:
                    os._exit(0 if not own.reap() else 4)
                own.close()
                os._exit(os.waitpid(grandchild, 0)[1] or (5 if queued.failed else 0))
            assert os.waitpid(child, 0)[1] == 0
        assert mover.reap() == [done]
        assert mover.cancel(running)
        assert reaped(mover, 1) == [running]
        submitted(mover, queued)
        mover.close()
        print("lives")
    """)


def test_after_a_fork_the_library_itself_refuses_every_call(native):
    """A lock of its pool may be held by a thread that the child does not have."""
    lives("""
        from remote_server.native.library import load
        library, job = load(), copies(Memory(9), Memory(9), [9])
        pool, numbers = library.pool_new(1, 1), ctypes.create_string_buffer(8)
        number = library.submit(pool, job.header)
        child = os.fork()
        if not child:
            results = (
                library.submit(pool, job.header), library.cancel(pool, number),
                library.pool_descriptor(pool), library.reap(pool, ctypes.addressof(numbers), 1),
            )
            library.pool_free(pool)
            os._exit(results != (-errno.ECHILD,) * 3 + (0,))
        assert os.waitpid(child, 0)[1] == 0
        until(lambda: library.reap(pool, ctypes.addressof(numbers), 1))
        library.pool_free(pool)
        print("lives")
    """)


@pytest.mark.parametrize(("kind", "end"), [("native", ""), ("native", "1 / 0"), ("python", "")])
def test_an_exit_with_running_jobs_ends_them_first(kind, end):
    """Or threads would copy from memory that the interpreter has unmapped."""
    if kind == "native":
        need_library()
    done = run(f"""
        os.environ.update({{"KVFERRY_MOVER": "python"}} if {kind == "python"} else {{}})
        mover = make_mover(2)
        source, target = Memory(16 << 20), Memory(16 << 20)
        for _ in range(100):
            mover.submit(copies(target, source, [4 << 20] * 4))
        mover.submit(Endless().job(2))
        del source, target
        {end}
    """)
    assert done.returncode == (1 if "/" in end else 0), done.stderr
    assert done.stderr == "" or "/" in end
