"""Bad input: one line that says what is wrong, from rank 0, the specified exit code, on all ranks, within seconds."""

import json
import os
import pathlib
import shutil
import struct
import tempfile
import unittest

from program import CHECKPOINTS, PATIENCE, run, run_ranks

MINI = CHECKPOINTS / "mini"


class BadInput(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def copy_of_mini(self):
        copy = self.directory / "model"
        shutil.copytree(MINI, copy)
        for path in copy.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return copy

    def refused(self, arguments, code, *words, ranks=(0, 3), **options):
        for count in ranks:
            with self.subTest(ranks=count, arguments=arguments):
                if count == 0:
                    result = run(arguments, **options)
                    self.assertEqual(result.code, code, result.err)
                else:
                    result = run_ranks(arguments, count, **options)
                    self.assertEqual(result.code, [code] * count, result.err)
                self.assertEqual(result.out, "")
                lines = result.messages()
                self.assertEqual(len(lines), 1, result.err)
                for word in words:
                    self.assertIn(word, lines[0])
                self.assertNotIn("core dumped", result.err)
                self.assertNotIn("MPI_ABORT", result.err)
                self.assertLess(result.seconds, 15 * PATIENCE)  # 5 s on a machine that does nothing else

    def with_prompt(self, model, *more):
        return ["--model", model, "--prompt", "a", *more]

    def test_the_launcher_ends_with_the_code(self):
        for arguments, code in ((["--model", self.directory / "none", "--prompt", "a"], 3), (["--promt", "a"], 2)):
            result = run(arguments, ranks=3)
            self.assertEqual(result.code, code, result.err)
            self.assertEqual(len(result.messages()), 1, result.err)

    def test_no_model_directory(self):
        self.refused(self.with_prompt(self.directory / "none"), 3, str(self.directory / "none"))

    def test_empty_model_directory(self):
        self.refused(self.with_prompt(self.directory), 3, "empty")

    def test_foreign_model_directory(self):
        (self.directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
        self.refused(self.with_prompt(self.directory), 3, "config.json")

    def test_missing_shard(self):
        model = self.copy_of_mini()
        (model / "model-00007-of-00018.safetensors").unlink()
        self.refused(self.with_prompt(model), 3, "model-00007-of-00018.safetensors")

    def test_truncated_shard(self):
        model = self.copy_of_mini()
        os.truncate(model / "model-00009-of-00018.safetensors", 30000)
        self.refused(self.with_prompt(model), 3, "model-00009-of-00018.safetensors", "truncated")

    def test_garbage_header(self):
        model = self.copy_of_mini()
        with open(model / "model-00009-of-00018.safetensors", "r+b") as shard:
            shard.write(struct.pack("<Q", 1 << 60))
        self.refused(self.with_prompt(model), 3, "model-00009-of-00018.safetensors")

    def test_config_contradicts_tensors(self):
        model = self.copy_of_mini()
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["moe_intermediate_size"] = 96
        (model / "config.json").write_text(json.dumps(config))
        self.refused(self.with_prompt(model), 3, "moe_inter_dim", "shared_experts.w1")

    def test_damaged_tokenizer(self):
        model = self.copy_of_mini()
        (model / "tokenizer.json").write_text("{}")
        self.refused(self.with_prompt(model), 3, "tokenizer.json")

    def test_unknown_flag(self):
        self.refused(["--prompt", "a", "--promt", "b"], 2, "--promt")

    def test_bad_numbers(self):
        for flag, value in (("--max-tokens", "-1"), ("--max-tokens", "12x"), ("--temperature", "nan"), ("--top-p", "2"),
                            ("--chunk", "0"), ("--overlap", "2"), ("--seed", "99999999999999999999"), ("--threads", "0")):
            self.refused(["--prompt", "a", flag, value], 2, flag, value, ranks=(0,))

    def test_no_prompt(self):
        self.refused([], 2, "--prompt")

    def test_two_prompts(self):
        self.refused(["--prompt", "a", "--prompt-ids", "1"], 2, "--prompt-ids")

    def test_id_out_of_range(self):
        self.refused(["--model", MINI, "--prompt-ids", "0,768"], 2, "768")

    def test_bad_id_list(self):
        for text in ("", ",", "1,,2", "1, 2", "-1", "4294967296", "x"):
            self.refused(["--model", MINI, "--prompt-ids", text], 2, "prompt-ids", ranks=(0,))

    def test_empty_prompt_file(self):
        (self.directory / "empty").write_bytes(b"")
        self.refused(["--model", MINI, "--prompt-file", self.directory / "empty"], 2, "empty")

    def test_missing_prompt_file(self):
        self.refused(["--model", MINI, "--prompt-file", self.directory / "none"], 2, "none")

    def test_invalid_utf8(self):
        (self.directory / "bytes").write_bytes(b"a\xff\xfeb")
        self.refused(["--model", MINI, "--prompt-file", self.directory / "bytes"], 2, "UTF-8")

    def test_prompt_longer_than_context(self):
        (self.directory / "long").write_text("0," * 4096 + "0")
        ids = (self.directory / "long").read_text()
        self.refused(["--model", MINI, "--prompt-ids", ids], 2, "4097", "4096")

    def test_more_ranks_than_experts(self):
        self.refused(self.with_prompt(MINI), 2, "experts", ranks=(10,))

    def test_unknown_placement(self):
        self.refused(self.with_prompt(MINI, "--placement", "spiral"), 2, "spiral", ranks=(3,))

    def test_unknown_backend(self):
        self.refused(self.with_prompt(MINI, "--backend", "abacus"), 2, "abacus")

    def test_unwritable_output(self):
        self.refused(self.with_prompt(MINI, "--dump-logits", self.directory / "no" / "where.h5"), 2, "where.h5")


if __name__ == "__main__":
    unittest.main()
