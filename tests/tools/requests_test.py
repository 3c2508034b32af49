"""Many requests in one run: results as JSON lines, malformed lines fail alone, the batch changes nothing."""

import json
import pathlib
import random
import shutil
import tempfile
import unittest

from program import CHECKPOINTS, run


class Requests(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def results(self, lines, *arguments, model="mini", **options):
        path = self.directory / "in.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        result = run(["--model", CHECKPOINTS / model, "--requests", path, "--quiet", *arguments], **options)
        self.assertEqual(result.code, 0, result.err)
        return {entry["line"]: entry for entry in map(json.loads, result.out.splitlines())}

    def test_malformed_lines_fail_alone(self):
        lines = [b'{"id": "fr", "prompt": "The capital of France is"}', b"garbage", b"", b'{"prompt": "a", "colour": 1}',
                 b'{"prompt_ids": [0, 99999]}', b'{"prompt": "\xff"}', b"[" * 5000, b'{"id": "two", "prompt": "a", "prompt_ids": [1]}',
                 b'{"prompt": "a", "max_tokens": -1}', b'{"prompt_ids": []}',
                 b'{"prompt": "The capital of Japan is", "stop": "kyo"}']
        got = self.results(lines, "--batch", "4", model="capitals")
        self.assertEqual(got[1]["text"], " Paris.")
        self.assertEqual(got[1]["id"], "fr")
        self.assertEqual((got[11]["text"], got[11]["finish"]), (" To", "stop"))
        self.assertNotIn(3, got)  # an empty line asks for nothing
        for line in (2, 4, 5, 6, 7, 8, 9, 10):
            self.assertIn("error", got[line])

    def test_standard_streams(self):
        text = b'{"prompt": "The capital of France is"}\n{"prompt": "The capital of Japan is"}'
        result = run(["--requests", "-", "--batch", "2"], stdin=text)
        self.assertEqual(sorted(json.loads(line)["text"] for line in result.out.splitlines()), [" Paris.", " Tokyo."])

    def test_batches_and_ranks_change_nothing(self):
        draw = random.Random(3)
        lines = []
        for i in range(16):
            ids = [0] + [draw.randrange(3, 760) for _ in range(draw.choice((1, 5, 40, 120)))]
            lines.append(json.dumps({"prompt_ids": ids, "max_tokens": 5, "ignore_eos": True,
                                     "temperature": i % 2, "seed": i}).encode())
        expected = self.outputs(self.results(lines))
        self.assertEqual(self.outputs(self.results(lines, "--batch", "16", "--step-tokens", "40")), expected)
        self.assertEqual(self.outputs(self.results(lines, "--batch", "4", "--no-skip", ranks=3)), expected)

    @staticmethod
    def outputs(results):
        return {line: (entry["output_ids"], entry["text"], entry["finish"]) for line, entry in results.items()}

    def test_logits_of_every_request_are_the_same_bytes(self):
        lines = [json.dumps({"prompt_ids": [0] + list(range(5, 5 + n)), "max_tokens": 3}).encode() for n in (3, 50, 20)]
        dumps = {}
        for name, arguments in (("one", []), ("all", ["--batch", "3", "--step-tokens", "17"])):
            self.results(lines, "--dump-logits", self.directory / name, *arguments)
            dumps[name] = {path.name: path.read_bytes() for path in sorted((self.directory / name).iterdir())}
        self.assertEqual(len(dumps["one"]), 3)
        self.assertEqual(dumps["one"], dumps["all"])

    def test_what_can_never_fit_is_refused_with_numbers(self):
        got = self.results([b'{"prompt": "a", "max_tokens": 4000}', b'{"prompt": "a", "max_tokens": 1}'],
                           "--context-memory", "400K")
        self.assertIn("--context-memory", got[1]["error"])
        self.assertIn("text", got[2])


if __name__ == "__main__":
    unittest.main()
