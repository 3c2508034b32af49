"""Dumped logits are the same bytes for any number of ranks, placement, chunk, thread count, backend and transport."""

import json
import random
import re
import unittest

from logits import SameLogits
from program import CHECKPOINTS, OB1, UCX, run


class Invariance(SameLogits):
    REFERENCE = ("--threads", "1")

    def test_chunks(self):
        for chunk in (1, 3, 16):
            self.same(["--chunk", chunk])

    def test_threads(self):
        self.same(["--threads", "2"])

    def test_backends(self):
        """All that this CPU can run; the others are refused with what they need."""
        dry = ["--model", CHECKPOINTS / "mini", "--prompt", "x", "--dry-run"]
        names = re.search(r"there are: auto, (.*)", run([*dry, "--backend", "?"]).err)[1].split(", ")
        self.assertIn("plain", names)
        for name in names:
            refusal = run([*dry, "--backend", name])
            if refusal.code == 0:
                self.same(["--backend", name])
            else:
                self.assertRegex(refusal.err, f"backend '{name}' needs .*, which this CPU does not have")

    def test_ranks(self):
        for ranks in (1, 2, 3, 5):
            self.same([], ranks=ranks)

    def test_steps_in_halves(self):
        for ranks in (1, 2, 3):
            for chunk in ("2", "16"):
                self.same(["--overlap", "on", "--chunk", chunk], "steps in two halves", ranks=ranks)
        for ranks in (2, 5):
            self.same(["--overlap", "auto", "--chunk", "2"], "steps in two halves", ranks=ranks)
            self.same(["--overlap", "off", "--chunk", "2"], ranks=ranks)

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
