"""Every fault, in every phase, at every kind of rank: the job ends in time, with a code and a line that says where.

Faults come from outside (signals to the rank's process) or from the message layer below the program (a preloaded
library, support/interposer.cc, that also tells when a rank enters and leaves the message layer); the program is the one
that users run. Prints a table in Markdown. DSV41_FAULT_JOBS says how many jobs run side by side (2); arguments
PHASE,RANK,FAULT choose cells. docs/failures.md describes what is checked. Standard library only.
"""

import array
import concurrent.futures
import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
from program import BIN, CHECKPOINTS, OB1, environment, ranks_of  # noqa: E402

MODEL = CHECKPOINTS / "mini"
INTERPOSER = BIN.parent / "lib" / "libdsv41_interposer.so"
RANKS = 3
TIMEOUT = 3  # --rank-timeout, seconds
BOUND = TIMEOUT + 5
PHASES = ("start", "load", "prefill", "decode", "output", "shutdown")
LAUNCHER, ALL = -1, -2
NAMES = {0: "host", 1: "expert 1", 2: "expert 2", LAUNCHER: "launcher", ALL: "launcher and all ranks"}
FAULTS = ("kill", "stop", "stall", "slow", "malformed")
REQUEST, REPLY, CONTROL, GATHER, BROADCAST = 1, 2, 3, 1000, 1001
# Messages of the start by phase and rank: the exchange of host names; the report on what the rank has loaded, which is sent
# while the host rank still waits for the prompt.
EARLY = {("start", 0): f"{BROADCAST}.1", ("start", 1): f"{GATHER}.1", ("start", 2): f"{GATHER}.1",
         ("load", 1): f"{GATHER}.3", ("load", 2): f"{GATHER}.3"}
ATTEMPTS = 3  # to meet the phase


def applies(phase, rank, fault):
    """No message of the program travels after the farewell."""
    if rank < 0:
        return fault == "kill" and (rank, phase) != (ALL, "start")  # before the message layer has names for its memory
    return not (fault == "malformed" and phase in ("output", "shutdown"))


