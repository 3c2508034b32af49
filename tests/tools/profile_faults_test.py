"""What becomes of a profile while its run goes on, when ranks are killed, and when it cannot be written.
Needs h5py and numpy (development time): exits with 77, which ctest shows as skipped, where they are missing."""

import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import h5py
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from program import CHECKPOINTS, command, environment, ranks_of, run

# As long as the checkpoint allows, with the slowest kernels: the readers must not outlast it.
ENDLESS = ["--model", CHECKPOINTS / "mini", "--prompt-ids", "0,270", "-n", "4000", "--ignore-eos", "--speculate", "off", "--quiet",
           "--backend", "plain"]


def whole_steps(file):
    """Steps that every table of a file holds, as tools/profile.md says."""
    steps = min(len(column) for group in ("steps", "layers", "ranks") for column in file[group].values())
    total = file["steps/total_ns"][:steps]
    return int(np.max(np.nonzero(total > 0)[0], initial=-1)) + 1


def shared_memory_of(pid):
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {pathlib.Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and "deleted" not in line}


class Running:
    """A run of four ranks that writes a profile until it is ended; its text goes to a file, so that no pipe fills."""

    def __init__(self, test, more=()):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        test.addCleanup(shutil.rmtree, self.directory)
        self.file = self.directory / "run.h5"
        self.text = open(self.directory / "text", "wb")
        self.errors = open(self.directory / "errors", "w+b")
        self.process = subprocess.Popen(command([*ENDLESS, "--profile", self.file, *more], ranks=4), stdin=subprocess.DEVNULL,
                                        stdout=self.text, stderr=self.errors, start_new_session=True,
                                        env=environment(OMPI_MCA_orte_tmpdir_base=str(self.directory)))
        test.addCleanup(self.text.close)
        test.addCleanup(self.errors.close)
        test.addCleanup(self.end)

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def said(self):
        return os.pread(self.errors.fileno(), 1 << 20, 0).decode(errors="replace")

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"did not get there: {self.said()}")
            time.sleep(0.05)

    def profiled(self, steps):
        """Whether the file holds more than this many steps; it may not even exist yet."""
        try:
            with h5py.File(self.file, "r") as file:
                return whole_steps(file) > steps
        except (OSError, KeyError, ValueError):
            return False


