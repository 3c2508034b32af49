"""Where weights are kept changes no bit: --engram, --engram-cache, --expert-memory alone and under mpirun; what is refused
and what is replaced is said."""

import ctypes
import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import threading
import unittest

from logits import MINI, SameLogits
from program import command, environment, run

EXPERT = 20 << 10  # bytes that one expert of the mini checkpoint takes, with what lies around it


def refuse_io_uring():
    """A seccomp filter as containers have it: io_uring_setup fails with EPERM."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    io_uring_setup = 425  # on every architecture
    instructions = b"".join(struct.pack("=HBBI", *i) for i in (
        (0x20, 0, 0, 0),                       # load the number of the system call
        (0x15, 0, 1, io_uring_setup),          # not this one: skip one instruction
        (0x06, 0, 0, 0x00050000 | 1),          # fail with EPERM
        (0x06, 0, 0, 0x7FFF0000)))             # allow
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = Program(4, ctypes.addressof(code))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.byref(program), 0, 0) != 0:
        os._exit(99)


class Residency(SameLogits):
    TOKENS = 6

    def test_engram_modes(self):
        self.same(["--engram", "mmap"])
        self.same(["--engram", "direct"], "engram direct (", "rows asked for")
        self.same(["--engram", "direct", "--engram-cache", "1K", "--chunk", "7"])
        self.same(["--engram", "resident"], "engram resident", "engram tables:")
        self.same(["--engram", "direct", "--speculate", "5"], ranks=3)
        self.same(["--engram", "resident"], ranks=2)

    def test_expert_memory(self):
        for experts, ranks in ((1, 0), (1, 3), (4, 0), (9, 3), (200, 1)):
            self.same(["--expert-memory", experts * EXPERT], "experts: ", ranks=ranks)
        self.same(["--expert-memory", 2 * EXPERT, "--speculate", "5", "--chunk", "9"])
        self.same(["--expert-memory", 2 * EXPERT, "--speculate", "off"], ranks=3)

    def test_large_steps_in_two_halves(self):
        """From 32 rows on the other half's request is there while one is computed, and is read ahead."""
        draws = [str((i * 37) % 760) for i in range(300)]
        dumps = []
        for arguments, ranks in (([], 0), (["--expert-memory", 5 * EXPERT], 3), (["--expert-memory", EXPERT], 2)):
            path = self.directory / "halves.h5"
            result = run(["--model", MINI, "--prompt-ids", ",".join(draws), "-n", "2", "--ignore-eos", "--dump-logits", path,
                          "--chunk", "100", *arguments], ranks=ranks)
            self.assertEqual(result.code, 0, result.err)
            dumps.append(path.read_bytes())
        self.assertEqual(dumps[0], dumps[1])
        self.assertEqual(dumps[0], dumps[2])

    def test_batches(self):
        requests = self.directory / "in.jsonl"
        requests.write_text("".join(json.dumps({"prompt_ids": [0] + list(range(5, 5 + 11 * n)), "max_tokens": 4,
                                                "ignore_eos": True}) + "\n" for n in range(1, 7)))
        outputs = []
        for arguments, ranks in (([], 0), (["--engram", "direct", "--engram-cache", "1K", "--expert-memory", 3 * EXPERT], 0),
                                 (["--engram", "direct", "--expert-memory", 3 * EXPERT], 3)):
            result = run(["--model", MINI, "--requests", requests, "--batch", "4", "--step-tokens", "40", *arguments],
                         ranks=ranks)
            self.assertEqual(result.code, 0, result.err)
            outputs.append({one["line"]: one["output_ids"] for one in map(json.loads, result.out.splitlines())})
        self.assertEqual(len(outputs[0]), 6)
        self.assertEqual(outputs[0], outputs[1])
        self.assertEqual(outputs[0], outputs[2])

    def test_without_io_uring(self):
        """Threads do the work, and a line says so."""
        path = self.directory / "logits.h5"
        arguments = ["--model", MINI, "--prompt-ids", self.ids, "-n", "6", "--ignore-eos", "--dump-logits", path,
                     "--engram", "direct", "--expert-memory", 3 * EXPERT]
        done = subprocess.run(command(arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=120, env=environment(), preexec_fn=refuse_io_uring)
        said = done.stderr.decode()
        self.assertEqual(done.returncode, 0, said)
        self.assertEqual(path.read_bytes(), self.expected)
        self.assertIn("the kernel refuses io_uring: Operation not permitted", said)
        self.assertIn("threads", said)

    def test_refusals(self):
        for arguments, code, word in (
                (["--engram", "tape"], 2, "tape"), (["--engram-cache", "1M"], 2, "--engram direct"),
                (["--engram", "direct", "--engram-cache", "-1"], 2, "engram-cache"), (["--expert-memory", "0"], 2, "expert-memory"),
                (["--expert-memory", "1000"], 4, "hold no expert")):
            for ranks in (0, 3):
                with self.subTest(arguments=arguments, ranks=ranks):
                    result = run(["--model", MINI, "--prompt", "a", *arguments], ranks=ranks)
                    self.assertEqual(result.code, code, result.err)
                    self.assertEqual(len(result.messages()), 1, result.err)
                    self.assertIn(word, result.messages()[0])

    def test_dry_run_says_what_stays_in_memory(self):
        result = run(["--model", MINI, "--dry-run", "--engram", "resident", "--expert-memory", 5 * EXPERT], ranks=3)
        self.assertEqual(result.code, 0, result.err)
        self.assertIn("GiB of memory for engram rows", result.err)
        self.assertEqual(result.err.count("5 experts in "), 2)

    def test_a_file_that_is_cut_while_running(self):
        """An error with the file's name and the code of a damaged checkpoint; what was answered before stays."""
        copy = self.directory / "cut"
        shutil.copytree(MINI, copy)
        index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
        victims = {"engram": index["layers.6.engram.embed.weight"], "experts": index["layers.4.ffn.experts.3.w1.weight"]}
        for kind, arguments in (("engram", ["--engram", "direct", "--engram-cache", "1"]), ("experts", ["--expert-memory", EXPERT])):
            with self.subTest(kind=kind):
                shard = copy / victims[kind]
                shard.chmod(0o644)
                content = shard.read_bytes()
                program = subprocess.Popen(command(["--model", copy, "--requests", "-", *arguments]), stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
                watchdog = threading.Timer(60, program.kill)
                watchdog.start()
                program.stdin.write(b'{"prompt_ids": [0, 5, 6], "max_tokens": 2}\n')
                program.stdin.flush()
                first = program.stdout.readline()
                os.truncate(shard, 4096)
                program.stdin.write(json.dumps({"prompt_ids": list(range(300)), "max_tokens": 2}).encode() + b"\n")
                program.stdin.close()
                said = program.stderr.read().decode()
                code = program.wait()
                watchdog.cancel()
                program.stdout.close()
                program.stderr.close()
                self.assertEqual(json.loads(first)["line"], 1)
                self.assertEqual(code, 3, said)
                self.assertIn(str(shard), said)
                self.assertIn("while in use", said)
                shard.write_bytes(content)


if __name__ == "__main__":
    unittest.main()