class Job:
    def __init__(self, directory, phase):
        self.directory, self.phase = directory, phase
        self.text, self.errors, self.lock = b"", b"", threading.Lock()
        self.pids, self.writer = {}, None
        self.fifo = directory / "prompt"
        os.mkfifo(self.fifo)
        arguments = ["--model", MODEL, "--rank-timeout", TIMEOUT, "--speculate", "off"]
        self.results = None
        if phase == "output":
            (directory / "requests").write_text("".join(
                '{"id": "%d", "prompt_ids": [0, %d], "max_tokens": 8, "ignore_eos": true}\n' % (i, i) for i in range(1, 700)))
            os.mkfifo(directory / "results")
            self.results = os.open(directory / "results", os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(self.results, fcntl.F_SETPIPE_SZ, 4096)
            arguments += ["--requests", directory / "requests", "--out", directory / "results"]
        else:
            arguments += ["--prompt-file", self.fifo, "--ignore-eos", "--no-skip"]
            arguments += ["-n", "2" if phase == "shutdown" else "4000"]
        self.segments = set()
        hold = {"FAULT_HOLD_MS": "700"} if phase in ("start", "shutdown") else {}
        self.process = subprocess.Popen(
            ["mpirun", "-np", str(RANKS), "--oversubscribe", *OB1, "-x", f"LD_PRELOAD={INTERPOSER}",
             str(BIN / "dsv41-mpi"), *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(FAULT_DIRECTORY=str(directory), OMPI_MCA_orte_tmpdir_base=str(directory), **hold))
        self.readers = [threading.Thread(target=self.read, args=(self.process.stdout, "text"), daemon=True),
                        threading.Thread(target=self.read, args=(self.process.stderr, "errors"), daemon=True)]
        for reader in self.readers:
            reader.start()

    def read(self, file, name):
        while piece := os.read(file.fileno(), 65536):
            with self.lock:
                setattr(self, name, getattr(self, name) + piece)

    def until(self, what, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"the job did not get to {what}: {self.errors.decode(errors='replace')}")
            time.sleep(0.002)

    def give_prompt(self):
        # A prompt that nearly fills the context keeps the ranks busy for a while.
        text = "the quick brown fox " * 190 if self.phase == "prefill" else "a"
        os.write(self.writer, text.encode())
        os.close(self.writer)
        self.writer = None

    def output_waits(self):
        waiting = array.array("i", [0])
        fcntl.ioctl(self.results, termios.FIONREAD, waiting)
        return waiting[0] > 1000

    def reach(self, rank):
        """Returns when the job is in its phase."""
        rank = max(rank, 0)
        self.until("its start", lambda: (self.directory / f"start.{rank}").exists())
        self.until("all ranks", lambda: len(ranks_of(self.process.pid)) == RANKS)
        self.pids = ranks_of(self.process.pid)
        if self.phase == "start":
            return
        if self.phase == "output":
            self.until("its output", self.output_waits)
            return
        self.until("the prompt", self.prompt_is_awaited)
        if self.phase == "load":
            return
        self.give_prompt()
        self.until("the start line", lambda: b"transport" in self.errors)
        if self.phase == "prefill":
            time.sleep(0.1)
            if self.text:
                raise RuntimeError("prefill was over before the fault")
        elif self.phase == "decode":
            self.until("text", lambda: len(self.text) > 20)
        elif self.phase == "shutdown":
            self.until("shutdown", lambda: (self.directory / f"shutdown.{rank}").exists())

    def prompt_is_awaited(self):
        """Whether the host rank, with the tokenizer loaded, has opened the pipe of the prompt; from then on it waits."""
        if self.writer is None:
            try:
                self.writer = os.open(self.fifo, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads
                return False
        return True

    def after(self):
        """What the outside world does once the fault is there: gives the prompt, reads the output."""
        try:
            if self.phase in ("start", "load"):
                self.until("the prompt", self.prompt_is_awaited, 10)
                self.give_prompt()
        except (OSError, RuntimeError):
            pass  # the host is gone or stands
        if self.results is not None:
            threading.Thread(target=self.drain, daemon=True).start()

    def drain(self):
        os.set_blocking(self.results, True)
        while os.read(self.results, 65536):
            pass

    def clean(self):
        """Ends what is left; returns what was."""
        left = [f"rank {rank}" for rank, pid in self.pids.items() if self.alive(pid)]
        for pid in self.pids.values():
            if self.alive(pid):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            left.append("mpirun")
            self.process.kill()
        self.process.wait()
        litter = [segment for segment in self.segments if pathlib.Path(segment).exists() and os.path.getsize(segment) > 0]
        for segment in self.segments:
            pathlib.Path(segment).unlink(missing_ok=True)
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None
        return left + litter

    def note_segments(self):
        """Shared memory that the ranks have mapped."""
        for pid in self.pids.values():
            maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
            self.segments |= {line.removesuffix(" (deleted)").split()[-1] for line in maps.splitlines() if "/dev/shm/" in line}

    def alive(self, pid):
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"


def inject(job, rank, fault):
    if rank < 0:
        for victim in [job.process.pid, *(job.pids.values() if rank == ALL else ())]:
            os.kill(victim, signal.SIGKILL)
        return
    pid = job.pids[rank]
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif fault == "stall":  # longer than allowed, and then it is back
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(TIMEOUT + 4, proceed, [pid]).start()
    elif fault == "slow":  # a tenth of its speed, never silent for long; for 3 s
        threading.Thread(target=slow_down, args=(pid,), daemon=True).start()
    elif fault == "malformed":
        if (job.phase, rank) in EARLY:
            return  # done already
        if job.phase == "load":
            tag = BROADCAST
        else:
            tag = REQUEST if rank == 0 else REPLY
        (job.directory / f"corrupt.{rank}.{tag}").touch()


def proceed(pid):
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def slow_down(pid):
    try:
        for _ in range(30):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
    except ProcessLookupError:
        pass


def message_of(errors):
    """The line that tells: ours if there is one, else the launcher's about the rank that it lost."""
    ours = [line for line in errors.splitlines() if re.match(r"dsv41-mpi: (?!.*(tok/s|rows skipped|requests finished))", line)]
    lost = re.search(r"process rank \d+ with PID \d+ on node \S+ exited on\s+signal \d+[^.]*", errors)
    lines = ([" ".join(lost.group(0).split())] if lost else []) + ours
    return " / ".join(lines[:3])


def cell(phase, rank, fault):
    """(verdict, exit code, seconds, message)"""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="dsv41-fault-"))
    if fault == "malformed" and (phase, rank) in EARLY:
        (directory / f"corrupt.{rank}.{EARLY[phase, rank]}").touch()
    job = Job(directory, phase)
    try:
        job.reach(rank)
        job.note_segments()
        had_text = job.text
        start = time.monotonic()
        inject(job, rank, fault)
        job.after()
        if fault == "slow":  # goes on; ended by the user when it has been slow for long enough
            time.sleep(4)
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGUSR1)
        limit = 30 if fault == "slow" else BOUND + 5
        while time.monotonic() - start < limit:
            if job.process.poll() is not None and not any(map(job.alive, job.pids.values())):
                break
            time.sleep(0.01)
        seconds = time.monotonic() - start
        left = job.clean()
        for reader in job.readers:
            reader.join(5)
        errors = job.errors.decode(errors="replace")
        code, message = job.process.returncode, message_of(errors)
        wrong = []
        if left:
            wrong.append(f"left behind: {', '.join(left)}")
        if fault == "slow":
            if code != 0:
                wrong.append("a slow rank is not a failure")
            message = message or "goes on, ends on request"
        elif fault == "stall" and code == 0 and phase == "shutdown":
            pass  # its work was done: late is not wrong
        else:
            if code == 0:
                wrong.append("exit code 0")
            if seconds > BOUND:
                wrong.append(f"more than {BOUND} s")
            if rank >= 0 and not re.search(r"rank \d", message):
                wrong.append("no rank is named")
        if not job.text.startswith(had_text):
            wrong.append("text was lost")
        if re.search("core dumped|Segmentation", errors):
            wrong.append("a crash")
            print(errors, file=sys.stderr)
        return "; ".join(wrong) or "ok", code, seconds, message or errors.strip()[-200:]
    finally:
        job.clean()
        if job.results is not None:
            os.close(job.results)
        shutil.rmtree(directory)