class Live(unittest.TestCase):
    def test_other_programs_read_while_the_run_goes_on(self):
        running = Running(self)
        running.until(lambda: running.profiled(0))
        seen, grown = 0, 0
        end = time.monotonic() + 4
        while time.monotonic() < end:  # many looks, some of them in the middle of a write
            with h5py.File(running.file, "r") as file:
                steps = whole_steps(file)
                for group in ("steps", "layers", "ranks"):
                    for column in file[group].values():
                        column[:steps]
                self.assertTrue((file["steps/step"][:steps] == np.arange(1, steps + 1)).all())
                counts = file["experts/counts"][:]
                self.assertTrue((file["experts/counts_even_steps"][:] <= counts).all())
            self.assertGreaterEqual(steps, seen)
            grown += steps > seen
            seen = steps
        self.assertGreater(grown, 2)
        dumped = subprocess.run(["h5dump", "-d", "/steps/total_ns", str(running.file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(dumped.returncode, 0, dumped.stderr)
        self.assertGreaterEqual(int(re.search(rb"SIMPLE \{ \( (\d+) \)", dumped.stdout)[1]), seen)
        whole = subprocess.run(["h5dump", "-H", "-A", str(running.file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        self.assertIn(b'"meaning"', whole.stdout)
        tool = run([running.file], program="dsv41-profile")
        self.assertEqual(tool.code, 0, tool.err)
        self.assertIsNone(running.process.poll(), running.said())  # readers did not disturb it
        running.process.send_signal(signal.SIGUSR1)  # … and it completes its file
        self.assertEqual(running.process.wait(60), 0, running.said())
        with h5py.File(running.file, "r") as file:
            self.assertEqual({len(column) for group in ("steps", "layers", "ranks") for column in file[group].values()},
                             {len(file["steps/step"])})
            self.assertGreaterEqual(whole_steps(file), seen)


class Kills(unittest.TestCase):
    """kill -9 in the middle of a run: the file opens and holds all but the last steps."""

    def kill(self, which):
        running = Running(self)
        running.until(lambda: running.profiled(100))
        ranks = ranks_of(running.process.pid)
        self.assertEqual(sorted(ranks), [0, 1, 2, 3])
        victims = {"host": [ranks[0]], "expert": [ranks[2]], "all": [running.process.pid, *ranks.values()]}[which]
        if which == "all":  # then nobody is left to remove the message layer's files
            for segment in shared_memory_of(ranks[1]):
                self.addCleanup(segment.unlink, missing_ok=True)
        killed = time.monotonic_ns()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.assertNotEqual(running.process.wait(60), 0)
        with h5py.File(running.file, "r") as profile:
            steps = whole_steps(profile)
            self.assertTrue((profile["steps/step"][:steps] == np.arange(1, steps + 1)).all())
            for group in ("steps", "layers", "ranks"):
                for column in profile[group].values():
                    column[:steps]  # every chunk is there
            # The clock is that of this process too: how long before the kill does the profile end?
            total = profile["steps/total_ns"][:steps]
            end = int(profile["run"].attrs["clock_zero_ns"]) + int(profile["steps/start_ns"][steps - 1]) + int(total[-1])
        self.assertLess(killed - end, 20 * int(np.median(total)) + 2_000_000_000)
        self.assertGreater(steps, 100)
        tool = run([running.file], program="dsv41-profile")
        self.assertEqual(tool.code, 0, tool.err)
        self.assertIn("decode: ", tool.out)

    def test_host(self):
        self.kill("host")

    def test_expert(self):
        self.kill("expert")

    def test_all(self):
        self.kill("all")


class Disks(unittest.TestCase):
    """The run goes on without its profile, says so once, and ends as it would have."""

    ARGUMENTS = [*ENDLESS[:4], "-n", "1500", *ENDLESS[6:]]

    @classmethod
    def setUpClass(cls):
        cls.expected = run(cls.ARGUMENTS).out

    def check(self, result, file):
        self.assertEqual((result.code, result.out), (0, self.expected), result.err)
        self.assertEqual(len(result.messages()), 1, result.err)
        self.assertRegex(result.messages()[0], r"profile stopped before step \d+: .*run\.h5")
        step = int(result.messages()[0].split("before step ")[1].split(":")[0])
        with h5py.File(file, "r") as profile:  # what was written before stays
            self.assertEqual(whole_steps(profile), step - 1)
            self.assertTrue((profile["steps/step"][:step - 1] == np.arange(1, step)).all())
            self.assertGreater(step, 1)
        self.assertEqual(run([file], program="dsv41-profile").code, 0)

    def test_disk_that_fills_up(self):
        for ranks in (0, 3):
            with self.subTest(ranks=ranks), tempfile.TemporaryDirectory() as directory:
                mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", directory], stderr=subprocess.PIPE)
                if mounted.returncode != 0:
                    self.skipTest(f"no small disk: {mounted.stderr.decode().strip()}")
                try:
                    file = pathlib.Path(directory) / "run.h5"
                    self.check(run([*self.ARGUMENTS, "--profile", file], ranks=ranks), file)
                finally:
                    subprocess.run(["umount", directory], check=True)

    def test_disk_that_is_full(self):
        with tempfile.TemporaryDirectory() as directory:
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", directory], stderr=subprocess.PIPE)
            if mounted.returncode != 0:
                self.skipTest(f"no small disk: {mounted.stderr.decode().strip()}")
            try:
                (pathlib.Path(directory) / "full").write_bytes(bytes(65536))
                result = run([*self.ARGUMENTS, "--profile", pathlib.Path(directory) / "run.h5"], ranks=3)
                self.assertIn(result.code, (0, 4), result.err)
                self.assertEqual(len(result.messages()), 1, result.err)
                self.assertIn("No space left on device", result.messages()[0])
                self.assertEqual(result.out, self.expected if result.code == 0 else "")
            finally:
                subprocess.run(["umount", directory], check=True)

    def test_file_that_may_not_grow(self):
        with tempfile.TemporaryDirectory() as directory:
            file, limit = pathlib.Path(directory) / "run.h5", 700_000
            done = subprocess.run(command([*self.ARGUMENTS, "--profile", file]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, env=environment(), timeout=120,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
            errors = done.stderr.decode()
            self.assertEqual((done.returncode, done.stdout.decode(errors="replace")), (0, self.expected), errors)
            self.assertEqual(len(errors.splitlines()), 1, errors)
            self.assertRegex(errors, r"profile stopped before step \d+: .*run\.h5")

    def test_paths_that_cannot_be_written(self):
        with tempfile.TemporaryDirectory() as directory:
            for path, reason in (("/nonexistent/run.h5", "No such file or directory"), (directory, "Is a directory")):
                result = run([*self.ARGUMENTS, "--profile", path], ranks=3)
                self.assertEqual((result.code, result.out), (2, ""))
                self.assertEqual(result.messages(), [f"dsv41-mpi: cannot write {path}: {reason}"])


if __name__ == "__main__":
    unittest.main()
