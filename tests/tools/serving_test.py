"""Thirty-two requests of very different lengths: no batch, step size, order, number of ranks or shortcut changes a byte. With
DSV41_LONG=1 also ten thousand requests through one process, whose memory stays where it was."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import unittest

from program import CHECKPOINTS, command, environment, run

LENGTHS = [1, 1, 2, 3, 3000, 5, 8, 13, 21, 1100, 34, 55, 89, 144, 233, 377, 610, 2, 4, 6, 10, 16, 26, 42, 68, 110, 178, 288,
           466, 1700, 7, 127]


def requests():
    draw = random.Random(5)
    shared = [0] + [draw.randrange(3, 760) for _ in range(200)]
    lines = []
    for i, length in enumerate(LENGTHS):
        ids = [0] + [draw.randrange(3, 760) for _ in range(length - 1)]
        if i % 3 == 0:  # several prompts begin alike
            ids = (shared[:length] + ids[len(shared):])[:length]
        lines.append({"id": f"r{i}", "prompt_ids": ids, "max_tokens": 1 + i % 6, "ignore_eos": True,
                      "temperature": 0.8 * (i % 2), "seed": i})
    return lines


class MixedLengths(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def serve(self, lines, *arguments, ranks=0, dump=None):
        path = self.directory / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        logits = ["--dump-logits", self.directory / dump] if dump else []
        result = run(["--model", CHECKPOINTS / "mini", "--requests", path, "--quiet", *arguments, *logits], ranks=ranks,
                     timeout=400)
        self.assertEqual(result.code, 0, result.err)
        entries = [json.loads(line) for line in result.out.splitlines()]
        if dump:  # under the name of the request, wherever it stood in the file
            name_of = {entry["line"]: entry["id"] for entry in entries}
            self.dumped = {name_of[int(file.stem.split("-")[1])]: file.read_bytes()
                           for file in (self.directory / dump).iterdir()}
        return {entry["id"]: (entry["output_ids"], entry["text"], entry["finish"]) for entry in entries}

    def test_outputs(self):
        lines = requests()
        expected = self.serve(lines, "--no-skip", "--no-prefix-sharing", "--speculate", "off")
        self.assertEqual(len(expected), 32)
        self.assertEqual(self.serve(lines, "--batch", "4", "--step-tokens", "100"), expected)
        shuffled = random.Random(1).sample(lines, len(lines))
        self.assertEqual(self.serve(shuffled, "--batch", "32", "--step-tokens", "700", ranks=3), expected)
        self.assertEqual(self.serve(shuffled[::-1], "--batch", "32", "--no-skip", ranks=5), expected)

    def test_dumped_logits(self):
        lines = [line for line in requests() if len(line["prompt_ids"]) < 400]
        outputs = self.serve(lines, "--no-skip", "--no-prefix-sharing", "--speculate", "off", dump="alone")
        expected = self.dumped
        self.assertEqual(len(expected), len(lines))
        for name, ranks, arguments in (("one", 0, ["--batch", "4", "--step-tokens", "33"]), ("three", 3, ["--batch", "32"]),
                                       ("five", 5, ["--batch", "32", "--step-tokens", "90", "--overlap", "on"])):
            self.assertEqual(self.serve(lines[::-1], *arguments, ranks=ranks, dump=name), outputs)
            self.assertTrue(self.dumped == expected, name)


def resident_kib(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1])


@unittest.skipUnless(os.environ.get("DSV41_LONG") == "1", "long: set DSV41_LONG=1")
class TenThousandRequests(unittest.TestCase):
    def test_memory_stays_flat(self):
        draw = random.Random(2)
        process = subprocess.Popen(command(["--model", CHECKPOINTS / "mini", "--requests", "-", "--quiet", "--batch", "8"]),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        memory = []
        for hundred in range(100):
            for i in range(100):
                line = {"prompt_ids": [0] + [draw.randrange(3, 760) for _ in range(draw.choice((0, 2, 5, 40)))],
                        "max_tokens": draw.randrange(1, 4), "stop": ["e"]}
                if i % 10 == 3:
                    line["prompt_ids"] = [10**6]  # refused
                process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            for _ in range(100):
                self.assertTrue(process.stdout.readline())
            memory.append(resident_kib(process.pid))
        process.stdin.close()
        self.assertEqual(process.wait(timeout=60), 0)
        print("resident KiB after each thousand requests:", memory[9::10])
        self.assertLess(memory[-1] - memory[20], 1024, memory)


if __name__ == "__main__":
    unittest.main()