def row(chosen):
    """(whether the cell is as specified, its line of the table)"""
    phase, rank, fault = chosen
    for _ in range(ATTEMPTS):
        try:
            verdict, code, seconds, message = cell(phase, rank, fault)
            break
        except RuntimeError as error:  # the phase was not met; that is nobody's fault
            verdict, code, seconds, message = "not reached", "-", 0, " ".join(str(error).split())[-300:]
    message = message.replace("|", "/").replace("dsv41-mpi: ", "").replace(os.uname().nodename, "HOST")
    return verdict == "ok", f"| {phase} | {NAMES[rank]} | {fault} | {verdict} | {code} | {seconds:.1f} | {message} |"


def main():
    jobs = int(os.environ.get("DSV41_FAULT_JOBS", "2"))
    cells = [(p, r, f) for p in PHASES for r in NAMES for f in FAULTS if applies(p, r, f)]
    if len(sys.argv) > 1:
        cells = [(p, int(r), f) for p, r, f in (argument.split(",") for argument in sys.argv[1:])]
    print(f"{len(cells)} cells, {jobs} at a time, {RANKS} ranks, --rank-timeout {TIMEOUT}: bound {BOUND} s\n")
    print("| phase | rank | fault | verdict | code | seconds | message |\n|---|---|---|---|---|---|---|", flush=True)
    good = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for as_specified, line in pool.map(row, cells):
            good += as_specified
            print(line, flush=True)
    print(f"\n{good} of {len(cells)} cells as specified")
    return 0 if good == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
