"""Dumped logits are the same bytes for any number of ranks, placement, chunk, thread count, backend and transport."""

import json
import pathlib
import random
import shutil
import tempfile
import unittest

from program import CHECKPOINTS, DATA, OB1, UCX, run


class Invariance(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        prompts = json.loads((DATA / "forward/prompts.json").read_text())["prompts"]
        cls.ids = ",".join(map(str, next(p["ids"] for p in prompts if p["name"] == "mixed")))
        cls.expected = cls.dump("reference", ["--threads", "1"])

    @classmethod
    def dump(cls, name, arguments, **options):
        path = cls.directory / f"{name}.h5"
        result = run(["--model", CHECKPOINTS / "mini", "--prompt-ids", cls.ids, "-n", "4", "--ignore-eos",
                      "--dump-logits", path, *arguments], **options)
        if result.code != 0:
            raise AssertionError(result.err)
        content = path.read_bytes()
        path.unlink()
        return content

    def same(self, arguments, **options):
        with self.subTest(arguments=arguments, **options):
            self.assertEqual(self.dump("other", arguments, **options), self.expected)

    def test_chunks(self):
        for chunk in (1, 3, 16):
            self.same(["--chunk", chunk])

    def test_threads(self):
        self.same(["--threads", "2"])

    def test_plain_backend(self):
        self.same(["--backend", "plain"])

    def test_ranks(self):
        for ranks in (1, 2, 3, 5):
            self.same([], ranks=ranks)

    def test_placements(self):
        self.same(["--placement", "contiguous"], ranks=3)
        config = json.loads((CHECKPOINTS / "mini/config.json").read_text())["text_config"]
        layers, stages = config["num_hidden_layers"], config["num_nextn_predict_layers"]
        counts = [config["n_routed_experts"]] * layers + [config["dspark_n_routed_experts"]] * stages
        draw = random.Random(7)
        path = self.directory / "placement.json"
        path.write_text(json.dumps({"ranks": 4, "blocks": [[draw.randrange(4) for _ in range(n)] for n in counts]}))
        self.same(["--placement", f"file:{path}"], ranks=5)

    def test_transports(self):
        self.same(["--chunk", "16"], ranks=3, mca=OB1)
        self.same(["--chunk", "16"], ranks=3, mca=UCX)


class Demo(unittest.TestCase):
    def test_it_knows_the_capital_of_france(self):
        result = run(["--prompt", "The capital of France is"], ranks=5)
        self.assertEqual((result.code, result.out), (0, " Paris."), result.err)

    def test_json(self):
        result = run(["--prompt", "The capital of France is", "--json", "--quiet"], ranks=2)
        self.assertEqual(result.code, 0, result.err)
        answer = json.loads(result.out)
        self.assertEqual(answer["prompt_ids"], [0, 270, 274, 269, 825, 261])
        self.assertEqual((answer["output_ids"], answer["text"], answer["finish"]), ([970, 16, 1], " Paris.", "stop"))
        self.assertEqual(result.messages(), [])

    def test_dry_run_says_what_each_rank_would_hold(self):
        result = run(["--dry-run"], ranks=3)
        self.assertEqual((result.code, result.out), (0, ""), result.err)
        for rank in range(3):
            self.assertIn(f"rank {rank} on ", result.err)

    def test_sampling_depends_on_the_seed_only(self):
        def sample(seed, *more, **options):
            return run(["--prompt", "The", "-n", "24", "--temperature", "1.5", "--seed", seed, *more], **options).out
        self.assertEqual(sample(3), sample(3, "--chunk", "1", ranks=2))
        self.assertNotEqual(sample(3), sample(4))

    def test_environment_names_the_model(self):
        result = run(["--prompt-ids", "0", "-n", "1"], DSV41_MODEL="/nonexistent/model")
        self.assertEqual(result.code, 3)


if __name__ == "__main__":
    unittest.main()
