"""Dumped logits of a golden prompt, for tests in which every way to run the program gives the same bytes."""

import json
import pathlib
import shutil
import tempfile
import unittest

from program import CHECKPOINTS, DATA, run

MINI = CHECKPOINTS / "mini"


class SameLogits(unittest.TestCase):
    TOKENS = 4     # to generate
    REFERENCE = ()  # arguments of the run that the others are compared with

    @classmethod
    def setUpClass(cls):
        cls.directory = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        prompts = json.loads((DATA / "forward/prompts.json").read_text())["prompts"]
        cls.ids = ",".join(map(str, next(p["ids"] for p in prompts if p["name"] == "mixed")))
        cls.expected, _ = cls.dump(cls.REFERENCE)

    @classmethod
    def dump(cls, arguments, **options):
        """The file's bytes, and what was said on standard error."""
        path = cls.directory / "logits.h5"
        result = run(["--model", MINI, "--prompt-ids", cls.ids, "-n", cls.TOKENS, "--ignore-eos", "--dump-logits", path,
                      *arguments], **options)
        if result.code != 0:
            raise AssertionError(result.err)
        content = path.read_bytes()
        path.unlink()
        return content, result.err

    def same(self, arguments, *words, **options):
        with self.subTest(arguments=arguments, **options):
            content, said = self.dump(arguments, **options)
            self.assertEqual(content, self.expected)
            for word in words:
                self.assertIn(word, said)
