"""Speculative decoding as a user runs it: drafts change neither a token nor a bit of the logits, only the number of steps."""

import json
import pathlib
import random
import shutil
import tempfile
import unittest

from program import CHECKPOINTS, run

TEMPERATURES = (0, 0.3, 0.8, 1.3)


class Speculation(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def serve(self, lines, name, *arguments, model="mini", dump=False, ranks=0):
        """Outputs by line, and the bytes of the dumped logits by file."""
        path = self.directory / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        logits = ["--dump-logits", self.directory / name] if dump else []
        result = run(["--model", CHECKPOINTS / model, "--requests", path, "--quiet", *arguments, *logits], ranks=ranks)
        self.assertEqual(result.code, 0, result.err)
        self.results = [json.loads(line) for line in result.out.splitlines()]
        outputs = {entry["line"]: (entry["output_ids"], entry["text"], entry["finish"]) for entry in self.results}
        self.assertEqual(len(outputs), len(lines))
        files = sorted((self.directory / name).iterdir()) if dump else []
        return outputs, {file.name: file.read_bytes() for file in files}

    def drafted(self):
        return sum(entry["speculation"]["drafted"] for entry in self.results)

    def test_a_hundred_sampled_runs(self):
        draw = random.Random(9)
        lines = [{"prompt_ids": [0] + [draw.randrange(3, 760) for _ in range(draw.randrange(1, 30))], "max_tokens": 8,
                  "temperature": TEMPERATURES[1 + i % 3], "top_p": 1 if i % 2 else 0.9, "seed": i, "ignore_eos": True}
                 for i in range(100)]
        expected = self.serve(lines, "off", "--speculate", "off", "--batch", "8")
        for arguments in (["--speculate", "5", "--batch", "1"], ["--speculate", "5", "--batch", "8", "--chunk", "7"],
                          ["--speculate", "auto", "--batch", "8"]):
            self.assertEqual(self.serve(lines, "on", *arguments), expected, arguments)

    def test_ranks_batches_and_chunks(self):
        lines = [{"prompt": prompt, "max_tokens": 12, "temperature": temperature, "seed": 3}
                 for prompt in ("The capital of France is", "2 plus 3 is") for temperature in TEMPERATURES]
        expected = self.serve(lines, "off", "--speculate", "off", model="capitals", dump=True)
        for number, (ranks, batch, chunk) in enumerate(((0, 1, 512), (1, 8, 3), (3, 8, 512), (5, 3, 4))):
            got = self.serve(lines, f"on{number}", "--speculate", "5", "--batch", batch, "--chunk", chunk, model="capitals",
                             dump=True, ranks=ranks)
            self.assertEqual(got, expected, (ranks, batch, chunk))
            self.assertGreater(self.drafted(), 0)

    def test_drafts_do_not_depend_on_the_ranks(self):
        """The draft stages' experts live on the expert ranks, too: what they propose is the same everywhere."""
        counts = []
        for ranks in (0, 3, 5):
            result = run(["--model", CHECKPOINTS / "mini", "--prompt-ids", "0,54,262,344,489", "-n", "40", "--ignore-eos",
                          "--temperature", "0.8", "--speculate", "5", "--json"], ranks=ranks)
            self.assertEqual(result.code, 0, result.err)
            speculation = json.loads(result.out)["speculation"]
            counts.append((speculation["drafted"], speculation["accepted"], speculation["by_place"]))
        self.assertGreater(counts[0][0], 0)
        self.assertEqual(counts[1:], counts[:1] * 2)

    def test_statistics(self):
        arguments = ["--prompt", "The capital of France is", "-n", "12", "--ignore-eos", "--json"]
        on, off = (json.loads(run([*arguments, "--speculate", mode]).out) for mode in ("5", "off"))
        self.assertEqual(on["output_ids"], off["output_ids"])
        speculation = on["speculation"]
        self.assertEqual(speculation["drafted"], sum(place["drafted"] for place in speculation["by_place"]))
        self.assertEqual(speculation["accepted"], sum(place["accepted"] for place in speculation["by_place"]))
        self.assertEqual(speculation["wasted_rows"], speculation["drafted"] - speculation["accepted"])
        # Every step but the first, which the prompt gives, adds one token and the accepted drafts.
        self.assertGreaterEqual(on["timings"]["decode_steps"] + speculation["accepted"], 11)
        self.assertLess(on["timings"]["decode_steps"], off["timings"]["decode_steps"])
        self.assertGreater(speculation["draft_s"], 0)
        self.assertGreater(speculation["verify_s"], 0)
        self.assertEqual((off["speculation"]["drafted"], off["speculation"]["verify_s"]), (0, 0))


if __name__ == "__main__":
    unittest.main()
