"""Signals, full disks, closed pipes, shrinking files: text stays, one clear line, the specified code, no core dump."""

import fcntl
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from program import CHECKPOINTS, OB1, command, environment, ranks_of, run

MINI = CHECKPOINTS / "mini"
ENDLESS = ["--model", MINI, "--prompt-ids", "0", "--ignore-eos", "-n", "4000", "--speculate", "off"]
AT_ONCE = 5  # seconds; 1 s is promised on a machine that does nothing else


class Running:
    """A run in progress; what it writes is collected in files, so that no pipe ever fills."""

    def __init__(self, test, arguments=ENDLESS, ranks=0, stdout=None, **options):
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(command(arguments, ranks, OB1), stdin=subprocess.DEVNULL,
                                        stdout=self.out if stdout is None else stdout, stderr=self.err,
                                        env=environment(), **options)
        test.addCleanup(self.err.close)
        test.addCleanup(self.out.close)
        test.addCleanup(self.process.wait)
        test.addCleanup(self.process.kill)

    @staticmethod
    def text(file):
        return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"did not get there: {self.text(self.err)}")
            time.sleep(0.01)
        return self

    def producing(self):
        return self.until(lambda: len(self.text(self.out)) > 20)

    def finished(self):
        start = time.monotonic()
        code = self.process.wait(60)
        return code, self.text(self.out), self.text(self.err), time.monotonic() - start


class Signals(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.reference = run([*ENDLESS[:5], "-n", "200", "--speculate", "off"]).out

    def check_text(self, text):
        self.assertGreater(len(text), 20)
        common = min(len(text), len(self.reference)) - 4  # the end may hold part of a character
        self.assertEqual(text[:common], self.reference[:common])

    def test_end(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(number.name):
                running = Running(self).producing()
                running.process.send_signal(number)
                code, text, errors, seconds = running.finished()
                self.assertEqual(code, 128 + number, errors)
                self.assertIn("ended by", errors)
                self.assertLess(seconds, AT_ONCE)
                self.check_text(text)

    def test_graceful_stop(self):
        for ranks in (0, 3):
            with self.subTest(ranks=ranks):
                running = Running(self, ranks=ranks).producing()
                running.process.send_signal(signal.SIGUSR1)  # mpirun forwards it
                code, text, errors, _ = running.finished()
                self.assertEqual(code, 0, errors)
                self.assertIn("finish: stopped", errors)
                self.check_text(text)

    def test_end_before_the_first_step(self):
        running = Running(self)
        time.sleep(0.02)
        running.process.send_signal(signal.SIGTERM)
        code, _, errors, seconds = running.finished()
        self.assertIn(code, (143, -signal.SIGTERM), errors)  # the second one before main is reached
        self.assertLess(seconds, AT_ONCE)

    def test_end_in_the_middle_of_a_step(self):
        """The step here does not end at all: nobody reads the output."""
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(writer, False)
        try:
            while os.write(writer, b"x"):
                pass
        except BlockingIOError:
            os.set_blocking(writer, True)
        running = Running(self, stdout=writer)
        running.until(lambda: "transport" in running.text(running.err))
        time.sleep(1)
        running.process.send_signal(signal.SIGTERM)
        code, _, errors, seconds = running.finished()
        os.close(reader), os.close(writer)
        self.assertEqual(code, 143, errors)
        self.assertIn("ended by SIGTERM", errors)
        self.assertLess(seconds, AT_ONCE)

    def test_one_rank_alone(self):
        for rank in (0, 2):
            with self.subTest(rank=rank):
                running = Running(self, ranks=3).producing()
                os.kill(ranks_of(running.process.pid)[rank], signal.SIGTERM)
                code, text, errors, seconds = running.finished()
                self.assertEqual(code, 143, errors)
                self.assertIn("ended by" if rank == 0 else f"rank {rank} (", errors)
                self.assertLess(seconds, AT_ONCE)
                self.check_text(text)

    def test_whole_job(self):
        running = Running(self, ranks=3).producing()
        pids = ranks_of(running.process.pid).values()
        running.process.send_signal(signal.SIGTERM)
        code, text, errors, seconds = running.finished()
        self.assertNotEqual(code, 0, errors)
        self.assertLess(seconds, AT_ONCE + 2)
        self.check_text(text)
        end = time.monotonic() + AT_ONCE  # the launcher does not wait for its ranks
        while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            self.assertLess(time.monotonic(), end, errors)
            time.sleep(0.02)


class Faults(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def one_line(self, code, expected, errors, *words):
        self.assertEqual(code, expected, errors)
        lines = [line for line in errors.splitlines() if line.startswith("dsv41-mpi: ")]
        self.assertEqual(len(lines), 1, errors)
        for word in words:
            self.assertIn(word, lines[0])
        self.assertNotIn("core dumped", errors)

    def test_shard_truncated_while_mapped(self):
        for ranks in (0, 3):
            with self.subTest(ranks=ranks):
                model = self.directory / f"model{ranks}"
                shutil.copytree(MINI, model)
                running = Running(self, ["--model", model, *ENDLESS[2:]], ranks=ranks).producing()
                for shard in model.glob("*.safetensors"):
                    shard.chmod(0o644)
                    os.truncate(shard, 100)
                code, text, errors, _ = running.finished()
                self.assertEqual(code, 3, errors)
                self.assertRegex(errors, r"dsv41-mpi: .*safetensors: truncated, replaced or unreadable")
                self.assertNotIn("core dumped", errors)
                self.assertTrue(text)

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            code, _, errors, _ = Running(self, stdout=full).finished()
        self.one_line(code, 4, errors, "standard output", "No space left on device")

    def test_reader_gone(self):
        reader, writer = os.pipe()
        os.close(reader)
        code, _, errors, _ = Running(self, stdout=writer).finished()
        os.close(writer)
        self.one_line(code, 4, errors, "standard output", "Broken pipe")

    def test_nobody_reads_errors(self):
        reader, writer = os.pipe()
        os.close(reader)
        process = subprocess.Popen(command([*ENDLESS[:4], "-n", "2"]), stdout=subprocess.DEVNULL, stderr=writer,
                                   env=environment())
        os.close(writer)
        self.assertGreaterEqual(process.wait(60), 0)  # by itself, not by a signal

    def test_logits_file_cannot_grow(self):
        code, _, errors, _ = Running(
            self, [*ENDLESS, "--dump-logits", self.directory / "logits.h5"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))).finished()
        self.one_line(code, 4, errors, "logits.h5")

    def test_out_of_memory(self):
        """Whatever the limit, it is a line and a code; with the largest it is enough."""
        codes = set()
        for megabytes in (150, 250, 350, 450, 4000):
            limit = megabytes << 20
            code, _, errors, _ = Running(
                self, [*ENDLESS[:4], "-n", "2", "--threads", "2"],
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))).finished()
            if "error while loading shared libraries" in errors:
                continue  # not even the program fits
            codes.add(code)
            self.assertIn(code, (0, 3, 4), f"{megabytes} MiB: {errors}")
            if code:
                self.assertIn("dsv41-mpi: ", errors)
        self.assertIn(0, codes)


if __name__ == "__main__":
    unittest.main()
