"""The released geometry, 475 GiB of holes: the audit, --dry-run, and one token through the whole model on three ranks."""

import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest

from program import BIN, DATA, environment, run

TOKENIZER = pathlib.Path(os.environ.get("DSV41_REAL_TOKENIZER", ""))


class FullSize(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        cls.model = cls.directory / "model"
        subprocess.run([BIN / "dsv41-tree", "--config", DATA / "release/config.json", "--out", cls.model, "--tokenizer", TOKENIZER],
                       check=True, env=environment())

    def test_audit(self):
        result = run(["--audit-only", "--model", self.model, "--require-complete"])
        self.assertEqual(result.code, 0, result.out)
        for figure in ("96,085", "510,286,023,000", "39"):
            self.assertIn(figure, result.out)

    def test_the_audit_runs_once_under_mpirun(self):
        alone = run(["--audit-only", "--model", self.model])
        self.assertEqual(run(["--audit-only", "--model", self.model], ranks=3).out.replace("\r", ""), alone.out)

    def test_dry_run(self):
        result = run(["--model", self.model, "--dry-run"], ranks=3)
        self.assertEqual(result.code, 0, result.err)
        self.assertIn("7872 experts", result.err)  # half of 40 * 384 + 3 * 128
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        self.assertLess(peak, 4 << 20)  # KiB, of the largest process

    def test_one_token_passes_through_all_layers(self):
        result = run(["--model", self.model, "--prompt-ids", "0", "-n", "1", "--chunk", "8", "--speculate", "off", "--json"],
                     ranks=3, timeout=800)
        self.assertEqual(result.code, 0, result.err)
        self.assertIn('"output_ids":[0]', result.out)  # all logits of zero weights are equal: the lowest id


if __name__ == "__main__":
    if not TOKENIZER.is_file():
        print("skipped: no released tokenizer (tools/fetch_tokenizer.sh)")
        sys.exit(77)
    unittest.main()
