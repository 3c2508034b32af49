"""The audit as a user runs it: alone, and under mpirun, where it happens once and every rank ends with its code."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
import unittest

from program import BIN, CHECKPOINTS, DATA, environment, run, run_ranks

RELEASED = DATA / "release/config.json"


class Audit(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def tree(self, *options):
        model = pathlib.Path(tempfile.mkdtemp(dir=self.directory))
        subprocess.run([BIN / "dsv41-tree", "--config", RELEASED, "--out", model, *options], check=True, env=environment())
        return model

    def copy_of_mini(self):
        model = self.directory / "mini"
        shutil.copytree(CHECKPOINTS / "mini", model)
        for path in model.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return model

    def launch(self, *arguments):
        result = run_ranks(arguments, 3)
        return result.code, result.out, result.err

    def test_partial_trees(self):
        for shards, figures in (("1-48", ("96,085", "510,286,023,000 bytes", "39/39 checks passed")),
                                ("1-20", ("42,303", "31/39 checks passed, 8 undecided, 0 failed")),
                                ("1-46", ("96,073", "35/39 checks passed, 4 undecided, 0 failed", "(32, 32): 353"))):
            with self.subTest(shards=shards):
                model = self.tree("--shards", shards)
                result = run(["--audit-only", "--model", model])
                self.assertEqual(result.code, 0, result.out)
                for figure in figures:
                    self.assertIn(figure, result.out)
                complete = run(["--audit-only", "--model", model, "--require-complete", "--quiet"])
                self.assertEqual(complete.code, 0 if shards == "1-48" else 1, complete.out)

    def test_every_rank_ends_with_the_code(self):
        alone = run(["--audit-only", "--model", CHECKPOINTS / "mini"])
        codes, out, _ = self.launch("--audit-only", "--model", CHECKPOINTS / "mini")
        self.assertEqual((codes, out), ([0, 0, 0], alone.out))

        model = self.copy_of_mini()
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["moe_intermediate_size"] = 96
        (model / "config.json").write_text(json.dumps(config))
        alone = run(["--audit-only", "--model", model])
        codes, out, _ = self.launch("--audit-only", "--model", model)
        self.assertEqual(alone.code, 1)
        self.assertEqual((codes, out), ([1, 1, 1], alone.out))

    def test_refusals_come_once(self):
        for arguments, code in ((("--model", self.directory / "none"), 3), (("--model", self.directory, "--no-such"), 2),
                                (("--model", CHECKPOINTS / "mini", "--json", self.directory / "no/where"), 4)):
            with self.subTest(arguments=arguments):
                codes, _, err = self.launch("--audit-only", *arguments)
                self.assertEqual(codes, [code] * 3, err)
                self.assertEqual(err.count("dsv41-mpi: "), 1, err)

    def test_ranks_wait_longer_than_their_patience(self):
        """Rank 0 is held where it writes its report, for several times the silence that ranks endure elsewhere."""
        model = self.copy_of_mini()
        report = self.directory / "report.json"
        os.mkfifo(report)
        texts = []

        def read_late():
            time.sleep(4)
            texts.append(report.read_text())

        reader = threading.Thread(target=read_late)
        reader.start()
        start = time.monotonic()
        codes, out, err = self.launch("--audit-only", "--verify-payload", "--model", model, "--json", report, "--rank-timeout", "1")
        seconds = time.monotonic() - start
        reader.join()
        self.assertEqual(codes, [0, 0, 0], err)
        self.assertGreater(seconds, 3.9)
        self.assertEqual(len(json.loads(texts[0])["checks"]), 39)
        self.assertTrue((model / "payload-manifest.jsonl").is_file())

        codes, _, err = self.launch("--audit-only", "--verify-payload", "--model", model)
        self.assertEqual(codes, [0, 0, 0], err)
        shard = model / "model-00009-of-00018.safetensors"
        with shard.open("r+b") as file:  # one bit of the last tensor
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        codes, out, err = self.launch("--audit-only", "--verify-payload", "--model", model)
        self.assertEqual(codes, [1, 1, 1], err)


if __name__ == "__main__":
    unittest.main()
