"""Memory, disks and files that fail while they are used: one clear line, the specified code, the text stays, no core dump."""

import os
import pathlib
import re
import resource
import shutil
import subprocess
import tempfile
import unittest

from program import CHECKPOINTS, OB1, command, environment, ranks_of, run, sanitized
from running import Running

MINI = CHECKPOINTS / "mini"
# As long as the checkpoint allows, with the slowest kernels.
ENDLESS = ["--model", MINI, "--prompt-ids", "0", "--ignore-eos", "-n", "4000", "--speculate", "off", "--backend", "plain"]


class Resources(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def copy_of_mini(self, name):
        model = self.directory / name
        shutil.copytree(MINI, model)
        for path in model.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return model

    def one_line(self, code, expected, errors, *words):
        self.assertEqual(code, expected, errors)
        lines = [line for line in errors.splitlines() if line.startswith("dsv41-mpi: ")]
        self.assertEqual(len(lines), 1, errors)
        for word in words:
            self.assertIn(word, lines[0])
        self.assertNotIn("core dumped", errors)


class GoodRuns(Resources):
    def test_a_run_that_ends_well_leaves_and_says_nothing(self):
        running = Running(self, [*ENDLESS[:4], "-n", "300", "--ignore-eos", "--quiet"], ranks=3).producing()
        ranks = ranks_of(running.process.pid)
        segments = {line.removesuffix(" (deleted)").split()[-1] for pid in ranks.values()
                    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line}
        code, _, errors, _ = running.finished()
        self.assertEqual((code, errors), (0, ""))
        self.assertEqual([path for path in segments if pathlib.Path(path).exists()], [])


class Files(Resources):
    def damaged(self, model, ranks, launched=None):
        running = Running(self, ["--model", model, *ENDLESS[2:]], ranks=ranks, launched=launched).producing()
        for shard in model.glob("*.safetensors"):
            os.truncate(shard, 100)
        code, text, errors, _ = running.finished()
        self.assertEqual(code, 3, errors)
        self.assertNotRegex(errors, "core dumped|Segmentation")
        self.assertTrue(text)
        return errors

    def test_shard_truncated_while_mapped(self):
        for ranks in (0, 3):
            with self.subTest(ranks=ranks):
                errors = self.damaged(self.copy_of_mini(f"model{ranks}"), ranks)
                self.assertRegex(errors, r"dsv41-mpi: .*safetensors: truncated, replaced or unreadable")

    def test_shard_of_an_expert_rank_truncated_while_mapped(self):
        copy = self.copy_of_mini("model")
        launched = ["mpirun", "--oversubscribe", *OB1, "-np", "2", *map(str, command(ENDLESS)), ":", "-np", "1",
                    *map(str, command(["--model", copy, *ENDLESS[2:]]))]
        errors = self.damaged(copy, 3, launched)
        self.assertRegex(errors, r"dsv41-mpi: rank 2 \(.*safetensors: truncated, replaced or unreadable")

    def test_shards_renamed_over_are_harmless(self):
        """The usual way to replace a file: the old one stays mapped."""
        short = ["--prompt-ids", "0", "--ignore-eos", "-n", "2000", "--speculate", "off", "--quiet"]
        expected = run(["--model", MINI, *short]).out
        model = self.copy_of_mini("model")
        running = Running(self, ["--model", model, *short], ranks=3).producing()
        for shard in model.glob("*.safetensors"):
            (model / "new").write_bytes(b"something else")
            os.replace(model / "new", shard)
        self.assertIsNone(running.process.poll())
        code, text, errors, _ = running.finished()
        self.assertEqual((code, text), (0, expected), errors)


class Disks(Resources):
    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            code, _, errors, _ = Running(self, ENDLESS, stdout=full).finished()
        self.one_line(code, 4, errors, "standard output", "No space left on device")

    def test_full_disk_under_the_results_of_requests(self):
        requests = self.directory / "requests"
        requests.write_text('{"prompt_ids": [0], "max_tokens": 3}\n' * 20)
        for ranks in (0, 3):
            result = run(["--model", MINI, "--requests", requests, "--out", "/dev/full"], ranks=ranks)
            self.one_line(result.code, 4, result.err, "--out", "No space left on device")

    def test_reader_gone(self):
        reader, writer = os.pipe()
        os.close(reader)
        code, _, errors, _ = Running(self, ENDLESS, stdout=writer).finished()
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

    def test_disk_of_the_logits_fills_up(self):
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", self.directory], stderr=subprocess.PIPE)
        if mounted.returncode != 0:
            self.skipTest(f"no small disk: {mounted.stderr.decode().strip()}")
        self.addCleanup(subprocess.run, ["umount", self.directory], check=True)
        result = run([*ENDLESS, "--dump-logits", self.directory / "logits.h5"], ranks=3)
        self.assertEqual(result.code, 4, result.err)
        self.assertEqual(len([line for line in result.messages() if "logits.h5" in line]), 1, result.err)
        self.assertNotIn("core dumped", result.err)
        self.assertTrue(result.out)


@unittest.skipIf(sanitized(), "a sanitizer lives on the memory that is taken away here")
class Memory(Resources):
    def test_too_little_at_load(self):
        for megabytes, expected in ((4000, {0}), (450, {0, 4}), (350, {0, 3, 4}), (250, {0, 3, 4}), (150, {0, 3, 4})):
            limit = megabytes << 20
            code, _, errors, _ = Running(
                self, [*ENDLESS[:4], "-n", "2", "--threads", "2"],
                preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))).finished()
            if "error while loading shared libraries" in errors:
                continue  # not even the program fits
            self.assertIn(code, expected, f"{megabytes} MiB: {errors}")
            if code:
                self.assertIn("dsv41-mpi: ", errors)
            self.assertNotRegex(errors, "core dumped|Segmentation|Aborted")

    def test_too_little_while_running(self):
        """Once it runs, the host rank may not have any more memory, and then come requests that need more."""
        requests = self.directory / "requests"
        os.mkfifo(requests)
        running = Running(self, ["--model", MINI, "--requests", requests, "--out", "-", "--batch", "64", "--speculate", "off"],
                          ranks=3)
        with open(requests, "wb", buffering=0) as writer:
            writer.write(b'{"prompt_ids": [0, 5], "max_tokens": 4}\n')
            running.until(lambda: running.text(running.out) != "")
            pid = ranks_of(running.process.pid)[0]
            used = int(re.search(r"VmData:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) << 10
            resource.prlimit(pid, resource.RLIMIT_DATA, (used, used))
            for first in range(3, 67):
                try:
                    writer.write(b'{"prompt_ids": [%d%s], "max_tokens": 900, "ignore_eos": true}\n' % (first, b",7" * 2000))
                except BrokenPipeError:
                    break  # that was enough
        code, text, errors, _ = running.finished()
        self.assertEqual(code, 4, errors)
        self.assertIn("dsv41-mpi: out of memory", errors)
        self.assertNotRegex(errors, "core dumped|Segmentation|Aborted")
        self.assertTrue(text)  # what was finished stays


if __name__ == "__main__":
    unittest.main()
