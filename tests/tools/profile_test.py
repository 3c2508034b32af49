"""Profiles of real runs, read with h5py: sums, windows, counts, bytes, routes; placements; the tool's outputs. What
becomes of a profile whose run is killed or whose disk is full is in profile_faults_test.py.
Needs h5py and numpy (development time): exits with 77, which ctest shows as skipped, where they are missing."""

import json
import os
import pathlib
import shutil
import struct
import sys
import tempfile
import unittest

try:
    import h5py
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from program import CHECKPOINTS, DATA, run

HEADER, TIMING, ROUTE = 48, 64, 12  # bytes, runtime/exchange/messages.h
PHASES = ["embed", "engram_hash", "engram_gather", "engram", "hyper_connections", "attention", "indexer", "routing",
          "exchange_send", "shared_expert", "exchange_wait", "head", "sampling", "draft", "other"]


def read_tensors(path):
    """Integer and fp32 tensors of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    types = {"F32": np.float32, "I32": np.int32, "I64": np.int64}
    return {name: np.frombuffer(data[8 + size:], types[info["dtype"]], offset=info["data_offsets"][0],
                                count=int(np.prod(info["shape"]))).reshape(info["shape"])
            for name, info in header.items() if name != "__metadata__" and info["dtype"] in types}


class Profiles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        prompts = {p["name"]: p["ids"] for p in json.loads((DATA / "forward/prompts.json").read_text())["prompts"]}
        cls.ids = prompts["mixed"]
        cls.file = cls.directory / "run.h5"
        # Whole steps only: of halves nothing could be said about the times of a block.
        cls.run_program(cls.file, ["-n", "12", "--chunk", "16", "--profile-routes", "--overlap", "off"], ranks=5)

    @classmethod
    def run_program(cls, file, more, ranks, ids=None, speculate="off"):
        result = run(["--model", CHECKPOINTS / "mini", "--prompt-ids", ",".join(map(str, ids or cls.ids)), "--ignore-eos",
                      "--speculate", speculate, "--profile", file, *more], ranks=ranks)
        if result.code != 0:
            raise AssertionError(result.err)
        return result

    def setUp(self):
        self.profile = h5py.File(self.file, "r")
        self.addCleanup(self.profile.close)
        self.run_attributes = dict(self.profile["run"].attrs)

    def test_every_dataset_says_what_it_is(self):
        def check(name, item):
            if isinstance(item, h5py.Dataset):
                self.assertTrue(item.attrs["units"] and item.attrs["meaning"], name)
        self.profile.visititems(check)
        self.assertEqual(self.profile.attrs["format"], "dsv41-mpi profile")
        self.assertEqual(self.profile.attrs["schema_version"], 1)
        self.assertEqual((self.run_attributes["ranks"], self.run_attributes["placement"]), (5, "cyclic"))
        self.assertEqual(list(self.run_attributes["rank_numbers"]), [1, 2, 3, 4])
        self.assertTrue((self.run_attributes["read_bandwidth"] > 1e8).all())

    def test_steps(self):
        steps = self.profile["steps"]
        prefill = -(-len(self.ids) // 16)
        self.assertEqual(len(steps["total_ns"]), prefill + 11)  # the last token is not processed
        self.assertEqual(list(steps["kind"]), [0] * prefill + [1] * 11)
        self.assertEqual(steps["tokens"][:].sum(), len(self.ids) + 11)
        self.assertEqual(steps["emitted"][:].sum(), 12)
        self.assertEqual(list(steps["engram_rows"]), [12 * tokens for tokens in steps["tokens"]])  # two tables, six columns
        self.assertTrue((steps["start_ns"][1:] >= steps["start_ns"][:-1] + steps["total_ns"][:-1]).all())

    def test_drafts(self):
        """Every decode step emits one token and the drafts that agreed."""
        path = self.directory / "drafts.h5"
        result = self.run_program(path, ["-n", "12"], ranks=3, speculate="5")
        with h5py.File(path, "r") as file:
            steps = file["steps"]
            decode = steps["kind"][:] == 1
            drafted, accepted = steps["drafted"][:], steps["accepted"][:]
            self.assertGreater(drafted.sum(), 0)
            self.assertTrue((accepted <= drafted).all() and (drafted[~decode] == 0).all())
            self.assertTrue((steps["tokens"][:][decode] == 1 + drafted[decode]).all())
            self.assertTrue((steps["emitted"][:][decode] == 1 + accepted[decode]).all())
            self.assertIn(f"drafts: {accepted.sum()} of {drafted.sum()} accepted", result.err)

    def test_residency(self):
        """Rows and experts that had to be read, step by step."""
        path = self.directory / "residency.h5"
        expert = 20 << 10
        result = self.run_program(path, ["-n", "6", "--engram", "direct", "--expert-memory", 6 * expert], ranks=3)
        with h5py.File(path, "r") as file:
            self.assertEqual(list(file["run"].attrs["expert_capacity"]), [6, 6])
            steps, ranks = file["steps"], file["ranks"]
            self.assertTrue((steps["engram_distinct"][:] <= steps["engram_rows"][:]).all())
            self.assertTrue((steps["engram_cached"][:] <= steps["engram_distinct"][:]).all())
            self.assertTrue(((steps["engram_bytes"][:] > 0) == (steps["engram_distinct"][:] > steps["engram_cached"][:])).all())
            hits, misses = ranks["cache_hits"][:], ranks["cache_misses"][:]
            self.assertTrue((hits + misses == ranks["experts"][:]).all())
            self.assertIn(f"experts: {hits.sum()} found in memory, {misses.sum()} read", result.err)
            self.assertIn(f"engram: {steps['engram_rows'][:].sum()} rows asked for, {steps['engram_distinct'][:].sum()} distinct",
                          result.err)

    def test_phases_sum_to_their_step(self):
        steps, layers = self.profile["steps"], self.profile["layers"]
        phases = sum(steps[f"{name}_ns"][:] for name in PHASES)
        self.assertTrue((np.abs(phases - steps["total_ns"][:]) <= 0.02 * steps["total_ns"][:]).all())
        in_layers = sum(layers[f"{name}_ns"][:] for name in PHASES if f"{name}_ns" in layers)
        self.assertTrue((in_layers == layers["total_ns"][:]).all())
        self.assertTrue((layers["total_ns"][:].sum(axis=1) <= steps["total_ns"][:]).all())
        for name in set(PHASES) - {"draft"}:  # each of them is measured somewhere
            self.assertGreater(steps[f"{name}_ns"][:].sum(), 0, name)

    def test_ranks_compute_inside_the_window_of_request_and_reply(self):
        ranks = {name: column[:] for name, column in self.profile["ranks"].items()}
        numbers = self.run_attributes["rank_numbers"]
        offset, error = (self.run_attributes[name][numbers] for name in ("clock_offset_ns", "clock_error_ns"))
        asked = ranks["replied_ns"] >= 0
        self.assertTrue(asked.any())
        received = ranks["received_ns"] + offset
        done = received + ranks["receive_ns"] + ranks["compute_ns"]
        self.assertTrue((received + error >= ranks["sent_ns"])[asked].all())
        self.assertTrue((done - error <= ranks["replied_ns"])[asked].all())
        self.assertTrue((ranks["compute_ns"][asked] > 0).all())
        # … and where blocks do not take turns, replies arrive before the next block begins.
        starts = self.profile["layers/start_ns"][:]
        end = (self.profile["steps/start_ns"][:] + self.profile["steps/total_ns"][:])[:, None]
        next_start = np.where(starts >= 0, starts, end)
        next_start = np.concatenate([next_start[:, 1:], end], axis=1)[:, :, None]
        self.assertTrue((ranks["replied_ns"] <= end[:, :, None])[asked].all())
        self.assertTrue((ranks["replied_ns"] <= next_start)[asked].all())
        self.assertTrue((ranks["sent_ns"] >= starts[:, :, None])[asked].all())

    def test_counts(self):
        per_token, layers = self.run_attributes["experts_per_token"], self.run_attributes["layers"]
        counts = self.profile["experts/counts"][:]
        rows = self.profile["layers/rows"][:]
        tokens = self.profile["steps/tokens"][:]
        self.assertTrue((rows <= tokens[:, None]).all())
        self.assertTrue((counts.sum(axis=1)[:layers] == rows.sum(axis=0)[:layers] * per_token).all())
        self.assertTrue((rows[tokens == 1][:, :layers] == 1).all())
        self.assertEqual(self.profile["ranks/routes"][:].sum(), counts.sum())
        owner = self.profile["experts/owner"][:]
        for r in range(4):
            self.assertEqual(self.profile["ranks/routes"][:, :, r].sum(), counts[owner == r].sum())
        even = self.profile["steps/step"][:] % 2 == 0
        self.assertTrue((self.profile["experts/counts_even_steps"][:].sum(axis=1)[:layers] ==
                         rows[even].sum(axis=0)[:layers] * per_token).all())

    def test_all_logits_route_every_row(self):
        file = self.directory / "all.h5"
        self.run_program(file, ["-n", "3", "--dump-logits", self.directory / "logits.h5"], ranks=3)
        with h5py.File(file, "r") as profile:
            layers = profile["run"].attrs["layers"]
            tokens = profile["steps/tokens"][:]
            self.assertTrue((profile["layers/rows"][:, :layers] == tokens[:, None]).all())
            self.assertTrue((profile["experts/counts"][:layers].sum(axis=1) ==
                             tokens.sum() * profile["run"].attrs["experts_per_token"]).all())

    def test_bytes_are_those_of_the_protocol(self):
        ranks = {name: column[:].astype(np.int64) for name, column in self.profile["ranks"].items()}
        dim = int(self.run_attributes["dim"])
        asked = ranks["replied_ns"] >= 0
        out = ranks["requests"] * HEADER + ranks["tokens"] * (dim + dim // 32) + ranks["routes"] * ROUTE
        back = ranks["requests"] * (HEADER + TIMING) + ranks["routes"] * dim * 2
        self.assertTrue((ranks["bytes_out"] == np.where(asked, out, 0)).all())
        self.assertTrue((ranks["bytes_in"] == np.where(asked, back, 0)).all())
        for column in ("bytes_out", "bytes_in"):
            self.assertTrue((ranks[column].sum(axis=(1, 2)) == self.profile[f"steps/{column}"][:]).all())

    def test_routes_are_the_golden_gate_ids(self):
        golden = read_tensors(DATA / "forward/forward_trace.safetensors")
        file = self.directory / "golden.h5"
        self.run_program(file, ["-n", "1", "--dump-logits", self.directory / "golden_logits.h5", "--profile-routes"],
                         ranks=5, ids=golden["ids"].tolist())
        with h5py.File(file, "r") as profile:
            routes = {name: column[:] for name, column in profile["routes"].items()}
            for layer in range(int(profile["run"].attrs["layers"])):
                at = routes["layer"] == layer
                ids, weights = golden[f"layers.{layer}.gate.ids"], golden[f"layers.{layer}.gate.weights"]
                order = np.argsort(ids, axis=1)
                self.assertTrue((routes["row"][at] == np.arange(len(ids))).all())
                self.assertTrue((routes["ids"][at] == np.take_along_axis(ids, order, 1)).all())
                np.testing.assert_array_max_ulp(routes["weights"][at], np.take_along_axis(weights, order, 1), 2)

    def test_draft_stages(self):
        file = self.directory / "draft.h5"
        self.run_program(file, ["-n", "12"], ranks=5, speculate="3")
        with h5py.File(file, "r") as profile:
            layers = int(profile["run"].attrs["layers"])
            counts, rows = profile["experts/counts"][:], profile["layers/rows"][:].sum(axis=0)
            self.assertTrue((rows[layers:] > 0).all())
            chosen = counts.sum(axis=1)[layers:] / rows[layers:]
            self.assertTrue((chosen == chosen.astype(int)).all())
            self.assertEqual(profile["steps/emitted"][:].sum(), 12)
            self.assertGreater(profile["steps/draft_ns"][:].sum(), 0)
            in_layers = sum(profile[f"layers/{name}_ns"][:] for name in PHASES if f"{name}_ns" in profile["layers"])
            self.assertTrue((in_layers == profile["layers/total_ns"][:]).all())

    def test_one_process(self):
        file = self.directory / "one.h5"
        self.run_program(file, ["-n", "4"], ranks=0)
        with h5py.File(file, "r") as profile:
            self.assertEqual(list(profile["run"].attrs["rank_numbers"]), [0])
            self.assertTrue((profile["ranks/compute_ns"][:, :10] > 0).all())

    def test_a_profile_changes_no_logit(self):
        contents = []
        for more in ([], ["--profile", self.directory / "with.h5", "--profile-routes"]):
            path = self.directory / "compared.h5"
            result = run(["--model", CHECKPOINTS / "mini", "--prompt-ids", ",".join(map(str, self.ids)), "-n", "4",
                          "--ignore-eos", "--dump-logits", path, *more], ranks=3)
            self.assertEqual(result.code, 0, result.err)
            contents.append(path.read_bytes())
        self.assertEqual(contents[0], contents[1])

    def test_a_path_that_cannot_be_written(self):
        result = run(["--prompt-ids", "0", "--profile", "/nonexistent/run.h5"], ranks=3)
        self.assertEqual(result.code, 2)
        self.assertEqual(result.messages(), ["dsv41-mpi: cannot write /nonexistent/run.h5: No such file or directory"])


def skewed_checkpoint(directory):
    """A copy of the small random checkpoint whose gates always choose the experts 0 and 2, and one more: on two ranks
    both live on the first, contiguous as well as cyclic."""
    shutil.copytree(CHECKPOINTS / "mini", directory)
    changed = 0
    for shard in directory.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        for name, info in json.loads(data[8:8 + size]).items():
            if not name.endswith("gate.bias"):
                continue
            begin, end = (8 + size + offset for offset in info["data_offsets"])
            bias = np.frombuffer(data[begin:end], np.float32).copy()
            bias[[0, 2]] += 10  # scores are smaller by far
            data[begin:end] = bias.tobytes()
            changed += 1
        shard.chmod(0o644)
        shard.write_bytes(data)
    assert changed > 0
    return directory


class Placement(unittest.TestCase):
    def test_a_balanced_placement_evens_out_skewed_routes_and_changes_no_logit(self):
        directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        model = skewed_checkpoint(directory / "model")
        prompts = {p["name"]: p["ids"] for p in json.loads((DATA / "forward/prompts.json").read_text())["prompts"]}
        ids = ",".join(map(str, prompts["long"][:240]))
        balanced = directory / "balanced.json"
        imbalance, scored, logits, owners = {}, {}, {}, {}
        for placement in ("contiguous", "cyclic", f"file:{balanced}"):
            file, dump = directory / "run.h5", directory / "logits.h5"
            result = run(["--model", model, "--prompt-ids", ids, "--chunk", "24", "-n", "6", "--ignore-eos", "--speculate",
                          "off", "--profile", file, "--profile-routes", "--dump-logits", dump, "--placement", placement],
                         ranks=3)
            self.assertEqual(result.code, 0, result.err)
            logits[placement] = dump.read_bytes()
            with h5py.File(file, "r") as profile:  # measured on the half that the placement has not seen
                odd = profile["steps/step"][:] % 2 == 1
                routes = profile["ranks/routes"][:][odd].astype(float)
                imbalance[placement] = routes.max(axis=2).sum() / routes.mean(axis=2).sum()
                owners[placement] = profile["experts/owner"][:]
            if placement == "cyclic":
                tool = run([file, "--placement", balanced], program="dsv41-profile")
                self.assertEqual(tool.code, 0, tool.err)
                for line in tool.out.splitlines():
                    words = line.split()
                    if words and words[0] in ("contiguous", "cyclic", "balanced"):
                        scored[words[0]] = [float(word) for word in words[1:]]
        self.assertEqual(set(scored), {"contiguous", "cyclic", "balanced"}, tool.out)
        contiguous, cyclic, after = imbalance.values()
        self.assertGreater(min(contiguous, cyclic), 1.4)
        self.assertLess(after, 1 + (min(contiguous, cyclic) - 1) * 0.6, imbalance)
        for i in range(2):  # over all steps, step by step
            self.assertLess(scored["balanced"][i], min(scored["contiguous"][i], scored["cyclic"][i]), tool.out)
        # What the tool promised step by step is what the runs measured.
        self.assertAlmostEqual(scored["cyclic"][1], cyclic, delta=0.02)
        self.assertAlmostEqual(scored["contiguous"][1], contiguous, delta=0.02)
        hot = owners[f"file:{balanced}"]
        self.assertTrue((hot[:10, 0] != hot[:10, 2]).all())
        self.assertEqual(len(set(logits.values())), 1)


class Tool(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        cls.file = cls.directory / "run.h5"
        result = run(["--prompt", "The capital of France is", "-n", "24", "--ignore-eos", "--speculate", "off", "--profile",
                      cls.file], ranks=3)
        if result.code != 0:
            raise AssertionError(result.err)

    def tool(self, *arguments):
        result = run(arguments, program="dsv41-profile")
        self.assertEqual(result.code, 0, result.err)
        return result.out

    def test_outputs(self):
        text = self.tool(self.file)
        for part in ("prefill: 1 steps", "decode: 23 steps", "slowest layers", "critical path", "imbalance", "GB/s"):
            self.assertIn(part, text)
        self.assertEqual(len(self.tool(self.file, "--csv").splitlines()), 25)
        self.assertEqual(json.loads(self.tool(self.file, "--json"))["kinds"][1]["step"]["count"], 23)
        self.tool(self.file, "--trace", self.directory / "trace.json", "--plot", self.directory / "plot.svg")
        self.assertGreater(len(json.loads((self.directory / "trace.json").read_text())["traceEvents"]), 1000)
        self.assertIn("same settings", self.tool("--compare", self.file, self.file))

    def test_bad_input(self):
        directory = self.directory
        (directory / "text").write_text("not HDF5")
        (directory / "empty").write_bytes(b"")
        shutil.copy(self.file, directory / "truncated")
        os.truncate(directory / "truncated", os.path.getsize(self.file) // 2)
        with h5py.File(directory / "foreign", "w") as file:
            file["x"] = np.zeros(3)
        for name, change in (("newer", ("schema_version", 99)), ("older", ("schema_version", 0))):
            shutil.copy(self.file, directory / name)
            with h5py.File(directory / name, "r+") as file:
                file.attrs[change[0]] = change[1]
        shutil.copy(self.file, directory / "none")
        with h5py.File(directory / "none", "r+") as file:
            for group in ("steps", "layers", "ranks"):
                for column in file[group].values():
                    column.resize(0, axis=0)
        for name, reason in (("text", "is not an HDF5 file (8 bytes)"), ("empty", "is not an HDF5 file (0 bytes)"),
                             ("truncated", "truncated"), ("foreign", "not a profile of dsv41-mpi"),
                             ("newer", "schema version 99 is newer"), ("older", "schema version 0 does not exist"),
                             ("none", "empty run"), ("missing", "No such file"), (".", "not a file")):
            with self.subTest(name):
                result = run([directory / name], program="dsv41-profile")
                self.assertEqual((result.code, result.out), (2, ""))
                self.assertEqual(len(result.err.splitlines()), 1, result.err)
                self.assertIn(reason, result.err)


if __name__ == "__main__":
    unittest.main()
