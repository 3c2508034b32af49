"""Signals as launchers and users send them: text stays, one clear line, the specified code, in time."""

import fcntl
import os
import pathlib
import signal
import time
import unittest

from program import CHECKPOINTS, ranks_of, run
from running import Running

MINI = CHECKPOINTS / "mini"
# As long as the checkpoint allows, with the slowest kernels.
ENDLESS = ["--model", MINI, "--prompt-ids", "0", "--ignore-eos", "-n", "4000", "--speculate", "off", "--backend", "plain"]
AT_ONCE = 5  # seconds; 1 s is promised on a machine that does nothing else


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
                running = Running(self, ENDLESS).producing()
                running.process.send_signal(number)
                code, text, errors, seconds = running.finished()
                self.assertEqual(code, 128 + number, errors)
                self.assertIn("ended by", errors)
                self.assertLess(seconds, AT_ONCE)
                self.check_text(text)

    def test_graceful_stop(self):
        for ranks in (0, 3):
            with self.subTest(ranks=ranks):
                running = Running(self, ENDLESS, ranks=ranks).producing()
                running.process.send_signal(signal.SIGUSR1)  # mpirun forwards it
                code, text, errors, _ = running.finished()
                self.assertEqual(code, 0, errors)
                self.assertIn("finish: stopped", errors)
                self.check_text(text)

    def test_end_before_the_first_step(self):
        running = Running(self, ENDLESS)
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
        running = Running(self, ENDLESS, stdout=writer)
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
                running = Running(self, ENDLESS, ranks=3).producing()
                os.kill(ranks_of(running.process.pid)[rank], signal.SIGTERM)
                code, text, errors, seconds = running.finished()
                self.assertEqual(code, 143, errors)
                self.assertIn("ended by" if rank == 0 else f"rank {rank} (", errors)
                self.assertLess(seconds, AT_ONCE)
                self.check_text(text)

    def test_the_launcher_ends_the_others(self):
        """What is left of a job says that it did not end by itself."""
        running = Running(self, ENDLESS, ranks=3).producing()
        os.kill(ranks_of(running.process.pid)[2], signal.SIGKILL)
        code, text, errors, seconds = running.finished()
        self.assertNotEqual(code, 0, errors)
        self.assertRegex(errors, r"from the parent process \(a launcher|rank 2 \(")
        self.assertLess(seconds, AT_ONCE + 2)
        self.check_text(text)

    def test_whole_job(self):
        running = Running(self, ENDLESS, ranks=3).producing()
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


if __name__ == "__main__":
    unittest.main()
