"""Runs the built programs the way a user does: alone and under mpirun. Standard library only."""

import os
import pathlib
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("DSV41_BINARY_DIR", ROOT / "build/release/bin"))
CHECKPOINTS = ROOT / "tests/checkpoints"
DATA = ROOT / "tests/data"

# How much longer than usual things may take: sanitizers slow everything down.
PATIENCE = float(os.environ.get("DSV41_PATIENCE", "1"))

UCX = ["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any"]
OB1 = ["--mca", "pml", "ob1"]


class Result:
    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds

    def messages(self):
        """Lines of ours on standard error; mpirun adds its own when a rank ends with a code."""
        return [line for line in self.err.splitlines() if line.startswith("dsv41-mpi: ")]


def sanitized():
    return b"__asan_init" in (BIN / "dsv41-mpi").read_bytes()


def environment(**extra):
    values = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    values.pop("DSV41_MODEL", None)
    return {**values, **extra}


def launched(**extra):
    """See support/sanitizer_defaults.cc; nothing looks at it but programs built with a sanitizer."""
    return environment(**{"ASAN_OPTIONS": "fast_unwind_on_malloc=0", **extra})


def command(arguments, ranks=0, mca=(), program="dsv41-mpi"):
    """ranks 0: without a launcher."""
    launcher = ["mpirun", "-np", str(ranks), "--oversubscribe", *mca] if ranks else []
    return [*launcher, str(BIN / program), *map(str, arguments)]


def ranks_of(launcher):
    """Process ids by rank of the ranks that a launcher has started on this machine."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"PPid:\t{launcher}\n" not in (path / "status").read_text():
                continue
            for entry in (path / "environ").read_bytes().split(b"\0"):
                if entry.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(entry.partition(b"=")[2])] = int(path.name)
        except OSError:
            pass  # it is gone
    return found


def run(arguments, ranks=0, mca=(), timeout=120, program="dsv41-mpi", stdin=None, **extra):
    variables = launched(**extra) if ranks else environment(**extra)
    start = time.monotonic()
    done = subprocess.run(command(arguments, ranks, mca, program), input=stdin, stdin=None if stdin else subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout * PATIENCE, env=variables)
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"),
                  time.monotonic() - start)


def run_ranks(arguments, ranks, mca=OB1, timeout=120, **extra):
    """Each rank behind a shell that notes its exit code: mpirun by itself ends all at the first one that is not zero, and
    tells only that one. `code` is the list of all ranks' codes."""
    with tempfile.TemporaryDirectory() as notes:
        script = f'"$@"; echo $? >"{notes}/$OMPI_COMM_WORLD_RANK"'
        launcher = ["mpirun", "-np", str(ranks), "--oversubscribe", *mca, "sh", "-c", script, "sh"]
        start = time.monotonic()
        done = subprocess.run([*launcher, *command(arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=timeout * PATIENCE, env=launched(**extra))
        seconds = time.monotonic() - start
        codes = [int((pathlib.Path(notes) / str(rank)).read_text()) for rank in range(ranks)]
    return Result(codes, done.stdout.decode(errors="replace").replace("\r", ""), done.stderr.decode(errors="replace"), seconds)
